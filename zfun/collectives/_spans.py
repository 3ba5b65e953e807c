"""Sets of integers that are few intervals: which parts of a segment are free, and which are not mapped."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

__all__ = ["Spans"]


class Spans:
    """A set of integers as few intervals, in ascending order, each as long as can be."""

    __slots__ = ("_bounds",)

    def __init__(self) -> None:
        # Where they begin and end, in turn: a number is in the set if an odd number of bounds are not above it.
        self._bounds: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._bounds[::2], self._bounds[1::2], strict=True)

    def add(self, begin: int, end: int) -> None:
        """Put an interval in, which is not empty."""
        first, last = bisect.bisect_left(self._bounds, begin), bisect.bisect_right(self._bounds, end)
        self._bounds[first:last] = [begin] * (first % 2 == 0) + [end] * (last % 2 == 0)

    def remove(self, begin: int, end: int) -> None:
        """Take an interval out, which is not empty."""
        first, last = bisect.bisect_left(self._bounds, begin), bisect.bisect_right(self._bounds, end)
        self._bounds[first:last] = [begin] * (first % 2) + [end] * (last % 2)

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of an interval, which is not empty, that are in the set."""
        return self._cut(begin, end, 1)

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of an interval, which is not empty, that are not in the set."""
        return self._cut(begin, end, 0)

    def _cut(self, begin: int, end: int, parity: int) -> list[tuple[int, int]]:
        first, last = bisect.bisect_right(self._bounds, begin), bisect.bisect_left(self._bounds, end)
        cut = [begin] * (first % 2 == parity) + self._bounds[first:last] + [end] * (last % 2 == parity)
        return list(zip(cut[::2], cut[1::2], strict=True))
