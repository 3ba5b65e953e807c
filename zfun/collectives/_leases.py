"""Results that are borrowed: which regions there are, who looks at them, and for how long. See [Note: borrowed results]."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun.collectives._board import Board
from zfun.collectives._calls import AllReduce, Lane
from zfun.collectives._region import Region
from zfun.collectives._room import Room
from zfun.collectives._segment import Peer, Segment
from zfun.collectives._sent import Area, Sent, Watch, chunks, watched

__all__ = ["Leases"]

# Regions that nobody looks at now are kept for the next time, up to so many. Their pages count as memory of this rank, too. Where these are
# small pages, and all regions together are small, they stay mapped, so that a step maps nothing again. Of more, what was used last does: it
# is used first where backward follows forward, and the rest would not be there any more when its turn came.
_IDLE_REGIONS = 256
_SMALL_BYTES = 1 << 27
_IDLE_BYTES = 1 << 25


@dataclass(slots=True, eq=False)
class _Lease:
    """A borrowed result that this rank looks at: of which call, in which region, and over which of its own areas."""

    lane: Lane
    index: int
    slot: int
    region: Region
    area: Area
    offset: int
    watch: Watch
    is_returned: bool = False


class Leases:
    """What this rank has borrowed.

    Args:
        segment: what this rank writes.
        peers: what the others write.
        board: where it says that it has given something back.
        room: the areas of its segment.
        rank: this rank.
    """

    def __init__(self, segment: Segment, peers: Mapping[int, Peer], board: Board, room: Room, rank: int) -> None:
        self._segment = segment
        self._peers = peers
        self._board = board
        self._room = room
        self._rank = rank
        self._size = len(peers) + 1
        self._leases: dict[int, _Lease] = {}
        self._num_leases = 0
        self._regions: dict[tuple[int, ...], Region] = {}
        self._regions_bytes = 0
        # Those that nobody looks at, of which small pages are mapped: what was used last comes last.
        self._idle: dict[Region, None] = {}
        self._idle_bytes = 0
        # Filled where windows are gone, which may be at any moment and in any thread.
        self._ended: collections.deque[Watch] = collections.deque()

    def borrow(self, sent: Sent) -> Tensor:
        """Show the inputs of a gather, or the slices of a sum, one after the other."""
        x, area = sent.x, sent.area
        is_sum = isinstance(sent.call.op, AllReduce)
        offsets = [sent.offset] * self._size
        for peer in sent.plan.partners:
            _, offsets[peer] = self._board.record(sent, peer)
        piece_bytes = x.numel() * x.dtype.itemsize
        if is_sum:
            piece_bytes //= self._size
            offsets = [offset + rank * piece_bytes for rank, offset in enumerate(offsets)]
        assert area is not None
        try:
            region = self._region(tuple(offsets), piece_bytes)
        except OSError:
            return self._copied(sent, offsets, piece_bytes)
        if is_sum or not self._room.is_buffer(area):
            # This rank's own part is looked at through the region, and the rest of the input of a sum not at all.
            self._segment.unmap(sent.offset, x.nbytes)
        window = region.window()
        number, self._num_leases = self._num_leases, self._num_leases + 1
        watch = watched(window, self._ended, number)
        self._leases[number] = _Lease(sent.call.lane, sent.index, sent.slot, region, area, offsets[self._rank], watch)
        area.num_leases += 1
        if region in self._idle:
            del self._idle[region]
            self._idle_bytes -= region.nbytes
        region.num_views += 1
        return torch.frombuffer(window, dtype=x.dtype)

    def _copied(self, sent: Sent, offsets: Sequence[int], piece_bytes: int) -> Tensor:
        """Copy what the system does not map: it limits the number of mappings."""
        whole = torch.empty(self._size * piece_bytes // sent.x.dtype.itemsize, dtype=sent.x.dtype)
        for rank, piece in enumerate(chunks(whole, self._size)):
            source = self._segment if rank == self._rank else self._peers[rank]
            piece.copy_(source.view(offsets[rank], piece.numel(), piece.dtype))
        self._board.give_back(sent.call.lane, sent.index, sent.slot)
        return whole

    def find(self, x: Tensor) -> tuple[Area | None, int]:
        """Return the area that a tensor shows as this rank's own part of a borrowed result, if any, and where it lies in the segment."""
        address = x.data_ptr()
        for lease in self._leases.values():
            place = lease.region.offset_of(address)
            if place is not None:
                return lease.area, lease.offset + place
        return None, 0

    def give_up(self, area: Area, x: Tensor) -> None:
        """Give back all results that show an area. ``x`` is what is going to be written: a view of it, or of one of them."""
        for lease in [lease for lease in self._leases.values() if lease.area is area and not lease.is_returned]:
            # Who writes through the region itself has nobody else's views of it in mind.
            if lease.region.offset_of(x.data_ptr()) is None:
                self._detach(lease.region)
            else:
                self._return(lease)

    def own_all(self, x: Tensor) -> bool:
        """Make a borrowed result memory of this rank alone if ``x`` shows more of it than this rank's part; whether it did."""
        found = [lease.region for lease in self._leases.values() if lease.region.shows_others(x.data_ptr(), x.nbytes)]
        for region in dict.fromkeys(found):
            self._detach(region)
        return bool(found)

    def rest(self, x: Tensor) -> None:
        """Let go of what the region of a borrowed result shows of others, who keep it; and of this rank's part if that is a buffer."""
        address = x.data_ptr()
        for lease in self._leases.values():
            if 0 <= address - lease.region.begin < lease.region.nbytes:
                if self._room.is_buffer(lease.area):
                    lease.region.unmap()
                else:
                    lease.region.unmap_others()

    def end(self) -> None:
        """Give back what nobody looks at any more, and let go of regions that have not been used for long."""
        if not self._ended:
            return
        while self._ended:
            lease = self._leases.pop(self._ended.popleft().number, None)
            if lease is not None:
                self._end(lease)
                lease.region.num_views -= 1
                if not lease.region.num_views:
                    self._let_go(lease.region)
        if len(self._regions) > _IDLE_REGIONS:
            idle = [key for key, region in self._regions.items() if not region.num_views]
            for key in idle[: max(0, len(idle) - _IDLE_REGIONS)]:
                self._forget(key)
        if self._regions_bytes > _SMALL_BYTES:
            while self._idle_bytes > _IDLE_BYTES:
                region = next(iter(self._idle))
                del self._idle[region]
                self._idle_bytes -= region.nbytes
                region.unmap()

    def forget_all(self) -> None:
        """Forget everything. What is looked at lives as long as its views."""
        self._regions.clear()
        self._idle.clear()
        self._leases.clear()

    def _let_go(self, region: Region) -> None:
        """Note that nobody looks at a region now."""
        if region.has_huge_pages and self._segment.is_huge:
            # To map it again takes nothing.
            region.unmap()
        else:
            self._idle[region] = None
            self._idle_bytes += region.nbytes

    def _region(self, offsets: tuple[int, ...], piece_bytes: int) -> Region:
        """Return the region over pieces of all segments, and make it the one that has been used last."""
        key = (piece_bytes, *offsets)
        region = self._regions.pop(key, None)
        if region is None:
            fds = [self._segment.fd if rank == self._rank else self._peers[rank].fd for rank in range(self._size)]
            region = Region(list(zip(fds, offsets, strict=True)), piece_bytes, self._rank)
            self._regions_bytes += region.nbytes
        self._regions[key] = region
        return region

    def _forget(self, key: tuple[int, ...]) -> None:
        region = self._regions.pop(key)
        self._regions_bytes -= region.nbytes
        if region in self._idle:
            del self._idle[region]
            self._idle_bytes -= region.nbytes

    def _end(self, lease: _Lease) -> None:
        self._return(lease)
        self._room.end_lease(lease.area)

    def _return(self, lease: _Lease) -> None:
        if not lease.is_returned:
            lease.is_returned = True
            self._board.give_back(lease.lane, lease.index, lease.slot)

    def _detach(self, region: Region) -> None:
        """Let those who look at a region keep what they see."""
        region.detach()
        for key in [key for key, other in self._regions.items() if other is region]:
            self._forget(key)
        for number in [number for number, lease in self._leases.items() if lease.region is region]:
            self._end(self._leases.pop(number))
