"""Collectives of the CPU ranks of one host, through memory that all of them have mapped.

[Note: collectives through shared memory]

Every rank owns a segment, which only it writes and which the others have mapped for reading. The ``k``-th call of a rank in a lane leaves a
record there: what it is (a hash and the text it was made of) and where its data begin. Then the lane's counter of published calls goes to
``k + 1``. Who needs the data waits for that counter, compares the hash with that of its own ``k``-th call, and reads what it needs straight
out of the segment. When it has finished all calls before ``d``, its own counter of finished calls says ``d``: the owner may use the room of
those calls again. So each word has one writer, and what it announces has been written before it: x86-64 keeps the order of stores, and of
loads, which is all that is asked of it (and why other machines are refused).

* There is no thread. ``start`` copies the input into the segment (unless it lies there already, see ``buffer``), ``wait`` reads. Neither
  waits for another rank to *finish* anything: not for its readers, and not for room, since the segment grows instead. So ranks may wait in
  any order, and lanes do not know of each other. A rank waits for those that it sends to as well, but only until they have started the
  call: that bounds how far it runs ahead of them, and it is how both sides notice that they started different things.
* Records stand in a ring of slots per lane. If the next slot is still in use, the lane goes on in a ring of twice the size. What is small
  lies in the slot itself.
* An all-reduce reads everything from everybody, in one phase: two phases would need a thread, or depend on the order of waits.
* A segment is one sparse file as large as the machine's memory, mapped once. Pages are reserved before they are used (``posix_fallocate``),
  so that a lack of memory is an error at a known place and never a SIGBUS, and it cannot be truncated (seals).

The file never has a name: the ranks pass each other its descriptor over a Unix socket. So nothing can be left over, whatever ends the
ranks, nobody but they can open it, and neither the size of /dev/shm nor a hidden /proc matters. The sockets stay open: the end of a process
closes its own, which is how a waiting rank learns at once that another has died.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Lane, Op, Permute, Reduce, ReduceScatter
from zfun.errors import OptionError, PeerLost
from zfun.ops._sums import sum_in_rank_order

__all__ = ["Disagreement", "Sent", "SharedMemory", "TransportError", "Use", "meet"]

_MAGIC = 0x7A66756E_00000001
# Offsets in words of 8 bytes; what different ranks watch stands in different cache lines.
_HEAD_WORDS = 64
_LANE_WORDS = 128
_FINISHED = 8
_RINGS = 16
_MAX_RINGS = 32
_CONTROL_BYTES = 8 * (_HEAD_WORDS + _LANE_WORDS * len(Lane))

_SLOT_BYTES = 4096
_SLOTS = 64
_TEXT_AT = 64
_DATA_AT = 512
_INLINE_BYTES = _SLOT_BYTES - _DATA_AT

_COMMIT_BYTES = 1 << 21
_ADDRESS_SPACE_BYTES = 1 << 43
_RESERVE_BYTES = 1 << 26  # at a time, since a signal makes the system begin anew
_PAGE = 4096
_LINE = 128
_CHUNK_BYTES = 1 << 18  # of every term of a sum, so that all of them stay in the cache

_SPIN_S = 20e-6
_YIELD_S = 150e-6
_LONGEST_NAP_S = 1e-3
_MEETING_S = 20.0

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


# Memory.


@dataclass(slots=True)
class Use:
    """A call whose data others read."""

    lane: Lane
    index: int
    readers: tuple[int, ...]
    text: str


@dataclass(slots=True)
class _Area:
    """A piece of the segment: room for an input, or a buffer that the caller holds."""

    offset: int
    nbytes: int
    uses: list[Use] = field(default_factory=list)


class _Segment:
    """The memory that this rank writes and the others read, and which parts of it are in use."""

    def __init__(self, rank: int, size: int) -> None:
        self.fd = _anonymous_file()
        try:
            physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            # The segments of all ranks, in several groups, must fit the address space.
            self.capacity = min(_rounded(physical, _COMMIT_BYTES), _ADDRESS_SPACE_BYTES // size // _PAGE * _PAGE)
            os.ftruncate(self.fd, self.capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._reserved = 0
            self._free: list[tuple[int, int]] = []
            self._end = 0
            self.allocate(_CONTROL_BYTES)
            self.memory = mmap.mmap(self.fd, self.capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        _advise(self.memory)
        self.words = memoryview(self.memory).cast("q")
        self.words[:3] = memoryview(struct.pack("<3q", _MAGIC, rank, size)).cast("q")
        self.address = self.view(0, _CONTROL_BYTES, torch.uint8).data_ptr()

    def view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def locate(self, x: Tensor) -> int | None:
        """Return where in the segment a tensor begins, or None if it lies elsewhere."""
        offset = x.data_ptr() - self.address
        return offset if 0 <= offset < self.capacity else None

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return offset and length of a free piece: the lowest, which the others are most likely to have touched already.

        Raises:
            OSError: there is no memory.
        """
        unit = _PAGE if nbytes >= _PAGE else _LINE
        nbytes = _rounded(nbytes, unit)
        for place, (offset, length) in enumerate(self._free):
            start = _rounded(offset, unit)
            if start + nbytes <= offset + length:
                self._free[place : place + 1] = _pieces((offset, start), (start + nbytes, offset + length))
                return start, nbytes
        # What is free at the end is made longer.
        at_end = bool(self._free) and sum(self._free[-1]) == self._end
        offset = self._free[-1][0] if at_end else self._end
        start = _rounded(offset, unit)
        self._reserve(start + nbytes)
        if at_end:
            self._free.pop()
        self._free += _pieces((offset, start))
        self._end = start + nbytes
        return start, nbytes

    def release(self, offset: int, nbytes: int) -> None:
        """Take a piece back."""
        pieces = sorted([*self._free, (offset, nbytes)])
        self._free = pieces[:1]
        for begin, length in pieces[1:]:
            last, last_length = self._free[-1]
            if last + last_length == begin:
                self._free[-1] = (last, last_length + length)
            else:
                self._free.append((begin, length))

    def close(self) -> None:
        """Let go of the memory, unless there are buffers in it: then it goes with the last of them."""
        os.close(self.fd)
        self.words.release()
        with contextlib.suppress(BufferError):
            self.memory.close()
        del self.memory

    @property
    def in_use(self) -> int:
        """Bytes that are allocated."""
        return self._end - sum(length for _, length in self._free)

    @property
    def reserved(self) -> int:
        """Bytes that the system has set aside."""
        return self._reserved

    def _reserve(self, end: int) -> None:
        if end > self.capacity:
            raise OSError(errno.ENOMEM, "the segment is full")
        wanted = min(_rounded(end, _COMMIT_BYTES), self.capacity)
        while self._reserved < wanted:
            step = min(wanted - self._reserved, _RESERVE_BYTES)
            os.posix_fallocate(self.fd, self._reserved, step)
            self._reserved += step


