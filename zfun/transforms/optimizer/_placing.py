"""The placement changes of an update, before and after the optimizer; agreement on stores.

[Note: the update]
Down: parameters and gradients go to the placement, the group and the layout in which the optimizer
computes (``lower``). Then the optimizer runs. Up: new parameters, or updates, go to the placement,
the layout and the store of the old parameters (``lift``). Optimizers around others (``chain``,
``with_master``, ``offload``) see values that are placed already, and change no placement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.collectives import Group, gather_values, sum_group
from zfun.flat import Flat, change_layout, check_same_layout, ravel
from zfun.layout import Layout, split_by_label
from zfun.optim import Optimizer
from zfun.placement import Placement, S
from zfun.transforms.values._redistribute import redistribute


class PlacedOptimizer(NamedTuple):
    """Values in the form that an optimizer takes.

    Attributes:
        grads: the gradients.
        params: the parameters.
        present: the parameters in memory and in the optimizer's layout, but in the caller's
            placement.
    """

    grads: Flat
    params: Flat
    present: Flat


def layout_for(optimizer: Optimizer, layout: Layout) -> Layout:
    """The layout for an optimizer, which may treat leaves differently by label."""
    return layout if optimizer.labels is None else split_by_label(layout, optimizer.labels)


def is_placed(optimizer: Optimizer, params: tree.Tree) -> bool:
    """Whether parameters have the placement, group and layout of the optimizer."""
    return (
        isinstance(params, Flat)
        and params.placement is optimizer.placement
        and params.group is optimizer.group
        and params.layout == layout_for(optimizer, params.layout)
        and all(isinstance(buffer, Tensor) for buffer in params.buffers)
    )


def deliver(grads: Flat, placement: Placement, group: Group, *, donate: bool = False) -> Flat:
    """Bring gradients to the placement of an optimizer; stored ones bucket by bucket.

    Args:
        grads: gradients of any placement.
        placement: the placement to reach.
        group: the group of that placement.
        donate: overwrite the gradients; they are dead afterwards.

    Returns:
        Gradients in memory or in the store, as before.
    """

    def move(flat: Flat) -> Flat:
        return redistribute(flat, placement, group, name="grads", donate=donate)

    if grads.placement is placement and grads.group is group:
        return grads
    if all(isinstance(buffer, Tensor) for buffer in grads.buffers):
        return move(grads)
    return stores.by_bucket(move, grads)


def lower(optimizer: Optimizer, grads: tree.Tree, state: object, params: Flat) -> PlacedOptimizer:
    """Bring gradients and parameters to the placement of an optimizer.

    Args:
        optimizer: ``placement`` and ``group`` are the target; by default the parameters stay.
        grads: a flat of any placement, or a tree like the parameters.
        state: the optimizer's state, which decides whether the optimizer sums the terms now.
        params: a flat with placement ``R`` or ``S``.

    Returns:
        Gradients and parameters of one layout.
    """
    present = stores.resident(params)
    present = change_layout(present, layout_for(optimizer, present.layout))
    placed = redistribute(
        present,
        optimizer.placement or params.placement,
        optimizer.group or params.group,
        name="params",
    )
    if not isinstance(grads, Flat):
        grads = ravel(grads, placed.layout, placed.group)
    if grads.placement is not S and grads.layout != placed.layout:
        grads = change_layout(stores.resident(grads), placed.layout)
    check_same_layout(placed, grads, "parameters and gradients")
    if sum_group(params.group).size > 1 and optimizer.takes_terms(state):
        return PlacedOptimizer(stores.resident(grads), placed, present)
    return PlacedOptimizer(
        redistribute(grads, placed.placement, placed.group, name="grads"), placed, present
    )


def lift(new: Flat, params: Flat, into: Flat | None = None) -> Flat:
    """Bring new parameters to the placement, the layout and the store of the old ones.

    Args:
        new: new parameters, or updates.
        params: the old parameters.
        into: a dead flat of that placement, which the gather may overwrite.

    Returns:
        A flat like ``params``.
    """
    whole = redistribute(
        new, params.placement, params.group, name="params", zero_copy=True, into=into
    )
    whole = change_layout(whole, params.layout)
    old = iter(params.buffers)
    kept = stores.located(lambda x: _put_like(x, next(old)), whole)
    stores.flush(kept)
    return kept


def _put_like(new: Tensor, old: object) -> object:
    return old.store.put(new, old.name) if isinstance(old, stores.Stored) else new


def can_fail(value: tree.Tree) -> bool:
    """Whether a store of a tensor in a tree may fail."""
    return any(leaf.can_fail for leaf in stores.stored(value))


def agree(value: tree.Tree, like: Flat) -> None:
    """Wait until the stores of all ranks keep the new values in a tree."""
    stores.flush(value)
    await_ranks(value, like)


def await_ranks(value: tree.Tree, like: Flat) -> None:
    """Wait until all ranks are here, if a store of a tensor in a tree may fail on one of them."""
    if can_fail(value):
        # No rank gives up the old state before the stores of all ranks keep the new one.
        gather_values(torch.zeros(1, device=like.layout.device), like.group, "offload")
