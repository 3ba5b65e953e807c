"""The group of nccl over torch's fake backend, whose ``wait()`` returns at once, as that of nccl.

No device takes part: a stand-in says when the device has passed a collective.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zfun.collectives import AllGather, Collective, Permute, Stream, gather_values
from zfun.collectives._ops import describe
from zfun.collectives.backends import _nccl
from zfun.collectives.backends._followed import Followed
from zfun.collectives.backends._nccl import DeviceMarks, NativeGroup
from zfun.collectives.backends._watchdog import Watchdog
from zfun.errors import PeerLost

TIMEOUT_S = 0.75
CALL = Collective(AllGather(), "gather", "h.0", Stream.PARAMS)


class _StandIn:
    """A device that passes ``passed`` collectives of a stream, and then waits for a rank."""

    def __init__(self, passed: float = float("inf")) -> None:
        self.passed = passed
        self.number = 0

    def add(self) -> Callable[[], bool]:
        self.number = number = self.number + 1
        return lambda: number <= self.passed


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _group(world: Any, store: dist.Store, device: _StandIn) -> NativeGroup:
    group = NativeGroup(world, store, 0, 4, TIMEOUT_S, None)
    group._marks = dict.fromkeys(Stream, device)  # type: ignore[assignment]
    return group


def _failure(group: NativeGroup, within_s: float) -> PeerLost:
    began = time.monotonic()
    while group.failure is None:
        assert time.monotonic() - began < within_s
        time.sleep(0.02)
    assert isinstance(group.failure, PeerLost)
    return group.failure


def _peers(store: dist.Store) -> list[Watchdog]:
    return [
        Watchdog(store, rank, range(4), lambda: None, lambda: None, patience_s=0.1)
        for rank in (1, 2, 3)
    ]


def test_a_peer_that_never_answers_is_lost_in_time(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 3 wait too; rank 2 does nothing."""
    store, aborted = dist.HashStore(), []

    def abort(communicator: Any) -> None:
        aborted.append(communicator)

    peers = _peers(store)
    text = describe(CALL, 3, torch.float32)
    for peer in (peers[0], peers[2]):
        for _ in range(3):
            index = peer.note_start(Stream.PARAMS, text.__str__)
        peer.follow(Stream.PARAMS, index, lambda: False, lambda verdict: None)
    with _group(world, store, _StandIn(passed=2)) as group:
        monkeypatch.setattr(dist.ProcessGroup, "abort", abort)
        works = [group.start(CALL, torch.ones(3)) for _ in range(4)]
        for work in works[:3]:
            work.wait()
        # The watchdog looks every half second, and the ranks look for the cause for one more.
        error = _failure(group, TIMEOUT_S + 1.5 + 3.0)
        assert "rank 0 lost rank 2 in collective 2 of its stream (all_gather 'gather' (h.0)" in str(
            error
        )
        assert f"no answer within {TIMEOUT_S:g} s" in str(error)
        assert error.leaf == "h.0"
        deadline = time.monotonic() + 5.0
        while len(aborted) < len(Stream) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(aborted) == set(group._streams.values())
        with pytest.raises(PeerLost, match="lost rank 2"):
            works[3].wait()
        with pytest.raises(PeerLost, match="lost rank 2"):
            group.start(CALL, torch.ones(3))
    for peer in peers:
        peer.close()
    # The process goes on.
    with _group(world, dist.HashStore(), _StandIn()) as group:
        assert group.start(CALL, torch.ones(3)).wait().numel() == 12


