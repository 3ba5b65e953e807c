"""The exchange of errors and states between the ranks of a process group.

[Note: why a collective does not complete]

A rank sees a collective that cannot complete only as a closed connection, or as silence. The cause
is known on another rank, so the ranks of a process group use the store of the rendezvous:

* a rank that raises publishes the error before leaving;
* a rank whose wait is broken first publishes the rank that it suspects, because its own connections
  break too, and others would suspect this rank;
* a rank that has waited for ``patience_s`` publishes the collectives that the rank has started and
  waits for, and reads the records of the others. Waiting is pointless if another rank started a
  different collective at the same index, or has left, or if both wait for collectives that the
  other has not started. The rank then publishes a verdict and breaks its own connections, which
  ends the wait.

The process of rank 0 may hold the store. Then a store that does not answer tells that rank 0 is
lost. After an error this process lives on until the other ranks have read the error.

Nothing is written or read while collectives complete quickly. Records are JSON, so that bytes from
a peer cannot run code.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import Store

from zfun.collectives._ops import Stream
from zfun.collectives.backends._attempt import try_for
from zfun.collectives.backends._diagnosis import (
    HAS_LEFT,
    Status,
    Verdict,
    diagnose,
    end_of_suspicion,
)
from zfun.errors import CollectiveMismatch, ZfunError

_KEPT_CALLS = 32
_POST_MORTEM_S = 1.0


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
    ) -> None:
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in ranks if peer != rank]
        self._interrupt = interrupt
        self._broken_peer = broken_peer
        self._holder = holder
        self._patience_s = patience_s
        self._recent: list[collections.deque[tuple[int, str]]] = [
            collections.deque(maxlen=_KEPT_CALLS) for _ in Stream
        ]
        self._started = [0] * len(Stream)
        self._waits: dict[tuple[int, int], float] = {}
        self._verdict: Verdict | None = None
        self._last: tuple[Status, dict[int, Status]] | None = None
        self._published_error = False
        self._store_silent = False
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None

    def note_start(self, stream: Stream, text: str) -> int:
        """Number the next collective of a stream."""
        index = self._started[stream]
        self._started[stream] += 1
        self._recent[stream].append((index, text))
        return index

    @contextlib.contextmanager
    def waiting(self, stream: Stream, index: int) -> Iterator[None]:
        """Watch over a wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zfun watchdog", daemon=True)
            self._thread.start()
        self._waits[stream, index] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[stream, index]

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
        record = asdict(self._verdict or own) | {"passed_on": self._verdict is not None}
        self._talk(lambda: self._store.set(f"error/{self._rank}", json.dumps(record)))

    def close(self) -> None:
        """Publish that this rank leaves, and end the watchdog's thread."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None and not self._store_silent:
            self._thread.join(timeout=_POST_MORTEM_S)
        self._talk(lambda: self._publish_status(left=True))
        if self._published_error and self._holder == self._rank:
            self._talk(self._await_others)
        # A thread that still waits for a silent store needs the reference.
        if not self._store_silent:
            self._store_silent = True
            del self._store

    def _await_others(self) -> None:
        """Wait until the other ranks know the error, because this process holds the store."""
        lost = None if self._verdict is None else self._verdict.lost
        waiting = {peer for peer in self._peers if peer != lost}
        deadline = time.monotonic() + 2 * _POST_MORTEM_S
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            left = {peer for peer, status in self._read_statuses().items() if status.left}
            waiting -= left | {peer for peer in waiting if self._read(f"error/{peer}")}

    def _run(self) -> None:
        while not self._stop.wait(self._patience_s):
            now = time.monotonic()
            # Another thread may change the dict at any moment; the copy is atomic.
            if self._verdict is None and any(
                now - since > self._patience_s for since in dict(self._waits).values()
            ):
                with self._looking:
                    try:
                        self._look()
                    except RuntimeError:
                        self._store_silent = True
                        self._break(self._without_store())
                        return

    def _look(self) -> None:
        own = self._publish_status()
        # A rank publishes an error before leaving, so errors are read after the states.
        peers = self._read_statuses()
        verdict = self._read_error() or diagnose(
            self._rank, own, peers, certain=self._last == (own, peers)
        )
        self._last = (own, peers)
        if verdict is None and (peer := self._broken_peer()) is not None:
            verdict = self._post_mortem(peer, "the connection is closed")
        if verdict is not None and not verdict.mismatch and verdict.lost is not None:
            # Before the connections break, because others would suspect this rank.
            self._store.set(f"suspect/{self._rank}", json.dumps({"rank": verdict.lost}))
        self._break(verdict)

    def _break(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._verdict = verdict
            self._interrupt()

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
            str(int(stream)): {str(index): text for index, text in list(self._recent[stream])}
            for stream in Stream
        }
        return Status(tuple(self._started), recent, tuple(sorted(dict(self._waits))), left)

    def _publish_status(self, *, left: bool = False) -> Status:
        status = self._status(left=left)
        self._store.set(f"status/{self._rank}", json.dumps(asdict(status)))
        return status

    def _read(self, key: str) -> dict[str, object] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read_statuses(self) -> dict[int, Status]:
        statuses: dict[int, Status] = {}
        for peer in self._peers:
            record: Any = self._read(f"status/{peer}")
            if record is not None:
                started, recent, left = record["started"], record["recent"], record["left"]
                waiting = tuple((int(stream), int(index)) for stream, index in record["waiting"])
                statuses[peer] = Status(tuple(started), recent, waiting, bool(left))
        return statuses

    def _read_error(self) -> Verdict | None:
        records = [
            record for peer in self._peers if (record := self._read(f"error/{peer}")) is not None
        ]
        if not records:
            return None
        record = min(records, key=lambda entry: bool(entry["passed_on"]))
        lost: Any = record["lost"]
        return Verdict(str(record["message"]), bool(record["mismatch"]), lost)

    def _post_mortem(self, peer: int | None, reason: str) -> Verdict:
        found: list[Verdict] = []
        seen: dict[int, Status] = {}
        suspects: dict[int, int] = {}

        def ask() -> None:
            deadline = time.monotonic() + _POST_MORTEM_S
            self._store.set(f"suspect/{self._rank}", json.dumps({"rank": peer}))
            while time.monotonic() < deadline:
                seen.update(self._read_statuses())
                suspects.update(self._read_suspects())
                verdict = self._read_error()
                if verdict is not None:
                    found.append(verdict)
                    return
                end = end_of_suspicion(peer, suspects, self._rank)
                if end in seen and seen[end].left and end not in suspects:
                    return
                time.sleep(0.05)

        answered = self._talk(ask)
        if found:
            return found[0]
        lost = end_of_suspicion(peer, suspects, self._rank)
        if not answered and self._holder not in suspects:
            without = self._without_store()
            if without is not None:
                return without
        if lost in seen and seen[lost].left:
            return Verdict(HAS_LEFT, lost=lost)
        if lost in seen and seen[lost].waiting:
            stream, index = seen[lost].waiting[0]
            # The description of an old collective is no longer recorded.
            text = seen[lost].call(stream, index)
            reason += (
                f"; rank {lost} was last seen waiting in collective {index} of its "
                f"stream{'' if text is None else f' ({text})'}"
            )
        return Verdict(
            f"{reason}; it has published no error, so it was killed, stopped or is stuck; "
            "read its output, and if it is only slow pass a larger timeout_s to process_group()",
            lost=lost,
        )

    def _read_suspects(self) -> dict[int, int]:
        """Return for each rank whose wait is broken the rank that it suspects, if known."""
        suspects = {}
        for peer in self._peers:
            record: Any = self._read(f"suspect/{peer}")
            if record is not None and record["rank"] is not None:
                suspects[peer] = int(record["rank"])
        return suspects

    def _talk(self, ask: Callable[[], object]) -> bool:
        """Access the store for a bounded time, and never again after a timeout.

        The store may live in a rank that is dead or stopped. Return whether the store answers.
        """
        if not self._store_silent:
            self._store_silent = not try_for(2 * _POST_MORTEM_S + 1.0, ask)
        return not self._store_silent
