"""Schedules of pipelines: torch's lists, dependencies, bubbles, activations in flight, tables."""

from __future__ import annotations

import itertools
import types
from collections import Counter, deque
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as of_torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.parallel.pipelines import random_schedules
from zfun.errors import OptionError
from zfun.parallel import schedules
from zfun.parallel.schedules import Action, Schedule


def whole_rounds(num_ranks: int, num_micro_batches: int) -> bool:
    return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0


def known_schedules() -> st.SearchStrategy[tuple[Schedule, int, int, int]]:
    """A schedule, and its ranks, micro-batches and stages per rank."""

    def made(name: str, n: int, m: int, v: int) -> tuple[Schedule, int, int, int]:
        if name == "1f1b":
            return schedules.one_forward_one_backward(n, m), n, m, 1
        if name != "gpipe" and not whole_rounds(n, m):
            m = n * max(1, m // n)
        function = getattr(schedules, name)
        return function(n, m, v), n, m, v

    names = st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"])
    return st.builds(made, names, st.integers(1, 6), st.integers(1, 13), st.integers(1, 3))


def lists_of_torch(name: str, n: int, m: int, v: int) -> list[list[str]]:
    """The lists of torch, whose classes take only these numbers from their stages."""
    if name in ("gpipe", "1f1b"):
        kind: Any = {"gpipe": of_torch.ScheduleGPipe, "1f1b": of_torch.Schedule1F1B}[name]
        order = kind._get_pipeline_order(types.SimpleNamespace(_num_stages=n, _n_microbatches=m))
        if name == "1f1b":
            # Torch draws the forward passes of the last stage one micro-batch late.
            order[n - 1] = [
                action._replace(microbatch_index=action.microbatch_index - 1)
                if action is not None and action.computation_type == "F"
                else action
                for action in order[n - 1]
            ]
    else:
        kinds: dict[str, Any] = {
            "interleaved": of_torch.ScheduleInterleaved1F1B,
            "zero_bubble": of_torch.ScheduleInterleavedZeroBubble,
        }
        kind = kinds[name]
        numbers: Any = types.SimpleNamespace(
            n_local_stages=v,
            microbatches_per_round=m // max(1, m // n),
            pp_group_size=n,
            _n_microbatches=m,
        )
        order = {rank: kind._calculate_single_rank_operations(numbers, rank) for rank in range(n)}
    words = [[str(x) for x in order[rank] if x is not None] for rank in range(n)]
    return [[word for word in row if "REDUCE_GRAD" not in word] for row in words]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_lists_are_those_of_torch(name: str) -> None:
    compared = 0
    for n in range(1, 6):
        for m in range(n if name == "1f1b" else 1, 13):
            for v in (1,) if name in ("gpipe", "1f1b") else (1, 2, 3):
                if name in ("interleaved", "zero_bubble") and not whole_rounds(n, m):
                    continue
                made = (
                    schedules.one_forward_one_backward(n, m)
                    if name == "1f1b"
                    else getattr(schedules, name)(n, m, v)
                )
                found = [[str(action) for action in actions] for actions in made]
                assert found == lists_of_torch(name, n, m, v), (n, m, v)
                compared += 1
    assert compared > 40


@given(known_schedules())
def test_every_action_comes_once_and_on_one_rank(made: tuple[Schedule, int, int, int]) -> None:
    schedule, n, m, v = made
    count = Counter(action for actions in schedule for action in actions)
    assert set(count.values()) == {1}
    assert schedules.ranks_of_stages(schedule) == tuple(stage % n for stage in range(n * v))
    for stage in range(n * v):
        for k in range(m):
            kinds = {kind for kind in "FBIW" if Action(stage, kind, k) in count}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    schedules.check_schedule(schedule)


def run_with_messages(lists: Schedule) -> None:
    """Run lists as ranks do: sends and receives start in order, and a rank waits for what it uses.

    Two ranks must start their messages in one order, and an action finds what it needs.
    """
    rank_of = schedules.ranks_of_stages([[x for x in row if x.kind in "FBIW"] for row in lists])
    left = [deque(row) for row in lists]
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    order: dict[tuple[int, int], dict[int, list[str]]] = {}
    done: set[Action] = set()
    have: list[set[Action]] = [set() for _ in lists]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while row:
                stage, kind, k = action = row[0]
                if kind.startswith(("SEND", "RECV")):
                    step = 1 if kind in ("SEND_F", "RECV_B") else -1
                    other = rank_of[stage + step]
                    pair = (min(rank, other), max(rank, other))
                    sender = stage if kind.startswith("SEND") else stage + step
                    order.setdefault(pair, {}).setdefault(rank, []).append(
                        f"{kind[-1]} of {sender} for {k}"
                    )
                    if kind.startswith("SEND"):
                        sent.setdefault(pair, []).append(Action(sender, kind[-1], k))
                    else:
                        received.setdefault(pair, []).append(Action(sender, kind[-1], k))
                        have[rank].add(Action(sender, kind[-1], k))
                else:
                    before = Action(stage - 1, "F", k) if kind == "F" else Action(stage + 1, "B", k)
                    is_edge = not 0 <= before.stage < len(rank_of) or kind == "W"
                    if not is_edge and rank_of[before.stage] != rank:
                        assert before in have[rank], action
                        pair = (min(rank, rank_of[before.stage]), max(rank, rank_of[before.stage]))
                        if before not in sent.get(pair, []):
                            break
                    if kind in "BI":
                        assert Action(stage, "F", k) in done, action
                    done.add(action)
                row.popleft()
                moved = True
        assert moved, [row[0] for row in left if row]
    for pair, texts in order.items():
        first, second = texts.values()
        assert first == second
        assert sorted(sent[pair]) == sorted(received[pair])


@given(known_schedules())
def test_messages_follow_and_nobody_waits_for_ever(made: tuple[Schedule, int, int, int]) -> None:
    schedule, n, m, v = made
    lists = schedules.with_messages(schedule)
    assert tuple(tuple(x for x in row if x.kind in "FBIW") for row in lists) == schedule
    run_with_messages(lists)
    count = Counter(action.kind for row in lists for action in row)
    crossings = sum(stage % n != (stage + 1) % n for stage in range(n * v - 1))
    for kind in schedules.MESSAGES:
        assert count[kind] == crossings * m


@given(random_schedules())
def test_any_order_that_can_run_gets_messages_that_end(made: tuple[Schedule, int]) -> None:
    schedule, _ = made
    schedules.check_schedule(schedule)
    run_with_messages(schedules.with_messages(schedule))


@given(n=st.integers(1, 8), m=st.integers(1, 20), v=st.integers(1, 3), t=st.integers(1, 5))
def test_bubbles_have_closed_forms(n: int, m: int, v: int, t: int) -> None:
    share = (n - 1) / (m + n - 1)
    # The times of the three parts do not matter where all stages are equal.
    times = {"forward": 1.0, "inputs": float(t), "weights": 2.0}
    assert schedules.bubble(schedules.gpipe(n, m), **times) == pytest.approx(share)
    one = schedules.one_forward_one_backward(n, m)
    assert schedules.bubble(one, **times) == pytest.approx(share)
    # Interleaving divides the bubble by the stages of a rank, and ZB-H1 by three.
    rounds = schedules.interleaved(n, n * m, v)
    assert schedules.bubble(rounds, **times) == pytest.approx((n - 1) / (v * n * m + n - 1))
    assert schedules.bubble(schedules.zero_bubble(n, n * m)) == pytest.approx(
        (n - 1) / (3 * n * m + n - 1)
    )


@given(n=st.integers(1, 8), m=st.integers(1, 20), v=st.integers(1, 3))
def test_activations_in_flight_have_closed_forms(n: int, m: int, v: int) -> None:
    in_flight = schedules.activations_in_flight
    assert in_flight(schedules.gpipe(n, m, v)) == (m * v,) * n
    one = schedules.one_forward_one_backward(n, m)
    assert in_flight(one) == tuple(min(n - rank, m) for rank in range(n))
    rounds = schedules.interleaved(n, n * m, v)
    assert in_flight(rounds) == tuple(
        min((v - 1) * n + 2 * (n - 1 - rank) + 1, v * n * m) for rank in range(n)
    )
    assert in_flight(schedules.zero_bubble(n, n * m)) == (n,) * n


@given(known_schedules())
def test_a_table_is_read_as_it_was_written_and_torch_reads_it(
    made: tuple[Schedule, int, int, int],
) -> None:
    schedule, *_ = made
    text = schedules.write_csv(schedule)
    assert schedules.read_csv(text) == schedule
    for row, actions in zip(text.splitlines(), schedule, strict=True):
        read = [of_torch._Action.from_str(cell) for cell in row.split(",")]
        assert [
            (x.stage_index, str(x.computation_type.value), x.microbatch_index)
            for x in read
            if x is not None
        ] == [tuple(action) for action in actions]
    # Torch's lists with communication have the same actions.
    with_more = schedules.write_csv(schedules.with_messages(schedule))
    assert schedules.read_csv(with_more) == schedule


@pytest.mark.parametrize(
    ("made", "kinds"),
    [
        (schedules.one_forward_one_backward(4, 6), "FB"),
        (schedules.interleaved(2, 4, 2), "FB"),
        (schedules.zero_bubble(3, 5), "FIW"),
    ],
)
def test_a_picture_has_a_bar_for_each_action_and_gaps_for_the_waits(
    made: Schedule, kinds: str
) -> None:
    pytest.importorskip("matplotlib")
    times = {"forward": 2.0, "inputs": 1.0, "weights": 3.0}
    figure = schedules.draw(made, **times)
    (axes,) = figure.axes
    _, end = axes.get_xlim()
    bars: list[Any] = list(axes.patches)
    busy = 0.0
    for rank, actions in enumerate(made):
        row = [bar for bar in bars if round(bar.get_y() + bar.get_height() / 2) == rank]
        spans = sorted((bar.get_x(), bar.get_width()) for bar in row)
        assert len(spans) == len(actions)
        assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(spans))
        busy += sum(length for _, length in spans)
    assert busy / (len(made) * end) == pytest.approx(1 - schedules.bubble(made, **times))
    shown = [text.get_text()[0] for text in figure.legends[0].get_texts()]
    assert "".join(shown[: len(kinds)]) == kinds
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert schedules.draw(made, "Mine").get_suptitle() == "Mine"


