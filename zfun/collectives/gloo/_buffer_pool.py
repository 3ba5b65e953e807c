"""Room for what is sent and received, used again: fresh pages cost as much as a sum.

What is handed out comes back by itself, when the last view of it is gone. Hardly more is kept than
has been in use at one time.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

__all__ = ["BufferPool"]

# The allocator of the system uses smaller pieces again by itself.
_SMALL_BYTES = 1 << 18


class BufferPool:
    """Hands out uninitialised tensors, to any thread.

    A tensor lives as long as any view of it, whatever becomes of the pool.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._in_use = 0
        self._most_in_use = 0
        self._lock = threading.Lock()
        # Filled by finalizers, which may run at any moment and in any thread.
        self._dropped: collections.deque[mmap.mmap] = collections.deque()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor."""
        nbytes = numel * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return torch.empty(numel, dtype=dtype)
        with self._lock:
            block = self._take_block(nbytes)
        # The storage holds on to this object, and so its end is the end of the storage.
        window = memoryview(block)[:nbytes]
        weakref.finalize(window, self._dropped.append, block)
        return torch.frombuffer(window, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that are handed out or kept."""
        return self._in_use + sum(map(len, self._free))

    def _take_block(self, nbytes: int) -> mmap.mmap:
        self._reclaim()
        # The smallest that is large enough, unless most of it would lie idle.
        fitting = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
        else:
            block = _pages(nbytes)
        self._in_use += len(block)
        self._most_in_use = max(self._most_in_use, self._in_use)
        # Sizes differ a little from bucket to bucket: with no room to spare, each would drive out
        # what the next one needs.
        while self._free and self.nbytes > self._most_in_use + self._most_in_use // 8:
            self._free.pop(0)
        return block

    def _reclaim(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            self._in_use -= len(block)
            self._free.append(block)


def _pages(nbytes: int) -> mmap.mmap:
    # What is this process's own the system backs with huge pages where it does not so with shared
    # memory, which is the default here.
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not needed: fewer faults and misses where the system has huge pages.
    with contextlib.suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
