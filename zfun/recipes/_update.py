"""The parts of a step after backward: gradients, buffers and donated values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, ops, stores, tree
from zfun.errors import NonFiniteError
from zfun.flat import Flat, call_site, consume, flats
from zfun.layout import LeafSlot, logical_path
from zfun.optim import LossScaleState
from zfun.parallel import model_axes
from zfun.placement import P, Placement, R
from zfun.recipes._checks import check_used, first_bad_leaf
from zfun.recipes._late import scale_on
from zfun.recipes._options import ZeroOptions
from zfun.recipes._state import StepInfo, ZeroState
from zfun.reductions import merge_buffers, norm_and_counts, norm_on_device
from zfun.transforms import apply
from zfun.transforms.optimizer._apply import apply_if, apply_spending, finish
from zfun.transforms.optimizer._placing import deliver
from zfun.transforms.optimizer._stream import StreamedUpdate


def takes_terms(recipe: ZeroOptions, state: ZeroState) -> bool:
    """Whether the optimizer sums the ranks' terms of gradients, so that backward does not."""
    return collectives.sum_group(recipe.group).size > 1 and recipe.rule.takes_terms(state.opt_state)


def updated(
    recipe: ZeroOptions,
    state: ZeroState,
    grads: Flat,
    loss: Any,
    left: Flat | None,
    aux: Any,
    begun: StreamedUpdate | None = None,
    *,
    spends: bool = False,
) -> tuple[ZeroState, StepInfo]:
    """Take the second half of a step, from gradients to a new state.

    Args:
        recipe: the options.
        state: the old state.
        grads: the gradients, times the loss scale.
        loss: over all ranks.
        left: the buffers that the calls of the loss have left on this rank, if any.
        aux: the second result of the loss.
        begun: the update that began with this step and has stepped some buckets already.
        spends: whether the step may write to the memory of the gradients.
    """
    group, rule, scale, donate = recipe.group, recipe.rule, scale_of(state), recipe.donate
    grads = _delivered(grads, P if takes_terms(recipe, state) else rule.placement or R, group)
    # Unscale after the sum, because an unscaled gradient may be too small for float16.
    grads = grads if state.loss_scale is None else _unscaled(grads, scale)
    norm, counts, taken = _judged(recipe, state, grads)
    is_late = isinstance(taken, Tensor)
    unused = _unused_everywhere(grads, counts) if recipe.leaves_out else []
    leaves = grads.layout.leaves
    now = {**state.missed.of(leaves), **{x.path: None for x in unused}} if recipe.leaves_out else {}
    grads = grads.with_missed(now)
    bad_leaf = None if is_late or taken else _bad_leaf(recipe, state, grads)
    rate = rule.learning_rate(state.opt_state)
    # It may raise, and then the old state stays.
    loss_scale = _scale_after(recipe, state, taken)
    params, opt_state, kept = state.params, state.opt_state, state.buffers
    if is_late:
        params, opt_state = apply_if(taken, rule, grads, opt_state, params, donate=donate)
    elif taken and begun is not None:
        params, opt_state = finish(begun, grads, opt_state, params, donate=donate)
    elif taken:
        take = apply_spending if spends else apply
        params, opt_state = take(rule, grads, opt_state, params, donate=donate)
    if left is not None and recipe.buffers is not None and (is_late or taken):
        kept = _merged(recipe, left, kept, taken)
    if donate:
        params, opt_state = _handed_over(
            state, params, opt_state, f"step {state.step} at {call_site()}"
        )
    new = ZeroState(
        params,
        state.frozen,
        opt_state,
        step=state.step + 1,
        num_skipped=~taken * (state.num_skipped + 1)
        if is_late
        else 0
        if taken
        else int(state.num_skipped) + 1,
        loss_scale=loss_scale,
        buffers=kept,
        num_applied=(state.num_applied if is_late else int(state.num_applied)) + taken,
        # Missed steps are counted on the host, which waits if there are any.
        missed=state.missed.after([*map(logical_path, unused)])
        if unused and taken
        else state.missed,
    )
    skipped = ~taken if is_late else not taken
    return new, StepInfo(loss, norm, skipped, bad_leaf, aux, scale, rate, new.num_applied)


def _judged(
    recipe: ZeroOptions, state: ZeroState, grads: Flat
) -> tuple[Tensor, list[int], bool | Tensor]:
    """Return the norm, how many leaves each rank did not use, and whether the step is taken."""
    count, group = len(grads.missed), recipe.group
    if not recipe.decides_on_device:
        norm, counts = norm_and_counts(grads, count)
        size = float(norm)
        # A plan knows no norm. Along a model axis a run asks other ranks, but only if it is zero.
        is_planned = ops.is_abstract(norm) and not collectives.model_groups(group)
        if size == 0.0 or is_planned:
            check_used(state, counts, group)
        return norm, counts, math.isfinite(size)
    norm, mesh, counts = norm_on_device(grads), collectives.sum_group(group), [count]
    if mesh.size > 1:
        # A number of the host, which goes from host to host.
        mine = torch.tensor(count, dtype=torch.int64, device="cpu")
        found = collectives.gather_values(mine, mesh, "unused leaves")
        counts = [count] * mesh.size if ops.is_abstract(found) else found.tolist()
    if not collectives.model_groups(group):
        # Along a model axis other ranks may have used leaves.
        check_used(state, counts, group)
    if ops.is_abstract(norm):
        return norm, counts, torch.ones((), dtype=torch.bool, device="cpu")
    return norm, counts, torch.isfinite(norm)


