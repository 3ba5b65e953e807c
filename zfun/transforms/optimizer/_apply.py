"""Run an optimizer on values of any placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import errors, ops, stores, tree
from zfun.collectives import await_readers
from zfun.flat import (
    Flat,
    call_site,
    change_layout,
    check_same_layout,
    consume,
    flats,
    ravel,
    unravel,
)
from zfun.layout import Layout, LeafSlot, layout_of
from zfun.optim import Optimizer, as_optimizer
from zfun.options import takes
from zfun.placement import P, R, S
from zfun.transforms._notes import noting
from zfun.transforms.optimizer._placing import agree, can_fail, layout_for, lift, lower
from zfun.transforms.optimizer._probe import check_padding, probe
from zfun.transforms.optimizer._stream import StreamedUpdate, streamed
from zfun.transforms.values._redistribute import redistribute


@ops.uncompiled
@takes()
def apply(
    optimizer: Any, grads: tree.Tree, state: Any, params: tree.Tree, *, donate: bool = False
) -> tuple[tree.Tree, Any]:
    """Take one optimizer step on values of any placement.

    Gradients go to the placement in which the optimizer computes (that of the parameters, unless
    the optimizer says otherwise), and the new parameters to the placement and the form of the old
    ones. The collectives of stages 0 and 1 run here. An optimizer that sums the terms of gradients
    (``Optimizer.partial``) receives the terms. A gradient of zeros is stepped, as in JAX; only
    :func:`zfun.zero` makes gradients that leave leaves out (``Flat.missed``).

    Args:
        optimizer: an optimizer, or an ``(init, update)`` pair.
        grads: a ``Flat`` of any placement, or a tree like ``params``.
        state: the result of ``optimizer.init`` or of the last step.
        params: a ``Flat`` with placement ``R`` or ``S``, or a tree of tensors.
        donate: let the step take over the buffers of ``state`` and ``params``, which must be flat.
            A later use raises :class:`zfun.errors.DonatedStateError`.

    Returns:
        New parameters and new state. Without ``donate`` the results share no memory with the
        arguments.

    Raises:
        NotElementwiseError: an optimizer that mixes elements, on flat values.
        PlacementError: values that do not go together.

    Example:
        >>> import zfun as zf
        >>> optimizer = zf.optim.sgd(0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> zf.apply(optimizer, {"w": torch.ones(2)}, optimizer.init(params), params)[0]
        {'w': tensor([0.5000, 1.5000])}
    """
    return _apply(as_optimizer(optimizer), grads, state, params, donate=donate, spends=False)


def apply_spending(
    optimizer: Optimizer, grads: Flat, state: Any, params: Flat, *, donate: bool
) -> tuple[Flat, Any]:
    """Take a step like :func:`apply`, which may write to the memory of the gradients."""
    return _apply(optimizer, grads, state, params, donate=donate, spends=True)


def apply_if(
    taken: Tensor, optimizer: Optimizer, grads: Flat, state: Any, params: Flat, *, donate: bool
) -> tuple[Flat, Any]:
    """Take a step like :func:`apply`, or leave it out where ``taken``, on the device, is False."""
    return _apply(optimizer, grads, state, params, donate=donate, spends=False, taken=taken)


def _apply(
    chosen: Optimizer,
    grads: tree.Tree,
    state: Any,
    params: tree.Tree,
    *,
    donate: bool,
    spends: bool,
    taken: Tensor | None = None,
) -> tuple[Any, Any]:
    if not isinstance(grads, Flat) and not isinstance(params, Flat):
        return _apply_to_trees(chosen, grads, state, params, donate)
    probe(chosen)
    if not isinstance(params, Flat):
        return _apply_to_tree(chosen, grads, state, params, donate)
    if not isinstance(grads, Flat):
        raise errors.PlacementError(
            "flat parameters need flat gradients; got a tree of tensors; compute them from the "
            "same parameters with value_and_grad(), or wrap them in data_parallel()"
        )
    check_padding(chosen, {bucket.dtype for bucket in params.layout.buckets})
    if params.placement is P:
        raise errors.PlacementError(
            "parameters are whole or sharded; got a Flat with placement P; redistribute() it to "
            "R or S first"
        )
    check_same_layout(params, grads, "parameters and gradients")
    donated = [*flats(state), params] if donate else []
    # Stores that can fail keep the old state until all ranks have the new one.
    overwritten = [] if can_fail((state, params)) else donated
    stepped = _apply_by_bucket(chosen, grads, state, params, donate, spends, overwritten)
    new, new_state = stepped or _apply_at_once(
        chosen, grads, state, params, donate, overwritten, taken
    )
    return _taken_over(new, new_state, donated)


def finish(
    update: StreamedUpdate, grads: Flat, state: Any, params: Flat, *, donate: bool = False
) -> tuple[Flat, Any]:
    """Finish a step that began in backward; the arguments are those of :func:`apply`."""
    with noting("update"):
        new, new_state = update.finish(grads)
    return _taken_over(new, new_state, [*flats(state), params] if donate else [])


def _taken_over(new: Flat, new_state: Any, donated: Sequence[Flat]) -> tuple[Flat, Any]:
    """Mark old values as consumed."""
    if donated:
        # State that an optimizer returns unchanged must live on.
        new_state = tree.map(_with_new_life, new_state, is_leaf=lambda x: isinstance(x, Flat))
        consume(donated, f"zf.apply(..., donate=True) at {call_site()}")
    return new, new_state


def _apply_by_bucket(
    optimizer: Optimizer,
    grads: Flat,
    state: Any,
    params: Flat,
    donate: bool,
    spends: bool,
    overwritten: Sequence[Flat],
) -> tuple[Flat, Any] | None:
    """Step over stores; ``None`` if nothing is in a store, or the step must be taken at once."""
    if not stores.stored((grads, state, params)):
        return None
    with noting("update"):
        update = streamed(optimizer, grads, state, params)
        with _ConsumedOnError(overwritten):
            return None if update is None else update.run(donate=donate, spends=spends)


def _apply_at_once(
    optimizer: Optimizer,
    grads: Flat,
    state: Any,
    params: Flat,
    donate: bool,
    overwritten: Sequence[Flat],
    taken: Tensor | None,
) -> tuple[Flat, Any]:
    options = {} if taken is None else {"taken": taken}
    with noting("update"):
        placed = lower(optimizer, grads, state, params)
        if donate and optimizer.group is None:
            # Peers may still read the shards. A sharded optimizer waits for the peers itself.
            await_readers(placed.params.group, placed.params.buffers)
        with _ConsumedOnError(overwritten):
            new, new_state = optimizer.apply(
                placed.grads, state, placed.params, donate=donate, **options
            )
    given_up = placed.present if donate else None
    # The gradients are not held while new parameters are gathered.
    del placed
    with _ConsumedOnError(overwritten):
        new = lift(new, params, into=given_up)
    agree((new, new_state), params)
    return new, new_state


class _ConsumedOnError:
    """Let no one use values that an update has overwritten in part before the update failed."""

    def __init__(self, values: Sequence[Flat]) -> None:
        self._values = values

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            return
        # Other errors of zfun refuse the arguments before anything is written.
        if not issubclass(kind, errors.ZfunError) or issubclass(
            kind, (errors.PeerLost, errors.CollectiveMismatch)
        ):
            consume(
                self._values,
                f"zf.apply(..., donate=True) at {call_site()}, which failed half-way with "
                f"{kind.__name__}",
            )


def _with_new_life(value: Any) -> Any:
    return value.with_buffers(value.buffers) if isinstance(value, Flat) else value


def _apply_to_trees(
    optimizer: Optimizer, grads: tree.Tree, state: Any, params: tree.Tree, donate: bool
) -> tuple[Any, Any]:
    if donate:
        raise errors.OptionError(
            "donate=True takes over flat buffers; got trees of tensors; make the parameters flat "
            "with zf.replicate() or zf.shard()"
        )
    spec = tree.structure(params)
    like = tree.leaves_like(spec, grads)
    if like is None:
        raise errors.SpecMismatch(
            f"gradients must have the structure of the parameters; got {tree.paths(grads)} for "
            f"{tree.paths(params)}"
        )
    grads = tree.unflatten(spec, like)
    with noting("update"):
        new, state = optimizer.apply(grads, state, params)
    # Tied leaves got one gradient, so the new values are equal and stay one tensor.
    leaves = tree.leaves(new)
    positions = layout_of(params).positions
    first = dict(reversed(list(zip(positions, leaves, strict=True))))
    return tree.unflatten(spec, [first[position] for position in positions]), state


def _apply_to_tree(
    optimizer: Optimizer, grads: Flat, state: Any, params: tree.Tree, donate: bool
) -> tuple[Any, Any]:
    """Step a tree of parameters with flat gradients: ravel, step, and view the result as trees."""
    if donate:
        raise errors.OptionError(
            "donate=True takes over flat buffers; got parameters as a tree of tensors; make them "
            "flat with zf.replicate()"
        )
    layout, group = layout_for(optimizer, grads.layout), grads.group
    if grads.layout != layout:
        # The new parameters are whole, so whole gradients send no more bytes.
        grads = change_layout(
            redistribute(grads, R, group, name="grads")
            if grads.placement is S
            else stores.resident(grads),
            layout,
        )
    # Parts of the state with the structure of the parameters are flat during the step; counts and
    # flat parts are left alone.
    is_like = lambda x: isinstance(x, Flat) or _dtypes_like(x, layout) is not None
    was_flat = [isinstance(x, Flat) for x in tree.leaves(state, is_leaf=is_like) if is_like(x)]

    def to_flat(part: Any) -> Any:
        dtypes = None if isinstance(part, Flat) else _dtypes_like(part, layout)
        if dtypes is None:
            return part
        leaves, spec = tree.flatten(part)
        place = layout.select([bucket for bucket, dtype in enumerate(dtypes) if dtype is not None])
        # A state has one tensor for each of tied leaves; these tensors are equal and share a slot.
        first = dict(reversed(list(zip(place.positions, leaves, strict=True))))
        fetched = {position: stores.fetch(leaf, layout.device) for position, leaf in first.items()}
        for path, position, leaf in zip(place.paths, place.positions, leaves, strict=True):
            if leaf is not first[position] and not torch.equal(
                stores.fetch(leaf, layout.device), fetched[position]
            ):
                raise errors.AliasChanged(
                    f"tied leaves must be tied from the start; {place.leaves[position].path!r} "
                    f"and {path!r} are one tensor now and have two optimizer states; make a new "
                    "state with init()",
                    leaf=path,
                )
        whole = tree.unflatten(spec, [fetched[position] for position in place.positions])
        return ravel(whole, place, group, dtypes=[dtype for dtype in dtypes if dtype is not None])

    def to_tree(part: Any) -> Any:
        if not isinstance(part, Flat) or was_flat.pop(0):
            return part
        whole, held = unravel(stores.resident(part)), stores.stored(part)
        return tree.map(lambda x: held[0].store.put(x, "state"), whole) if held else whole

    new, state = apply(
        optimizer, grads, tree.map(to_flat, state, is_leaf=is_like), ravel(params, layout, group)
    )
    return unravel(new), tree.map(to_tree, state, is_leaf=lambda x: isinstance(x, Flat))


def _dtypes_like(value: Any, layout: Layout) -> list[torch.dtype | None] | None:
    """Compare a part of an optimizer's state with the structure and shapes of the parameters.

    Whole buckets may be missing.

    Returns:
        The dtype of each bucket, ``None`` for a missing bucket; or ``None`` alone for another
        structure.
    """
    if isinstance(value, (Tensor, stores.Stored)) and layout.spec.num_nodes > 1:
        return None
    parts = tree.subtrees(layout.spec, value)
    if parts is None or (layout.leaves and all(part is None for part in parts)):
        return None
    found: list[set[torch.dtype | None]] = [set() for _ in layout.buckets]
    for part, position in zip(parts, layout.positions, strict=True):
        slot = layout.leaves[position]
        found[slot.bucket].add(None if part is None else _real_dtype(part, slot))
    if any(len(dtypes) > 1 or torch.bool in dtypes for dtypes in found):
        return None
    return [next(iter(dtypes)) for dtypes in found]


def _real_dtype(part: Any, slot: LeafSlot) -> torch.dtype:
    """The dtype of the numbers in a leaf like a parameter; bool for a leaf of another kind."""
    if (
        not isinstance(part, (Tensor, stores.Stored))
        or tuple(part.shape) != slot.shape
        or part.dtype.is_complex != slot.dtype.is_complex
    ):
        return torch.bool
    return (
        part.dtype.to_real()
        if part.dtype.is_complex
        else part.dtype
        if part.dtype.is_floating_point
        else torch.bool
    )
