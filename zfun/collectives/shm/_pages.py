"""Ranges of addresses that map pages of files, by direct system calls.

Python's ``mmap`` can choose neither the address nor the alignment of a mapping.

[Note: huge pages]

The system maps a segment in pages of 2 MiB where it can (Linux 6.1 or later, when asked with
``MADV_COLLAPSE``). Mapping or unmapping a page of 4 KiB costs 0.1 us, and for the gradients alone
this adds up to a hundredth of a step. A page of 2 MiB costs no more than a small one. A window
shows huge pages only where its address and the offset in the file agree modulo 2 MiB, so the
allocator chooses offsets that agree (``Segment.allocate``). Without huge pages everything works,
slower.

[Note: pages in a fork]

A shared mapping would be one memory for a process and its forks, and a fork that writes to a shard
would change the parameters of its parent. So the system maps no page of a file in a fork
(``MADV_DONTFORK``): an access there is a segmentation fault. The fork may map something else at
these addresses, so finalizers in a fork leave the addresses alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

PAGE = 4096
HUGE_PAGE = 1 << 21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [
    *[ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
    *[ctypes.c_int, ctypes.c_void_p],
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Constants that Python does not name.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_COLLAPSE = 25  # Linux 6.1

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Pages:
    """A range of addresses that begins on a huge page. The range is unmapped with its last view.

    Args:
        nbytes: the length, a multiple of ``PAGE``.

    Raises:
        OSError: the system has no more addresses.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # The aligned part of a longer range is kept, the ends are given back.
        base = _map(None, nbytes + HUGE_PAGE, _PROT_NONE, _ANONYMOUS, -1, 0)
        self.begin = -(-base // HUGE_PAGE) * HUGE_PAGE
        end = self.begin + nbytes
        for low, high in ((base, self.begin), (end, base + nbytes + HUGE_PAGE)):
            if low < high:
                _libc.munmap(low, high - low)
        finalizer: Any = weakref.finalize(self, _unmap, os.getpid(), self.begin, nbytes)
        # At exit, threads may still read the range.
        finalizer.atexit = False

    def show(
        self, at: int, nbytes: int, fd: int, offset: int, *, writable: bool, shared: bool
    ) -> None:
        """Map pages of a file at a place of the range. A write to unshared pages stays private.

        Raises:
            OSError: the system refuses, because a process may have only so many mappings.
        """
        protection = _READ_WRITE if writable else mmap.PROT_READ
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        _map(self.begin + at, nbytes, protection, kind | _MAP_FIXED, fd, offset)
        # See [Note: pages in a fork].
        self.advise(at, nbytes, mmap.MADV_DONTFORK)

    def view(self) -> memoryview:
        """Return the range as a buffer. Every view of the buffer keeps the range mapped."""
        held: Any = (_Byte * self.nbytes).from_address(self.begin)
        held.pages = self
        array: Any = np.frombuffer(held, np.uint8)
        return memoryview(array)

    def detach(self) -> None:
        """Replace all pages by private copies, at the same addresses and in one step."""
        copy = _map(None, self.nbytes, _READ_WRITE, _ANONYMOUS, -1, 0)
        ctypes.memmove(copy, self.begin, self.nbytes)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        _checked(_libc.mremap(copy, self.nbytes, self.nbytes, flags, self.begin))

    def advise(self, at: int, nbytes: int, advice: int) -> bool:
        """Pass ``madvise`` on; return whether the system took the advice."""
        return nbytes > 0 and _libc.madvise(self.begin + at, nbytes, advice) == 0

    def unmap(self, at: int, nbytes: int) -> None:
        """Drop the whole pages of a piece from this process. The next access maps them again."""
        first, end = -(-at // PAGE) * PAGE, (at + nbytes) // PAGE * PAGE
        self.advise(first, end - first, mmap.MADV_DONTNEED)

    def collapse(self, at: int, nbytes: int) -> bool:
        """Turn small pages into huge ones; return whether the system did so."""
        return self.advise(at, nbytes, _MADV_COLLAPSE)


class _Byte(ctypes.c_uint8):
    """A subclass, because arrays of the plain type take no attributes."""


def _unmap(process: int, begin: int, nbytes: int) -> None:
    if process == os.getpid():
        _libc.munmap(begin, nbytes)


def _map(
    address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    return _checked(_libc.mmap(address, nbytes, protection, flags, fd, offset))


def _checked(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address
