"""Recompute activations in backward instead of keeping all: a transform of any tensor function.

[Note: tensors kept of a block]
In forward autograd keeps no tensor of a block, only placeholders of the non-reentrant
``torch.utils.checkpoint``. For recomputation zfun keeps:

* the *inputs* of the block. Results of differentiable operations are activations: an activation
  stays in place, moves to a store, or is cut into one part per rank. Parameters stay in place,
  because the caller keeps the parameters anyway. If the saved-tensor hooks around the block convert
  an input, those hooks keep the converted input (a view of a gathered bucket in ``shard_params``;
  an input of an inner block in an outer block). Lazy leaves stay lazy, because a lazy leaf has no
  data and recomputation gathers the bucket again;
* the *results* that the policy chooses;
* the *random state* at the start of the block, and after each random operation whose result is
  kept, because that operation does not run again.

Modules, each of which imports only modules above it:

==============  ====================================================================================
``_vectors``    convert a tensor to a vector that can be moved, cut and gathered, and back
``_elsewhere``  move one tensor to a store or cut the tensor into one part per rank, and back
``_inputs``     choose the inputs of a block that are activations
``_results``    keep the results that the policy chooses, and replay them during recomputation
``_block``      run the function twice under the same conditions
``_remat``      :func:`remat`, which combines the modules above
==============  ====================================================================================

Backward reads tensors from a store ahead; see [Note: reads of activations]. Parts of other ranks
are gathered when backward needs the tensor.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Cutting activations into
parts, optionally in host memory, is from Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models" (2020), section 6.1. The policies follow ``jax.checkpoint``.
"""

from zfun.transforms.remat._remat import Remat, remat, warn_of_whole_loss
