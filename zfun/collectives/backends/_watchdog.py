"""The exchange of errors and states between the ranks of a process group.

[Note: why a collective does not complete]

A rank sees a collective that cannot complete only as a closed connection, or as silence. The cause
is known on another rank, so the ranks of a process group use the store of the rendezvous:

* a rank that raises publishes the error before leaving;
* a rank that has waited for ``patience_s`` publishes the collectives that the rank has started and
  waits for, and reads the records of the others. Waiting is pointless if another rank started a
  different collective at the same index, or has left, or if both wait for collectives that the
  other has not started. The rank then records a verdict and breaks its own connections, which ends
  the wait.

Nothing is written or read while collectives complete quickly. Records are JSON, so that bytes from
a peer cannot run code.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import Store

from zfun.collectives._ops import Stream
from zfun.errors import CollectiveMismatch, PeerLost, ZfunError

__all__ = ["Status", "Verdict", "Watchdog", "diagnose", "different"]

_KEPT_CALLS = 32
_POST_MORTEM_S = 2.0


@dataclass(frozen=True, slots=True)
class Status:
    """The published state of a rank.

    Attributes:
        started: the number of collectives started in each stream.
        recent: the last collectives: stream, then index, then description. JSON keys are strings.
        waiting: stream and index of the collectives that the rank waits for.
        left: whether the rank has closed the group.
    """

    started: tuple[int, ...] = (0,) * len(Stream)
    recent: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    waiting: tuple[tuple[int, int], ...] = ()
    left: bool = False

    def call(self, stream: int, index: int) -> str | None:
        """Return the description of a collective, if started and still recorded."""
        return self.recent.get(str(stream), {}).get(str(index))

    def has_started(self, stream: int, index: int) -> bool:
        return self.started[stream] > index


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a collective will not complete.

    ``mismatch``: the ranks differ; otherwise a rank is lost.
    """

    message: str
    mismatch: bool = False

    def error(self, rank: int, collective: str | None) -> ZfunError:
        kind = CollectiveMismatch if self.mismatch else PeerLost
        return kind(self.message, rank=rank, collective=collective)


def diagnose(
    rank: int, own: Status, peers: Mapping[int, Status], *, certain: bool = True
) -> Verdict | None:
    """Say why the collectives that this rank waits for cannot complete, if the states tell.

    Args:
        rank: this rank.
        own: the state of this rank.
        peers: the published states of the other ranks.
        certain: whether the states are the same as at the last look, so that ranks which wait for
            each other will wait for ever.

    Returns:
        The verdict, or None if the others may only be slow.

    Example:
        >>> own = Status((1, 0, 0), {"0": {"0": "all_gather 'a'"}}, ((0, 0),))
        >>> other = Status((1, 0, 0), {"0": {"0": "all_gather 'b'"}}, ((0, 0),))
        >>> diagnose(0, own, {1: other}).mismatch
        True
    """
    for stream, index in own.waiting:
        text = own.call(stream, index)
        for peer, status in sorted(peers.items()):
            other = status.call(stream, index)
            if text is not None and other is not None and text != other:
                return different(index, (rank, text), (peer, other))
            if status.has_started(stream, index):
                continue
            if status.left:
                return Verdict(
                    f"rank {rank} waits in collective {index} of its stream ({text}) for rank "
                    f"{peer}, which has left the group"
                )
            circle = [
                (theirs, at) for theirs, at in status.waiting if not own.has_started(theirs, at)
            ]
            if circle and certain:
                theirs, at = circle[0]
                (low, low_text), (high, high_text) = sorted(
                    [
                        (rank, f"collective {index} ({text})"),
                        (peer, f"collective {at} ({status.call(theirs, at)})"),
                    ]
                )
                return Verdict(
                    f"the ranks wait for each other in different collectives: rank {low} in "
                    f"{low_text}, rank {high} in {high_text}",
                    mismatch=True,
                )
    return None


def different(index: int, *sides: tuple[int, str]) -> Verdict:
    """Return the verdict on two ranks that have started different collectives.

    Args:
        index: the number of the collective in its stream.
        sides: for both ranks, the rank and the collective that the rank has started.
    """
    (low, low_text), (high, high_text) = sorted(sides)
    return Verdict(
        f"all ranks must start the same collectives in the same order; at collective {index} of "
        f"its stream rank {low} started {low_text}, and rank {high} started {high_text}",
        mismatch=True,
    )