def _merged(recipe: ZeroOptions, left: Flat, before: Flat | None, taken: bool | Tensor) -> Flat:
    """Return the buffers after a step: those that the losses of the ranks have left, merged."""
    assert recipe.buffers is not None
    batched = [axis.group for axis in model_axes(recipe.loss_fn) if axis.has_batches]
    for group in (collectives.sum_group(left.group), *batched):
        left = merge_buffers(left, group, recipe.buffers)
    if before is None or not isinstance(taken, Tensor):
        return left
    pairs = zip(left.buffers, before.buffers, strict=True)
    return left.with_buffers([torch.where(taken, new, old) for new, old in pairs])


def _scale_after(
    recipe: ZeroOptions, state: ZeroState, taken: bool | Tensor
) -> LossScaleState | None:
    """Return the loss scale of the next step."""
    held = state.loss_scale
    if recipe.scaler is None or held is None:
        return None
    if isinstance(taken, Tensor):
        held = scale_on(held, taken.device)
    return recipe.scaler.update(held, taken)


def _bad_leaf(recipe: ZeroOptions, state: ZeroState, grads: Flat) -> str | None:
    """Name the leaf of a step that is skipped, and refuse to skip too many in a row."""
    bad_leaf, num_skipped = first_bad_leaf(grads), int(state.num_skipped) + 1
    if recipe.max_skipped is not None and num_skipped >= recipe.max_skipped:
        raise NonFiniteError(
            f"gradients must be finite; {num_skipped} steps in a row had some that were not, "
            f"now first in leaf {bad_leaf!r}; lower the learning rate, clip, or look at that "
            "leaf; the state is as it was",
            rank=collectives.global_ranks(recipe.group)[recipe.group.rank],
            step=state.step,
            leaf=bad_leaf,
        )
    return bad_leaf


def scale_of(state: ZeroState) -> float | Tensor:
    """Return the factor of the loss in backward: a number, or a tensor on the device."""
    if state.loss_scale is None:
        return 1.0
    scale = state.loss_scale.scale
    return float(scale) if scale.is_cpu else scale


def is_one(scale: float | Tensor) -> bool:
    """Whether the host knows that a factor is 1."""
    return isinstance(scale, float) and scale == 1.0


def _delivered(grads: Flat, placement: Placement, group: collectives.Group) -> Flat:
    """Bring gradients to the placement of the optimizer."""
    if placement is P:
        return stores.resident(grads)
    return deliver(grads, placement, group, donate=True)


def _unused_everywhere(grads: Flat, counts: Sequence[int]) -> list[LeafSlot]:
    """Return the leaves that no rank used, in the order of the layout.

    ``counts`` says how many leaves each rank did not use; ``grads`` names those of this rank.
    """
    unused = [slot for slot in grads.layout.leaves if slot.path in grads.missed]
    # A leaf that one of the ranks used is used, and mostly one of them uses all leaves.
    if len(counts) == 1 or min(counts) == 0:
        return unused if len(counts) == 1 else []
    here = [float(slot.path in grads.missed) for slot in grads.layout.leaves]
    # On the host, where they are needed.
    flags = torch.tensor(here, dtype=torch.uint8, device="cpu")
    found = collectives.gather_values(
        flags, collectives.agreement_group(grads.group), "unused leaves"
    )
    if ops.is_abstract(found) or grads.layout.device.type == "meta":
        return unused
    everywhere = found.all(0).tolist()
    return [slot for slot, flag in zip(grads.layout.leaves, everywhere, strict=True) if flag]


def _unscaled(grads: Flat, scale: float | Tensor) -> Flat:
    """Divide gradients by the loss scale, in a wide dtype with any scale, also with 1."""
    if is_one(scale) and all(x.dtype == ops.wide(x.dtype) for x in grads.buffers):
        return grads
    inverse = scale.double().reciprocal() if isinstance(scale, Tensor) else 1.0 / scale

    def divided(buffer: Any) -> Any:
        wide = ops.wide(buffer.dtype)
        factor = inverse.to(wide) if isinstance(inverse, Tensor) else inverse
        if isinstance(buffer, stores.Stored):
            # In the store the gradients stay as they are, and each read unscales a bucket.
            return stores.derived(buffer, lambda x: x.to(wide) * factor, wide)
        return buffer.to(wide).mul_(factor)

    return grads.with_buffers(map(divided, grads.buffers))


def _handed_over(
    state: ZeroState, params: Flat, opt_state: Any, consumed_by: str
) -> tuple[Flat, Any]:
    """Give the buffers to new values, and mark the old values as consumed."""
    params = params.with_buffers(params.buffers)
    opt_state = tree.map(
        lambda x: x.with_buffers(x.buffers) if isinstance(x, Flat) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, Flat),
    )
    consume([state.params, *flats(state.opt_state)], consumed_by)
    return params, opt_state
