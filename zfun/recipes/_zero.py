"""The stages of ZeRO as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.checkpoint import check_saves
from zfun.collectives import Group, agreement_group
from zfun.compression import Compression
from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.layout import DEFAULT_BUCKET_BYTES, PLACEMENT
from zfun.optim import LossScale, as_optimizer, with_master
from zfun.options import (
    ANY,
    BOOL,
    FUNCTION,
    GROUP,
    NAMES,
    OF_LEAVES,
    instance,
    integer,
    one_of,
    takes,
)
from zfun.placement import PlacementRule, Sharded
from zfun.recipes._checks import (
    check_is_flat,
    check_is_state,
    check_options,
    check_order,
    check_same_options,
    in_words,
    naming_the_rank,
    naming_the_step,
    outside_transforms,
)
from zfun.recipes._compose import gradient, optimizer_of, whole_loss
from zfun.recipes._known import KnownStates
from zfun.recipes._precision import Precision, policy_of, whole_tree
from zfun.recipes._start import first_values
from zfun.recipes._state import StepInfo, Zero, ZeroState
from zfun.recipes._update import ZeroUpdate, scale_of, split
from zfun.reductions import BufferRule
from zfun.stores import Offload
from zfun.transforms import (
    GradientFunction,
    MicroBatches,
    Pullback,
    ScheduleOptions,
    Tape,
    WeightedMean,
    accumulate,
    cast,
    scale_loss,
    split_batch,
    unshard,
    vjp,
)
from zfun.transforms.buffers import buffered, place_buffers, running, unwritten
from zfun.transforms.optimizer.in_backward import UpdateHook, begin
from zfun.typing import Aux, Gradient, Params

# Python's sum() of tensors has the type Tensor | int.
_Scalar: TypeAlias = Tensor | WeightedMean | float


@takes(
    stage=one_of(0, 1, 2, 3, example="3"),
    loss_fn=FUNCTION,
    optimizer=ANY,
    group=GROUP,
    precision=instance(Precision, "a zf.Precision", "zf.Precision(...)")
    | one_of(torch.bfloat16, torch.float16)
    | None,
    num_micro_batches=integer(1),
    trainable=OF_LEAVES | None,
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
    bucket_bytes=integer(1),
    order=NAMES | None,
    donate=BOOL,
    max_skipped=integer(1),
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
    max_skipped: int = 100,
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
        loss_fn: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`zfun.weighted_mean`.
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
        bucket_bytes: size in bytes at which a bucket closes.
        order: paths of leaves, first used first, from :func:`zfun.planner.order_of_use`; by default
            the order of the tree.
        donate: let ``step`` overwrite the buffers of the old state, which must not be used again.
        max_skipped: how many steps in a row may be skipped before
            :class:`zfun.errors.NonFiniteError` is raised.
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
    stores_of, codecs = offload or Offload(), compression or Compression()
    options = schedule or ScheduleOptions()
    check_options(stage, stores_of, codecs, options)
    numbers = {
        "stage": stage,
        "num_micro_batches": num_micro_batches,
        "bucket_bytes": bucket_bytes,
        "max_skipped": max_skipped,
        "unused": unused,
    }
    if placement is not None and stage == 0:
        raise OptionError(
            "placement says how ranks cut the state, and stage 0 cuts none; got "
            f"placement={placement!r} at stage 0; use a stage from 1 on, or leave it out"
        )
    policy = policy_of(precision)
    scaler = policy.loss_scale if isinstance(policy.loss_scale, LossScale) else None
    given = as_optimizer(optimizer)
    inner = given if policy.master is None else with_master(given, policy.master)
    placed, rule = optimizer_of(stage, inner, group, bucket_bytes, stores_of)
    known = KnownStates(stage, group, inner, trainable, policy, buffers, stores_of)
    composed: list[tuple[Callable[..., Any], Flat | None, int, Gradient]] = []
    hook = UpdateHook()
    leaves_out = unused == "skip"
    updated = ZeroUpdate(group, rule, scaler, buffers, max_skipped, donate, leaves_out)

    def gradient_of(fn: Callable[..., Any], frozen: Flat | None, summed: int) -> Gradient:
        if (known_vg := _composed_before(composed, fn, frozen, summed)) is not None:
            return known_vg
        inner = fn if buffers is None else buffered(fn)
        inner = inner if frozen is None or stage == 3 else unwritten(inner)
        inner = inner if policy.compute is None else cast(inner, policy.compute)
        loss = whole_loss(stage, inner, group, frozen, stores_of.params, options, codecs.params)
        vg = gradient(
            summed,
            loss,
            group,
            policy,
            bucket_bytes,
            hook,
            stores_of.grads,
            codecs.grads,
            hook.left.add if leaves_out else lambda bucket: None,
            once=num_micro_batches == 1,
        )
        composed[:] = [*composed[-7:], (fn, frozen, summed, vg)]
        return vg

    def start(params: tree.Tree, *, init: str = "check") -> ZeroState:
        if init not in ("check", "broadcast"):
            raise OptionError(
                f"init must be 'check' or 'broadcast'; got {init!r}; 'broadcast' takes rank 0's "
                "values"
            )
        check_order(order, params)
        params = whole_tree(params)
        check_same_options(
            {**numbers, **in_words(policy, codecs, options), **given.description()},
            {"trainable": trainable, "buffers": buffers},
            params,
            agreement_group(group),
        )
        written, params = split(params, buffers)
        trained, frozen, state = first_values(
            params,
            group,
            stage,
            (placed, rule),
            init=init,
            policy=policy,
            trainable=trainable,
            bucket_bytes=bucket_bytes,
            persistence=options.persistence if stage == 3 else 0,
            order=order,
            offload=stores_of,
            cut=placement,
        )
        known.made(trained, frozen)
        return ZeroState(
            trained,
            frozen,
            state,
            0,
            0,
            None if scaler is None else scaler.init(),
            place_buffers(written, group, buffers, init),
        )

    def step(state: ZeroState, batch: Any) -> tuple[ZeroState, StepInfo]:
        check_is_state(state)
        known.check(state)
        check_saves(group)
        scale, terms = scale_of(state), updated.takes_terms(state)
        hook.left.clear()
        vg = gradient_of(loss_fn, state.frozen, 1 if terms else stage)
        vg = vg if scale == 1.0 else scale_loss(vg, scale)
        vg = vg if num_micro_batches == 1 else accumulate(vg, num_micro_batches)
        hook.update = begin(
            rule,
            state.opt_state,
            state.params,
            donate=donate,
            in_backward=stage >= 2 and not terms and num_micro_batches == 1 and scale == 1.0,
            stores_grads=stores_of.grads is not None,
            missed=state.missed.counts if leaves_out else {},
        )
        begun = hook.update
        try:
            with running(state.buffers) as left:
                value, grads = vg(state.params, _only(batch, num_micro_batches))
        finally:
            hook.update = None
        loss, aux = value if type(value) is tuple else (value, None)
        loss = loss.mean if isinstance(loss, WeightedMean) else loss
        return updated(state, grads, loss, left(), aux, begun, spends=True)

    def forward(
        state: ZeroState, fn: Callable[..., Any], batch: Any, left: Flat | None
    ) -> tuple[Any, Pullback, Flat | None]:
        check_is_state(state)
        check_is_flat("buffers", left, "the buffers that vjp() returned", optional=True)
        known.check(state)
        vg = gradient_of(fn, state.frozen, 1 if updated.takes_terms(state) else stage)
        with running(state.buffers if left is None else left) as after:
            out, pullback = vjp(vg, state.params, batch)
        return out, pullback, after()

    def record(state: ZeroState, fn: Callable[..., Any], batch: Any) -> tuple[Any, Tape]:
        check_is_state(state)
        known.check(state)
        vg = gradient_of(fn, state.frozen, 1 if updated.takes_terms(state) else stage)
        assert isinstance(vg, GradientFunction)
        return vg.record(state.params, batch)

    def update(
        state: ZeroState, grads: Flat, loss: Tensor, left: Flat | None
    ) -> tuple[ZeroState, StepInfo]:
        check_is_state(state)
        check_is_flat("grads", grads, "the gradients that a pullback returned")
        check_is_flat("buffers", left, "the buffers that vjp() returned", optional=True)
        known.check(state)
        check_saves(group)
        return updated(state, grads, loss, left, None)

    def whole(state: ZeroState, select: Callable[[str, Tensor], bool] | None = None) -> tree.Tree:
        check_is_state(state)
        parts = (state.params, state.frozen, state.buffers)
        return tree.combine(*(unshard(part, select) for part in parts if part is not None))

    def named(fn: Callable[..., Any]) -> Callable[..., Any]:
        return ops.uncompiled(naming_the_step(naming_the_rank(outside_transforms(fn), group)))

    first_half, second_half, recorded = named(forward), named(update), named(record)
    return Zero(
        ops.uncompiled(naming_the_rank(outside_transforms(start), group)),
        named(step),
        ops.uncompiled(whole),
        lambda fn, state, batch, buffers=None: first_half(state, fn, batch, buffers),
        lambda state, grads, loss, buffers=None: second_half(state, grads, loss, buffers),
        lambda fn, state, batch: recorded(state, fn, batch),
    )


def _only(batch: Any, num_micro_batches: int) -> Any:
    """Return the batch for the gradient function; a list of one micro-batch has one batch."""
    is_listed = num_micro_batches == 1 and isinstance(batch, MicroBatches)
    return split_batch(batch, 1)[0] if is_listed else batch


def _composed_before(
    composed: list[tuple[Callable[..., Any], Flat | None, int, Gradient]],
    fn: Callable[..., Any],
    frozen: Flat | None,
    summed: int,
) -> Gradient | None:
    """Return the gradient of a function, because it remembers the order of use between steps."""
    for place, (known_fn, known_frozen, known_summed, vg) in enumerate(composed):
        if known_fn is fn:
            if known_frozen is frozen and known_summed == summed:
                return vg
            del composed[place]
            break
    return None