class Watchdog:
    """The part of a process group that finds out why a collective does not complete.

    See [Note: why a collective does not complete].

    Args:
        store: shared by the ranks of the group only.
        rank: this rank.
        ranks: all ranks, including this rank.
        interrupt: ends every wait for a message; called from the watchdog's thread.
        patience_s: how long a wait may last before the watchdog looks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        interrupt: Callable[[], None],
        patience_s: float = 0.5,
    ) -> None:
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in ranks if peer != rank]
        self._interrupt = interrupt
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

    def explain(self, peer: int | None, reason: str, collective: str) -> ZfunError:
        """Turn a broken wait into an error with the cause; ask the other ranks for a bounded time.

        Args:
            peer: the rank whose message did not arrive, if known.
            reason: the transport's error.
            collective: the collective that this rank waited for.
        """
        # The watchdog's thread may be about to write the verdict that has broken this wait.
        if self._looking.acquire(timeout=_POST_MORTEM_S):
            self._looking.release()
        else:
            self._store_silent = True
        if self._verdict is None:
            self._verdict = self._post_mortem(peer, reason, collective)
        error = self._verdict.error(self._rank, collective)
        self.publish_error(error)
        return error

    def conclude(self, verdict: Verdict, collective: str) -> ZfunError:
        """Turn a verdict of the waiting thread into an error, and publish the error."""
        if self._verdict is None:
            self._verdict = verdict
        error = self._verdict.error(self._rank, collective)
        self.publish_error(error)
        return error

    def publish_error(self, error: BaseException) -> None:
        """Publish why this rank stops. Only the first error counts."""
        if self._published_error:
            return
        self._published_error = True
        record = {
            "message": f"rank {self._rank} raised {type(error).__name__}: {error}"[:4000],
            "mismatch": isinstance(error, CollectiveMismatch),
            # An error that was caused by another rank's error passes the first error on.
            "passed_on": self._verdict is not None,
        }
        if self._verdict is not None:
            record |= asdict(self._verdict)
        self._talk(lambda: self._store.set(f"error/{self._rank}", json.dumps(record)))

    def close(self) -> None:
        """Publish that this rank leaves, and end the watchdog's thread."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None and not self._store_silent:
            self._thread.join(timeout=_POST_MORTEM_S)
        self._talk(lambda: self._publish_status(left=True))

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
                        return

    def _look(self) -> None:
        own = self._publish_status()
        # A rank publishes an error before leaving, so errors are read after the states.
        peers = self._read_statuses()
        verdict = self._read_error() or diagnose(
            self._rank, own, peers, certain=self._last == (own, peers)
        )
        self._last = (own, peers)
        if verdict is not None:
            self._verdict = verdict
            self._interrupt()

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
        return Verdict(str(record["message"]), bool(record["mismatch"]))

    def _post_mortem(self, peer: int | None, reason: str, collective: str) -> Verdict:
        found: list[Verdict] = []
        seen: dict[int, Status] = {}

        def ask() -> None:
            deadline = time.monotonic() + _POST_MORTEM_S
            while time.monotonic() < deadline:
                seen.update(self._read_statuses())
                verdict = self._read_error()
                if verdict is not None:
                    found.append(verdict)
                    return
                if peer in seen and seen[peer].left:
                    return
                time.sleep(0.05)

        self._talk(ask)
        who = "a rank" if peer is None else f"rank {peer}"
        start = f"rank {self._rank} lost {who} in {collective}: "
        if found:
            return Verdict(
                found[0].message if found[0].mismatch else start + found[0].message,
                found[0].mismatch,
            )
        if peer in seen and seen[peer].left:
            return Verdict(
                f"{start}it has left the group; every rank must take part in every collective"
            )
        if peer in seen and seen[peer].waiting:
            stream, index = seen[peer].waiting[0]
            # The description of an old collective is no longer recorded.
            text = seen[peer].call(stream, index)
            reason += (
                f"; rank {peer} was last seen waiting in collective {index} of its "
                f"stream{'' if text is None else f' ({text})'}"
            )
        return Verdict(
            f"{start}{reason}; it has published no error, so it was killed, stopped or is stuck; "
            "read its output, and if it is only slow pass a larger timeout_s to process_group()"
        )

    def _talk(self, ask: Callable[[], object]) -> None:
        """Access the store for a bounded time, and never again after a timeout.

        The store may live in a rank that is dead or stopped.
        """
        if self._store_silent:
            return

        def run() -> None:
            try:
                ask()
            except RuntimeError:
                self._store_silent = True

        thread = threading.Thread(target=run, name="zfun store", daemon=True)
        thread.start()
        thread.join(timeout=_POST_MORTEM_S + 1.0)
        self._store_silent |= thread.is_alive()
