"""Memory that the processes of one host share: what a rank writes, and what it reads of the others.

A segment is one sparse file as large as the machine's memory, mapped once. Pages are reserved before they are used (``posix_fallocate``),
so that a lack of memory is an error at a known place and never a SIGBUS, and it cannot be truncated (seals). The file never has a name, so
that nothing can be left over, whatever ends the ranks, and nobody but they can open it. Beyond its first pages, which all others map for a
few words, it is made of huge pages if the system makes some ([Note: huge pages]).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.collectives._calls import Lane
from zfun.collectives._mapping import HUGE_PAGE, PAGE, Mapping
from zfun.collectives._spans import Spans

__all__ = ["FINISHED", "HEAD_WORDS", "LANE_WORDS", "RINGS", "SLOT_BYTES", "Peer", "Segment"]

_MAGIC = 0x7A66756E_00000001
# Offsets in words of 8 bytes; what different ranks watch stands in different cache lines.
HEAD_WORDS = 64
LANE_WORDS = 128
FINISHED = 8
RINGS = 16
SLOT_BYTES = 4096
_CONTROL_BYTES = 8 * (HEAD_WORDS + LANE_WORDS * len(Lane))

_COMMIT_BYTES = HUGE_PAGE
_ADDRESS_SPACE_BYTES = 1 << 43
_RESERVE_BYTES = 1 << 26  # at a time, since a signal makes the system begin anew
_LINE = 128

# A piece of so many bytes begins with a huge page, for which an eighth of it is left free at most.
_LARGE_BYTES = 8 * HUGE_PAGE


class Segment:
    """The memory that this rank writes and the others read, and which parts of it are in use."""

    def __init__(self, rank: int, size: int) -> None:
        self.fd = _anonymous_file()
        try:
            physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            # The segments of all ranks, in several groups, must fit the address space.
            self.capacity = min(_rounded(physical, _COMMIT_BYTES), _ADDRESS_SPACE_BYTES // size // PAGE * PAGE)
            os.ftruncate(self.fd, self.capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._reserved = 0
            # Whether all that has been asked for as huge pages has become some.
            self.is_huge = True
            self._free = Spans()
            self._unmapped = Spans()
            self._end = 0
            self.most_in_use = 0
            self._mapping = Mapping(self.capacity)
            self._mapping.show(0, self.capacity, self.fd, 0, writable=True, shared=True)
            _advise(self._mapping)
            self.allocate(_CONTROL_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = self._mapping.window()
        self.words = self.memory.cast("q")
        self.words[:3] = memoryview(struct.pack("<3q", _MAGIC, rank, size)).cast("q")

    def view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def locate(self, x: Tensor) -> int | None:
        """Return where in the segment a tensor begins, or None if it lies elsewhere."""
        offset = x.data_ptr() - self._mapping.begin
        return offset if 0 <= offset < self.capacity else None

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return offset and length of a free piece: the lowest, which the others are most likely to have touched already.

        Raises:
            OSError: there is no memory.
        """
        unit = HUGE_PAGE if nbytes >= _LARGE_BYTES else PAGE if nbytes >= PAGE else _LINE
        nbytes = _rounded(nbytes, min(unit, PAGE))
        start = self._end
        for begin, end in self._free:
            # What is free at the end is made longer.
            if _rounded(begin, unit) + nbytes <= end or end == self._end:
                start = begin
                break
        start = _rounded(start, unit)
        if start + nbytes > self._end:
            self._reserve(start + nbytes)
            if start > self._end:
                self._free.add(self._end, start)
            self._end = start + nbytes
        self._free.remove(start, start + nbytes)
        self._map(start, start + nbytes)
        self.most_in_use = max(self.most_in_use, self.in_use)
        return start, nbytes

    def release(self, offset: int, nbytes: int) -> None:
        """Take a piece back."""
        self._free.add(offset, offset + nbytes)

    def unmap(self, offset: int, nbytes: int) -> None:
        """Drop this rank's mapping of some pages, which stay where they are: the next access maps them again."""
        if self._unmapped.missing(offset, offset + nbytes):
            self._mapping.unmap(offset, nbytes)
            self._unmapped.add(offset, offset + nbytes)

    def unmap_free(self, kept: int) -> None:
        """Drop this rank's mapping of what is free, but for the first so many bytes, which are used next."""
        for begin, end in self._free:
            if kept >= end - begin:
                kept -= end - begin
                continue
            for first, last in self._unmapped.missing(begin + kept, end):
                if last - first >= PAGE:
                    self.unmap(first, last - first)
            kept = 0

    def _map(self, begin: int, end: int) -> None:
        """Map what was unmapped of some pages, all at once: writing to them would map them one by one."""
        for first, last in self._unmapped.within(begin, end):
            self._mapping.populate(first, last - first)
        self._unmapped.remove(begin, end)

    def close(self) -> None:
        """Let go of the memory, unless there are buffers in it: then it goes with the last of them."""
        os.close(self.fd)
        self.words.release()
        del self.memory, self._mapping

    @property
    def in_use(self) -> int:
        """Bytes that are allocated."""
        return self._end - sum(end - begin for begin, end in self._free)

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
            # Everybody maps the first pages, for a few words.
            if self._reserved and self.is_huge:
                self.is_huge = self._mapping.collapse(self._reserved, step)
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


def _advise(mapping: Mapping) -> None:
    # Neither is needed: huge pages where the system has them for shared memory, and a core dump without what is shared.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        mapping.advise(0, mapping.nbytes, advice)


class Peer:
    """The segment of another rank, mapped for reading, and what tells whether its process lives."""

    def __init__(self, fd: int, rank: int, size: int, connections: Sequence[socket.socket], pid: int) -> None:
        self._mapping = Mapping(os.fstat(fd).st_size)
        self._mapping.show(0, self._mapping.nbytes, fd, 0, writable=False, shared=True)
        _advise(self._mapping)
        self.fd = os.dup(fd)
        # Torch warns of a buffer that it may not write, which this one does not say; nothing here hands it out.
        self._bytes = self._mapping.window()
        self.memory = self._bytes.toreadonly()
        self.words = self.memory.cast("q")
        if self.words[:3].tolist() != [_MAGIC, rank, size]:
            raise OSError("another program answered")
        self.address = self._mapping.begin
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

    def unmap(self, offset: int, nbytes: int) -> None:
        """Drop this rank's mapping of some pages, which are counted as its memory as long as it has them mapped."""
        self._mapping.unmap(offset, nbytes)

    def slot(self, lane: Lane, index: int) -> int:
        """Return where the record of a published call begins, in bytes."""
        rings = self._rings[lane]
        base = HEAD_WORDS + LANE_WORDS * lane + RINGS
        while len(rings) < self.words[base]:
            at = base + 1 + 3 * len(rings)
            first, offset, slots = self.words[at : at + 3].tolist()
            rings.append((first, offset, slots))
        for first, offset, slots in reversed(rings):
            if first <= index:
                return offset + (index - first) % slots * SLOT_BYTES
        raise IndexError(f"no call {index} has been published")

    def is_gone(self) -> bool:
        """Whether its process has ended or closed the group. It never sends anything."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.words.release()
        del self.memory, self._bytes, self._mapping
