"""Recipes: compositions of the transforms under well-known names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import Group, gather_values, global_ranks, is_symmetric, mesh_of
from zfun.compression import Codec, Compression
from zfun.errors import NonFiniteError, OptionError, checked_options
from zfun.flat import Flat, call_site, consume, flats, local_shards, ravel, unravel
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.optim import (
    LossScale,
    LossScaleState,
    Optimizer,
    as_optimizer,
    dynamic_loss_scale,
    static_loss_scale,
    with_master,
)
from zfun.placement import P, Placement, R
from zfun.reductions import global_norm
from zfun.stores import Offload, Store
from zfun.transforms import (
    ScheduleOptions,
    WeightedMean,
    accumulate,
    apply,
    cast,
    data_parallel,
    offload_grads,
    offload_loss,
    offload_optimizer,
    offload_params,
    probe,
    redistribute,
    replicate,
    replicate_grads,
    scale_loss,
    shard,
    shard_grads,
    shard_optimizer,
    shard_params,
    unshard,
    value_and_grad,
)
from zfun.typing import Gradient, Loss

__all__ = ["Precision", "StepInfo", "Zero", "ZeroState", "zero"]


_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training run; ``None`` leaves a dtype unchanged.

    Attributes:
        param: of parameters and frozen leaves between steps; complex and integer leaves keep their
            dtypes.
        compute: of parameters in the loss and in gathers.
        reduce: of the gradients: sent, summed over the ranks, accumulated. By default float32 for
            half parameters, else theirs.
        master: of master weights beside narrower parameters; the optimizer's state has this dtype
            too.
        loss_scale: a rule that goes on from step to step, or one number; ``None`` for none.

    Example:
        >>> Precision(compute=torch.bfloat16).master is None
        True
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    loss_scale: LossScale | float | None = None


class ZeroState(NamedTuple):
    """The state of a training run between steps.

    Attributes:
        params: the trained parameters: placement ``R`` at stages 0 to 2, ``S`` at stage 3.
        frozen: the leaves that are not trained, placed alike; ``None`` where there are none.
        opt_state: the optimizer's state.
        step: steps taken, skipped ones included.
        num_skipped: steps skipped in a row just now.
        loss_scale: the state of the loss scale; ``None`` where there is none.
    """

    params: Flat
    frozen: Flat | None
    opt_state: Any
    step: int
    num_skipped: int
    loss_scale: LossScaleState | None = None


class StepInfo(NamedTuple):
    """The results of one step; equal on all ranks.

    Attributes:
        loss: the loss over all ranks, a scalar.
        grad_norm: the norm of the gradient over all ranks, before any clipping, in float64. Where
            the optimizer sums by itself (:func:`zfun.optim.onebit_adam`), the sum of the norms of
            the ranks' terms: no less than that.
        skipped: whether gradients were not finite, and the step was not taken.
        bad_leaf: the first leaf with such a gradient, where a step was skipped.
        aux: the second result of the loss, from this rank's batch.
        loss_scale: the factor of the loss in backward; 1 where there is no loss scale.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: bool
    bad_leaf: str | None
    aux: Any
    loss_scale: float = 1.0


class _Init(Protocol):
    def __call__(self, params: tree.Tree, *, init: str = "check") -> ZeroState: ...


class Zero(NamedTuple):
    """A training loop's three functions.

    Attributes:
        init: ``init(params, init="check") -> state``: ``"check"`` compares the parameters across
            ranks and raises :class:`zfun.errors.SpecMismatch` on a difference; ``"broadcast"``
            takes rank 0's values.
        step: ``step(state, batch) -> (state, info)``.
        params: ``params(state) -> the whole tree``; every rank must call.
    """

    init: _Init
    step: Callable[[ZeroState, Any], tuple[ZeroState, StepInfo]]
    params: Callable[[ZeroState], tree.Tree]


