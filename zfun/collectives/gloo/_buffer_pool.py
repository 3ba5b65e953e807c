"""Reused buffers for communication, because the first access to fresh pages costs as much as a sum.

A buffer returns to the pool when the last view dies. The pool keeps little more than the largest
number of bytes that were in use at one time.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

# The system's allocator reuses smaller blocks.
_SMALL_BYTES = 1 << 18


class BufferPool:
    """Hands out uninitialised tensors, to any thread.

    A tensor lives as long as any view of the tensor, also after the pool is dropped.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._in_use = 0
        self._most_in_use = 0
        self._lock = threading.Lock()
        # Finalizers append here, at any moment and in any thread.
        self._dropped: collections.deque[mmap.mmap] = collections.deque()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor."""
        nbytes = numel * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return torch.empty(numel, dtype=dtype)
        with self._lock:
            block = self._take_block(nbytes)
        # The storage holds this object, so the finalizer runs when the storage is freed.
        window = memoryview(block)[:nbytes]
        weakref.finalize(window, self._dropped.append, block)
        return torch.frombuffer(window, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that are in use or kept for reuse."""
        return self._in_use + sum(map(len, self._free))

    def _take_block(self, nbytes: int) -> mmap.mmap:
        self._reclaim()
        # The smallest buffer that is large enough, unless most of the buffer would stay unused.
        fitting = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
        else:
            block = _pages(nbytes)
        self._in_use += len(block)
        self._most_in_use = max(self._most_in_use, self._in_use)
        # Bucket sizes differ a little. Without slack, each buffer would evict the one that the next
        # bucket needs.
        while self._free and self.nbytes > self._most_in_use + self._most_in_use // 8:
            self._free.pop(0)
        return block

    def _reclaim(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            self._in_use -= len(block)
            self._free.append(block)


def _pages(nbytes: int) -> mmap.mmap:
    # Private memory, because the system gives huge pages to private mappings but often not to
    # shared ones, which are the default of mmap.
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Optional: huge pages mean fewer page faults and TLB misses.
    with contextlib.suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
