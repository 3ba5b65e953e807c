"""Simulated ranks: results, order, and errors instead of hangs."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest
import torch

from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    barrier,
    gather_values,
    simulate,
)
from zfun.errors import CollectiveMismatch, OptionError, PeerLost
from zfun.ops import sum_in_rank_order

pytestmark = pytest.mark.timeout(30)


def test_results_are_in_rank_order() -> None:
    assert simulate(4, lambda group, factor: group.rank * factor, 10) == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (AllGather(), [[0, 1, 10, 11]] * 2),
        (ReduceScatter(), [[10], [12]]),
        (AllReduce(), [[10, 12]] * 2),
        (Broadcast(1), [[10, 11]] * 2),
        (Reduce(1), [[0, 0], [10, 12]]),
        (AllToAll(), [[0, 10], [1, 11]]),
        (Permute((1, 0)), [[10, 11], [0, 1]]),
    ],
)
@pytest.mark.parametrize("given_out", [False, True])
def test_every_op_has_the_expected_result(
    op: AllGather, expected: list[list[int]], given_out: bool
) -> None:
    def program(group: Group) -> list[int]:
        x = torch.tensor([0, 1]) + 10 * group.rank
        out = torch.empty(op.output_numel(2, 2), dtype=torch.int64) if given_out else None
        result = group.start(Collective(op), x, out).wait()
        assert result is out or out is None
        assert not result.is_set_to(x)
        return result.tolist()

    assert simulate(2, program) == expected


def test_half_types_are_rounded_once() -> None:
    terms = [torch.tensor([256.0], dtype=torch.bfloat16)] + [
        torch.tensor([0.75], dtype=torch.bfloat16)
    ] * 2
    assert sum_in_rank_order(terms).item() == 258.0  # a sum in bfloat16 stays at 256


def test_the_sum_is_in_rank_order() -> None:
    terms = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    expected = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    results = simulate(
        4, lambda group: group.start(Collective(AllReduce()), terms[group.rank]).wait()
    )
    assert all(torch.equal(result, expected) for result in results)


def test_streams_are_independent() -> None:
    def program(group: Group) -> tuple[float, float]:
        streams = [Stream.PARAMS, Stream.GRADS]
        order = streams if group.rank else streams[::-1]
        started = {
            stream: group.start(
                Collective(AllReduce(), stream=stream), torch.tensor([1.0 + stream])
            )
            for stream in order
        }
        return started[Stream.GRADS].wait().item(), started[Stream.PARAMS].wait().item()

    assert simulate(2, program) == [(4.0, 2.0)] * 2


def test_the_sender_may_change_the_tensor_after_the_start() -> None:
    def program(group: Group) -> list[int]:
        x = torch.tensor([group.rank])
        pending = group.start(Collective(AllGather()), x)
        x.fill_(99)
        return pending.wait().tolist()

    assert simulate(3, program) == [[0, 1, 2]] * 3


def test_an_error_ends_all_ranks_and_names_the_rank() -> None:
    def program(group: Group) -> None:
        if group.rank == 2:
            raise ValueError("bad batch")
        barrier(group)

    with pytest.raises(ValueError, match="bad batch") as caught:
        simulate(4, program)
    assert caught.value.__notes__ == ["raised on rank 2 of 4 simulated ranks"]


def test_the_original_error_of_the_lowest_rank_is_raised() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            try:
                barrier(group)
            except PeerLost as error:
                raise RuntimeError("consequence") from error
        raise ValueError(f"original {group.rank}")

    with pytest.raises(ValueError, match="original 1"):
        simulate(3, program)


def test_the_other_ranks_learn_which_rank_failed() -> None:
    seen: list[str] = []

    def program(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("leaf")
        try:
            barrier(group)
        except PeerLost as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError):
        simulate(2, program)
    assert seen == ["rank 0 ends because rank 1 failed: KeyError: 'leaf'"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Collective(AllReduce(), "a"), Collective(AllReduce(), "b")),
        (Collective(AllReduce(), "a", "bucket 0"), Collective(AllReduce(), "a", "bucket 1")),
        (Collective(AllReduce(), "a"), Collective(AllGather(), "a")),
        (Collective(Broadcast(0)), Collective(Broadcast(1))),
    ],
)
def test_different_collectives_are_named_on_all_ranks(
    first: Collective, second: Collective
) -> None:
    messages: list[str] = []

    def program(group: Group) -> None:
        try:
            group.start(second if group.rank == 2 else first, torch.ones(2)).wait()
        except CollectiveMismatch as error:
            messages.append(str(error))
            raise

    with pytest.raises(CollectiveMismatch, match="rank 2 started"):
        simulate(3, program)
    assert len(messages) == 3
    assert len(set(messages)) == 1


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, dtype=torch.int32)])
def test_different_tensors_are_a_mismatch(x: torch.Tensor) -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 started all_reduce of 2 float32.*rank 1 started"
    ):
        simulate(
            2,
            lambda group: group.start(
                Collective(AllReduce()), x if group.rank else torch.ones(2)
            ).wait(),
        )


def test_a_rank_that_returns_early_is_an_error() -> None:
    with pytest.raises(
        PeerLost, match="rank 1 returned, while rank 0 waits for it in collective 0"
    ):
        simulate(2, lambda group: None if group.rank else barrier(group))


def test_a_collective_that_a_rank_misses_is_an_error_without_any_wait() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.start(Collective(AllReduce(), "loss"), torch.ones(1))

    with pytest.raises(
        PeerLost, match=r"rank 1 returned without collective 0 .*'loss'.*which rank 0 started"
    ):
        simulate(2, program)


def test_a_circle_of_waits_is_an_error() -> None:
    with pytest.raises(CollectiveMismatch, match=r"wait for each other.*; let all ranks call"):
        simulate(
            2,
            lambda group: group.start(
                Collective(AllReduce(), stream=Stream(group.rank)), torch.ones(1)
            ).wait(),
        )


def test_an_interrupt_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    real_join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("rank"):
            raise KeyboardInterrupt
        real_join(thread, timeout)

    def program(group: Group) -> None:
        while True:
            time.sleep(0.001)
            barrier(group)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(2, program)


def test_simulations_nest() -> None:
    inner = lambda group: int(gather_values(torch.tensor(group.rank), group, "inner").sum())
    assert (
        simulate(
            2,
            lambda group: [
                sum(simulate(3, inner)),
                int(gather_values(torch.tensor(1), group, "outer").sum()),
            ],
        )
        == [[9, 2]] * 2
    )


def test_ranks_inherit_grad_mode_and_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("outer")
    with torch.no_grad():
        assert (
            simulate(2, lambda group: (torch.is_grad_enabled(), variable.get()))
            == [(False, "outer")] * 2
        )


def test_ranks_take_turns_in_rank_order() -> None:
    log: list[tuple[int, int]] = []

    def program(group: Group) -> None:
        for turn in range(3):
            log.append((turn, group.rank))
            time.sleep(0.002 * (3 - group.rank))
            barrier(group)

    simulate(3, program)
    # The last rank to arrive at a barrier goes on at once.
    assert log == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]


def test_each_rank_has_a_default_generator_of_its_own() -> None:
    def program(group: Group, seed: bool) -> list[float]:
        if seed:
            torch.manual_seed(group.rank)
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            barrier(group)
        return [*drawn, *torch.nn.functional.dropout(torch.ones(4), 0.5).tolist()]

    def alone(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [torch.rand(()).item() for _ in range(3)] + torch.nn.functional.dropout(
            torch.ones(4), 0.5
        ).tolist()

    with torch.random.fork_rng():
        assert simulate(3, program, True) == [alone(seed) for seed in range(3)]
        torch.manual_seed(5)
        unseeded = simulate(3, program, False)
        assert unseeded == [alone(5)] * 3
        torch.manual_seed(5)
        simulate(3, program, True)
        first = torch.rand(())
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand(()))  # the caller's generator was not used


def test_a_simulation_may_have_many_ranks() -> None:
    assert (
        simulate(
            128,
            lambda group: int(
                group.start(Collective(AllReduce()), torch.tensor([group.rank])).wait()
            ),
        )
        == [8128] * 128
    )


def test_a_simulation_of_no_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="integer of at least 1"):
        simulate(0, lambda group: None)


def test_tensors_of_other_devices_are_refused() -> None:
    with pytest.raises(OptionError, match="CPU tensors only"):
        simulate(
            2, lambda group: group.start(Collective(AllReduce()), torch.empty(2, device="meta"))
        )