def _anonymous_file() -> int:
    no_execution = 0x8  # MFD_NOEXEC_SEAL: newer systems can be set to refuse files without it, older ones do not know it
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("zfun", flags | no_execution)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("zfun", flags)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _pieces(*spans: tuple[int, int]) -> list[tuple[int, int]]:
    return [(begin, end - begin) for begin, end in spans if begin < end]


def _advise(memory: mmap.mmap) -> None:
    # Neither is needed: huge pages where the system has them for shared memory, and a core dump without what is shared.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))


class _Peer:
    """The segment of another rank, mapped for reading, and what tells whether its process lives."""

    def __init__(self, fd: int, rank: int, size: int, connections: Sequence[socket.socket], pid: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        _advise(self.memory)
        self.words = memoryview(self.memory).cast("q")
        if self.words[:3].tolist() != [_MAGIC, rank, size]:
            raise OSError("another program answered")
        # Torch warns of a buffer that it may not write, which this one does not say; nothing here hands it out.
        self._bytes = (ctypes.c_uint8 * len(self.memory)).from_address(np.frombuffer(self.memory, np.uint8, 1).ctypes.data)
        self._rings: list[list[tuple[int, int, int]]] = [[] for _ in Lane]
        self._connections = list(connections)
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection, select.POLLIN)
        # A process that the other rank has forked holds its sockets open too.
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            if pid > 0:
                self._pidfd = os.pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)

    def slot(self, lane: Lane, index: int) -> int:
        """Return where the record of a published call begins, in bytes."""
        rings = self._rings[lane]
        base = _HEAD_WORDS + _LANE_WORDS * lane + _RINGS
        while len(rings) < self.words[base]:
            at = base + 1 + 3 * len(rings)
            first, offset, slots = self.words[at : at + 3].tolist()
            rings.append((first, offset, slots))
        first, offset, slots = next(ring for ring in reversed(rings) if ring[0] <= index)
        return offset + (index - first) % slots * _SLOT_BYTES

    def is_gone(self) -> bool:
        """Whether its process has ended or closed the group. It never sends anything."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.words.release()
        self.memory.close()


# The protocol.


class Sent(NamedTuple):
    """A call that this rank has published: what ``finish`` needs."""

    call: Call
    index: int
    identity: int
    plan: _Plan
    offset: int
    x: Tensor
    out: Tensor


class SharedMemory:
    """The segments of all ranks, and the protocol over them. See [Note: collectives through shared memory].

    Args:
        segment: what this rank writes.
        peers: what the others write.
        rank: this rank.
        timeout_s: how long a wait may last.
    """

    def __init__(self, segment: _Segment, peers: dict[int, _Peer], rank: int, timeout_s: float) -> None:
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
        # Filled by finalizers, which may run at any moment and in any thread.
        self._dropped: collections.deque[int] = collections.deque()

    def send(self, call: Call, text: str, x: Tensor, out: Tensor) -> Sent:
        """Publish this rank's next call of a lane.

        Raises:
            OptionError: there is no memory for the input. Nothing has been published then.
        """
        plan = _plan(call.op, self.rank, self.size)
        lane = call.lane
        index = self._published[lane]
        identity, label = _identity(text)
        try:
            slot = self._next_slot(lane, index)
            form, offset = self._lay_out(call.op, plan, x, out, slot, Use(lane, index, plan.readers, text))
        except OSError as error:
            nbytes = x.numel() * x.dtype.itemsize
            raise OptionError(f"the system has no shared memory for {nbytes} bytes ({error}); pass shared_memory=False") from error
        # All partners compare the record, whether or not they need what it points to.
        self._slot_uses[lane][slot] = Use(lane, index, plan.partners, text)
        words, at = self._segment.words, slot // 8
        words[at] = index
        words[at + 1] = identity
        words[at + 2] = form
        words[at + 3] = offset
        words[at + 4] = len(label)
        self._segment.memory[slot + _TEXT_AT : slot + _TEXT_AT + len(label)] = label
        # From here on the others see the call.
        words[_HEAD_WORDS + _LANE_WORDS * lane] = index + 1
        self._published[lane] = index + 1
        return Sent(call, index, identity, plan, offset, x, out)

    def finish(self, sent: Sent) -> None:
        """Wait for the others' calls and compute the result.

        Raises:
            Disagreement: one of them is another call.
            TransportError: one did not come.
        """
        if not self._peers:
            raise OptionError("a closed group finishes no collectives; wait for them before it is closed")
        self._deadline = None
        match sent.call.op:
            case AllGather() | AllToAll():
                self._gather(sent)
            case ReduceScatter() | AllReduce():
                self._sum(sent)
            case Reduce(root) if root == self.rank:
                self._sum(sent)
            case Reduce():
                self._move(sent, None)
            case Broadcast(root):
                self._move(sent, root)
            case Permute() as op:
                self._move(sent, op.sources[self.rank])
        self._note_finished(sent.call.lane, sent.index)

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
        window = memoryview(self._segment.memory)[offset : offset + numel * dtype.itemsize]
        self._buffers[offset] = _Area(offset, nbytes)
        weakref.finalize(window, self._dropped.append, offset)
        return torch.frombuffer(window, dtype=dtype)

    def uses(self, x: Tensor) -> list[Use]:
        """Return the calls in which others may still read the buffer that a tensor lies in."""
        area = self._buffer_of(x)
        return [] if area is None else area.uses

    def await_readers(self, use: Use) -> None:
        """Return when nobody reads the data of a call any more.

        Raises:
            TransportError: a reader did not finish it.
        """
        self._deadline = None
        for peer in use.readers:
            self._block(peer, _HEAD_WORDS + _LANE_WORDS * use.lane + _FINISHED, use.index, use.lane, use.index)

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

    # Sending.

    def _lay_out(self, op: Op, plan: _Plan, x: Tensor, out: Tensor, slot: int, use: Use) -> tuple[int, int]:
        """Put an input where the others can read it; return how and where it lies."""
        form = plan.form if x.numel() else _NOTHING
        if form == _NOTHING:
            return form, 0
        area = self._buffer_of(x)
        if area is not None and self._may_lend(op, x, out):
            area.uses.append(use)
            return _WHOLE, x.data_ptr() - self._segment.address
        numel = x.numel() if form == _WHOLE else x.numel() // self.size * (self.size - 1)
        nbytes = numel * x.dtype.itemsize
        if nbytes <= _INLINE_BYTES:
            offset = slot + _DATA_AT
        else:
            self._reclaim()
            offset, length = self._segment.allocate(nbytes)
            self._staged[use.lane].append(_Area(offset, length, [use]))
        room = self._segment.view(offset, numel, x.dtype)
        if form == _WHOLE:
            room.copy_(x)
        else:
            chunk = x.numel() // self.size
            before = self.rank * chunk
            room[:before].copy_(x[:before])
            room[before:].copy_(x[before + chunk :])
        return form, offset

    def _may_lend(self, op: Op, x: Tensor, out: Tensor) -> bool:
        """Whether others can read an input while the result is written, and read what it means."""
        if x.is_conj() or x.is_neg():
            return False
        begin, nbytes = x.data_ptr(), x.numel() * x.dtype.itemsize
        if isinstance(op, AllGather) and begin == out.data_ptr() + self.rank * nbytes:
            return True
        return begin + nbytes <= out.data_ptr() or out.data_ptr() + out.numel() * out.dtype.itemsize <= begin

    def _next_slot(self, lane: Lane, index: int) -> int:
        ring = self._ring[lane]
        if ring is not None:
            first, offset, slots = ring
            slot = offset + (index - first) % slots * _SLOT_BYTES
            last = self._slot_uses[lane].get(slot)
            if last is None or self._is_over(last):
                return slot
        slots = _SLOTS if ring is None else 2 * ring[2]
        offset, _ = self._segment.allocate(slots * _SLOT_BYTES)
        words, base, number = self._segment.words, _HEAD_WORDS + _LANE_WORDS * lane + _RINGS, self._num_rings[lane]
        at = base + 1 + 3 * number
        words[at], words[at + 1], words[at + 2] = index, offset, slots
        words[base] = self._num_rings[lane] = number + 1
        self._ring[lane] = (index, offset, slots)
        self._slot_uses[lane] = {}
        return offset

    def _is_over(self, use: Use) -> bool:
        word = _HEAD_WORDS + _LANE_WORDS * use.lane + _FINISHED
        # This rank reads its own input, too.
        return self._finished[use.lane] > use.index and all(self._peers[peer].words[word] > use.index for peer in use.readers)

    def _reclaim(self) -> None:
        """Take back what nobody reads any more."""
        for staged in self._staged:
            while staged and self._is_over(staged[0].uses[0]):
                area = staged.popleft()
                self._segment.release(area.offset, area.nbytes)
        while self._dropped:
            self._dropping.append(self._buffers.pop(self._dropped.popleft()))
        if self._dropping:
            over = [area for area in self._dropping if all(self._is_over(use) for use in area.uses)]
            for area in over:
                self._dropping.remove(area)
                self._segment.release(area.offset, area.nbytes)

    def _buffer_of(self, x: Tensor) -> _Area | None:
        if not self._buffers:
            return None
        offset = self._segment.locate(x)
        if offset is None:
            return None
        return next((area for area in self._buffers.values() if area.offset <= offset < area.offset + area.nbytes), None)

    # Receiving.

    def _record(self, sent: Sent, peer: int) -> tuple[int, int]:
        """Wait until another rank has published the call; return how and where its input lies."""
        lane, index = sent.call.lane, sent.index
        self._block(peer, _HEAD_WORDS + _LANE_WORDS * lane, index, lane, index)
        other = self._peers[peer]
        slot = other.slot(lane, index)
        its_index, identity, form, offset, length = other.words[slot // 8 : slot // 8 + 5].tolist()
        if its_index != index or identity != sent.identity:
            raise Disagreement(peer, other.memory[slot + _TEXT_AT : slot + _TEXT_AT + length].decode(errors="replace"))
        return form, offset

    def _input(self, sent: Sent, peer: int, numel: int) -> Tensor:
        """Return what another rank sends to this one, where it lies. ``numel`` is its length, not 0."""
        form, offset = self._record(sent, peer)
        if sent.call.op.splits_input:
            position = self.rank - (form == _PACKED and self.rank > peer)
            offset += position * numel * sent.x.dtype.itemsize
        return self._peers[peer].view(offset, numel, sent.x.dtype)

    def _copy(self, sent: Sent, peer: int, out: Tensor) -> None:
        if out.numel():
            out.copy_(self._input(sent, peer, out.numel()))
        else:
            self._record(sent, peer)

    def _move(self, sent: Sent, source: int | None) -> None:
        """Take the input of one rank as the result; that of no rank is zero."""
        for peer in sent.plan.partners:
            if peer != source:
                self._record(sent, peer)
        if source is None:
            sent.out.zero_()
        elif source != self.rank:
            self._copy(sent, source, sent.out)
        elif not sent.out.is_set_to(sent.x):
            sent.out.copy_(sent.x)

    def _gather(self, sent: Sent) -> None:
        slices = _chunks(sent.out, self.size)
        own = _chunks(sent.x, self.size)[self.rank] if sent.call.op.splits_input else sent.x
        if not slices[self.rank].is_set_to(own):
            slices[self.rank].copy_(own)
        for peer in sent.plan.partners:
            self._copy(sent, peer, slices[peer])

    def _sum(self, sent: Sent) -> None:
        out = sent.out
        if not out.numel():
            for peer in sent.plan.partners:
                self._record(sent, peer)
            return
        terms = {peer: self._input(sent, peer, out.numel()) for peer in sent.plan.partners}
        terms[self.rank] = self._own_term(sent)
        in_order = [terms[rank] for rank in range(self.size)]
        step = _CHUNK_BYTES // out.dtype.itemsize
        for begin in range(0, out.numel(), step):
            sum_in_rank_order([term[begin : begin + step] for term in in_order], out[begin : begin + step])

    def _own_term(self, sent: Sent) -> Tensor:
        x, out = sent.x, sent.out
        if isinstance(sent.call.op, AllReduce):
            # The result may go where the input was, so that the term is the one that the others read.
            return self._segment.view(sent.offset, x.numel(), x.dtype)
        own = _chunks(x, self.size)[self.rank] if sent.call.op.splits_input else x
        # A sum starts with the first term, and would overwrite another one before its turn.
        return own.clone() if own.is_set_to(out) else own

    def _note_finished(self, lane: Lane, index: int) -> None:
        early, finished = self._finished_early[lane], self._finished[lane]
        early.add(index)
        while finished in early:
            early.remove(finished)
            finished += 1
        self._finished[lane] = finished
        self._segment.words[_HEAD_WORDS + _LANE_WORDS * lane + _FINISHED] = finished

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
            os.sched_yield()
            if words[word] > count:
                return
        if self._deadline is None:
            self._deadline = started + self._timeout_s
        with self.watch(lane, index):
            while words[word] <= count:
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


# Meeting.


def meet(store: Store, rank: int, size: int, timeout_s: float, wanted: bool | None) -> SharedMemory | str:
    """Map the memory of all ranks, if all of them can; otherwise say why not. All ranks come to the same answer.

    Args:
        store: shared by the ranks of the group.
        rank: this rank.
        size: the number of ranks.
        timeout_s: how long a wait may last, in seconds.
        wanted: False: this rank does not want it, and only says so.

    Returns:
        The memory, or why there is none.

    Raises:
        PeerLost: a rank did not answer.
    """
    store = PrefixStore("shared", store)
    with contextlib.ExitStack() as stack:
        segment: _Segment | None = None
        listener: socket.socket | None = None
        problem, name = "it was made with shared_memory=False" if wanted is False else _unsupported(), ""
        if not problem:
            try:
                segment = _Segment(rank, size)
                stack.callback(os.close, segment.fd)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                name = f"zfun-{secrets.token_hex(16)}"
                listener.bind("\0" + name)
                listener.listen(size)
            except (OSError, ValueError, OverflowError) as error:
                problem = f"memory cannot be mapped there: {error}"
        offers = _exchange_texts(store, "offer", rank, size, timeout_s, json.dumps([problem, _host(), name]), answer=wanted is not False)
        found = _first_problem([json.loads(offer) for offer in offers], rank, size)
        if found or segment is None or listener is None:
            return found or problem
        peers: dict[int, _Peer] = {}
        try:
            peers = _trade(segment, listener, [json.loads(offer)[2] for offer in offers], rank)
        except (OSError, ValueError, struct.error) as error:
            problem = f"rank {rank} cannot map the memory of the others: {error}"
        problems = _exchange_texts(store, "mapped", rank, size, timeout_s, problem)
        if any(problems):
            for peer in peers.values():
                peer.close()
            return next(filter(None, problems))
        listener.close()
        stack.pop_all()
        return SharedMemory(segment, peers, rank, timeout_s)


def _unsupported() -> str:
    """Say what this process lacks, if anything."""
    if sys.platform != "linux":
        return f"it runs on {sys.platform}, not on Linux"
    if platform.machine() != "x86_64":
        return f"its processor ({platform.machine()}) may reorder stores; x86-64 does not"
    missing = [name for module, name in ((os, "memfd_create"), (os, "posix_fallocate"), (socket, "send_fds")) if not hasattr(module, name)]
    return f"its Python has no {missing[0]}" if missing else ""


def _host() -> str:
    """Name what ranks must have in common to reach each other's memory: the running system, its network namespace and the user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/net").readlink()
    except OSError:
        # Then the socket finds out.
        return ""
    return f"{boot} {namespace} {os.getuid()}"


