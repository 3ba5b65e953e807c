"""Schedules of a pipeline, as data: for each rank the list of its actions, in order.

[Note: actions]
A stage has three actions for each micro-batch. ``F`` is forward, and ``B`` backward; a schedule may
divide ``B`` in two, of which ``I`` differentiates the inputs and ``W`` the parameters. An action
waits for what it needs: ``F`` for ``F`` of the stage before, ``B`` and ``I`` for ``F`` of the same
stage and for ``B`` or ``I`` of the stage after, and ``W`` for ``I``. The order of a list says the
rest. ``2F0`` is forward of stage 2 for micro-batch 0, as in the tables of
``torch.distributed.pipelining``, which :func:`read_csv` and :func:`write_csv` exchange.

A schedule has no sends and receives, because they follow: :func:`with_messages` adds them. It runs
all lists in one order, and adds a message to both of its ranks at once. So any two ranks have their
messages in one order, and no rank waits for a message that comes later in this order: there is no
deadlock, whatever the time that an action takes.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from zfun.errors import OptionError
from zfun.options import TEXT, each, instance, integer, number, takes

__all__ = [
    "Action",
    "Schedule",
    "activations_in_flight",
    "bubble",
    "check_schedule",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "ranks_of_stages",
    "read_csv",
    "with_messages",
    "write_csv",
    "zero_bubble",
]

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

# Of torch's tables: what follows from the schedule, or is no matter of a schedule here.
_IGNORED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", *MESSAGES)
_CELL = re.compile(rf"(\d+)(F|B|I|W|{'|'.join(_IGNORED)})(\d*)")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action of a rank; see [Note: actions].

    Attributes:
        stage: the stage.
        kind: ``F``, ``B``, ``I`` or ``W``; in lists with messages also ``SEND_F``, ``RECV_F``,
            ``SEND_B`` and ``RECV_B``, of the outputs of the stage (or its inputs, received) and of
            their cotangents.
        micro_batch: the micro-batch.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


ACTIONS = each(
    each(instance(Action, "an action", "Action(0, 'F', 0)"), "a list of actions", "[]"),
    "the actions of each rank",
    "zf.parallel.schedules.gpipe(2, 4)",
    least=1,
)

Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""For each rank its actions, in order."""


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


@takes(text=TEXT)
def read_csv(text: str) -> Schedule:
    r"""Read a schedule as ``torch.distributed.pipelining`` writes it: a row of actions for a rank.

    Args:
        text: the table. Empty cells, and the sends, receives, gathers and reductions of tables with
            communication, are left out.

    Returns:
        The schedule.

    Raises:
        OptionError: a cell is no action, or the schedule cannot run; see :func:`check_schedule`.

    Example:
        >>> read_csv("0F0,,0B0\n1F0,1B0,1REDUCE_GRAD")[1]
        (Action(stage=1, kind='F', micro_batch=0), Action(stage=1, kind='B', micro_batch=0))
    """
    rows = csv.reader(io.StringIO(text))
    schedule = tuple(tuple(action for cell in row for action in _actions_in(cell)) for row in rows)
    check_schedule(schedule)
    return schedule


def _actions_in(cell: str) -> Iterator[Action]:
    cell = cell.strip()
    together = _TOGETHER.fullmatch(cell)
    for part in together[1].split(";") if together else [cell] if cell else []:
        found = _CELL.fullmatch(part.strip())
        if found is None or (found[2] not in _IGNORED and not found[3]):
            raise OptionError(
                "a cell of a schedule has a stage, an action and a micro-batch, such as 2F0; got "
                f"{cell!r}; the actions are F, B, I and W"
            )
        if found[2] not in _IGNORED:
            yield Action(int(found[1]), found[2], int(found[3]))


@takes(schedule=ACTIONS)
def write_csv(schedule: Sequence[Sequence[Action]]) -> str:
    r"""Write a schedule as a table that ``torch.distributed.pipelining`` reads.

    Args:
        schedule: the schedule, also with messages.

    Returns:
        The table.

    Example:
        >>> write_csv(one_forward_one_backward(1, 2))
        '0F0,0B0,0F1,0B1\n'
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)


@takes(schedule=ACTIONS)
def ranks_of_stages(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        schedule: the schedule.

    Returns:
        One rank for each stage.

    Raises:
        OptionError: a stage is on two ranks, or on none.

    Example:
        >>> ranks_of_stages(interleaved(2, 2, 2))
        (0, 1, 0, 1)
    """
    found: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise OptionError(
                    f"a stage is on one rank; got {action} on rank {rank}, and stage "
                    f"{action.stage} on rank {found[action.stage]} too; move it to one rank"
                )
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise OptionError(
            f"stages are numbered from 0 without a gap; got no action of stage {missing[0]}, and "
            f"one of stage {max(found, default=0)}; add it to a rank"
        )
    return tuple(found[stage] for stage in range(len(found)))


@takes(schedule=ACTIONS)
def check_schedule(schedule: Sequence[Sequence[Action]]) -> None:
    """Refuse a schedule that leaves an action out, has one twice, or waits for ever.

    Args:
        schedule: the schedule, without messages.

    Raises:
        OptionError: the message names the action.

    Example:
        >>> check_schedule(gpipe(4, 8))
    """
    num_stages = len(ranks_of_stages(schedule))
    given = [action for actions in schedule for action in actions]
    present = set(given)
    if len(present) < len(given):
        twice = next(action for action in present if given.count(action) > 1)
        raise OptionError(f"a schedule has each action once; got {twice} twice; leave one out")
    num_micro_batches = 1 + max(action.micro_batch for action in given)
    for stage in range(num_stages):
        for k in range(num_micro_batches):
            kinds = "".join(x for x in "FBIW" if (stage, x, k) in present)
            if kinds not in ("FB", "FIW"):
                raise OptionError(
                    "a stage has for each micro-batch one forward pass, and a backward pass (B, "
                    f"or I and W); got {', '.join(f'{stage}{x}{k}' for x in kinds) or 'none'} of "
                    f"stage {stage} and micro-batch {k}; add the rest"
                )
    for _ in _in_turn(schedule):
        pass