def test_a_raised_error_is_read_before_the_time_is_up(world: Any) -> None:
    store = dist.HashStore()
    peers = _peers(store)
    with _group(world, store, _StandIn(passed=0)) as group:
        group._watchdog._limit_s = 60.0
        group.start(CALL, torch.ones(3)).wait()
        peers[1].publish_error(ValueError("not finite"))
        assert "rank 2 raised ValueError: not finite" in str(_failure(group, 5.0))
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("when", ["start", "wait"])
def test_an_error_of_torch_names_the_bucket(
    world: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class _Broken:
        def wait(self) -> None:
            raise RuntimeError("out of memory. At line 3")

    def gather(*args: Any, **kwargs: Any) -> _Broken:
        if when == "start":
            _Broken().wait()
        return _Broken()

    monkeypatch.setattr(_nccl, "_all_gather_into", gather)
    with _group(world, dist.HashStore(), _StandIn()) as group:
        with pytest.raises(PeerLost, match="out of memory;") as caught:
            group.start(CALL, torch.ones(3)).wait()
        assert caught.value.leaf == "h.0"
        assert group.failure is caught.value


def test_a_device_that_is_far_behind_loses_nobody(world: Any) -> None:
    """More collectives are pending than the limit allows one of them to last."""
    device = _StandIn(passed=0)
    with _group(world, dist.HashStore(), device) as group:
        for _ in range(8):
            group.start(CALL, torch.ones(3)).wait()
        for device.passed in range(1, 9):
            time.sleep(TIMEOUT_S / 3)
        time.sleep(TIMEOUT_S)
        assert group.failure is None


def test_the_time_counts_from_the_end_of_the_collective_before() -> None:
    followed, complete = Followed(), set[int]()
    for index in range(2):
        followed.add(Stream.GRADS, index, lambda index=index: index in complete, fail=print)
    time.sleep(0.2)
    assert followed.longest_s() >= 0.2
    complete.add(0)
    assert followed.longest_s() < 0.1
    assert followed.firsts() == [(Stream.GRADS, 1)]


def test_queues_pass_their_marks_in_any_order() -> None:
    marks = DeviceMarks(torch.device("cpu"))
    for turn in range(600):
        passed = [marks.add() for _ in range(100)]
        assert all(done() for done in passed)
        if turn == 0:
            # The device as it was before the marks: it then passes the last mark first.
            for reached in marks.reached:
                reached.zero_()
            assert not any(done() for done in passed)
            marks.reached[99].fill_(1)
            assert [number for number, done in enumerate(passed) if done()] == [99]


@pytest.mark.parametrize("destinations", [(0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)])
def test_every_rank_takes_part_in_a_permutation(
    world: Any, monkeypatch: pytest.MonkeyPatch, destinations: tuple[int, ...]
) -> None:
    """Also a rank that keeps its tensor: the first call of a communicator needs all."""
    calls: list[tuple[list[int], list[int]]] = []

    class _Complete:
        def wait(self) -> None: ...

    def all_to_all(out: Any, x: Any, received: list[int], sent: list[int], **_: Any) -> _Complete:
        calls.append((received, sent))
        return _Complete()

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    with _group(world, dist.HashStore(), _StandIn()) as group:
        group.start(Collective(Permute(destinations)), torch.ones(5)).wait()
    ((received, sent),) = calls
    assert sent == [5 * (rank == destinations[0]) for rank in range(4)]
    assert received == [5 * (destinations[rank] == 0) for rank in range(4)]


def _in_threads(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[NativeGroup], Any], timeout_s: float
) -> list[Any]:
    """Run three ranks that have met, with tensors on the CPU and another device."""
    monkeypatch.setattr(_nccl, "_device_of_rank", lambda: torch.device("meta"))
    store, streams = dist.HashStore(), dict.fromkeys(Stream)

    def run(rank: int) -> Any:
        with NativeGroup(
            None, store, rank, 3, timeout_s, None, ranks=range(3), streams=streams
        ) as made:
            made._has_met = True
            return main(made)

    monkeypatch.setattr(NativeGroup, "_release", lambda self: setattr(self, "_host", None))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3)))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64]
)
def test_values_of_the_host_are_gathered_on_the_host(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def main(group: NativeGroup) -> Any:
        first = gather_values(torch.tensor([group.rank, 1]).to(dtype), group, "first")
        second = gather_values(torch.tensor(group.rank == 1).to(dtype), group, "second")
        return first, second

    expected = torch.tensor([[0, 1], [1, 1], [2, 1]]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    for first, second in _in_threads(monkeypatch, main, 20.0):
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])


def test_a_peer_that_sends_no_value_of_its_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Barrier(3, timeout=30.0)

    def main(group: NativeGroup) -> Any:
        gather_values(torch.ones(1), group, "first")
        found = None
        if group.rank != 2:
            with pytest.raises(PeerLost) as caught:
                gather_values(torch.ones(1), group, "second")
            found = str(caught.value)
        done.wait()
        return found

    found = _in_threads(monkeypatch, main, TIMEOUT_S)
    for text in found[:2]:
        assert "lost rank 2 in collective 1 of its stream (all_gather 'second'" in text


def test_communicators_are_split_on_the_device_that_torch_knows(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    handling: set[str | None] = set()
    device = torch.device("cuda", 3)

    def split(parent: Any, parts: list[list[int]], timeout: Any) -> str:
        made.append((parent, parts))
        handling.add(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        return f"{len(made)}"

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.setattr(_nccl, "DeviceMarks", lambda device: device)
    monkeypatch.setattr(NativeGroup, "_release", lambda self: None)
    monkeypatch.setattr(_nccl, "_bound_device", lambda: device)
    store = dist.HashStore()
    with NativeGroup(world, store, 0, 4, TIMEOUT_S, None) as given:
        assert given._device == device
        # The world is the program's, so zfun's collectives have their own order.
        assert made == [(world, [[0, 1, 2, 3]])] * 3
    made.clear()
    with NativeGroup(world, store, 0, 4, TIMEOUT_S, lambda: None) as own:
        assert made == [(world, [[0, 1, 2, 3]])] * 2
        assert own._streams[Stream.CONTROL] is world
        made.clear()
        half = own.subgroup([[0, 1], [2, 3]])
        assert isinstance(half, NativeGroup)
        assert half._device == device
        assert made == [(own._streams[stream], [[0, 1], [2, 3]]) for stream in own._streams]
    assert handling == {"0"}
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