@checked_options
def zero(
    stage: int,
    loss_fn: Loss,
    optimizer: Any,
    group: Group,
    *,
    precision: torch.dtype | Precision | None = None,
    num_micro_batches: int = 1,
    trainable: Callable[[str, Any], bool] | None = None,
    offload: Offload | None = None,
    compression: Compression | None = None,
    schedule: ScheduleOptions | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    order: Sequence[str] | None = None,
    donate: bool = True,
    max_skipped: int = 100,
) -> Zero:
    """Compose the transforms of a ZeRO stage.

    ===== ======================= ========= ================== =================
    stage known as                params    grads at update    optimizer state
    ===== ======================= ========= ================== =================
    0     data parallel           ``R``     ``R``              ``R``
    1     ZeRO-1                  ``R``     ``P -> S``         ``S``
    2     ZeRO-2                  ``R``     ``S``              ``S``
    3     ZeRO-3                  ``S``     ``S``              ``S``
    ===== ======================= ========= ================== =================

    Gradients that are not finite skip the step on all ranks together, without a change to
    parameters and optimizer state.

    Args:
        stage: 0, 1, 2 or 3.
        loss_fn: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`zfun.weighted_mean`.
        optimizer: an optimizer of ``zfun.optim``, or an element-wise ``(init, update)`` pair.
        group: the ranks; each passes a batch of its own to ``step``. The inner axis of a mesh
            shares the state over that axis and sums gradients over the whole mesh, whose every rank
            gives a batch (HSDP, MiCS).
        precision: ``torch.bfloat16`` keeps, computes and gathers parameters in it, and reduces,
            accumulates and updates in float32, with float32 master weights and moments;
            ``torch.float16`` does the same with a dynamic loss scale; a :class:`zfun.Precision`
            says each by itself. By default everything has the dtypes of the parameters.
        num_micro_batches: how many micro-batches a batch is split in.
        trainable: which leaves are trained, by path and leaf; by default all. No gradient or
            optimizer state is made for the others.
        offload: stores for parameters, gradients and the optimizer's state.
        compression: codecs for gathers of parameters and sums of gradients.
        schedule: when stage 3 gathers and releases buckets; see :func:`zfun.shard_params`.
        bucket_bytes: where a bucket closes, in bytes.
        order: paths of leaves, first used first, from :func:`zfun.planner.order_of_use`; by default
            the order of the tree.
        donate: let ``step`` overwrite the buffers of the old state, which must not be used again.
        max_skipped: how many steps in a row may be skipped before
            :class:`zfun.errors.NonFiniteError` is raised.

    Returns:
        The functions ``init``, ``step`` and ``params``.

    Raises:
        OptionError: an option that does not exist or does not go with the stage.
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
    stores_of = _record("offload", offload, Offload, "Offload(optimizer=zf.stores.host())")
    codecs = _record(
        "compression", compression, Compression, "Compression(grads=zf.compression.int4())"
    )
    options = _record("schedule", schedule, ScheduleOptions, "ScheduleOptions(prefetch=2)")
    counts = {
        "num_micro_batches": num_micro_batches,
        "bucket_bytes": bucket_bytes,
        "max_skipped": max_skipped,
    }
    _check_options(stage, counts, stores_of, codecs, options)
    policy = policy_of(precision)
    scaler = policy.loss_scale if isinstance(policy.loss_scale, LossScale) else None
    rule = _optimizer_of(stage, optimizer, group, bucket_bytes, stores_of.optimizer, policy.master)
    place = _placed_at(stage, group, options.persistence)
    composed: list[tuple[tuple[Flat | None, int], Gradient]] = []

    def gradient_of(frozen: Flat | None, scale: float, summed: int) -> Gradient:
        # Composed once, because the transforms remember the order of use from step to step.
        if not composed or composed[0][0][0] is not frozen or composed[0][0][1] != summed:
            cast_loss = loss_fn if policy.compute is None else cast(loss_fn, policy.compute)
            loss = _whole_loss(
                stage, cast_loss, group, frozen, stores_of.params, options, codecs.params
            )
            vg = _gradient(
                summed,
                loss,
                group,
                policy,
                bucket_bytes,
                stores_of.grads,
                codecs.grads,
                once=num_micro_batches == 1,
            )
            composed[:] = [((frozen, summed), vg)]
        vg = composed[0][1] if scale == 1.0 else scale_loss(composed[0][1], scale)
        return vg if num_micro_batches == 1 else accumulate(vg, num_micro_batches)

    def start(params: tree.Tree, *, init: str = "check") -> ZeroState:
        if init not in ("check", "broadcast"):
            raise OptionError(f"init must be 'check' or 'broadcast'; got {init!r}")
        exact, params = _rounded_as(policy, params, group, bucket_bytes, init)
        chosen, rest = (params, None) if trainable is None else tree.partition(params, trainable)
        trained = place(
            chosen, group, bucket_bytes=bucket_bytes, init=init, labels=rule.labels, order=order
        )
        frozen = (
            None
            if rest is None or not tree.leaves(rest)
            else place(rest, group, bucket_bytes=bucket_bytes, init=init, order=order)
        )
        exact = exact if trainable is None else tree.partition(exact, trainable)[0]
        state = rule.init(_unrounded(trained, exact, policy.master))
        if stores_of.params is not None:
            trained = offload_params(trained, stores_of.params)
            frozen = None if frozen is None else offload_params(frozen, stores_of.params)
        return ZeroState(trained, frozen, state, 0, 0, None if scaler is None else scaler.init())

    def step(state: ZeroState, batch: Any) -> tuple[ZeroState, StepInfo]:
        scale = 1.0 if state.loss_scale is None else float(state.loss_scale.scale)
        # An optimizer that sums the terms of gradients gets each rank's own terms, so backward does
        # not sum.
        terms = mesh_of(group).size > 1 and rule.takes_terms(state.opt_state)
        value, grads = gradient_of(state.frozen, scale, 1 if terms else stage)(state.params, batch)
        loss, aux = value if type(value) is tuple else (value, None)
        loss = loss.mean if isinstance(loss, WeightedMean) else loss
        grads = _delivered(grads, P if terms else rule.placement or R, group)
        # After the sum, because an unscaled gradient may be too small for float16.
        grads = grads if scale == 1.0 else _unscaled(grads, scale)
        norm = _norm(grads)
        skipped = not bool(torch.isfinite(norm))
        params, opt_state = state.params, state.opt_state
        if skipped:
            bad_leaf = _first_bad_leaf(grads)
            if state.num_skipped + 1 >= max_skipped:
                raise NonFiniteError(
                    f"gradients must be finite; {state.num_skipped + 1} steps in a row had some "
                    f"that were not, now first in leaf {bad_leaf!r}; lower the learning rate, "
                    "clip, or look at that leaf; the state is as it was",
                    rank=global_ranks(group)[group.rank],
                    step=state.step,
                    leaf=bad_leaf,
                )
        else:
            bad_leaf = None
            params, opt_state = apply(rule, grads, opt_state, params, donate=donate)
        if donate:
            params, opt_state = _handed_over(
                state, params, opt_state, f"step {state.step} at {call_site()}"
            )
        after = (
            None
            if scaler is None or state.loss_scale is None
            else scaler.update(state.loss_scale, not skipped)
        )
        new = ZeroState(
            params,
            state.frozen,
            opt_state,
            state.step + 1,
            state.num_skipped + 1 if skipped else 0,
            after,
        )
        return new, StepInfo(loss, norm, skipped, bad_leaf, aux, scale)

    def whole(state: ZeroState) -> tree.Tree:
        params = unshard(state.params)
        return params if state.frozen is None else tree.combine(params, unshard(state.frozen))

    return Zero(start, step, whole)


def _placed_at(stage: int, group: Group, persistence: int) -> Callable[..., Flat]:
    """Return the function that places parameters at a stage."""
    if stage == 3:
        return functools.partial(shard, persistence=persistence)
    return _replicate_in_place if stage and is_symmetric(mesh_of(group)) else replicate


def _replicate_in_place(params: tree.Tree, group: Group, **options: Any) -> Flat:
    """Replicate a tree over ranks that share memory: each rank owns and updates one part."""
    return redistribute(shard(params, group, **options), R, group, name="params", zero_copy=True)


def _record(name: str, value: Any, kind: type[_Record], example: str) -> _Record:
    """Return the options that belong together, or their defaults."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise OptionError(
            f"{name} is a zf.{kind.__name__} or None; got {value!r}; write zf.{example}"
        )
    return value


