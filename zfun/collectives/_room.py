"""Where what a rank sends lies in its segment, and when that room may be used again. See [Note: collectives through shared memory].

[Note: room]

An input lies in one of three places: where it is, if that is in the segment and nobody writes to it before all have read it; in the slot of
its record, if it is small; else in an area that is made for it. Areas for copies are taken back in the order of their calls. A buffer that
a caller has made is taken back when no view of it is left and nobody reads it: neither the others, nor this rank in a borrowed result.
"""

from __future__ import annotations

import collections

import torch
from torch import Tensor

from zfun.collectives._board import DATA_AT, INLINE_BYTES, Board
from zfun.collectives._calls import AllGather, Lane, Op
from zfun.collectives._mapping import PAGE
from zfun.collectives._segment import Segment
from zfun.collectives._sent import NOTHING, WHOLE, Area, Plan, Use, Watch, watched

__all__ = ["Room"]

# What is free of this rank's segment stays mapped up to so many bytes.
_FREE_BYTES = 1 << 28


class Room:
    """The areas of this rank's segment.

    Args:
        segment: what this rank writes.
        board: knows who still reads.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, segment: Segment, board: Board, rank: int, size: int) -> None:
        self._segment = segment
        self._board = board
        self._rank = rank
        self._size = size
        self._staged: list[collections.deque[Area]] = [collections.deque() for _ in Lane]
        self._buffers: dict[int, Area] = {}
        self._dropping: list[Area] = []
        # Filled where windows are gone, which may be at any moment and in any thread.
        self._dropped: collections.deque[Watch] = collections.deque()

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor in the segment, uninitialised, or None if there is no memory for it."""
        try:
            offset, nbytes = self._segment.allocate(numel * dtype.itemsize)
        except OSError:
            return None
        self._unmap_free()
        # The storage holds on to this object, and so its end is the end of the storage.
        window = self._segment.memory[offset : offset + numel * dtype.itemsize]
        self._buffers[offset] = Area(offset, nbytes, watch=watched(window, self._dropped, offset))
        return torch.frombuffer(window, dtype=dtype)

    def is_buffer(self, area: Area) -> bool:
        """Whether the caller holds an area as a buffer."""
        return area.offset in self._buffers

    def can_show(self, offset: int) -> bool:
        """Whether what begins there may be a part of a region."""
        return offset % PAGE == 0

    def find(self, x: Tensor) -> tuple[Area | None, int]:
        """Return the area in which a tensor lies, if any, and where in the segment."""
        offset = self._segment.locate(x) if self._buffers else None
        if offset is None:
            return None, 0
        area = self._buffers.get(offset)
        if area is None:
            area = next((area for area in self._buffers.values() if area.offset <= offset < area.offset + area.nbytes), None)
        return area, offset

    def lay_out(
        self, op: Op, plan: Plan, x: Tensor, out: Tensor | None, slot: int, use: Use, place: tuple[Area | None, int]
    ) -> tuple[int, int, Area | None]:
        """Put an input where the others can read it.

        Args:
            op: what is done.
            plan: this rank's part in it.
            x: the input.
            out: where the result goes, if it is not borrowed.
            slot: of the record.
            use: who reads the input.
            place: the area in which it lies already, if any, and where in the segment.

        Returns:
            How and where it lies, and in which area.

        Raises:
            OSError: there is no memory.
        """
        form = plan.form if x.numel() else NOTHING
        if form == NOTHING:
            return form, 0, None
        area, offset = place
        if area is not None and self._may_lend(op, x, out) and (not use.borrowed or self.can_show(offset)):
            if len(area.uses) > 4:
                self.forget_uses(area)
            area.uses.append(use)
            return WHOLE, offset, area
        numel = x.numel() if form == WHOLE else x.numel() // self._size * (self._size - 1)
        nbytes = numel * x.dtype.itemsize
        area = None
        if nbytes <= INLINE_BYTES:
            offset = slot + DATA_AT
        else:
            self.reclaim()
            offset, length = self._segment.allocate(nbytes)
            area = Area(offset, length, [use])
            # What is borrowed may be held for long, and in any order.
            if use.borrowed:
                self._dropping.append(area)
            else:
                self._staged[use.lane].append(area)
        room = self._segment.view(offset, numel, x.dtype)
        if form == WHOLE:
            room.copy_(x)
        else:
            # All but this rank's own part.
            chunk = x.numel() // self._size
            begin, end = self._rank * chunk, (self._rank + 1) * chunk
            if begin:
                room[:begin].copy_(x[:begin])
            if end < x.numel():
                room[begin:].copy_(x[end:])
        return form, offset, area

    def _may_lend(self, op: Op, x: Tensor, out: Tensor | None) -> bool:
        """Whether others can read an input while the result is written, and read what it means."""
        if x.is_conj() or x.is_neg():
            return False
        if out is None:
            return True
        begin, nbytes = x.data_ptr(), x.numel() * x.dtype.itemsize
        if isinstance(op, AllGather) and begin == out.data_ptr() + self._rank * nbytes:
            return True
        return begin + nbytes <= out.data_ptr() or out.data_ptr() + out.numel() * out.dtype.itemsize <= begin

    def forget_uses(self, area: Area) -> None:
        """Forget who has read an area."""
        area.uses = [use for use in area.uses if not self._board.is_over(use)]

    def reclaim(self) -> None:
        """Take back what nobody reads any more."""
        for staged in self._staged:
            while staged and self._board.is_over(staged[0].uses[0]):
                area = staged.popleft()
                self._segment.release(area.offset, area.nbytes)
        while self._dropped:
            area = self._buffers.pop(self._dropped.popleft().number)
            self._dropping.append(area)
            if area.num_leases:
                # From now on it is looked at through regions alone.
                self._segment.unmap(area.offset, area.nbytes)
        if self._dropping:
            dropping = self._dropping.copy()
            self._dropping.clear()
            if sum(map(self._release, dropping)):
                self._unmap_free()

    def _unmap_free(self) -> None:
        """Let go of what is free beyond what has been in use, or will be soon."""
        segment = self._segment
        segment.unmap_free(min(_FREE_BYTES, segment.most_in_use - segment.in_use))

    def _release(self, area: Area) -> bool:
        """Take an area back, if nobody reads it any more."""
        # What this rank sees of it through a region is in use, also where it has given back what it saw of the others. There may be many
        # such areas, and for long: they are asked about again when the last lease ends.
        area.is_parked = area.num_leases > 0
        if area.is_parked:
            return False
        while area.uses:
            if not self._board.is_over(area.uses[-1]):
                self._dropping.append(area)
                return False
            area.uses.pop()
        self._segment.release(area.offset, area.nbytes)
        return True

    def end_lease(self, area: Area) -> None:
        """Note that a borrowed result shows an area to this rank no more."""
        area.num_leases -= 1
        if area.is_parked and not area.num_leases:
            area.is_parked = False
            self._dropping.append(area)
