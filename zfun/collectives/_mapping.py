"""Ranges of addresses over pages of files, as the system's own calls make them: Python's ``mmap`` can choose neither address nor alignment.

[Note: huge pages]

To map or unmap a page of 4 KiB takes a tenth of a microsecond, which for the gradients of a step is a hundredth of its time and more. Of
pages of 2 MiB (``HUGE_PAGE``) it takes nothing, and the processor finds them sooner. The system makes one of 512 small ones where it is
asked to (Linux 6.1 on; for shared memory its settings say whether it also does so by itself, as a rule not), and shows it as one where
address and place in the file are multiples of 2 MiB together. So what begins a huge page of a segment is shown at the beginning of one,
wherever that can be. None of it is needed: what cannot be had is small pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

__all__ = ["HUGE_PAGE", "PAGE", "Mapping"]

PAGE = 4096
HUGE_PAGE = 1 << 21

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000

# Python has no names for them.
_POPULATE_READ = 22  # Linux 5.14
_COLLAPSE = 25  # Linux 6.1


class Mapping:
    """A range of addresses. It lives as long as it or a window of it does.

    Args:
        nbytes: its length, whole pages.
        phase: where it begins between two huge pages, in bytes, whole pages.

    Raises:
        OSError: there are no addresses.
    """

    def __init__(self, nbytes: int, phase: int = 0) -> None:
        self.nbytes = nbytes
        # Of a range that is longer there is a part that begins where it should.
        base = _map(None, nbytes + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        before = (phase - base) % HUGE_PAGE
        self.begin = base + before
        for first, end in ((base, self.begin), (self.begin + nbytes, base + nbytes + HUGE_PAGE)):
            if first < end:
                _libc.munmap(first, end - first)
        end: Any = weakref.finalize(self, _libc.munmap, self.begin, nbytes)
        # At exit somebody may still look.
        end.atexit = False

    def show(self, at: int, nbytes: int, fd: int, offset: int, *, writable: bool, shared: bool) -> None:
        """Put pages of a file at a place; without a file (-1), fresh ones. What is written to pages that are not shared stays here.

        Raises:
            OSError: the system does not map them.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        _map(self.begin + at, nbytes, protection, kind | _MAP_FIXED | (mmap.MAP_ANONYMOUS if fd < 0 else 0), fd, offset)

    def window(self) -> memoryview:
        """Return the whole as a buffer; what is made of it keeps the mapping."""
        held: Any = (_Bytes * self.nbytes).from_address(self.begin)
        held.mapping = self
        whole: Any = np.frombuffer(held, np.uint8)
        return memoryview(whole)

    def advise(self, at: int, nbytes: int, advice: int) -> bool:
        """Tell the system something of whole pages; whether it heeds it."""
        return nbytes > 0 and _libc.madvise(self.begin + at, nbytes, advice) == 0

    def unmap(self, at: int, nbytes: int) -> None:
        """Drop what is mapped of the whole pages in a piece, which stay where they are: the next access maps them again."""
        first, end = -(-at // PAGE) * PAGE, (at + nbytes) // PAGE * PAGE
        self.advise(first, end - first, mmap.MADV_DONTNEED)

    def populate(self, at: int, nbytes: int) -> None:
        """Map all pages of a piece at once, if the system can."""
        first, end = at // PAGE * PAGE, -(-(at + nbytes) // PAGE) * PAGE
        self.advise(first, end - first, _POPULATE_READ)

    def collapse(self, at: int, nbytes: int) -> bool:
        """Make huge pages of small ones; whether the system has done so."""
        return self.advise(at, nbytes, _COLLAPSE)


class _Bytes(ctypes.c_uint8):
    """Not a plain byte, so that arrays of it have attributes."""


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found: int = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