def _check_options(
    stage: int,
    counts: dict[str, int],
    offload: Offload,
    compression: Compression,
    schedule: ScheduleOptions,
) -> None:
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise OptionError(f"stage must be 0, 1, 2 or 3; got {stage!r}")
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1; got {value}")
    if stage == 3:
        return
    if offload.params is not None:
        raise OptionError(
            f"Offload.params keeps shards, which only stage 3 has; got stage {stage}; use "
            "stage=3, or leave params out of Offload()"
        )
    if compression.params is not None:
        raise OptionError(
            f"Compression.params is for stage 3, whose shards stay exact; got stage {stage}; use "
            "stage=3, or leave params out of Compression()"
        )
    if schedule != ScheduleOptions(schedule.prefetch):
        raise OptionError(
            "all of ScheduleOptions but prefetch is about gathered parameters, which only stage "
            f"3 has; got {schedule} at stage {stage}; use stage=3, or leave schedule out"
        )


def policy_of(precision: torch.dtype | Precision | None) -> Precision:
    """Return the dtypes of a precision."""
    match precision:
        case None:
            return Precision()
        case Precision():
            for name in ("param", "compute", "reduce", "master"):
                dtype = getattr(precision, name)
                if dtype is not None and not (
                    isinstance(dtype, torch.dtype) and dtype.is_floating_point
                ):
                    raise OptionError(
                        f"Precision.{name} is a floating dtype or None; got {dtype!r}"
                    )
            scale = precision.loss_scale
            rule = (
                scale if scale is None or isinstance(scale, LossScale) else static_loss_scale(scale)
            )
            return replace(precision, loss_scale=rule)
        case torch.bfloat16:
            return Precision(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
        case torch.float16:
            return Precision(
                torch.float16, torch.float16, torch.float32, torch.float32, dynamic_loss_scale()
            )
    raise OptionError(
        f"precision is torch.bfloat16, torch.float16, a zf.Precision or None; got {precision!r}; "
        "say each dtype by itself with zf.Precision(...)"
    )


def _rounded(params: tree.Tree, dtype: torch.dtype) -> tree.Tree:
    """Cast the floating leaves of a tree; tied ones stay tied."""
    made: dict[object, Tensor] = {}

    def one(leaf: Any) -> Any:
        # Leaves without a layout are refused later, when the ranks compare their trees.
        if (
            not isinstance(leaf, Tensor)
            or not leaf.is_floating_point()
            or leaf.layout is not torch.strided
        ):
            return leaf
        key = (
            (
                leaf.untyped_storage()._cdata,
                leaf.storage_offset(),
                leaf.shape,
                leaf.stride(),
                leaf.dtype,
            )
            if leaf.numel()
            else id(leaf)
        )
        if key not in made:
            made[key] = leaf.detach().to(dtype)
        return made[key]

    return tree.map(one, params)


def _rounded_as(
    policy: Precision, params: tree.Tree, group: Group, bucket_bytes: int, init: str
) -> tuple[tree.Tree, tree.Tree]:
    """Return parameters before and after rounding."""
    exact = unshard(params) if isinstance(params, Flat) else params
    if policy.param is None:
        return exact, exact
    if policy.master is not None:
        # Ranks must agree on the digits that rounding removes, because the master weights start
        # from them.
        exact = unravel(replicate(exact, group, bucket_bytes=bucket_bytes, init=init))
    return exact, _rounded(exact, policy.param)


def _unrounded(flat: Flat, exact: tree.Tree, dtype: torch.dtype | None) -> Flat:
    """Return unrounded parameters, for master weights wider than the parameters."""
    if dtype is None:
        return flat
    narrow = [bucket.dtype.itemsize < dtype.itemsize for bucket in flat.layout.buckets]
    if not any(narrow):
        return flat
    dtypes = [
        dtype if is_narrow else bucket.dtype
        for bucket, is_narrow in zip(flat.layout.buckets, narrow, strict=True)
    ]
    whole = ravel(exact, flat.layout, flat.group, dtypes=dtypes)
    return redistribute(whole, flat.placement, flat.group, name="params", donate=True)


def _delivered(grads: Flat, placement: Placement, group: Group) -> Flat:
    """Bring gradients to the placement of the optimizer."""
    if placement is P:
        return stores.resident(grads)
    return redistribute(grads, placement, group, name="grads", donate=True)


def _norm(grads: Flat) -> Tensor:
    """Return the norm of gradients over all ranks; for terms (``P``) an upper bound."""
    return (
        gather_values(global_norm(unravel(grads)), grads.group, "norm").sum()
        if grads.placement is P
        else global_norm(grads)
    )


def _unscaled(grads: Flat, scale: float) -> Flat:
    factor = 1.0 / scale
    return grads.with_buffers(
        buffer.to(ops.wide(buffer.dtype)).mul_(factor) for buffer in grads.buffers
    )


def _optimizer_of(
    stage: int,
    optimizer: Any,
    group: Group,
    bucket_bytes: int,
    store: Store | None,
    master: torch.dtype | None,
) -> Optimizer:
    rule = (
        as_optimizer(optimizer) if master is None else with_master(as_optimizer(optimizer), master)
    )
    probe(rule)
    if stage == 3 and rule.partial is not None:
        raise OptionError(
            "an optimizer that sums the terms of gradients by itself, as onebit_adam() does, "
            "keeps whole values on every rank, which stage 3 is there to avoid; got stage 3; use "
            "stage 0, 1 or 2"
        )
    if stage >= 1:
        rule = shard_optimizer(rule, group, bucket_bytes=bucket_bytes)
    return rule if store is None else offload_optimizer(rule, store)


def _whole_loss(
    stage: int,
    loss_fn: Loss,
    group: Group,
    frozen: Flat | None,
    store: Store | None,
    schedule: ScheduleOptions,
    codec: Codec | None,
) -> Loss:
    """Return a loss of the trained parameters alone, in the placement of the stage."""
    if stage == 3:
        loss = shard_params(loss_fn, group, frozen=frozen, schedule=schedule, compression=codec)
        return loss if store is None else offload_loss(loss, store)
    if frozen is None:
        return loss_fn
    rest = unravel(frozen)
    return lambda params, batch: loss_fn(tree.combine(params, rest), batch)


def _gradient(
    stage: int,
    loss: Loss,
    group: Group,
    policy: Precision,
    bucket_bytes: int,
    store: Store | None,
    codec: Codec | None,
    *,
    once: bool,
) -> Gradient:
    vg: Gradient = data_parallel(
        value_and_grad(loss),
        mesh_of(group),
        reduce_dtype=policy.reduce,
        bucket_bytes=bucket_bytes,
        compression=codec,
    )
    if stage >= 2:
        vg = shard_grads(vg, group)
    elif stage == 0 and once:
        # Whole gradients of several micro-batches are added before the sum over the ranks.
        vg = replicate_grads(vg, mesh_of(group))
    return vg if store is None else offload_grads(vg, store)


def _handed_over(
    state: ZeroState, params: Flat, opt_state: Any, consumed_by: str
) -> tuple[Flat, Any]:
    """Give the buffers to new values, and mark the old ones."""
    params = params.with_buffers(params.buffers)
    opt_state = tree.map(
        lambda x: x.with_buffers(x.buffers) if isinstance(x, Flat) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, Flat),
    )
    consume([state.params, *flats(state.opt_state)], consumed_by)
    return params, opt_state


def _first_bad_leaf(grads: Flat) -> str | None:
    """Name the first leaf with a gradient that is not finite, over all ranks."""
    group, layout = grads.group, grads.layout
    first = len(layout.leaves)
    whole = grads.placement is P
    for index, piece in enumerate(grads.buffers if whole else local_shards(grads)):
        bad = torch.nonzero(~torch.isfinite(piece)).view(-1) + (
            0 if whole else group.rank * grads.shard_numel(index)
        )
        leaves = layout.buckets[index].leaves
        ends = torch.tensor(
            [layout.leaves[leaf].offset for leaf in leaves[1:]],
            dtype=torch.int64,
            device=bad.device,
        )
        # Leaves need not lie in the order of the tree.
        first = min(
            [
                first,
                *(
                    leaves[place]
                    for place in torch.bucketize(bad, ends, right=True).unique().tolist()
                ),
            ]
        )
    first = int(
        gather_values(torch.tensor([first], device=layout.device), group, "first bad leaf").min()
    )
    return layout.leaves[first].path if first < len(layout.leaves) else None
