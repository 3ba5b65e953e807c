"""The making of a group, which ends in time also if a rank is killed or stopped.

[Note: missing ranks]

The ranks make connections in calls of torch that may take several times their timeout, and that
name no rank. So one thread makes the connections, and another thread counts in the store while this
rank is alive. At the end of the time, the missing ranks are those whose counts stand still, because
a rank that waits for a missing rank still counts. The thread that waits for both asks nothing of
the store, because a store in a stopped process never answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed import PrefixStore, Store

from zfun.collectives.backends._attempt import never_came

_Result = TypeVar("_Result")

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-4, 0.2
# A rank that has not counted for so long is missing.
_STILL_S = 1.0
_DONE, _FAILED = "done", "failed"


def make_together(
    store: Store,
    rank: int,
    numbers: Sequence[int],
    timeout_s: float,
    make: Callable[[], _Result],
    holder: int | None,
) -> _Result:
    """Return ``make()``, called on all ranks, when all have returned. See [Note: missing ranks].

    The store is new to the ranks, and ``make`` runs in a thread of its own. Messages call the ranks
    by ``numbers``; ``holder`` is the number of the rank whose process holds the store, if a rank
    does. A rank that did not come, or has ended, raises :class:`PeerLost`.
    """
    pulse = _Pulse(PrefixStore("together", store), rank, len(numbers))
    made: Future[_Result] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001, the caller raises it
            made.set_exception(error)
        pulse.become(_FAILED if made.exception() else _DONE)

    for target in (pulse.run, work):
        threading.Thread(target=target, name="zfun making", daemon=True).start()
    try:
        pulse.ended.wait(timeout_s)
        if pulse.complete:
            return made.result()
        error = made.exception() if made.done() else None
        if error is not None and not isinstance(error, (RuntimeError, OSError)):
            raise error
        lost = [numbers[peer] for peer in pulse.missing()] or ([] if holder is None else [holder])
        raise never_came(lost, numbers[rank], timeout_s) from error
    finally:
        pulse.stop()


class _Pulse:
    """Counts in the store, and watches the counts of the other ranks.

    Attributes:
        ended: set when there is nothing to wait for.
        complete: whether all ranks have done their part.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.ended = threading.Event()
        self.complete = False
        self._store = store
        self._rank = rank
        self._state = ""
        self._woken = threading.Event()
        self._stopped = False
        now = time.monotonic()
        # The last state of each peer, and since when.
        self._seen = {peer: ("", now) for peer in range(size) if peer != rank}
        self._answered = now

    def become(self, state: str) -> None:
        """Tell the other ranks how this rank's part has ended."""
        self._state = state
        self._woken.set()

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()

    def run(self) -> None:
        """Count until the end."""
        done_at = None
        for count in itertools.count():
            state = self._state
            try:
                self._store.set(str(self._rank), state or str(count))
                self._look()
            except RuntimeError:
                self.ended.set()
                return
            states = {found for found, _ in self._seen.values()}
            self.complete = state == _DONE and states <= {_DONE}
            if self.complete or state == _FAILED or (state and _FAILED in states):
                self.ended.set()
            if self.complete or self._stopped:
                return
            if state:
                done_at = done_at or time.monotonic()
                nap = (time.monotonic() - done_at) / 8
                time.sleep(min(max(nap, _SHORTEST_NAP_S), _LONGEST_NAP_S))
            else:
                self._woken.wait(_LONGEST_NAP_S)

    def missing(self) -> list[int]:
        """Return the ranks that do not count; none if the store does not answer."""
        # This rank may end before the others look.
        self.become(_FAILED)
        time.sleep(_STILL_S + _LONGEST_NAP_S)
        now = time.monotonic()
        if now - self._answered > _STILL_S:
            return []
        waits = {
            peer: since
            for peer, (state, since) in self._seen.items()
            if state not in (_DONE, _FAILED)
        }
        still = [peer for peer, since in waits.items() if now - since > _STILL_S]
        failed = [peer for peer, (state, _) in self._seen.items() if state == _FAILED]
        return still or failed or list(waits)

    def _look(self) -> None:
        for peer, (before, _) in self._seen.items():
            if self._store.check([str(peer)]):
                state = self._store.get(str(peer)).decode()
                if state != before:
                    self._seen[peer] = state, time.monotonic()
        self._answered = time.monotonic()
