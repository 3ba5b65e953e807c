"""Leases, which return when dropped, and regions of one file that are leased."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any


class Lease:
    """Some bytes or elements from ``start`` on that nobody else uses while this object lives."""

    __slots__ = ("_dropped", "length", "start")

    def __init__(self, start: int, length: int, dropped: collections.deque[Any]) -> None:
        self.start, self.length, self._dropped = start, length, dropped

    def __del__(self) -> None:
        # Appending to a deque needs no lock, because this may run at any moment in any thread.
        self._dropped.append((self.start, self.length))


class Regions:
    """Cuts a file into regions; neighbours that are free become one.

    The file grows on demand. Its length is the peak of the live regions, plus fragmentation.

    Args:
        grow: ``grow(offset, num_bytes)`` grows the file by ``num_bytes`` from the end at
            ``offset``, or raises, and then nothing changes.

    Example:
        >>> regions = Regions(lambda offset, num_bytes: None)
        >>> first, second = regions.take(8192), regions.take(4096)
        >>> del first
        >>> regions.take(4096).start, regions.num_bytes
        (0, 12288)
    """

    def __init__(self, grow: Callable[[int, int], None]) -> None:
        self.num_bytes = 0
        self._grow = grow
        self._lock = threading.Lock()
        self._dropped: collections.deque[tuple[int, int]] = collections.deque()
        # The free regions: by start, by end, and by length.
        self._lengths: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_length: dict[int, set[int]] = {}

    def take(self, num_bytes: int) -> Lease:
        """Return a region, cut from the smallest free one that is large enough."""
        with self._lock:
            while self._dropped:
                self._add(*self._dropped.popleft())
            length = min((free for free in self._by_length if free >= num_bytes), default=None)
            if length is not None:
                start = next(iter(self._by_length[length]))
                self._remove(start)
                if length > num_bytes:
                    self._add(start + num_bytes, length - num_bytes)
            else:
                end = self.num_bytes
                start = self._starts.get(end, end)
                self._grow(end, start + num_bytes - end)
                if start < end:
                    self._remove(start)
                self.num_bytes = start + num_bytes
        return Lease(start, num_bytes, self._dropped)

    def _add(self, start: int, length: int) -> None:
        if start in self._starts:
            before = self._starts[start]
            length += self._remove(before)
            start = before
        if start + length in self._lengths:
            length += self._remove(start + length)
        self._lengths[start] = length
        self._starts[start + length] = start
        self._by_length.setdefault(length, set()).add(start)

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[start + length]
        same = self._by_length[length]
        same.remove(start)
        if not same:
            del self._by_length[length]
        return length
