"""Optimizers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.layout import LabelFn
from zfun.optim._base import InitFn, Optimizer, State, UpdateFn, as_optimizer, prepared, remembered
from zfun.optim._factors import FactorUpdate, is_scaling
from zfun.optim._missed import passed_on
from zfun.tree import Tree


@remembered
def chain(*optimizers: Optimizer | tuple[InitFn, UpdateFn]) -> Optimizer:
    """Give the updates of each optimizer to the next one as gradients.

    Args:
        optimizers: at least one; the last one steps the parameters, the others transform gradients.

    Returns:
        An optimizer whose state is the tuple of all states. ``apply`` is the ``apply`` of the
        last optimizer, after the updates of the others.

    Raises:
        OptionError: there is none, or one is not an optimizer.
        PlacementError: two parts compute in different placements or over different groups; or a
            part that sums the terms of gradients is not the first.

    Example:
        >>> import torch
        >>> from zfun.optim import clip_by_global_norm, sgd
        >>> clipped = chain(clip_by_global_norm(1.0), sgd(1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.apply({"w": torch.tensor([30.0, -40.0])}, clipped.init(params), params)[0]
        {'w': tensor([-0.6000,  0.8000])}
    """
    if not optimizers:
        raise OptionError(
            "chain() takes at least one optimizer; got none; pass the one that steps the "
            "parameters, as in chain(sgd(0.1))"
        )
    parts = tuple(as_optimizer(part) for part in optimizers)
    placements = {part.placement for part in parts if part.placement is not None}
    groups = {id(part.group): part.group for part in parts if part.group is not None}
    if len(placements) > 1 or len(groups) > 1:
        raise PlacementError(
            "the optimizers of a chain compute in one placement over one group; got "
            f"{', '.join(map(_placed, parts))}; "
            "chain them first and shard the chain: shard_optimizer(chain(...), group)"
        )
    if any(part.partial is not None for part in parts[1:]):
        raise PlacementError(
            "an optimizer that sums the terms of gradients by itself, as onebit_adam() does, "
            "stands first in a chain, because a part in front would see terms and not the "
            f"gradient; got {', '.join(part.name or 'a pair' for part in parts)}; put the "
            "optimizer that sums in front"
        )
    return _chained(parts)


def _chained(parts: tuple[Optimizer, ...]) -> Optimizer:
    first, last_place = parts[0].partial, len(parts) - 1
    factor = _fused_factor(parts)

    def init(params: Tree) -> State:
        return tuple(part.init(params) for part in parts)

    def thread(grads: Tree, state: State, params: Tree, stop: int) -> tuple[Tree, list[State]]:
        _check_states(state, len(parts))
        states = []
        for part, own_state in zip(parts[:stop], state[:stop], strict=True):
            updates, after = part.update(grads, own_state, params)
            grads = passed_on(updates, grads)
            states.append(after)
        return grads, states

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        grads, states = thread(grads, state, params, last_place)
        updates, last = parts[-1].update(grads, state[-1], params)
        return updates, (*states, last)

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False, **options: Any
    ) -> tuple[Tree, State]:
        grads, states = thread(grads, state, params, last_place - (factor is not None))
        options["donate"] = donate
        if factor is not None:
            options["scale"] = factor(grads, state[-2])
            states.append(state[-2])
        params, last = parts[-1].apply(grads, state[-1], params, **options)
        return params, (*states, last)

    def prepare(grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        _check_states(state, len(parts))
        ready = [
            # The gradients of later parts are those that the parts before return.
            prepared(part, None if index else grads, own_state, params)
            for index, (part, own_state) in enumerate(zip(parts, state, strict=True))
        ]
        if any(part is None for part in ready):
            return None
        return _chained(tuple(part for part in ready if part is not None))

    return Optimizer(
        init,
        update,
        apply,
        placement=next((part.placement for part in parts if part.placement is not None), None),
        group=next((part.group for part in parts if part.group is not None), None),
        labels=_labels_of(parts),
        by_leaf=any(part.by_leaf for part in parts),
        partial=None if first is None else lambda state: first(state[0]),
        prepare=prepare,
        parts=parts,
    )


def _fused_factor(parts: Sequence[Optimizer]) -> Callable[[Tree, State], Any] | None:
    """Return the number by which the last part multiplies in place of the part before it."""
    if len(parts) < 2 or not is_scaling(parts[-1]):
        return None
    before = parts[-2].update
    return before.factor if isinstance(before, FactorUpdate) else None


def _placed(part: Optimizer) -> str:
    if part.group is None:
        return repr(part.placement)
    return f"{part.placement!r} over {part.group!r}"


def _labels_of(parts: Sequence[Optimizer]) -> LabelFn | None:
    found = tuple(part.labels for part in parts if part.labels is not None)
    if len(found) < 2:
        return next(iter(found), None)
    return lambda path, leaf: tuple(label(path, leaf) for label in found)


def _check_states(state: State, count: int) -> None:
    if not isinstance(state, tuple) or len(state) != count:
        got = f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
        raise SpecMismatch(
            f"the state of a chain of {count} is a tuple of {count} states; got {got}; pass "
            "the init(params) of this chain, or the state of the last step"
        )