def _first_problem(offers: Sequence[Sequence[str]], rank: int, size: int) -> str:
    if len(offers) < size:
        return offers[0][0] if offers else ""
    for peer, (problem, host, _) in enumerate(offers):
        if problem:
            return f"rank {peer} cannot take part: {problem}"
        if host != offers[0][1]:
            return f"ranks 0 and {peer} are on different hosts, or belong to different users or networks of one"
    return ""


def _exchange_texts(store: Store, key: str, rank: int, size: int, timeout_s: float, text: str, *, answer: bool = True) -> list[str]:
    try:
        store.set(f"{key}/{rank}", text)
        if not answer:
            return []
        keys = [f"{key}/{peer}" for peer in range(size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(name).decode() for name in keys]
    except RuntimeError as error:
        raise PeerLost(f"a rank did not come to the making of the group within {timeout_s:g} s: {error}", rank=rank) from error


def _trade(segment: _Segment, listener: socket.socket, names: Sequence[str], rank: int) -> dict[int, _Peer]:
    """Send every other rank the descriptor of the own segment, and map theirs.

    All listen already, so that nobody waits for another to connect; then what each sends fits the sockets' buffers.
    """
    others = [peer for peer in range(len(names)) if peer != rank]
    with contextlib.ExitStack() as stack:
        asked: dict[int, socket.socket] = {}
        for peer in others:
            asked[peer] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            asked[peer].settimeout(_MEETING_S)
            asked[peer].connect("\0" + names[peer])
            asked[peer].sendall(struct.pack("<q", rank))
        answered: dict[int, socket.socket] = {}
        listener.settimeout(_MEETING_S)
        while len(answered) < len(others):
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(_MEETING_S)
            # Names of this kind have no permissions: who is no other rank of this user gets nothing.
            if _credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            (peer,) = struct.unpack("<q", connection.recv(8, socket.MSG_WAITALL))
            if peer not in others or peer in answered:
                raise OSError("a stranger connected")
            socket.send_fds(connection, [b"\0"], [segment.fd])
            answered[peer] = connection
        peers: dict[int, _Peer] = {}
        for peer, connection in asked.items():
            _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
            try:
                pid, user = _credentials(connection)
                if user != os.getuid():
                    raise OSError("another user answered")
                peers[peer] = _Peer(fd, peer, len(names), (connection, answered[peer]), pid)
            finally:
                os.close(fd)
        stack.pop_all()
        return peers


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, as the system knows them."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