def _needed(action: Action, present: set[Action], num_stages: int) -> Iterator[Action]:
    """Yield what an action waits for; see [Note: actions]."""
    stage, kind, k = action
    if kind == FORWARD and stage > 0:
        yield Action(stage - 1, FORWARD, k)
    elif kind == WEIGHTS:
        yield Action(stage, INPUTS, k)
    elif kind in (BACKWARD, INPUTS):
        yield Action(stage, FORWARD, k)
        if stage < num_stages - 1:
            whole = Action(stage + 1, BACKWARD, k)
            yield whole if whole in present else Action(stage + 1, INPUTS, k)


def _in_turn(schedule: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield ranks, actions and what these need, in an order in which all lists can run."""
    num_stages = len(ranks_of_stages(schedule))
    present = {action for actions in schedule for action in actions}
    left = [deque(actions) for actions in schedule]
    done: set[Action] = set()
    while any(left):
        before = len(done)
        # One action of each rank that has one to run, so that the order is that of equal times.
        for rank, actions in enumerate(left):
            needed = list(_needed(actions[0], present, num_stages)) if actions else []
            if actions and done.issuperset(needed):
                done.add(actions[0])
                yield rank, actions.popleft(), needed
        if len(done) == before:
            missing = {
                rank: [str(x) for x in _needed(actions[0], present, num_stages) if x not in done]
                for rank, actions in enumerate(left)
                if actions
            }
            waits = "; ".join(
                f"rank {rank} waits in {left[rank][0]} for {', '.join(names)}"
                for rank, names in missing.items()
            )
            raise OptionError(
                f"the ranks of a schedule do not wait for each other in a circle; {waits}; put "
                "one of the actions first"
            )


@takes(schedule=ACTIONS)
def with_messages(schedule: Sequence[Sequence[Action]]) -> Schedule:
    """Add the sends and the receives between ranks; see [Note: actions].

    Args:
        schedule: the schedule. Stages of one rank send each other nothing.

    Returns:
        The lists with messages. A receive stands where the sender sends, and may start there.

    Raises:
        OptionError: ranks wait for each other in a circle.

    Example:
        >>> print(write_csv(with_messages(one_forward_one_backward(2, 1))), end="")
        0F0,0SEND_F0,0RECV_B0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
    """
    rank_of = ranks_of_stages(schedule)
    lists: list[list[Action]] = [[] for _ in schedule]
    for rank, action, _ in _in_turn(schedule):
        lists[rank].append(action)
        stage, kind, k = action
        letter, other = ("F", stage + 1) if kind == FORWARD else ("B", stage - 1)
        if kind == WEIGHTS or not 0 <= other < len(rank_of) or rank_of[other] == rank:
            continue
        lists[rank].append(Action(stage, f"SEND_{letter}", k))
        lists[rank_of[other]].append(Action(other, f"RECV_{letter}", k))
    return tuple(map(tuple, lists))


@takes(schedule=ACTIONS, forward=number(0), inputs=number(0), weights=number(0))
def bubble(
    schedule: Sequence[Sequence[Action]],
    *,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> float:
    """Return the share of a step in which a rank waits, if messages take no time.

    Args:
        schedule: the schedule.
        forward: the time of ``F``.
        inputs: the time of ``I``; ``B`` takes as long as ``I`` and ``W``.
        weights: the time of ``W``.

    Returns:
        A number from 0 to 1. Of GPipe and 1F1B with n ranks and m micro-batches it is
        ``(n - 1) / (m + n - 1)``.

    Example:
        >>> round(bubble(one_forward_one_backward(4, 12)), 4), round(bubble(zero_bubble(4, 12)), 4)
        (0.2, 0.0769)
    """
    times = {FORWARD: forward, BACKWARD: inputs + weights, INPUTS: inputs, WEIGHTS: weights}
    free = [0.0] * len(schedule)
    ends: dict[Action, float] = {}
    for rank, action, needed in _in_turn(schedule):
        start = max([free[rank], *(ends[other] for other in needed)])
        free[rank] = ends[action] = start + times[action.kind]
    busy = sum(times[action.kind] for actions in schedule for action in actions)
    return 1.0 - busy / (len(schedule) * max(free)) if busy else 0.0


@takes(schedule=ACTIONS)
def activations_in_flight(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return for each rank the most forward passes whose backward pass has not ended.

    Args:
        schedule: the schedule.

    Returns:
        One number for each rank: the micro-batches of GPipe; for rank r of n under 1F1B, at most
        ``n - r``.

    Example:
        >>> activations_in_flight(gpipe(4, 8)), activations_in_flight(zero_bubble(4, 8))
        ((8, 8, 8, 8), (4, 4, 4, 4))
        >>> activations_in_flight(one_forward_one_backward(4, 8))
        (4, 3, 2, 1)
    """
    found = []
    for actions in schedule:
        most = now = 0
        for action in actions:
            now += {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}.get(action.kind, 0)
            most = max(most, now)
        found.append(most)
    return tuple(found)
