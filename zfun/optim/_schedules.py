"""Schedules: functions from the number of steps taken to a learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import TypeAlias

from zfun.errors import OptionError

__all__ = ["Schedule", "constant", "linear", "warmup_cosine", "warmup_linear"]

Schedule: TypeAlias = Callable[[int], float]


def constant(value: float) -> Schedule:
    """Return the same value at every step.

    Args:
        value: the value.

    Returns:
        ``schedule(step) -> float``.

    Example:
        >>> constant(0.1)(0), constant(0.1)(1000)
        (0.1, 0.1)
    """
    return lambda step: value


def linear(start: float, end: float, num_steps: int) -> Schedule:
    """Go from one value to another in a straight line, and stay there.

    ``start + (end - start) min(step, num_steps) / num_steps``

    Args:
        start: the value at step 0.
        end: the value from step ``num_steps`` on.
        num_steps: length of the way, in steps, at least 1.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: ``num_steps`` is less than 1.

    Example:
        >>> [linear(1.0, 0.0, 4)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if num_steps < 1:
        raise OptionError(f"num_steps must be at least 1; got {num_steps}; use constant() for a value that does not change")

    def schedule(step: int) -> float:
        return end if step >= num_steps else start + (end - start) * (max(step, 0) / num_steps)

    return schedule


def warmup_linear(peak: float, num_warmup: int, num_steps: int, end: float = 0.0) -> Schedule:
    """Rise in a straight line from 0 to a peak, then fall in a straight line.

    Args:
        peak: the value at step ``num_warmup``.
        num_warmup: steps from 0 to the peak; 0 starts there.
        num_steps: all steps, those of the warm-up included.
        end: the value from step ``num_steps`` on.

    Returns:
        ``schedule(step) -> float``: 0 at step 0, ``peak`` at ``num_warmup``, ``end`` from ``num_steps`` on.

    Raises:
        OptionError: the warm-up is negative or not shorter than the whole.

    Example:
        >>> [warmup_linear(1.0, 2, 6)(step) for step in range(8)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _warmup(peak, num_warmup, num_steps, linear(peak, end, max(num_steps - num_warmup, 1)))


def warmup_cosine(peak: float, num_warmup: int, num_steps: int, end: float = 0.0) -> Schedule:
    """Rise in a straight line from 0 to a peak, then fall along half a cosine.

    After the warm-up: ``end + (peak - end) (1 + cos(π (step - num_warmup) / (num_steps - num_warmup))) / 2``.
    "SGDR: Stochastic gradient descent with warm restarts", Loshchilov and Hutter, 2017, here without restarts.

    Args:
        peak: the value at step ``num_warmup``.
        num_warmup: steps from 0 to the peak; 0 starts there.
        num_steps: all steps, those of the warm-up included.
        end: the value from step ``num_steps`` on.

    Returns:
        ``schedule(step) -> float``: 0 at step 0, ``peak`` at ``num_warmup``, ``end`` from ``num_steps`` on.

    Raises:
        OptionError: the warm-up is negative or not shorter than the whole.

    Example:
        >>> [round(warmup_cosine(1.0, 2, 6)(step), 4) for step in range(8)]
        [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """

    def fall(step: int) -> float:
        length = num_steps - num_warmup
        return end if step >= length else end + (peak - end) * (0.5 * (1.0 + math.cos(math.pi * step / length)))

    return _warmup(peak, num_warmup, num_steps, fall)


def _warmup(peak: float, num_warmup: int, num_steps: int, after: Schedule) -> Schedule:
    if not 0 <= num_warmup < num_steps:
        raise OptionError(
            f"the warm-up must be shorter than the whole and not negative; got {num_warmup} of {num_steps} steps; num_steps counts both"
        )

    def schedule(step: int) -> float:
        return peak * (max(step, 0) / num_warmup) if step < num_warmup else after(step - num_warmup)

    return schedule


def check_rate(learning_rate: object) -> None:
    """Refuse what is neither a number nor a function of the step count."""
    if callable(learning_rate):
        return
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, Real):
        raise OptionError(
            f"learning_rate is a number or a function of the step count; got {type(learning_rate).__name__}; "
            "pass a float or one of zf.optim's schedules"
        )
    if not 0 <= float(learning_rate) < math.inf:
        raise OptionError(f"learning_rate is finite and not negative; got {learning_rate}; updates already point downhill")


def rate_at(learning_rate: float | Schedule, step: int) -> float:
    """Return the learning rate of the step after ``step`` others."""
    return float(learning_rate(step) if callable(learning_rate) else learning_rate)