def test_a_table_with_pairs_and_holes_is_read() -> None:
    text = "0F0,,(0F1;0B0)OVERLAP_F_B,0UNSHARD,0REDUCE_GRAD,0B1\n1F0,1B0,1F1,1B1\n"
    assert [str(x) for x in schedules.read_csv(text)[0]] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", r"such as 2F0; got '0X0'"),
        ("0F0,0B", r"such as 2F0; got '0B'"),
        ("0F0", r"got 0F0 of stage 0 and micro-batch 0; add the rest"),
        ("0F0,0B0,0W0", r"got 0F0, 0B0, 0W0 of stage 0"),
        ("0F0,0F0,0B0", r"each action once; got 0F0 twice"),
        ("0F0,0B0\n0F1,0B1", r"a stage is on one rank; got 0F1 on rank 1"),
        ("0F0,0B0\n2F0,2B0", r"without a gap; got no action of stage 1"),
        ("0B0,0F0", r"in a circle; rank 0 waits in 0B0 for 0F0"),
        (
            "0F0,0F1,0B1,0B0\n1B0,1F0,1F1,1B1",
            r"rank 0 waits in 0B1 for 1B1; rank 1 waits in 1B0 for 1F0",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        schedules.read_csv(text)


def test_rounds_have_one_size() -> None:
    with pytest.raises(OptionError, match=r"got 5 micro-batches for 2 ranks, which are 2 rounds"):
        schedules.interleaved(2, 5)
