"""Transforms of gradients and updates, to stand in a chain."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.errors import OptionError
from zfun.flat import global_norm
from zfun.optim._base import Optimizer, State, flat_view, optimizer, remembered, step_count
from zfun.optim._schedules import Schedule
from zfun.tree import Tree

__all__ = ["ScheduleState", "clip_by_global_norm", "scale", "scale_by_schedule"]


class ScheduleState(NamedTuple):
    """State of :func:`scale_by_schedule`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
    """

    count: Tensor


@remembered
def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Shrink gradients whose norm, over all leaves and ranks, is above a bound.

    ``g / max(1, (‖grads‖ + 1e-6) / max_norm)``, the norm in float64 over every element once, sharded or not. The host does not wait for it.
    "On the difficulty of training recurrent neural networks", Pascanu, Mikolov and Bengio, 2013.

    Args:
        max_norm: the bound, above 0.

    Returns:
        An optimizer without state, to stand before others in a :func:`chain`.

    Raises:
        OptionError: ``max_norm`` is not above 0.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> grads = {"w": torch.tensor([30.0]), "b": torch.tensor([40.0])}
        >>> clip.update(grads, clip.init(grads), grads)[0]
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    if not max_norm > 0:
        raise OptionError(f"max_norm is above 0; got {max_norm}; leave clip_by_global_norm out of the chain to not clip")

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        with torch.no_grad():
            # A norm that is not a number must reach the parameters, or the step that tests for it: clamp keeps it.
            coefficient = torch.clamp((global_norm(grads) + 1e-6) / max_norm, min=1.0).reciprocal()
        return _scaled(grads, coefficient), state

    return optimizer(_no_state, update)


@remembered
def scale(factor: float) -> Optimizer:
    """Multiply by one number.

    Args:
        factor: the number; ``scale(-0.1)`` alone is gradient descent.

    Returns:
        An optimizer without state.

    Raises:
        OptionError: ``factor`` is not finite.

    Example:
        >>> scale(-0.5).apply({"w": torch.ones(1)}, (), {"w": torch.ones(1)})[0]
        {'w': tensor([0.5000])}
    """
    if not math.isfinite(factor):
        raise OptionError(f"factor is finite; got {factor}")

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return _scaled(grads, factor), state

    return optimizer(_no_state, update)


@remembered
def scale_by_schedule(schedule: Schedule) -> Optimizer:
    """Multiply by a function of the number of steps taken so far.

    Args:
        schedule: ``schedule(step) -> float``; called with 0 at the first step.

    Returns:
        An optimizer with :class:`ScheduleState`.

    Raises:
        OptionError: ``schedule`` is not a function.

    Example:
        >>> halving = scale_by_schedule(lambda step: 0.5**step)
        >>> state = halving.init({"w": torch.ones(1)})
        >>> updates, state = halving.update({"w": torch.ones(1)}, state, {"w": torch.ones(1)})
        >>> halving.update(updates, state, {"w": torch.ones(1)})[0]
        {'w': tensor([0.5000])}
    """
    if not callable(schedule):
        raise OptionError(f"a schedule is a function of the step count; got {type(schedule).__name__}; use scale() for a number")

    def init(params: Tree) -> ScheduleState:
        return ScheduleState(torch.zeros((), dtype=torch.int64, device="cpu"))

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return _scaled(grads, float(schedule(step_count(state.count)))), ScheduleState(state.count + 1)

    return optimizer(init, update)


def _no_state(params: Tree) -> tuple[()]:
    return ()


def _scaled(grads: Tree, factor: float | Tensor) -> Tree:
    def one(g: Tensor) -> Tensor:
        out = torch.empty_like(g, memory_format=torch.contiguous_format, requires_grad=False)
        ops.scale_into(flat_view(out), flat_view(g), factor)
        return out

    return tree.map(one, grads)
