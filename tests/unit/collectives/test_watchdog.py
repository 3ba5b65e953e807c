"""The watchdog: what its looks cost, and what they find."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from zfun.collectives import Stream
from zfun.collectives.backends._watchdog import Watchdog
from zfun.errors import CollectiveMismatch, PeerLost


class _CountingStore:
    """A store in memory that counts the requests and the bytes of each rank."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.requests = 0
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            answer = ask(*args)
            self.requests += 1
            self.nbytes += sum(len(arg) for arg in (*args, answer) if isinstance(arg, (str, bytes)))
            return answer

        return counted


def _watchdogs(store: Any, size: int, patience_s: float = 60.0) -> list[Watchdog]:
    return [
        Watchdog(store, rank, range(size), lambda: None, lambda: None, patience_s=patience_s)
        for rank in range(size)
    ]


@contextlib.contextmanager
def _all_wait(watchdogs: list[Watchdog], texts: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for watchdog, text in zip(watchdogs, texts, strict=True):
            index = watchdog.note_start(Stream.GRADS, text.__str__)
            stack.enter_context(watchdog.waiting(Stream.GRADS, index))
        yield


def _ask(store: _CountingStore, size: int) -> tuple[int, int]:
    """Return the requests and bytes of one look of each rank but one, which is late."""
    watchdogs = _watchdogs(store, size)
    with _all_wait(watchdogs[:-1], ["all_gather 'a'"] * (size - 1)):
        for _ in range(4):
            for watchdog in watchdogs[:-1]:
                watchdog._look()
        before, nbytes = store.requests, store.nbytes
        for watchdog in watchdogs[:-1]:
            watchdog._look()
        counts = store.requests - before, store.nbytes - nbytes
    for watchdog in watchdogs:
        watchdog.close()
    return counts


def test_a_look_costs_the_same_in_every_group() -> None:
    costs = {size: _ask(_CountingStore(), size) for size in (2, 8, 64)}
    for size, (requests, nbytes) in costs.items():
        # The own record; the record of one other rank; the journal.
        assert requests <= 5 * (size - 1)
        assert nbytes <= 1000 * (size - 1)


def test_a_short_wait_asks_nothing() -> None:
    store = _CountingStore()
    watchdogs = _watchdogs(store, 8)
    for _ in range(100):
        with _all_wait(watchdogs, ["all_gather 'a'"] * 8):
            pass
    assert store.requests == 0


@pytest.mark.parametrize("odd", [0, 3, 7])
def test_one_rank_that_differs_is_found_in_two_looks(odd: int) -> None:
    watchdogs = _watchdogs(dist.HashStore(), 8)
    texts = [f"all_gather '{'b' if rank == odd else 'a'}'" for rank in range(8)]
    with _all_wait(watchdogs, texts):
        for _ in range(2):
            for watchdog in watchdogs:
                watchdog._look()
        # The rank before the odd one, and the odd one, have found it; the others read of it.
        finders = [watchdogs[odd - 1], watchdogs[odd]]
        errors = [finder.explain(None, "it is broken", "x") for finder in finders]
        errors += [watchdog.explain(None, "it is broken", "x") for watchdog in watchdogs]
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        assert f"rank {odd} started all_gather 'b'" in str(error)


def test_ranks_that_wait_for_each_other_are_found_wherever_they_stand() -> None:
    """Ranks 0 and 2 wait for each other; ranks 1 and 3 have started both collectives."""
    watchdogs = _watchdogs(dist.HashStore(), 4)
    with contextlib.ExitStack() as stack:
        for rank, streams in enumerate([[Stream.GRADS], [*Stream], [Stream.PARAMS], [*Stream]]):
            indices = [watchdogs[rank].note_start(x, x.name.__str__) for x in streams]
            stack.enter_context(watchdogs[rank].waiting(streams[0], indices[0]))
        for _ in range(4):
            for watchdog in watchdogs:
                watchdog._look()
        for rank in (0, 1):
            error = watchdogs[rank].explain(None, "it is broken", "x")
            assert isinstance(error, CollectiveMismatch)
    assert "rank 0 in collective 0 (GRADS), rank 2 in collective 0 (PARAMS)" in str(error)


def test_a_rank_that_leaves_is_named_by_all_others() -> None:
    watchdogs = _watchdogs(dist.HashStore(), 8)
    with _all_wait(watchdogs[:5] + watchdogs[6:], ["all_gather 'a'"] * 7):
        watchdogs[5].close()
        for rank in (0, 4, 7):
            watchdogs[rank]._look()
            error = watchdogs[rank].explain(None, "it is broken", "x")
            assert isinstance(error, PeerLost)
            assert "lost rank 5" in str(error)
            assert "it has left the group" in str(error)


def test_a_raised_error_ends_a_wait() -> None:
    interrupted = collections.Counter[int]()
    store = dist.HashStore()
    watchdogs = [
        Watchdog(
            store,
            rank,
            range(3),
            lambda rank=rank: interrupted.update([rank]),
            lambda: None,
            patience_s=0.05,
        )
        for rank in range(3)
    ]
    with _all_wait(watchdogs[:2], ["all_gather 'a'"] * 2):
        watchdogs[2].publish_error(ValueError("not finite"))
        deadline = time.monotonic() + 20.0
        while len(interrupted) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for watchdog in watchdogs[:2]:
            assert "rank 2 raised ValueError: not finite" in str(watchdog.explain(2, "it", "x"))
    for watchdog in watchdogs:
        watchdog.close()


def test_a_group_of_one_rank_has_nobody_to_ask() -> None:
    (watchdog,) = _watchdogs(_CountingStore(), 1, patience_s=0.0)
    with _all_wait([watchdog], ["all_reduce 'a'"]):
        watchdog._look()
    watchdog.close()
