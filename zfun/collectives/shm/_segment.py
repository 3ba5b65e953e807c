"""The segment of a rank: memory that the rank writes and its peers read.

A segment is a sparse anonymous file, as large as the memory of the machine, mapped once. Pages
are reserved before use (``posix_fallocate``), so that a lack of memory is an ``OSError`` at a
known place and never a SIGBUS. Seals keep the file from being truncated. The file has no name:
the system frees the memory with the last process, however that process ends.
"""

from __future__ import annotations

import bisect
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

from zfun.collectives.shm._pages import HUGE_PAGE, PAGE, Pages

_MAGIC = 0x7A66756E_00000002
# The first pages of a segment: words and records of the mailbox.
CONTROL_BYTES = 32 * PAGE

_ADDRESS_SPACE_BYTES = 1 << 43
# Reserved at a time, because a signal makes the system start the call again.
_RESERVE_BYTES = 1 << 26
_LINE = 128
# Aligning a block of this size on huge pages wastes at most a quarter of the block.
_ALIGNED_BYTES = 4 * HUGE_PAGE


class Segment:
    """The memory that this rank writes, and its allocator: first fit over a list of free pieces.

    Attributes:
        fd: the descriptor that peers map.
        reserved: bytes that the system has set aside.

    Raises:
        OSError: the system has no memory, or no such files.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.fd = _anonymous_file()
        try:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            # The segments of all ranks, in several groups, must fit into the address space.
            limit = _ADDRESS_SPACE_BYTES // size
            self.capacity = min(_rounded(memory, HUGE_PAGE), limit // HUGE_PAGE * HUGE_PAGE)
            os.ftruncate(self.fd, self.capacity)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._rank = rank
            self._pages = Pages(self.capacity)
            self._pages.show(0, self.capacity, self.fd, 0, writable=True, shared=True)
            _advise(self._pages)
            self.reserved = 0
            self._is_huge = True
            self._end = 0
            # Free pieces below the end: begins, ascending, and ends.
            self._begins: list[int] = []
            self._ends: list[int] = []
            self.allocate(CONTROL_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = self._pages.view()
        self.words = self.memory.cast("q")
        self.words[:3] = memoryview(struct.pack("<3q", _MAGIC, rank, size)).cast("q")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def offset_of(self, address: int) -> int | None:
        """Return the offset of an address, or None if the address is not in the segment."""
        offset = address - self._pages.begin
        return offset if 0 <= offset < self.capacity else None

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return offset and length of a free piece.

        A piece of a page or more is whole pages. In a window the piece of rank r begins at r times
        the length of a piece. So a large piece of rank r gets an offset that agrees with this place
        modulo a huge page.

        Raises:
            OSError: there is no memory.
        """
        nbytes = _rounded(nbytes, PAGE if nbytes >= PAGE else _LINE)
        unit, phase = PAGE if nbytes >= PAGE else _LINE, 0
        if nbytes >= _ALIGNED_BYTES:
            unit, phase = HUGE_PAGE, self._rank * nbytes % HUGE_PAGE
        place = 0
        for begin, end in zip(self._begins, self._ends, strict=True):
            start = begin + (phase - begin) % unit
            # A free piece at the end of the segment is made longer.
            if start + nbytes <= end or end == self._end:
                break
            place += 1
        else:
            begin = end = self._end
            start = begin + (phase - begin) % unit
        if start + nbytes > self._end:
            # The free piece stays in the list if there is no memory.
            self._reserve(start + nbytes)
            self._end = end = start + nbytes
        if place < len(self._begins):
            del self._begins[place], self._ends[place]
        if begin < start:
            self.release(begin, start - begin)
        if start + nbytes < end:
            self.release(start + nbytes, end - start - nbytes)
        return start, nbytes

    def release(self, offset: int, nbytes: int) -> None:
        """Take a piece back and join it with its free neighbours."""
        end = offset + nbytes
        place = bisect.bisect_left(self._begins, offset)
        if place < len(self._begins) and self._begins[place] == end:
            del self._begins[place]
            end = self._ends.pop(place)
        if place and self._ends[place - 1] == offset:
            self._ends[place - 1] = end
        else:
            self._begins.insert(place, offset)
            self._ends.insert(place, end)

    def unmap(self, offset: int, nbytes: int) -> None:
        """Drop pages from this process, which keep their contents."""
        self._pages.unmap(offset, nbytes)

    @property
    def in_use(self) -> int:
        """Bytes that are allocated."""
        return self._end - sum(self._ends) + sum(self._begins)

    def close(self) -> None:
        """Release the memory; tensors in the segment keep the pages mapped."""
        os.close(self.fd)
        self.words.release()
        del self.memory, self._pages

    def _reserve(self, end: int) -> None:
        if end > self.capacity:
            raise OSError(errno.ENOMEM, "the segment is full")
        wanted = _rounded(end, HUGE_PAGE)
        while self.reserved < wanted:
            step = min(wanted - self.reserved, _RESERVE_BYTES)
            os.posix_fallocate(self.fd, self.reserved, step)
            # Peers map the first pages for a few words, which are not worth a huge page.
            if self.reserved and self._is_huge:
                self._is_huge = self._pages.collapse(self.reserved, step)
            self.reserved += step


class Peer:
    """The segment of another rank, mapped for reading, and whether its process lives.

    The peer's process holds the sockets ``connections`` open.
    """

    def __init__(
        self, fd: int, rank: int, size: int, connections: Sequence[socket.socket], pid: int
    ) -> None:
        self._pages = Pages(os.fstat(fd).st_size)
        self._pages.show(0, self._pages.nbytes, fd, 0, writable=False, shared=True)
        _advise(self._pages)
        # Torch warns about buffers that are marked read-only, so tensors use the unmarked buffer.
        # No such tensor leaves this package.
        self._bytes = self._pages.view()
        self.memory = self._bytes.toreadonly()
        self.words = self.memory.cast("q")
        if self.words[:3].tolist() != [_MAGIC, rank, size]:
            raise OSError("another program answered")
        self.fd = os.dup(fd)
        self._connections = list(connections)
        self._poll = select.poll()
        for connection in connections:
            self._poll.register(connection, select.POLLIN)
        # A process that the peer has forked holds the sockets open too, but has another pid.
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            if pid > 0:
                self._pidfd = os.pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel, offset=offset)

    def unmap(self, offset: int, nbytes: int) -> None:
        """Drop pages from this process, because mapped pages count as memory of this rank."""
        self._pages.unmap(offset, nbytes)

    def is_gone(self) -> bool:
        """Whether the peer's process has ended or closed the group: then a socket is readable."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for connection in self._connections:
            # A fork may hold the sockets open for longer.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        os.close(self.fd)
        self.words.release()
        del self.memory, self._bytes, self._pages


def _anonymous_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    # MFD_NOEXEC_SEAL: some systems require the flag, and old systems do not know the flag.
    try:
        return os.memfd_create("zfun", flags | 0x8)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("zfun", flags)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _advise(pages: Pages) -> None:
    # Huge pages where the system has them, and core dumps without shared memory.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        pages.advise(0, pages.nbytes, advice)
