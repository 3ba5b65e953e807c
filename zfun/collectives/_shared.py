"""Collectives of the CPU ranks of one host, through memory that all of them have mapped.

[Note: collectives through shared memory]

Every rank owns a segment, which only it writes and which the others have mapped for reading. The ``k``-th call of a rank in a lane leaves a
record there: what it is (a hash and the text it was made of) and where its data begin. Then the lane's counter of published calls goes to
``k + 1``. Who needs the data waits for that counter, compares the hash with that of its own ``k``-th call, and reads what it needs straight
out of the segment. When it has finished all calls before ``d``, its own counter of finished calls says ``d``: the owner may use the room of
those calls again. So each word has one writer, and what it announces has been written before it: x86-64 keeps the order of stores, and of
loads, which is all that is asked of it (and why other machines are refused). Kernels that write past the caches, where that does not hold,
see to it before they return.

* There is no thread. ``start`` copies the input into the segment (unless it lies there already, see ``buffer``), ``wait`` reads. Neither
  waits for another rank to *finish* anything: not for its readers, and not for room, since the segment grows instead. So ranks may wait in
  any order, and lanes do not know of each other. A rank waits for those that it sends to as well, but only until they have started the
  call: that bounds how far it runs ahead of them, and it is how both sides notice that they started different things.
* Records stand in a ring of slots per lane. If the next slot is still in use, the lane goes on in a ring of twice the size. What is small
  lies in the slot itself.
* An all-reduce reads everything from everybody, in one phase: two phases would need a thread, or depend on the order of waits.

[Note: borrowed results]

A result that is only read (``Call.borrow``) need not be copied. If the inputs of an all-gather are whole pages, the result is a region of
addresses in which those very pages stand one after the other, and costs nothing: regions are kept, for the same inputs come again at every
step. A borrowed all-reduce has two phases: each rank sums its own slice over its own input, where nobody else reads it, and says so; then
the slices are borrowed. Who waits for anything sums its slices of whatever has come meanwhile, so that waits may still be in any order.

Who borrows says in the record of its own call when it has given the result back: when the last view of it is gone, or when it is about to
write to its own part (``give_up``). A view that somebody has kept in spite of that gets pages of its own then. So the owner knows when it
may write to what it has lent, and its old values never change under anybody's feet.

[Note: whose memory it is]

The system counts a page as memory of everybody who has it mapped, once for each mapping. A rank's own pages count where it writes them.
What it has read of the others, and regions that nobody looks at, are unmapped. That changes no page, and where they are huge ([Note: huge
pages]) it takes no time either. Small pages the next access finds again, 16 at a time when it reads; so a few regions of these stay mapped.
A write finds one at a time, so what was unmapped of a segment is mapped as a whole where a buffer is made of it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Lane, Op, Permute, Reduce, ReduceScatter
from zfun.collectives._segment import FINISHED, HEAD_WORDS, LANE_WORDS, PAGE, RINGS, SLOT_BYTES, Peer, Region, Segment
from zfun.errors import OptionError
from zfun.ops._sums import sum_and_square, sum_in_rank_order

__all__ = ["Disagreement", "Sent", "SharedMemory", "TransportError", "Use"]

# A record, in words: its number, the hash, form and place of the input, the length of the text; then what its owner says later on, as the
# number of the call plus one, so that it grows when the slot is used again.
_RETURNED, _SUMMED = 5, 6
_TEXT_AT = 64
_DATA_AT = 512
_INLINE_BYTES = SLOT_BYTES - _DATA_AT
_SLOTS = 64

_SPIN_S = 20e-6
_YIELD_S = 150e-6
_LONGEST_NAP_S = 1e-3

# Regions that nobody looks at now are kept for the next time, up to so many. Their pages count as memory of this rank, too. Where these are
# small pages, and all regions together are small, they stay mapped, so that a step maps nothing again. Of more, what was used last does: it
# is used first where backward follows forward, and the rest would not be there any more when its turn came.
_IDLE_REGIONS = 256
_SMALL_BYTES = 1 << 27
_IDLE_BYTES = 1 << 25

# What is free of this rank's segment stays mapped up to so many bytes.
_FREE_BYTES = 1 << 28

# Mappings of less are not worth a call of the system.
_UNMAPPED_BYTES = 1 << 18

# How an input lies in the segment: as it is, or without the owner's own chunk.
_NOTHING, _WHOLE, _PACKED = range(3)


class TransportError(Exception):
    """A message that did not come or could not be sent. ``peer`` is the other rank."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Disagreement(Exception):
    """Another rank has started something else at this place. ``text`` says what."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.text = text


# What is sent to whom.


class _Plan(NamedTuple):
    """The part of a rank in a collective.

    Attributes:
        form: how its input is laid out for the others.
        readers: the ranks that read it.
        partners: the ranks that it sends to or reads from.
    """

    form: int
    readers: tuple[int, ...]
    partners: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _plan(op: Op, rank: int, size: int) -> _Plan:
    # Neighbours first, each rank its own, so that not all of them read from rank 0 at once.
    others = tuple((rank + step) % size for step in range(1, size))
    match op:
        case AllGather() | AllReduce():
            return _Plan(_WHOLE, others, others)
        case ReduceScatter() | AllToAll():
            return _Plan(_PACKED, others, others)
        case Broadcast(root):
            return _Plan(_WHOLE, others, others) if rank == root else _Plan(_NOTHING, (), (root,))
        case Reduce(root):
            return _Plan(_NOTHING, (), others) if rank == root else _Plan(_WHOLE, (root,), (root,))
        case Permute(destinations):
            target, source = destinations[rank], op.sources[rank]
            if target == rank:
                return _Plan(_NOTHING, (), ())
            return _Plan(_WHOLE, (target,), (source,) if source == target else (source, target))


@functools.lru_cache(maxsize=4096)
def _identity(text: str) -> tuple[int, bytes]:
    """Return the hash of a call's description, and as much of the description as a slot holds."""
    data = text.encode()
    (number,) = struct.unpack("<q", hashlib.blake2b(data, digest_size=8).digest())
    return number, data[: _DATA_AT - _TEXT_AT]


