"""Recompute in backward what would take memory to keep: a transform of any function of tensors.

[Note: what is kept of a block]
Forward, autograd keeps no tensor of a block, only placeholders (``torch.utils.checkpoint`` without reentry does that). Of the block remain:

* its *inputs*. Those that are results of differentiable operations are activations; they stay where they are, or go to a store, or each
  rank keeps its part. Parameters stay, for somebody else keeps them anyway. What the hooks around the block make into something else is
  theirs (a view of a gathered bucket, in ``shard_params``; an input of an inner block, in an outer one). Lazy leaves are kept as they are:
  they have no data, and computing the block again gathers them again;
* the *results* that the policy asks for;
* the *random state* at its beginning, and after each random operation whose result is kept, since that does not run again.

The modules, each of which imports only those above it:

==============  ==========================================================================================
``_vectors``    a tensor's memory as a vector, and the tensor again: what can be moved, cut and gathered
``_elsewhere``  one tensor that moves: to a store, or each rank keeps its part, and back
``_inputs``     which inputs of a block are activations, and so move
``_results``    which results are kept, and how they take the place of operations when the block runs again
``_block``      what is run twice, and what must be as it was when it runs again
``_remat``      :func:`remat` itself, which puts these together
==============  ==========================================================================================

Not optimal yet: what comes from a store or from other ranks is asked for when it is needed, not ahead.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). That each rank keeps its part of an activation, in host memory
where asked, is from Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 6.1.
Policies are those of ``jax.checkpoint``.
"""

from zfun.transforms._remat._remat import Remat, remat, warn_of_whole_loss

__all__ = ["Remat", "remat", "warn_of_whole_loss"]
