"""The stages of ZeRO as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun.collectives import Group
from zfun.compression import Compression
from zfun.layout import DEFAULT_BUCKET_BYTES, PLACEMENT
from zfun.optim import as_optimizer
from zfun.options import OF_LEAVES, instance, integer, one_of, takes
from zfun.parallel import beside_model_axes
from zfun.placement import PlacementRule, Sharded
from zfun.recipes._loop import Loop
from zfun.recipes._options import ZeroOptions
from zfun.recipes._precision import Precision, policy_of
from zfun.recipes._state import Zero
from zfun.reductions import BufferRule
from zfun.stores import Offload
from zfun.transforms import ScheduleOptions, WeightedMean
from zfun.typing import Aux, Params

# Python's sum() of tensors has the type Tensor | int.
_Scalar: TypeAlias = Tensor | WeightedMean | float


@takes(
    stage=one_of(0, 1, 2, 3, example="3"),
    precision=instance(Precision, "a zf.Precision", "zf.Precision(...)")
    | one_of(torch.bfloat16, torch.float16)
    | None,
    buffers=OF_LEAVES | None,
    offload=instance(
        Offload, "a zf.stores.Offload", "zf.stores.Offload(optimizer=zf.stores.host())"
    )
    | None,
    compression=instance(
        Compression,
        "a zf.compression.Compression",
        "zf.compression.Compression(grads=zf.compression.int8())",
    )
    | None,
    schedule=instance(ScheduleOptions, "a zf.ScheduleOptions", "zf.ScheduleOptions(prefetch=2)")
    | None,
    max_skipped=integer(1) | None,
    unused=one_of("skip", "zeros"),
    placement=PLACEMENT | None,
)
def zero(
    stage: int,
    loss_fn: Callable[[Params, Any], _Scalar | tuple[_Scalar, Aux]],
    optimizer: Any,
    group: Group,
    *,
    precision: torch.dtype | Precision | None = None,
    num_micro_batches: int = 1,
    trainable: Callable[[str, Any], bool] | None = None,
    buffers: BufferRule | None = None,
    offload: Offload | None = None,
    compression: Compression | None = None,
    schedule: ScheduleOptions | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    order: Sequence[str] | None = None,
    donate: bool = True,
    max_skipped: int | None = 100,
    unused: str = "skip",
    placement: Sharded | PlacementRule | None = None,
) -> Zero[Params, Aux]:
    """Compose the transforms of a ZeRO stage.

    ===== ======================= ========= ================== =================
    stage known as                params    grads at update    optimizer state
    ===== ======================= ========= ================== =================
    0     data parallel           ``R``     ``R``              ``R``
    1     ZeRO-1                  ``R``     ``P -> S``         ``S``
    2     ZeRO-2                  ``R``     ``S``              ``S``
    3     ZeRO-3                  ``S``     ``S``              ``S``
    ===== ======================= ========= ================== =================

    If a gradient is not finite, all ranks skip the step, and parameters and optimizer state stay
    unchanged. A leaf that no rank used takes no step; see ``unused``.

    Args:
        stage: 0, 1, 2 or 3.
        loss_fn: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`zfun.weighted_mean`. A
            loss over model axes, as :func:`zfun.tensor_parallel` returns it, gets this rank's
            leaves; ``init`` takes the logical tree, and ``params`` returns it.
        optimizer: an optimizer of ``zfun.optim``, or an element-wise ``(init, update)`` pair.
        group: the ranks; each passes a batch of its own to ``step``. The inner axis of a mesh
            shards the state over that axis and sums gradients over the whole mesh; every rank of
            the mesh passes a batch (HSDP, MiCS).
        precision: ``torch.bfloat16`` keeps, computes and gathers parameters in bfloat16, and
            reduces, accumulates and updates in float32, with float32 master weights and moments;
            ``torch.float16`` does the same with a dynamic loss scale; a :class:`zfun.Precision`
            sets each dtype. By default everything has the dtypes of the parameters.
        num_micro_batches: the number of micro-batches that a batch is split in, or that a list of
            batches has; see :func:`zfun.accumulate`.
        trainable: which leaves are trained, by path and leaf; by default all. No gradient or
            optimizer state is made for the others.
        buffers: which leaves the loss writes, such as the running statistics of BatchNorm.
            ``buffers(path, leaf)`` returns the rule by which a step merges the values that the
            losses of the ranks have left: ``"mean"`` over the ranks (of integers, the values of
            rank 0), ``"rank 0"`` for the values of rank 0, ``"by rank"`` for the values of each
            rank; ``None`` for a leaf that is no buffer. Buffers keep their dtypes, and are neither
            trained nor sharded.
        offload: stores for parameters, gradients and the optimizer's state.
        compression: codecs for gathers of parameters and sums of gradients.
        schedule: when stage 3 gathers and releases buckets; see :func:`zfun.shard_params`.
        bucket_bytes: the most bytes of a bucket, unless a single leaf has more. Within this bound a
            bucket is a block (``h.0``), or some small blocks; see :func:`zfun.layout.layout_of`.
        order: paths of leaves, first used first, from :func:`zfun.planner.order_of_use`; by default
            the order of the tree.
        donate: let ``step`` overwrite the buffers of the old state, which must not be used again.
        max_skipped: how many steps in a row may be skipped before
            :class:`zfun.errors.NonFiniteError` is raised. With ``None`` any number, and the device
            decides whether a step is taken, with the same bits: the host does not wait for it. The
            numbers of ``StepInfo`` are tensors of the device then, and wait when you read them.
            Element-wise rules of zfun can do so, without stores; others are refused.
        unused: the step of a leaf that no rank used in any micro-batch. ``"skip"`` takes none, as
            the optimizers of torch do where ``grad`` is ``None``: the parameter, its moments and
            its master weight keep their bits, and the steps that the bias correction counts do not
            grow. Schedules count every step. ``"zeros"`` steps by a gradient of zeros, as
            optimizers in JAX do, so that weight decay and momentum move the leaf. A gradient that
            is zero is a gradient, and is stepped. Rules that look at whole leaves, and an ``(init,
            update)`` pair, count the steps of the run.

        placement: how the ranks cut each bucket of parameters, gradients and optimizer state, from
            stage 1 on: one of :mod:`zfun.placement`, or a rule ``(path, leaf) -> placement``; by
            default in equal pieces. No bit of the result depends on the cuts.

    Returns:
        The functions ``init``, ``step`` and ``params``.

    Raises:
        OptionError: an option that does not exist or does not go with the stage.
        CheckpointError: from ``step``, once, where a save in the background failed.
        LeafError: from ``step``, where no trained leaf gets a gradient on any rank.
        SpecMismatch: from ``step``, for a state of another stage, trained set, precision or
            optimizer.
        NotElementwiseError: an optimizer that mixes elements.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        ...     z = zf.zero(3, loss, zf.optim.sgd(0.25), group)
        ...     state = z.init({"w": torch.zeros(2)})
        ...     state, info = z.step(state, torch.tensor([1.0, 2.0]))
        ...     return info.loss.item(), z.params(state)["w"]
        >>> zf.simulate(2, main)[0]
        (5.0, tensor([0.5000, 1.0000]))

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020).
    """
    recipe = ZeroOptions(
        stage,
        loss_fn,
        as_optimizer(optimizer),
        beside_model_axes(group, loss_fn),
        policy_of(precision),
        num_micro_batches,
        trainable,
        buffers,
        offload or Offload(),
        compression or Compression(),
        schedule or ScheduleOptions(),
        bucket_bytes,
        order,
        donate,
        max_skipped,
        unused,
        placement,
    )
    return Loop(recipe).functions()