@dataclass(slots=True)
class Use:
    """A call whose data others read; a borrowed result counts as read until it is given back."""

    lane: Lane
    index: int
    readers: tuple[int, ...]
    text: str
    borrowed: bool = False


class _Watch(weakref.ref[memoryview]):
    """Says when a window is gone, under a number: that of a lease, or where a buffer lies."""

    __slots__ = ("number",)

    number: int


def _watched(window: memoryview, gone: collections.deque[_Watch], number: int) -> _Watch:
    watch = _Watch(window, gone.append)
    watch.number = number
    return watch


@dataclass(slots=True, eq=False)
class _Area:
    """A piece of the segment: room for an input, or a buffer that the caller holds."""

    offset: int
    nbytes: int
    uses: list[Use] = field(default_factory=list)
    num_leases: int = 0
    is_parked: bool = False
    watch: _Watch | None = None


@dataclass(slots=True, eq=False)
class _Lease:
    """A borrowed result that this rank looks at: in which region, over which of its own areas, and where to say that it is given back."""

    use: Use
    word: int
    region: Region
    area: _Area
    offset: int
    watch: _Watch
    is_returned: bool = False


# The protocol.


class Sent(NamedTuple):
    """A call that this rank has published: what ``finish`` needs. Without ``out`` the result is borrowed."""

    call: Call
    index: int
    identity: int
    plan: _Plan
    slot: int
    offset: int
    area: _Area | None
    x: Tensor
    out: Tensor | None


