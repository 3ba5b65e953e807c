"""The orders of known schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zfun.errors import OptionError
from zfun.options import integer, takes
from zfun.parallel.schedules._actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, Schedule


@takes(num_ranks=integer(1), num_micro_batches=integer(1), stages_per_rank=integer(1))
def gpipe(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule of GPipe: all forward passes, then all backward passes.

    Args:
        num_ranks: the ranks of the pipeline.
        num_micro_batches: the micro-batches of a step.
        stages_per_rank: how many stages a rank has; stage s is on rank ``s % num_ranks``.

    Returns:
        The schedule.

    Example:
        >>> from zfun.parallel.schedules import write_csv
        >>> print(write_csv(gpipe(2, 2)), end="")
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0,1B1

    After Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism" (2019); with several stages on a rank, after Lamy-Poirier, "Breadth-First Pipeline
    Parallelism" (2022).
    """
    micro = range(num_micro_batches)
    return tuple(
        (
            *(Action(stage, FORWARD, k) for stage in stages for k in micro),
            *(Action(stage, BACKWARD, k) for stage in reversed(stages) for k in micro),
        )
        for rank in range(num_ranks)
        for stages in [range(rank, num_ranks * stages_per_rank, num_ranks)]
    )


@takes(num_ranks=integer(1), num_micro_batches=integer(1))
def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B: each rank has one stage, and goes backward as soon as it can.

    Args:
        num_ranks: the ranks of the pipeline.
        num_micro_batches: the micro-batches of a step.

    Returns:
        The schedule.

    Example:
        >>> from zfun.parallel.schedules import write_csv
        >>> print(write_csv(one_forward_one_backward(2, 3)), end="")
        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2

    After Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019).
    """
    return tuple(
        _alternating(
            rank,
            num_ranks,
            1,
            num_micro_batches,
            num_micro_batches,
            min(num_ranks - 1 - rank, num_micro_batches),
        )
        for rank in range(num_ranks)
    )


@takes(num_ranks=integer(1), num_micro_batches=integer(1), stages_per_rank=integer(1))
def interleaved(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the interleaved schedule 1F1B: each rank has several stages, which take turns.

    Args:
        num_ranks: the ranks of the pipeline.
        num_micro_batches: the micro-batches of a step, in rounds of ``num_ranks`` or somewhat more,
            of equal size.
        stages_per_rank: how many stages a rank has; stage s is on rank ``s % num_ranks``.

    Returns:
        The schedule.

    Raises:
        OptionError: the micro-batches do not make rounds of one size.

    Example:
        >>> from zfun.parallel.schedules import write_csv
        >>> print(write_csv(interleaved(2, 2, 2)), end="")
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1

    After Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021).
    """
    turn = _round(num_ranks, num_micro_batches)
    return tuple(
        _alternating(
            rank,
            num_ranks,
            stages_per_rank,
            num_micro_batches,
            turn,
            (stages_per_rank - 1) * turn + 2 * (num_ranks - 1 - rank),
        )
        for rank in range(num_ranks)
    )


@takes(num_ranks=integer(1), num_micro_batches=integer(1), stages_per_rank=integer(1))
def zero_bubble(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule ZB-H1: parameters are differentiated later, while a rank would wait.

    Args:
        num_ranks: the ranks of the pipeline.
        num_micro_batches: the micro-batches of a step; see :func:`interleaved`.
        stages_per_rank: how many stages a rank has; stage s is on rank ``s % num_ranks``.

    Returns:
        The schedule. It has the activations of 1F1B in flight.

    Raises:
        OptionError: the micro-batches do not make rounds of one size.

    Example:
        >>> from zfun.parallel.schedules import write_csv
        >>> print(write_csv(zero_bubble(2, 3)), end="")
        0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
        1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2

    After Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
    turn = _round(num_ranks, num_micro_batches)
    return tuple(
        _alternating(
            rank,
            num_ranks,
            stages_per_rank,
            num_micro_batches,
            turn,
            (stages_per_rank - 1) * turn + num_ranks - 1 - rank,
            delay=rank,
        )
        for rank in range(num_ranks)
    )


def _round(num_ranks: int, num_micro_batches: int) -> int:
    """Return how many micro-batches a stage takes before the next stage of the rank has a turn."""
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise OptionError(
            "stages of a rank take turns in rounds of equally many micro-batches; got "
            f"{num_micro_batches} micro-batches for {num_ranks} ranks, which are {rounds} rounds; "
            f"use a multiple of {rounds}"
        )
    return num_micro_batches // rounds


def _alternating(
    rank: int,
    num_ranks: int,
    num_stages: int,
    num_micro_batches: int,
    turn: int,
    warm_up: int,
    delay: int | None = None,
) -> tuple[Action, ...]:
    """Return the actions of a rank that alternates forward and backward after a warm-up.

    Args:
        rank: the rank.
        num_ranks: the ranks.
        num_stages: the stages of the rank.
        num_micro_batches: the micro-batches.
        turn: how many micro-batches a stage takes before the next one of the rank has a turn.
        warm_up: how many forward passes come first.
        delay: how many backward passes a pass for parameters waits; ``None`` for undivided ones.
    """
    total = num_stages * num_micro_batches
    warm_up = min(warm_up, total)

    def order(kind: str, *, last_first: bool) -> list[Action]:
        found = []
        for n in range(total):
            # Within a round the stages have one turn each.
            cycle, place = divmod(n, turn * num_stages)
            local, k = divmod(place, turn)
            local = num_stages - 1 - local if last_first else local
            found.append(Action(local * num_ranks + rank, kind, cycle * turn + k))
        return found

    forward = order(FORWARD, last_first=False)
    backward = order(BACKWARD if delay is None else INPUTS, last_first=True)
    weights = deque(() if delay is None else order(WEIGHTS, last_first=True))
    actions = forward[:warm_up]
    for n, action in enumerate(backward):
        actions += [*forward[warm_up + n : warm_up + n + 1], action]
        if delay is not None and n >= delay:
            actions.append(weights.popleft())
    return (*actions, *weights)


# The schedules by the names that zf.pipeline() takes.
BY_NAME: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": lambda num_ranks, num_micro_batches, stages_per_rank: (
        one_forward_one_backward(num_ranks, num_micro_batches)
        if stages_per_rank == 1
        else interleaved(num_ranks, num_micro_batches, stages_per_rank)
    ),
    "zero_bubble": zero_bubble,
}
