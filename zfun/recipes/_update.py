"""The parts of a step after backward: gradients, buffers and donated values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zfun import ops, stores, tree
from zfun.collectives import Group, agreement_group, gather_values, global_ranks, sum_group
from zfun.errors import NonFiniteError
from zfun.flat import Flat, call_site, consume, flats
from zfun.layout import LeafSlot, logical_path
from zfun.parallel import model_axes
from zfun.placement import P, Placement, R
from zfun.recipes._checks import check_used, first_bad_leaf
from zfun.recipes._options import ZeroOptions
from zfun.recipes._state import StepInfo, ZeroState
from zfun.reductions import merge_buffers, norm_and_counts
from zfun.transforms import apply
from zfun.transforms.optimizer._apply import apply_spending, finish
from zfun.transforms.optimizer._placing import deliver
from zfun.transforms.optimizer._stream import StreamedUpdate


def takes_terms(recipe: ZeroOptions, state: ZeroState) -> bool:
    """Whether the optimizer sums the ranks' terms of gradients, so that backward does not."""
    return sum_group(recipe.group).size > 1 and recipe.rule.takes_terms(state.opt_state)


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
    grads = grads if scale == 1.0 else _unscaled(grads, scale)
    norm, counts = norm_and_counts(grads, len(grads.missed))
    size = float(norm)
    if size == 0.0:
        check_used(state, counts, group)
    unused = _unused_everywhere(grads, counts) if recipe.leaves_out else []
    leaves = grads.layout.leaves
    now = {**state.missed.of(leaves), **{x.path: None for x in unused}} if recipe.leaves_out else {}
    grads = grads.with_missed(now)
    skipped = not math.isfinite(size)
    bad_leaf = _bad_leaf(recipe, state, grads) if skipped else None
    rate, num_applied = rule.learning_rate(state.opt_state), state.num_applied + (not skipped)
    params, opt_state, kept = state.params, state.opt_state, state.buffers
    if not skipped:
        if begun is not None:
            params, opt_state = finish(begun, grads, opt_state, params, donate=donate)
        else:
            take = apply_spending if spends else apply
            params, opt_state = take(rule, grads, opt_state, params, donate=donate)
        if left is not None and recipe.buffers is not None:
            batched = [axis.group for axis in model_axes(recipe.loss_fn) if axis.has_batches]
            for group in (sum_group(left.group), *batched):
                left = merge_buffers(left, group, recipe.buffers)
            kept = left
    if donate:
        params, opt_state = _handed_over(
            state, params, opt_state, f"step {state.step} at {call_site()}"
        )
    new = ZeroState(
        params,
        state.frozen,
        opt_state,
        step=state.step + 1,
        num_skipped=state.num_skipped + 1 if skipped else 0,
        loss_scale=None
        if recipe.scaler is None or state.loss_scale is None
        else recipe.scaler.update(state.loss_scale, not skipped),
        buffers=kept,
        num_applied=num_applied,
        missed=state.missed if skipped else state.missed.after([*map(logical_path, unused)]),
    )
    return new, StepInfo(loss, norm, skipped, bad_leaf, aux, scale, rate, num_applied)


def _bad_leaf(recipe: ZeroOptions, state: ZeroState, grads: Flat) -> str | None:
    """Name the leaf of a step that is skipped, and refuse to skip too many in a row."""
    bad_leaf, num_skipped = first_bad_leaf(grads), state.num_skipped + 1
    if num_skipped >= recipe.max_skipped:
        raise NonFiniteError(
            f"gradients must be finite; {num_skipped} steps in a row had some that were not, "
            f"now first in leaf {bad_leaf!r}; lower the learning rate, clip, or look at that "
            "leaf; the state is as it was",
            rank=global_ranks(recipe.group)[recipe.group.rank],
            step=state.step,
            leaf=bad_leaf,
        )
    return bad_leaf


def scale_of(state: ZeroState) -> float:
    """Return the factor of the loss in backward."""
    return 1.0 if state.loss_scale is None else float(state.loss_scale.scale)


def _delivered(grads: Flat, placement: Placement, group: Group) -> Flat:
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
    found = gather_values(flags, agreement_group(grads.group), "unused leaves")
    if ops.is_abstract(found) or grads.layout.device.type == "meta":
        return unused
    everywhere = found.all(0).tolist()
    return [slot for slot, flag in zip(grads.layout.leaves, everywhere, strict=True) if flag]


def _unscaled(grads: Flat, scale: float) -> Flat:
    factor = 1.0 / scale

    def divided(buffer: Any) -> Any:
        wide = ops.wide(buffer.dtype)
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
