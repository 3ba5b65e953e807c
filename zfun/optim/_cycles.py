"""One cycle: schedules that go up and down once."""

from __future__ import annotations

from collections.abc import Callable

from zfun.optim._schedules import Schedule
from zfun.options import integer, number, takes

_CYCLE = {
    "low": number(),
    "high": number(),
    "num_up": integer(1),
    "num_down": integer(1) | None,
    "stairs_up": integer(0),
    "stairs_down": integer(0) | None,
    "decay_rate": number(0),
    "decay_steps": integer(0),
}


@takes(**_CYCLE)
def one_cycle(
    low: float,
    high: float,
    num_up: int = 2000,
    num_down: int | None = None,
    *,
    stairs_up: int = 0,
    stairs_down: int | None = None,
    decay_rate: float = 0.0,
    decay_steps: int = 0,
) -> Schedule:
    """Go up and down once in straight lines, then decay.

    In the cycle ``low + (high - low) s``, where ``s`` goes from 0 to 1 and back; ``d`` steps after
    the cycle ``low / (1 + decay_rate d / decay_steps)``. The learning rate of DeepSpeed's OneCycle;
    :func:`one_cycle_momentum` is its momentum. "Super-convergence: very fast training of neural
    networks using large learning rates", Smith and Topin, 2018.

    Args:
        low: the value at step 0 and at the end of the cycle.
        high: the value at step ``num_up``.
        num_up: steps up, at least 1.
        num_down: steps down, at least 1; by default ``num_up``.
        stairs_up: the number of stairs up; 0 for a straight line.
        stairs_down: the number of stairs down; by default ``stairs_up``.
        decay_rate: how fast the value decays after the cycle.
        decay_steps: steps in which ``1 / value`` grows by ``decay_rate / low``; 0 for no decay.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: a number of steps or stairs is too small.

    Example:
        >>> [one_cycle(0.0, 1.0, 4)(step) for step in range(10)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    cycle = _cycle(num_up, num_down, stairs_up, stairs_down)
    return _cycled(low, high, cycle, decay_rate, decay_steps, lambda growth: low / growth)


@takes(**_CYCLE)
def one_cycle_momentum(
    low: float = 0.8,
    high: float = 0.9,
    num_up: int = 2000,
    num_down: int | None = None,
    *,
    stairs_up: int = 0,
    stairs_down: int | None = None,
    decay_rate: float = 0.0,
    decay_steps: int = 0,
) -> Schedule:
    """Go down and up while :func:`one_cycle` with the same steps goes up and down.

    In the cycle ``high - (high - low) s``; ``d`` steps after the cycle
    ``high (1 + decay_rate d / decay_steps)``. Use this for a momentum, such as ``sgd(...,
    momentum=...)`` and ``adamw(..., b1=...)``, which must stay below 1. "A disciplined approach to
    neural network hyper-parameters: Part 1", Smith, 2018.

    Args:
        low: the value at step ``num_up``.
        high: the value at step 0 and at the end of the cycle.
        num_up: steps down to ``low``, at least 1.
        num_down: steps back to ``high``, at least 1; by default ``num_up``.
        stairs_up: the number of stairs in the first part; 0 for a straight line.
        stairs_down: the number of stairs in the second part; by default ``stairs_up``.
        decay_rate: how fast the value grows after the cycle.
        decay_steps: steps in which the value grows by ``decay_rate high``; 0 for no growth.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: a number of steps or stairs is too small.

    Example:
        >>> [one_cycle_momentum(0.5, 1.0, 2)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.75, 1.0, 1.0]
    """
    cycle = _cycle(num_up, num_down, stairs_up, stairs_down)
    return _cycled(high, low, cycle, decay_rate, decay_steps, lambda growth: high * growth)


def _cycle(
    num_up: int, num_down: int | None, stairs_up: int, stairs_down: int | None
) -> tuple[Callable[[int], float], int]:
    """Return the height of a cycle by step, from 0 to 1 and back, and the cycle's length."""
    num_down = num_up if num_down is None else num_down
    stairs_down = stairs_up if stairs_down is None else stairs_down

    def height(step: int) -> float:
        here = min(max(step, 0), num_up + num_down)
        steps, length, stairs = (
            (here, num_up, stairs_up)
            if here <= num_up
            else (num_up + num_down - here, num_down, stairs_down)
        )
        # Divide integers, so that no rounding loses a stair.
        return steps * stairs // length / stairs if stairs else steps / length

    return height, num_up + num_down


def _cycled(
    start: float,
    turn: float,
    cycle: tuple[Callable[[int], float], int],
    decay_rate: float,
    decay_steps: int,
    decayed: Callable[[float], float],
) -> Schedule:
    """Go from ``start`` to ``turn`` and back, then follow ``decayed(growth)``."""
    height, length = cycle

    def schedule(step: int) -> float:
        if step <= length or not decay_steps:
            return start + (turn - start) * height(step)
        return decayed(1.0 + decay_rate * ((step - length) / decay_steps))

    return schedule
