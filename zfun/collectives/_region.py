"""Pieces of several segments as one range of addresses. See [Note: borrowed results]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zfun.collectives._mapping import HUGE_PAGE, Mapping

__all__ = ["Region"]

# Of a piece of so many bytes at least three quarters are whole huge pages, wherever it begins.
_LARGE_BYTES = 4 * HUGE_PAGE


class Region:
    """Equal pieces of several segments, one after the other in a range of addresses: whole pages, so that nothing is copied.

    This rank's piece is the very memory of its segment. Of the others' there is what they write; a write to it here would go to a page of
    this process alone.

    Args:
        pieces: for each rank the descriptor of its segment, and where its piece begins.
        nbytes: the length of a piece, in bytes.
        rank: this rank.

    Raises:
        OSError: the system does not map them.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]], nbytes: int, rank: int) -> None:
        self.nbytes = nbytes * len(pieces)
        self.num_views = 0
        self._piece_bytes = nbytes
        self._is_detached = False
        # A piece shows huge pages if it lies between two of them here as in its segment.
        phases = [(offset - place * nbytes) % HUGE_PAGE for place, (_, offset) in enumerate(pieces)]
        self.has_huge_pages = len(set(phases)) == 1 and nbytes >= _LARGE_BYTES
        self._mapping = Mapping(self.nbytes, phases[rank])
        self.begin = self._mapping.begin
        self.own = self.begin + rank * nbytes
        for place, (fd, offset) in enumerate(pieces):
            self._mapping.show(place * nbytes, nbytes, fd, offset, writable=True, shared=place == rank)

    def window(self) -> memoryview:
        """Return the whole as a buffer, whose life is that of what is made of it; it keeps the memory."""
        return self._mapping.window()

    def offset_of(self, address: int) -> int | None:
        """Return how far into this rank's piece an address lies, or None if it does not."""
        offset = address - self.own
        return offset if 0 <= offset < self._piece_bytes else None

    def shows_others(self, address: int, nbytes: int) -> bool:
        """Tell whether a piece of memory lies here, and not all of it in this rank's piece."""
        is_own = self.own <= address and address + nbytes <= self.own + self._piece_bytes
        return self.begin <= address < self.begin + self.nbytes and not is_own

    def unmap(self) -> None:
        """Drop this rank's mapping of all pages, which the segments keep: the next access maps them again."""
        self._unmap(self.begin, self.begin + self.nbytes)

    def unmap_others(self) -> None:
        """The same for all but this rank's own piece."""
        self._unmap(self.begin, self.own)
        self._unmap(self.own + self._piece_bytes, self.begin + self.nbytes)

    def _unmap(self, begin: int, end: int) -> None:
        if not self._is_detached:
            self._mapping.unmap(begin - self.begin, end - begin)

    def detach(self) -> None:
        """Copy everything to pages of this process, in place: what is written to the segments from now on is not seen here."""
        self._is_detached = True
        whole = torch.frombuffer(self.window(), dtype=torch.uint8)
        saved = whole.clone()
        self._mapping.show(0, self.nbytes, -1, 0, writable=True, shared=False)
        whole.copy_(saved)
