"""The exchange of errors and states between the ranks of a process group.

[Note: why a collective does not complete]

A rank sees a collective that cannot complete only as a closed connection, or as silence. The cause
is known on another rank, so the ranks of a process group use the store of the rendezvous:

* a rank that raises publishes the error before leaving;
* a rank whose wait is broken first publishes the rank that it suspects, because its own connections
  break too, and others would suspect this rank;
* a rank that has waited for ``patience_s`` publishes the collectives that the rank has started and
  waits for, reads the journal, and reads the record of one other rank. Waiting is pointless if that
  rank started a different collective at the same index, or has left, or if both wait for
  collectives that the other has not started. The rank then publishes a verdict and breaks its own
  connections, which ends the wait.

A look reads one other rank, so its cost does not grow with the group: the next rank twice, then the
one after that, and so on. Where ranks differ, two ranks beside each other differ, so one of them
sees it at its first looks, and the others read its verdict in the journal.

The process of rank 0 may hold the store. Then a store that does not answer tells that rank 0 is
lost. After an error this process lives on until the other ranks have read the error.

Nothing is written or read while collectives complete quickly.

On a device a wait returns at once, and only the device's queue waits. So the watchdog follows such
a collective until the device has passed it. A collective's time counts from the moment at which the
one before it has ended. When the time is up, no message tells which rank is missing: it is one that
has not published the start of the collective.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from zfun.collectives._ops import Stream
from zfun.collectives.backends._attempt import try_for
from zfun.collectives.backends._board import Board, News
from zfun.collectives.backends._diagnosis import (
    HAS_LEFT,
    Status,
    Verdict,
    diagnose,
    end_of_suspicion,
)
from zfun.collectives.backends._followed import Followed
from zfun.errors import CollectiveMismatch, ZfunError

_KEPT_CALLS = 32
_POST_MORTEM_S = 1.0


class _Wait:
    """The context of a wait. A class, because every collective makes one."""

    __slots__ = ("_key", "_waits")

    def __init__(self, waits: dict[tuple[int, int], float], key: tuple[int, int]) -> None:
        self._waits = waits
        self._key = key

    def __enter__(self) -> None:
        self._waits[self._key] = time.monotonic()

    def __exit__(self, *error: object) -> None:
        del self._waits[self._key]


class Watchdog:
    """The part of a process group that finds out why a collective does not complete.

    See [Note: why a collective does not complete].

    Args:
        store: shared by the ranks of the group only.
        rank: this rank.
        ranks: all ranks, including this rank.
        interrupt: ends every wait for a message; called from the watchdog's thread.
        broken_peer: returns a rank whose connection is broken, if any; called from that thread.
        holder: the rank whose process holds the store, if a rank does.
        patience_s: how long a wait may last before the watchdog looks.
        limit_s: how long a followed collective may last.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        interrupt: Callable[[], None],
        broken_peer: Callable[[], int | None],
        holder: int | None = None,
        patience_s: float = 0.5,
        limit_s: float = float("inf"),
    ) -> None:
        self._board = Board(store, rank)
        self._rank = rank
        own = list(ranks).index(rank)
        # The next rank first.
        self._peers = [*ranks[own + 1 :], *ranks[:own]]
        self._interrupt = interrupt
        self._broken_peer = broken_peer
        self._holder = holder
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._recent: list[collections.deque[tuple[int, Callable[[], str]]]] = [
            collections.deque(maxlen=_KEPT_CALLS) for _ in Stream
        ]
        self._started = [0] * len(Stream)
        self._waits: dict[tuple[int, int], float] = {}
        self._followed = Followed()
        self._verdict: Verdict | None = None
        self._last: tuple[Status, int, Status | None] | None = None
        self._num_looks = 0
        # A peer that was late at a look.
        self._late: int | None = None
        self._published_error = False
        self._store_silent = False
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None

    def note_start(self, stream: Stream, text: Callable[[], str]) -> int:
        """Number the next collective of a stream; ``text`` describes it if a look needs that."""
        index = self._started[stream]
        self._started[stream] += 1
        self._recent[stream].append((index, text))
        return index

    def waiting(self, stream: Stream, index: int) -> _Wait:
        """Watch over a wait."""
        if self._thread is None:
            self._start_thread()
        return _Wait(self._waits, (stream, index))

    def follow(
        self,
        stream: Stream,
        index: int,
        done: Callable[[], bool],
        fail: Callable[[Verdict], object],
    ) -> None:
        """Watch over a collective that goes on after its wait.

        Args:
            stream: the stream.
            index: the number of the collective there.
            done: whether the collective is complete; called from any thread.
            fail: hears why the collective cannot complete, before the waits are ended.
        """
        if self._thread is None:
            self._start_thread()
        self._followed.add(stream, index, done, fail)

    def explain(
        self, peer: int | None, reason: str, collective: str, leaf: str | None = None
    ) -> ZfunError:
        """Turn a broken wait into an error with the cause; ask the other ranks for a bounded time.

        Args:
            peer: the rank whose message did not arrive, if known.
            reason: the transport's error.
            collective: the collective that this rank waited for.
            leaf: the leaf of the collective, or the bucket.
        """
        # The watchdog's thread may be about to write the verdict that has broken this wait.
        if self._looking.acquire(timeout=1.5 * _POST_MORTEM_S):
            self._looking.release()
        else:
            self._store_silent = True
        if self._verdict is None:
            self._verdict = self._post_mortem(peer, reason)
        error = self._verdict.error(self._rank, collective, leaf)
        self.publish_error(error)
        return error

    def conclude(self, verdict: Verdict, collective: str, leaf: str | None = None) -> ZfunError:
        """Turn a verdict of the waiting thread into an error, and publish the error."""
        if self._verdict is None:
            self._verdict = verdict
        error = self._verdict.error(self._rank, collective, leaf)
        self.publish_error(error)
        return error

    def publish_error(self, error: BaseException) -> None:
        """Publish why this rank stops. Only the first error counts."""
        if self._published_error:
            return
        self._published_error = True
        message = f"rank {self._rank} raised {type(error).__name__}: {error}"[:4000]
        own = Verdict(message, isinstance(error, CollectiveMismatch), self._rank)
        # An error that was caused by another rank's error passes the first error on.
        verdict, passed_on = self._verdict or own, self._verdict is not None
        self._talk(lambda: self._board.add_error(verdict, passed_on=passed_on))

    def close(self) -> None:
        """Publish that this rank leaves, and end the watchdog's thread."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None and not self._store_silent:
            self._thread.join(timeout=_POST_MORTEM_S)
        self._talk(lambda: self._board.add_exit(self._status(left=True)))
        if self._published_error and self._holder == self._rank:
            self._talk(self._await_others)
        # A thread that still waits for a silent store needs the reference.
        if not self._store_silent:
            self._store_silent = True
            del self._board

    def _await_others(self) -> None:
        """Wait until the other ranks know the error, because this process holds the store."""
        lost = None if self._verdict is None else self._verdict.lost
        waiting = {peer for peer in self._peers if peer != lost}
        deadline = time.monotonic() + 2 * _POST_MORTEM_S
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            news = self._board.read_news()
            waiting -= {*news.left, *news.errors}

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="zfun watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._patience_s):
            if self._verdict is None and self._longest_s() > self._patience_s:
                with self._looking:
                    self._look()

    def _longest_s(self) -> float:
        now = time.monotonic()
        # Another thread may change the dict at any moment; the copy is atomic.
        waits = [now - since for since in dict(self._waits).values()]
        return max([*waits, self._followed.longest_s()])

    def _look(self) -> None:
        verdict = None
        if self._peers and not self._store_silent:
            try:
                verdict = self._read_board()
            except RuntimeError:
                self._store_silent = True
                verdict = self._without_store()
        if verdict is None and self._followed.longest_s() > self._limit_s:
            verdict = self._post_mortem(None, f"no answer within {self._limit_s:g} s")
        if verdict is not None:
            self._verdict = verdict
            self._followed.fail(verdict)
            self._interrupt()

    def _read_board(self) -> Verdict | None:
        own = self._status()
        self._board.set_status(own)
        if self._last is None or self._last[0] != own:
            self._num_looks = 0
        peer = self._peers[self._num_looks // 2 % len(self._peers)]
        self._num_looks += 1
        # A rank publishes an error before leaving, so errors are read after the states.
        status = self._board.status_of(peer)
        news = self._board.read_news()
        before, self._last = self._last, (own, peer, status)
        self._late = peer if _is_late(status, own) else None
        verdict = self._error_in(news) or diagnose(
            self._rank,
            own,
            ({} if status is None else {peer: status}) | self._who_left_early(own, news),
            certain=self._last == before,
        )
        if verdict is None and (broken := self._broken_peer()) is not None:
            verdict = self._post_mortem(broken, "the connection is closed")
        if verdict is not None and not verdict.mismatch and verdict.lost is not None:
            # Before the connections break, because others would suspect this rank.
            self._board.add_suspect(verdict.lost)
        return verdict

    def _who_left_early(self, own: Status, news: News) -> dict[int, Status]:
        """Return a rank that left before starting a collective that this rank waits for."""
        for peer, started in news.left.items():
            if any(started[stream] <= index for stream, index in own.waiting):
                return {peer: self._board.status_of(peer) or Status(started, left=True)}
        return {}

    def _without_store(self) -> Verdict | None:
        """Return the verdict on the rank that holds the store, if the store does not answer."""
        if self._holder in (None, self._rank):
            return None
        return Verdict(
            "its process holds the store of the rendezvous, which does not answer; it was killed, "
            "stopped or has ended; read its output",
            lost=self._holder,
        )

    def _status(self, *, left: bool = False) -> Status:
        recent = {
            str(int(stream)): {str(index): text() for index, text in list(self._recent[stream])}
            for stream in Stream
        }
        waiting = sorted({*dict(self._waits), *self._followed.firsts()})
        return Status(tuple(self._started), recent, tuple(waiting), left)

    def _error_in(self, news: News) -> Verdict | None:
        others = [peer for peer in news.errors if peer != self._rank]
        return self._board.error_of(others[0]) if others else None

    def _post_mortem(self, peer: int | None, reason: str) -> Verdict:
        found: list[Verdict] = []
        news, last = News(), dict[int, Status | None]()

        def ask() -> None:
            nonlocal news, peer
            deadline = time.monotonic() + _POST_MORTEM_S
            if peer is not None:
                self._board.add_suspect(peer)
            others = iter([*([] if self._late is None else [self._late]), *self._peers])
            while time.monotonic() < deadline:
                news = self._board.read_news()
                verdict = self._error_in(news)
                if verdict is not None:
                    found.append(verdict)
                    return
                if peer is None:
                    peer = self._find_suspect(news, next(others, None))
                end = end_of_suspicion(peer, news.suspects, self._rank)
                if end in news.left and end not in news.suspects:
                    return
                time.sleep(0.05)
            end = end_of_suspicion(peer, news.suspects, self._rank)
            if end is not None:
                last[end] = self._board.status_of(end)

        answered = self._talk(ask)
        if found:
            return found[0]
        lost = end_of_suspicion(peer, news.suspects, self._rank)
        if not answered and self._holder not in news.suspects:
            without = self._without_store()
            if without is not None:
                return without
        if lost in news.left:
            return Verdict(HAS_LEFT, lost=lost)
        reason += "" if lost is None else _last_seen(lost, last.get(lost))
        return Verdict(
            f"{reason}; it has published no error, so it was killed, stopped, is stuck or makes "
            "fewer calls; read its output; let ranks make equally many calls, or evaluate in "
            "uneven(); and if it is only slow pass a larger timeout_s to process_group()",
            lost=lost,
        )

    def _find_suspect(self, news: News, peer: int | None) -> int | None:
        """Return the first suspect of another rank, or else a peer that is late."""
        for suspect in news.suspects.values():
            if suspect != self._rank:
                return suspect
        if peer is None or not _is_late(self._board.status_of(peer), self._status()):
            return None
        self._board.add_suspect(peer)
        return peer

    def _talk(self, ask: Callable[[], object]) -> bool:
        """Access the store for a bounded time, and never again after a timeout.

        The store may live in a rank that is dead or stopped. Return whether the store answers.
        """
        if not self._store_silent:
            self._store_silent = not try_for(2 * _POST_MORTEM_S + 1.0, ask)
        return not self._store_silent


def _is_late(peer: Status | None, own: Status) -> bool:
    """Whether a peer has not published the start of a collective that this rank waits for."""
    return any(peer is None or not peer.has_started(*wait) for wait in own.waiting)


def _last_seen(peer: int, status: Status | None) -> str:
    if status is None or not status.waiting:
        return ""
    stream, index = status.waiting[0]
    # The description of an old collective is no longer recorded.
    text = status.call(stream, index)
    return (
        f"; rank {peer} was last seen waiting in collective {index} of its "
        f"stream{'' if text is None else f' ({text})'}"
    )
