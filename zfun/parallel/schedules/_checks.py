"""Whether a schedule can run, its messages, its bubble, and the activations that it keeps."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zfun.errors import OptionError
from zfun.options import TEXT, number, takes
from zfun.parallel.schedules._actions import (
    ACTIONS,
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Action,
    Schedule,
)

if TYPE_CHECKING:
    from zfun.drawing import Drawing


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
        >>> from zfun.parallel.schedules import interleaved
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
        >>> from zfun.parallel.schedules import gpipe
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
        >>> from zfun.parallel.schedules import one_forward_one_backward, write_csv
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
        >>> from zfun.parallel.schedules import one_forward_one_backward, zero_bubble
        >>> round(bubble(one_forward_one_backward(4, 12)), 4), round(bubble(zero_bubble(4, 12)), 4)
        (0.2, 0.0769)
    """
    times = {FORWARD: forward, BACKWARD: inputs + weights, INPUTS: inputs, WEIGHTS: weights}
    bars = spans_of(schedule, times)
    busy = sum(end - begin for _, _, begin, end in bars)
    last = max((bar[3] for bar in bars), default=0.0)
    return 1.0 - busy / (len(schedule) * last) if busy else 0.0


def spans_of(
    schedule: Sequence[Sequence[Action]], times: Mapping[str, float]
) -> list[tuple[int, Action, float, float]]:
    """Return rank, action, begin and end of each action, if messages take no time.

    Args:
        schedule: the schedule.
        times: of each kind of action.
    """
    free = [0.0] * len(schedule)
    ends: dict[Action, float] = {}
    found = []
    for rank, action, needed in _in_turn(schedule):
        begin = max([free[rank], *(ends[other] for other in needed)])
        free[rank] = ends[action] = begin + times[action.kind]
        found.append((rank, action, begin, free[rank]))
    return found


@takes(schedule=ACTIONS, title=TEXT, forward=number(0), inputs=number(0), weights=number(0))
def draw(
    schedule: Sequence[Sequence[Action]],
    title: str = "",
    *,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> Drawing:
    """Draw a schedule: a row of bars for each rank, and the gaps in which it waits.

    Args:
        schedule: the schedule, without messages.
        title: stands above the bars; by default the share of waits.
        forward: as for :func:`bubble`.
        inputs: as for :func:`bubble`.
        weights: as for :func:`bubble`.

    Returns:
        A matplotlib figure, which a notebook shows.

    Raises:
        OptionError: matplotlib is not installed, or the schedule cannot run.

    Example:
        >>> from zfun.parallel.schedules import one_forward_one_backward
        >>> draw(one_forward_one_backward(4, 12)).get_suptitle()
        '4 ranks, 12 micro-batches: waits take 20 % of the step'
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "a picture needs matplotlib; matplotlib cannot be imported; install zfun[demo], or "
            "print write_csv(schedule)"
        )
    from zfun.parallel.schedules._drawing import drawn

    times = {FORWARD: forward, BACKWARD: inputs + weights, INPUTS: inputs, WEIGHTS: weights}
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in schedule]
    for rank, action, begin, end in spans_of(schedule, times):
        rows[rank].append((begin, end - begin, action))
    share = bubble(schedule, forward=forward, inputs=inputs, weights=weights)
    count = 1 + max((action.micro_batch for row in rows for _, _, action in row), default=-1)
    return drawn(
        rows,
        title
        or f"{len(rows)} ranks, {count} micro-batches: waits take {100 * share:.0f} % of the step",
    )


@takes(schedule=ACTIONS)
def activations_in_flight(schedule: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return for each rank the most forward passes whose backward pass has not ended.

    Args:
        schedule: the schedule.

    Returns:
        One number for each rank: the micro-batches of GPipe; for rank r of n under 1F1B, at most
        ``n - r``.

    Example:
        >>> from zfun.parallel.schedules import gpipe, one_forward_one_backward, zero_bubble
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
