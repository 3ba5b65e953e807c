"""Schedules: functions from the number of steps taken to a learning rate, or to a momentum."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from zfun.errors import OptionError
from zfun.options import SCHEDULE, SECOND_DECAY, Kind, each, integer, number, one_of, shown, takes

Schedule: TypeAlias = Callable[[int], float]


FINITE = number()
_RATE = number(0, example="3e-4")
SHAPE = one_of("linear", "log")

_WARMUP_AND_FALL = {
    "peak": number(),
    "num_warmup": integer(0),
    "num_steps": integer(1),
    "end": number(),
    "start": number(),
    "shape": SHAPE,
}


@takes()
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


@takes()
def linear(start: float, end: float, num_steps: int) -> Schedule:
    """Go from one value to another in a straight line, and stay there.

    ``start + (end - start) min(step, num_steps) / num_steps``

    Args:
        start: the value at step 0.
        end: the value from step ``num_steps`` on.
        num_steps: steps from ``start`` to ``end``, at least 1.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: ``num_steps`` is less than 1.

    Example:
        >>> [linear(1.0, 0.0, 4)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    def schedule(step: int) -> float:
        return end if step >= num_steps else start + (end - start) * (max(step, 0) / num_steps)

    return schedule


@takes(shape=SHAPE)
def warmup(peak: float, num_warmup: int, *, start: float = 0.0, shape: str = "linear") -> Schedule:
    """Rise to a peak, and stay there.

    ``start + (peak - start) w``, where ``w = step / num_warmup``, or
    ``ln(step + 1) / ln(num_warmup)`` with ``shape="log"``, and 1 from step ``num_warmup`` on.
    DeepSpeed's WarmupLR has a counter that is 0 at the second step;
    ``lambda step: warmup(...)(step - 1)`` gives the same values. "Accurate, Large Minibatch SGD:
    Training ImageNet in 1 Hour", Goyal et al., 2017.

    Args:
        peak: the value from step ``num_warmup`` on.
        num_warmup: steps from ``start`` to the peak; 0 starts at the peak.
        start: the value at step 0 and before.
        shape: ``"linear"`` or ``"log"``.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: the warm-up is negative, or the shape is another.

    Example:
        >>> [round(warmup(1.0, 4, shape="log")(step), 4) for step in range(6)]
        [0.0, 0.5, 0.7925, 1.0, 1.0, 1.0]
    """
    return _warmup(peak, num_warmup, start, shape, constant(peak))


@takes(**_WARMUP_AND_FALL)
def warmup_linear(
    peak: float,
    num_warmup: int,
    num_steps: int,
    end: float = 0.0,
    *,
    start: float = 0.0,
    shape: str = "linear",
) -> Schedule:
    """Rise to a peak as :func:`warmup` does, then fall in a straight line.

    With ``shape="log"`` and ``start`` equal to ``end``, called with ``step - 1``, this is
    DeepSpeed's WarmupDecayLR.

    Args:
        peak: the value at step ``num_warmup``.
        num_warmup: steps from ``start`` to the peak; 0 starts at the peak.
        num_steps: all steps, those of the warm-up included.
        end: the value from step ``num_steps`` on.
        start: the value at step 0.
        shape: of the warm-up, ``"linear"`` or ``"log"``.

    Returns:
        ``schedule(step) -> float``: ``start`` at step 0, ``peak`` at ``num_warmup``, ``end`` from
        ``num_steps`` on.

    Raises:
        OptionError: the warm-up is negative or not shorter than the whole, or the shape is another.

    Example:
        >>> [warmup_linear(1.0, 2, 6)(step) for step in range(8)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    _check_shorter(num_warmup, num_steps)
    return _warmup(peak, num_warmup, start, shape, linear(peak, end, num_steps - num_warmup))


@takes(**_WARMUP_AND_FALL)
def warmup_cosine(
    peak: float,
    num_warmup: int,
    num_steps: int,
    end: float = 0.0,
    *,
    start: float = 0.0,
    shape: str = "linear",
) -> Schedule:
    """Rise to a peak as :func:`warmup` does, then fall along half a cosine.

    After the warm-up: ``end + (peak - end) (1 + cos(π (step - num_warmup) / (num_steps -
    num_warmup))) / 2``, DeepSpeed's WarmupCosineLR at the counter ``step - 1``. "SGDR: Stochastic
    gradient descent with warm restarts", Loshchilov and Hutter, 2017, here without restarts.

    Args:
        peak: the value at step ``num_warmup``.
        num_warmup: steps from ``start`` to the peak; 0 starts at the peak.
        num_steps: all steps, those of the warm-up included.
        end: the value from step ``num_steps`` on.
        start: the value at step 0.
        shape: of the warm-up, ``"linear"`` or ``"log"``.

    Returns:
        ``schedule(step) -> float``: ``start`` at step 0, ``peak`` at ``num_warmup``, ``end`` from
        ``num_steps`` on.

    Raises:
        OptionError: the warm-up is negative or not shorter than the whole, or the shape is another.

    Example:
        >>> [round(warmup_cosine(1.0, 2, 6)(step), 4) for step in range(8)]
        [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    _check_shorter(num_warmup, num_steps)

    def fall(step: int) -> float:
        length = num_steps - num_warmup
        return (
            end
            if step >= length
            else end + (peak - end) * (0.5 * (1.0 + math.cos(math.pi * step / length)))
        )

    return _warmup(peak, num_warmup, start, shape, fall)


@takes()
def lr_range_test(
    start: float, num_steps: int = 2000, rate: float = 1.0, *, staircase: bool = False
) -> Schedule:
    """Rise without end, to see from which learning rate on a loss diverges.

    ``start (1 + rate q)`` with ``q = step / num_steps``; a staircase rounds q down. DeepSpeed's
    LRRangeTest. "A disciplined approach to neural network hyper-parameters: Part 1", Smith, 2018.

    Args:
        start: the value at step 0.
        num_steps: steps in which the rate grows by ``rate start``, at least 1.
        rate: share of ``start`` that is added in ``num_steps`` steps.
        staircase: whether the value grows at every ``num_steps``-th step only.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: ``num_steps`` is less than 1.

    Example:
        >>> [lr_range_test(1.0, 2)(step) for step in range(5)]
        [1.0, 1.5, 2.0, 2.5, 3.0]
        >>> [lr_range_test(1.0, 2, staircase=True)(step) for step in range(5)]
        [1.0, 1.0, 2.0, 2.0, 3.0]
    """

    def schedule(step: int) -> float:
        before = max(step, 0)
        return start * (1.0 + rate * (before // num_steps if staircase else before / num_steps))

    return schedule


@takes(
    schedules=each(SCHEDULE, "a sequence of schedules", "[zf.optim.constant(0.1)]"),
    boundaries=each(integer(1), "a sequence of ascending steps above 0", "[100]"),
)
def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Follow one schedule after the other, each from step 0.

    Args:
        schedules: at least one.
        boundaries: for each schedule but the first, the step at which the schedule starts;
            ascending.

    Returns:
        ``schedule(step) -> float``.

    Raises:
        OptionError: the boundaries do not ascend, or there is not one for each schedule but the
            first.

    Example:
        >>> joined = join([linear(0.0, 1.0, 2), constant(1.0), linear(1.0, 0.0, 2)], [2, 4])
        >>> [joined(step) for step in range(8)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    parts, starts = tuple(schedules), (0, *boundaries)
    if len(parts) != len(starts):
        raise OptionError(
            f"join() takes one boundary for each schedule but the first; got {len(parts)} "
            f"schedules, {len(starts) - 1} boundaries; a boundary is the step at which the next "
            "schedule starts"
        )
    if any(not before < after for before, after in itertools.pairwise(starts)):
        raise OptionError(
            f"boundaries ascend and are above 0; got {list(boundaries)}; a schedule of no steps "
            "is left out"
        )

    def schedule(step: int) -> float:
        place = max(bisect.bisect_right(starts, step) - 1, 0)
        return parts[place](step - starts[place])

    return schedule


def _check_shorter(num_warmup: int, num_steps: int) -> None:
    if num_warmup >= num_steps:
        raise OptionError(
            f"the warm-up must be shorter than the whole and not negative; got {num_warmup} of "
            f"{num_steps} steps; num_steps counts both"
        )


def _warmup(peak: float, num_warmup: int, start: float, shape: str, after: Schedule) -> Schedule:
    def rise(step: int) -> float:
        if shape == "linear":
            return step / num_warmup
        # ln(1) is 0, so a warm-up of one step stays at the start.
        return math.log(step + 1) / math.log(num_warmup) if num_warmup > 1 else 0.0

    def schedule(step: int) -> float:
        return (
            start + (peak - start) * rise(max(step, 0))
            if step < num_warmup
            else after(step - num_warmup)
        )

    return schedule


def value_at(name: str, value: float | Schedule, step: int, kind: Kind) -> float:
    """Return an option at the step after ``step`` others.

    Raises:
        OptionError: the schedule returned no number of the kind.
    """
    if not callable(value):
        return float(value)
    found: Any = value(step)
    now = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if not kind.accepts(now):
        raise OptionError(
            f"{name} is {kind} at every step; its schedule gave {shown(found)} at step {step}; "
            "let the schedule return such a number, and stay at its last value after its end"
        )
    return float(now)


def rate_at(learning_rate: float | Schedule, step: int) -> float:
    """Return the learning rate of the step after ``step`` others."""
    return value_at("learning_rate", learning_rate, step, _RATE)


def decay_at(name: str, value: float | Schedule, step: int) -> float:
    """Return the decay of a moment at the step after ``step`` others."""
    return value_at(name, value, step, SECOND_DECAY)
