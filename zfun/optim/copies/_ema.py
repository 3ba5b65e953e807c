"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import OptionError
from zfun.optim._base import (
    InitFn,
    Optimizer,
    State,
    UpdateFn,
    apply_updates,
    around,
    as_optimizer,
    remembered,
)
from zfun.optim._rows import aligned, check_fields, check_trainable, own, step_count
from zfun.optim._schedules import Schedule, decay_at
from zfun.optim._stepping import no_steps
from zfun.options import DECAY, takes
from zfun.tree import Tree


class EmaState(NamedTuple):
    """State of :func:`ema`.

    Attributes:
        average: the averages: a tree like the parameters, in float32 where these are narrower.
        count: steps taken, 0-dim int64 on the CPU.
        inner: the state of the optimizer that steps the parameters.
    """

    average: Tree
    count: Tensor
    inner: State


@takes(decay=DECAY)
@remembered
def ema(decay: float | Schedule, optimizer: Optimizer | tuple[InitFn, UpdateFn]) -> Optimizer:
    """Keep an exponential moving average of the parameters beside an optimizer.

    After each step ``average += (1 - decay) (params - average)``; the average begins as the first
    parameters. (Averages of ``torch.optim.swa_utils`` begin after the first step, as with the decay
    ``lambda step: 0.999 if step else 0.0``.) With ``precision=`` of :func:`zfun.zero` the average
    follows the master weights, because bfloat16 would lose its small changes. A step that
    :func:`zfun.zero` skips changes nothing; leaves that a step does not use are averaged like all
    others. The average is one more number for each parameter, sharded and stored as the moments
    are. "Acceleration of Stochastic Approximation by Averaging", Polyak and Juditsky, 1992.

    Args:
        decay: the share of the old average that stays, in [0, 1), or a function of the number of
            steps taken so far; ``lambda step: min(0.999, (1 + step) / (10 + step))`` follows the
            first steps closely.
        optimizer: an optimizer, or an ``(init, update)`` pair; chains and optimizers by label too.

    Returns:
        An optimizer with :class:`EmaState`. :func:`zfun.evaluation.averaged` puts the average in
        the place of the parameters.

    Raises:
        OptionError: ``decay`` is not in [0, 1), or the optimizer keeps master weights inside.

    Example:
        >>> from zfun.optim import sgd
        >>> averaging = ema(0.5, sgd(1.0))
        >>> params, grads = {"w": torch.zeros(1)}, {"w": torch.tensor([-8.0])}
        >>> params, state = averaging.apply(grads, averaging.init(params), params)
        >>> params, state.average
        ({'w': tensor([8.])}, {'w': tensor([4.])})
    """
    inner = as_optimizer(optimizer)
    if _has_masters(inner):
        raise OptionError(
            "ema() stands inside of with_master(), where it sees the master weights; got an "
            "optimizer with master weights of its own; write with_master(ema(decay, optimizer))"
        )
    return _averaging(decay, inner)


def _averaging(decay: float | Schedule, inner: Optimizer) -> Optimizer:
    def init(params: Tree) -> EmaState:
        check_trainable(params)
        # A copy, because the parameters are stepped in place.
        average = tree.map(lambda p: _wide(p).clone(), params)
        return EmaState(average, no_steps(), inner.init(params))

    def after(params: Tree, state: EmaState, inner_state: State, donate: bool) -> EmaState:
        kept = 1.0 - decay_at("decay", decay, step_count(state.count))
        average = _nearer(params, state.average, kept, donate)
        return EmaState(average, state.count + 1, inner_state)

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, EmaState]:
        check_fields(state, *EmaState._fields)
        updates, inner_state = inner.update(grads, state.inner, params)
        return updates, after(apply_updates(params, updates), state, inner_state, donate=False)

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, EmaState]:
        check_fields(state, *EmaState._fields)
        new, inner_state = inner.apply(grads, state.inner, params, donate=donate)
        return new, after(new, state, inner_state, donate)

    outer = around(inner, lambda ready: _averaging(decay, ready), EmaState._fields)
    return outer._replace(init=init, update=update, apply=apply)


def averages_of(opt_state: Tree) -> list[EmaState]:
    """Return the states of :func:`ema` in the state of an optimizer."""
    nodes = tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, EmaState))
    return [node for node in nodes if isinstance(node, EmaState)]


def _has_masters(optimizer: Optimizer) -> bool:
    return optimizer.wide is not None or any(map(_has_masters, optimizer.parts))


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def _nearer(params: Tree, average: Tree, share: float, donate: bool) -> Tree:
    """Move averages towards parameters, each operation rounded once wherever a buffer is cut."""
    rows: Sequence[tuple[Tensor, ...]] = aligned(params, average=average)
    moved = own([old for _, old in rows], donate)
    for (new, _), out in zip(rows, moved, strict=True):
        out.add_(new.detach().to(out.dtype).sub(out).mul_(share))
    return tree.unflatten(tree.structure(params), moved)