class SharedMemory:
    """The segments of all ranks, and the protocol over them. See [Note: collectives through shared memory].

    Args:
        segment: what this rank writes.
        peers: what the others write.
        rank: this rank.
        timeout_s: how long a wait may last.
    """

    def __init__(self, segment: Segment, peers: dict[int, Peer], rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self.interrupted = False
        self.watch: Callable[[Lane, int], AbstractContextManager[None]] = lambda lane, index: contextlib.nullcontext()
        self._segment = segment
        self._peers = peers
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._spin_s = _SPIN_S if len(os.sched_getaffinity(0)) >= self.size else 0.0
        self._published = [0] * len(Lane)
        self._finished = [0] * len(Lane)
        self._finished_early: list[set[int]] = [set() for _ in Lane]
        self._ring: list[tuple[int, int, int] | None] = [None] * len(Lane)
        self._num_rings = [0] * len(Lane)
        self._slot_uses: list[dict[int, Use]] = [{} for _ in Lane]
        self._staged: list[collections.deque[_Area]] = [collections.deque() for _ in Lane]
        self._buffers: dict[int, _Area] = {}
        self._dropping: list[_Area] = []
        self._unsummed: list[collections.deque[Sent]] = [collections.deque() for _ in Lane]
        self._borrowed: set[tuple[Lane, int]] = set()
        self._leases: dict[int, _Lease] = {}
        self._num_leases = 0
        self._regions: dict[tuple[int, ...], Region] = {}
        self._regions_bytes = 0
        # Those that nobody looks at, of which small pages are mapped: what was used last comes last.
        self._idle: dict[Region, None] = {}
        self._idle_bytes = 0
        # Filled where windows are gone, which may be at any moment and in any thread.
        self._dropped: collections.deque[_Watch] = collections.deque()
        self._ended: collections.deque[_Watch] = collections.deque()

    def send(self, call: Call, text: str, x: Tensor, out: Tensor | None) -> Sent:
        """Publish this rank's next call of a lane.

        Args:
            call: what is done.
            text: what the ranks compare.
            x: the input.
            out: where the result goes; None to borrow it.

        Raises:
            OptionError: there is no memory for the input. Nothing has been published then.
        """
        self._end_leases()
        plan = _plan(call.op, self.rank, self.size)
        lane = call.lane
        index = self._published[lane]
        identity, label = _identity(text)
        borrowed = out is None
        try:
            slot = self._next_slot(lane, index)
            form, offset, area = self._lay_out(call.op, plan, x, out, slot, Use(lane, index, plan.readers, text, borrowed))
        except OSError as error:
            nbytes = x.numel() * x.dtype.itemsize
            raise OptionError(f"the system has no shared memory for {nbytes} bytes ({error}); pass shared_memory=False") from error
        # All partners compare the record, whether or not they need what it points to.
        self._slot_uses[lane][slot] = Use(lane, index, plan.partners, text, borrowed)
        words, at = self._segment.words, slot // 8
        words[at] = index
        words[at + 1] = identity
        words[at + 2] = form
        words[at + 3] = offset
        words[at + 4] = len(label)
        self._segment.memory[slot + _TEXT_AT : slot + _TEXT_AT + len(label)] = label
        # From here on the others see the call.
        words[HEAD_WORDS + LANE_WORDS * lane] = index + 1
        self._published[lane] = index + 1
        sent = Sent(call, index, identity, plan, slot, offset, area, x, out)
        if borrowed:
            self._borrowed.add((lane, index))
            if isinstance(call.op, AllReduce):
                self._unsummed[lane].append(sent)
        return sent

    def finish(self, sent: Sent) -> Tensor:
        """Wait for the others' calls and return the result.

        Raises:
            Disagreement: one of them is another call.
            TransportError: one did not come.
        """
        if not self._peers:
            raise OptionError("a closed group finishes no collectives; wait for them before it is closed")
        self._deadline = None
        if sent.out is None:
            result = self._borrow(sent)
        else:
            self._compute(sent, sent.out)
            result = sent.out
        self._note_finished(sent.call.lane, sent.index)
        return result

    def _compute(self, sent: Sent, out: Tensor) -> None:
        match sent.call.op:
            case AllGather() | AllToAll():
                self._gather(sent, out)
            case ReduceScatter() | AllReduce():
                self._sum(sent, out)
            case Reduce(root) if root == self.rank:
                self._sum(sent, out)
            case Reduce():
                self._move(sent, None, out)
            case Broadcast(root):
                self._move(sent, root, out)
            case Permute() as op:
                self._move(sent, op.sources[self.rank], out)

    def can_borrow(self, op: Op, x: Tensor) -> bool:
        """Whether a result can be borrowed: the same on all ranks."""
        nbytes = x.numel() * x.dtype.itemsize
        if isinstance(op, AllGather):
            return nbytes > 0 and nbytes % PAGE == 0
        return isinstance(op, AllReduce) and nbytes > 0 and x.numel() % self.size == 0 and nbytes % (PAGE * self.size) == 0

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor in the segment, uninitialised, or None if there is no memory for it."""
        if numel == 0:
            return None
        self._reclaim()
        try:
            offset, nbytes = self._segment.allocate(numel * dtype.itemsize)
        except OSError:
            return None
        # The storage holds on to this object, and so its end is the end of the storage.
        window = self._segment.memory[offset : offset + numel * dtype.itemsize]
        self._buffers[offset] = _Area(offset, nbytes, watch=_watched(window, self._dropped, offset))
        return torch.frombuffer(window, dtype=dtype)

    def give_up(self, x: Tensor) -> list[Use]:
        """Say that this rank reads no result any more which it has borrowed and which shows a buffer; see [Note: borrowed results].

        Args:
            x: a view of a buffer, or of this rank's own part of a borrowed result. It is going to be written.

        Returns:
            The calls in which others may still read it.
        """
        self._end_leases()
        area, _ = self._find(x)
        if area is None:
            return []
        for lease in [lease for lease in self._leases.values() if lease.area is area and not lease.is_returned]:
            # Who writes through the region itself has nobody else's views of it in mind.
            if lease.region.offset_of(x.data_ptr()) is None:
                self._detach(lease.region)
            else:
                self._return(lease)
        area.uses = [use for use in area.uses if not self._is_over(use)]
        return list(area.uses)

    def await_readers(self, use: Use) -> None:
        """Return when nobody reads the data of a call any more.

        Raises:
            TransportError: a reader did not finish it.
        """
        self._deadline = None
        for peer in use.readers:
            self._block(peer, HEAD_WORDS + LANE_WORDS * use.lane + FINISHED, use.index, use.lane, use.index)
            if use.borrowed:
                self._block(peer, self._peers[peer].slot(use.lane, use.index) // 8 + _RETURNED, use.index, use.lane, use.index)

    def rest(self, x: Tensor) -> None:
        """Let go of what the region of a borrowed result shows of others; they keep it. Room that has become free is let go of, too."""
        self._reclaim()
        address = x.data_ptr()
        for lease in self._leases.values():
            if 0 <= address - lease.region.begin < lease.region.nbytes:
                lease.region.unmap_others()

    @property
    def in_use(self) -> int:
        """Bytes of the segment that hold something now."""
        self._reclaim()
        return self._segment.in_use

    @property
    def reserved(self) -> int:
        """Bytes of memory that the segment has taken."""
        return self._segment.reserved

    def close(self) -> None:
        """Hang up and let go of the memory."""
        if self._peers:
            self._segment.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}
        # What is looked at lives as long as its views.
        self._regions.clear()
        self._leases.clear()

    # Sending.

    def _lay_out(self, op: Op, plan: _Plan, x: Tensor, out: Tensor | None, slot: int, use: Use) -> tuple[int, int, _Area | None]:
        """Put an input where the others can read it; return how and where it lies."""
        form = plan.form if x.numel() else _NOTHING
        if form == _NOTHING:
            return form, 0, None
        area, offset = self._find(x)
        if area is not None and self._may_lend(op, x, out) and not (use.borrowed and offset % PAGE):
            if len(area.uses) > 4:
                area.uses = [old for old in area.uses if not self._is_over(old)]
            area.uses.append(use)
            return _WHOLE, offset, area
        numel = x.numel() if form == _WHOLE else x.numel() // self.size * (self.size - 1)
        nbytes = numel * x.dtype.itemsize
        area = None
        if nbytes <= _INLINE_BYTES:
            offset = slot + _DATA_AT
        else:
            self._reclaim()
            offset, length = self._segment.allocate(nbytes)
            area = _Area(offset, length, [use])
            # What is borrowed may be held for long, and in any order.
            if use.borrowed:
                self._dropping.append(area)
            else:
                self._staged[use.lane].append(area)
        room = self._segment.view(offset, numel, x.dtype)
        if form == _WHOLE:
            room.copy_(x)
        else:
            chunk = x.numel() // self.size
            before = self.rank * chunk
            room[:before].copy_(x[:before])
            room[before:].copy_(x[before + chunk :])
        return form, offset, area

    def _may_lend(self, op: Op, x: Tensor, out: Tensor | None) -> bool:
        """Whether others can read an input while the result is written, and read what it means."""
        if x.is_conj() or x.is_neg():
            return False
        if out is None:
            return True
        begin, nbytes = x.data_ptr(), x.numel() * x.dtype.itemsize
        if isinstance(op, AllGather) and begin == out.data_ptr() + self.rank * nbytes:
            return True
        return begin + nbytes <= out.data_ptr() or out.data_ptr() + out.numel() * out.dtype.itemsize <= begin

    def _next_slot(self, lane: Lane, index: int) -> int:
        ring = self._ring[lane]
        if ring is not None:
            first, offset, slots = ring
            slot = offset + (index - first) % slots * SLOT_BYTES
            last = self._slot_uses[lane].get(slot)
            if last is None or self._is_over(last):
                return slot
        slots = _SLOTS if ring is None else 2 * ring[2]
        offset, _ = self._segment.allocate(slots * SLOT_BYTES)
        # What was there before says nothing of calls.
        self._segment.view(offset, slots * SLOT_BYTES // 8, torch.int64).view(slots, -1)[:, _RETURNED : _SUMMED + 1].zero_()
        words, base, number = self._segment.words, HEAD_WORDS + LANE_WORDS * lane + RINGS, self._num_rings[lane]
        at = base + 1 + 3 * number
        words[at], words[at + 1], words[at + 2] = index, offset, slots
        words[base] = self._num_rings[lane] = number + 1
        self._ring[lane] = (index, offset, slots)
        self._slot_uses[lane] = {}
        return offset

    def _is_over(self, use: Use) -> bool:
        lane, index = use.lane, use.index
        # This rank reads its own input, too.
        if self._finished[lane] <= index or (use.borrowed and (lane, index) in self._borrowed):
            return False
        word = HEAD_WORDS + LANE_WORDS * lane + FINISHED
        for peer in use.readers:
            other = self._peers[peer]
            if other.words[word] <= index or (use.borrowed and other.words[other.slot(lane, index) // 8 + _RETURNED] <= index):
                return False
        return True

    def _reclaim(self) -> None:
        """Take back what nobody reads any more."""
        self._end_leases()
        for staged in self._staged:
            while staged and self._is_over(staged[0].uses[0]):
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
                self._segment.unmap_free(_FREE_BYTES)

    def _release(self, area: _Area) -> bool:
        """Take an area back, if nobody reads it any more."""
        # What this rank sees of it through a region is in use, also where it has given back what it saw of the others. There may be many
        # such areas, and for long: they are asked about again when the last lease ends.
        area.is_parked = area.num_leases > 0
        if area.is_parked:
            return False
        while area.uses:
            if not self._is_over(area.uses[-1]):
                self._dropping.append(area)
                return False
            area.uses.pop()
        self._segment.release(area.offset, area.nbytes)
        return True

    def _find(self, x: Tensor) -> tuple[_Area | None, int]:
        """Return the area that a tensor lies in, directly or as this rank's part of a borrowed result, and where in the segment."""
        if self._buffers:
            offset = self._segment.locate(x)
            if offset is not None:
                area = self._buffers.get(offset)
                if area is None:
                    area = next((area for area in self._buffers.values() if area.offset <= offset < area.offset + area.nbytes), None)
                return area, offset
        address = x.data_ptr()
        for lease in self._leases.values():
            place = lease.region.offset_of(address)
            if place is not None:
                return lease.area, lease.offset + place
        return None, 0

    # Borrowing.

    def _borrow(self, sent: Sent) -> Tensor:
        call, x, area = sent.call, sent.x, sent.area
        piece_bytes = x.numel() * x.dtype.itemsize
        if isinstance(call.op, AllReduce):
            piece_bytes //= self.size
            self._sum_own_slices(sent)
        offsets = [sent.offset] * self.size
        for peer in sent.plan.partners:
            _, offsets[peer] = self._record(sent, peer)
        if isinstance(call.op, AllReduce):
            offsets = [offset + rank * piece_bytes for rank, offset in enumerate(offsets)]
        assert area is not None
        try:
            region = self._region(tuple(offsets), piece_bytes)
        except OSError:
            return self._copied(sent, offsets, piece_bytes)
        if isinstance(call.op, AllReduce) or area.offset not in self._buffers:
            # This rank's own part is looked at through the region, and the rest of the input of a sum not at all.
            self._segment.unmap(sent.offset, sent.x.nbytes)
        window = region.window()
        number, self._num_leases = self._num_leases, self._num_leases + 1
        use = Use(call.lane, sent.index, sent.plan.readers, "", borrowed=True)
        watch = _watched(window, self._ended, number)
        self._leases[number] = _Lease(use, sent.slot // 8 + _RETURNED, region, area, offsets[self.rank], watch)
        area.num_leases += 1
        if region in self._idle:
            del self._idle[region]
            self._idle_bytes -= region.nbytes
        region.num_views += 1
        return torch.frombuffer(window, dtype=x.dtype)

    def _copied(self, sent: Sent, offsets: Sequence[int], piece_bytes: int) -> Tensor:
        """Copy what the system does not map: it limits the number of mappings."""
        whole = torch.empty(self.size * piece_bytes // sent.x.dtype.itemsize, dtype=sent.x.dtype)
        for rank, piece in enumerate(_chunks(whole, self.size)):
            source = self._segment if rank == self.rank else self._peers[rank]
            piece.copy_(source.view(offsets[rank], piece.numel(), piece.dtype))
        self._give_back(sent.call.lane, sent.index, sent.slot // 8 + _RETURNED)
        return whole

    def _sum_own_slices(self, sent: Sent) -> None:
        """Sum this rank's slices of a borrowed all-reduce and of those before it in its lane, and wait until the others have done so."""
        queue = self._unsummed[sent.call.lane]
        while queue and queue[0].index <= sent.index:
            self._sum_own_slice(queue.popleft())
        for peer in sent.plan.partners:
            self._record(sent, peer)
            word = self._peers[peer].slot(sent.call.lane, sent.index) // 8 + _SUMMED
            self._block(peer, word, sent.index, sent.call.lane, sent.index)

    def _sum_own_slice(self, sent: Sent) -> None:
        whole = self._segment.view(sent.offset, sent.x.numel(), sent.x.dtype)
        self._add_up(sent, _chunks(whole, self.size)[self.rank])
        self._segment.words[sent.slot // 8 + _SUMMED] = sent.index + 1

    def _help(self) -> None:
        """Sum what the others may be waiting for, as far as all of it is there: they may have to come on before this rank can."""
        for lane, queue in enumerate(self._unsummed):
            word = HEAD_WORDS + LANE_WORDS * lane
            while queue and all(peer.words[word] > queue[0].index for peer in self._peers.values()):
                self._sum_own_slice(queue.popleft())

    def _region(self, offsets: tuple[int, ...], piece_bytes: int) -> Region:
        """Return the region over pieces of all segments, and make it the one that has been used last."""
        key = (piece_bytes, *offsets)
        region = self._regions.pop(key, None)
        if region is None:
            fds = [self._segment.fd if rank == self.rank else self._peers[rank].fd for rank in range(self.size)]
            region = Region(list(zip(fds, offsets, strict=True)), piece_bytes, self.rank)
            self._regions_bytes += region.nbytes
        self._regions[key] = region
        return region

    def _end_leases(self) -> None:
        """Give back what nobody looks at any more, and let go of regions that have not been used for long."""
        if not self._ended:
            return
        while self._ended:
            lease = self._leases.pop(self._ended.popleft().number, None)
            if lease is not None:
                self._end(lease)
                region = lease.region
                region.num_views -= 1
                if region.num_views:
                    continue
                if region.has_huge_pages and self._segment.is_huge:
                    # To map it again takes nothing.
                    region.unmap()
                else:
                    self._idle[region] = None
                    self._idle_bytes += region.nbytes
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

    def _forget(self, key: tuple[int, ...]) -> None:
        region = self._regions.pop(key)
        self._regions_bytes -= region.nbytes
        if region in self._idle:
            del self._idle[region]
            self._idle_bytes -= region.nbytes

    def _end(self, lease: _Lease) -> None:
        self._return(lease)
        lease.area.num_leases -= 1
        if lease.area.is_parked and not lease.area.num_leases:
            lease.area.is_parked = False
            self._dropping.append(lease.area)

    def _return(self, lease: _Lease) -> None:
        if not lease.is_returned:
            lease.is_returned = True
            self._give_back(lease.use.lane, lease.use.index, lease.word)

    def _give_back(self, lane: Lane, index: int, word: int) -> None:
        """Say that this rank looks at a borrowed result no more."""
        self._borrowed.discard((lane, index))
        self._segment.words[word] = index + 1

    def _detach(self, region: Region) -> None:
        """Let those who look at a region keep what they see."""
        region.detach()
        for key in [key for key, other in self._regions.items() if other is region]:
            self._forget(key)
        for number in [number for number, lease in self._leases.items() if lease.region is region]:
            self._end(self._leases.pop(number))

    # Receiving.

    def _record(self, sent: Sent, peer: int) -> tuple[int, int]:
        """Wait until another rank has published the call; return how and where its input lies."""
        lane, index = sent.call.lane, sent.index
        self._block(peer, HEAD_WORDS + LANE_WORDS * lane, index, lane, index)
        other = self._peers[peer]
        slot = other.slot(lane, index)
        its_index, identity, form, offset, length = other.words[slot // 8 : slot // 8 + 5].tolist()
        if its_index != index or identity != sent.identity:
            raise Disagreement(peer, bytes(other.memory[slot + _TEXT_AT : slot + _TEXT_AT + length]).decode(errors="replace"))
        return form, offset

    def _input(self, sent: Sent, peer: int, numel: int) -> Tensor:
        """Return what another rank sends to this one, where it lies. ``numel`` is its length, not 0."""
        form, offset = self._record(sent, peer)
        if sent.call.op.splits_input or sent.out is None:
            position = self.rank - (form == _PACKED and self.rank > peer)
            offset += position * numel * sent.x.dtype.itemsize
        return self._peers[peer].view(offset, numel, sent.x.dtype)

    def _unmap(self, peer: int, read: Tensor) -> None:
        """Let go of what another rank has sent, now that it has been read: mapped pages count as memory of this rank, too."""
        if read.nbytes >= _UNMAPPED_BYTES:
            other = self._peers[peer]
            other.unmap(read.data_ptr() - other.address, read.nbytes)

    def _copy(self, sent: Sent, peer: int, out: Tensor) -> None:
        if out.numel():
            found = self._input(sent, peer, out.numel())
            out.copy_(found)
            self._unmap(peer, found)
        else:
            self._record(sent, peer)

    def _move(self, sent: Sent, source: int | None, out: Tensor) -> None:
        """Take the input of one rank as the result; that of no rank is zero."""
        for peer in sent.plan.partners:
            if peer != source:
                self._record(sent, peer)
        if source is None:
            out.zero_()
        elif source != self.rank:
            self._copy(sent, source, out)
        elif not out.is_set_to(sent.x):
            out.copy_(sent.x)

    def _gather(self, sent: Sent, out: Tensor) -> None:
        slices = _chunks(out, self.size)
        own = _chunks(sent.x, self.size)[self.rank] if sent.call.op.splits_input else sent.x
        if not slices[self.rank].is_set_to(own):
            slices[self.rank].copy_(own)
        for peer in sent.plan.partners:
            self._copy(sent, peer, slices[peer])

    def _sum(self, sent: Sent, out: Tensor) -> None:
        if not out.numel():
            for peer in sent.plan.partners:
                self._record(sent, peer)
            return
        self._add_up(sent, out)

    def _add_up(self, sent: Sent, out: Tensor) -> None:
        terms = {peer: self._input(sent, peer, out.numel()) for peer in sent.plan.partners}
        terms[self.rank] = self._own_term(sent, out)
        in_order, squared = [terms[rank] for rank in range(self.size)], sent.call.squared
        # Of a sum that every rank takes as a whole, a piece would have to be measured by itself.
        is_piece = sent.out is None or isinstance(sent.call.op, ReduceScatter)
        if squared is not None and is_piece and out.is_floating_point():
            squared(sum_and_square(in_order, out))
        else:
            sum_in_rank_order(in_order, out)
        for peer in sent.plan.partners:
            self._unmap(peer, terms[peer])

    def _own_term(self, sent: Sent, out: Tensor) -> Tensor:
        x = sent.x
        if sent.out is not None and isinstance(sent.call.op, AllReduce):
            # The result may go where the input was, so that the term is the one that the others read.
            return self._segment.view(sent.offset, x.numel(), x.dtype)
        return out if sent.out is None else _chunks(x, self.size)[self.rank] if sent.call.op.splits_input else x

    def _note_finished(self, lane: Lane, index: int) -> None:
        early, finished = self._finished_early[lane], self._finished[lane]
        early.add(index)
        while finished in early:
            early.remove(finished)
            finished += 1
        self._finished[lane] = finished
        self._segment.words[HEAD_WORDS + LANE_WORDS * lane + FINISHED] = finished

    # Waiting.

    def _block(self, peer: int, word: int, count: int, lane: Lane, index: int) -> None:
        """Return when a counter of another rank is above ``count``: spin, then give way, then sleep for an eighth of the time waited."""
        words = self._peers[peer].words
        if words[word] > count:
            return
        started = time.monotonic()
        while time.monotonic() < started + self._spin_s:
            if words[word] > count:
                return
        while time.monotonic() < started + _YIELD_S:
            self._help()
            os.sched_yield()
            if words[word] > count:
                return
        if self._deadline is None:
            self._deadline = started + self._timeout_s
        with self.watch(lane, index):
            while words[word] <= count:
                self._help()
                if self.interrupted:
                    raise TransportError(peer, "the group is broken")
                # Its last words come before its end, but may have come after the look above.
                if self._peers[peer].is_gone():
                    if words[word] > count:
                        return
                    raise TransportError(peer, "its process has ended or closed the group")
                now = time.monotonic()
                if now >= self._deadline:
                    raise TransportError(peer, f"no answer within {self._timeout_s:g} s")
                time.sleep(min((now - started) / 8, _LONGEST_NAP_S, self._deadline - now))


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    return list(x.view(size, x.numel() // size).unbind())
