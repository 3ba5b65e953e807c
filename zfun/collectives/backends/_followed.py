"""Collectives that go on after their waits, because a device waits and not the host."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from zfun.collectives._ops import Stream
from zfun.collectives.backends._diagnosis import Verdict

# The number of a collective, whether it is complete, and what hears why it cannot complete. A plain
# tuple, because a named one takes a call in Python.
_Call: TypeAlias = tuple[int, Callable[[], bool], Callable[[Verdict], object]]


class Followed:
    """The collectives of each stream that are not complete, in order.

    The time of a collective counts from the moment at which the one before it has ended, so a host
    that runs far ahead of its device loses no time.
    """

    def __init__(self) -> None:
        self._calls: list[collections.deque[_Call]] = [collections.deque() for _ in Stream]
        # The time at which the first one became the first.
        self._since = [0.0] * len(Stream)
        self._lock = threading.Lock()

    def add(
        self,
        stream: Stream,
        index: int,
        done: Callable[[], bool],
        fail: Callable[[Verdict], object],
    ) -> None:
        with self._lock:
            self._drop_complete(stream)
            calls = self._calls[stream]
            if not calls:
                self._since[stream] = time.monotonic()
            calls.append((index, done, fail))

    def firsts(self) -> list[tuple[int, int]]:
        """Return stream and index of the first one in each stream."""
        with self._lock:
            self._drop_complete(*Stream)
            return [(stream, self._calls[stream][0][0]) for stream in Stream if self._calls[stream]]

    def longest_s(self) -> float:
        """Return for how long a collective has been the first; 0 if all are complete."""
        with self._lock:
            self._drop_complete(*Stream)
            now = time.monotonic()
            return max(
                (now - self._since[stream] for stream in Stream if self._calls[stream]), default=0.0
            )

    def fail(self, verdict: Verdict) -> None:
        """Tell the first ones why they cannot complete, and forget all."""
        with self._lock:
            firsts = [calls[0] for calls in self._calls if calls]
            for calls in self._calls:
                calls.clear()
        for _, _, fail in firsts:
            fail(verdict)

    def _drop_complete(self, *streams: Stream) -> None:
        for stream in streams:
            calls = self._calls[stream]
            while calls and calls[0][1]():
                calls.popleft()
                self._since[stream] = time.monotonic()
