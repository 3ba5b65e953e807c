"""Reused memory for direct transfers, which need addresses and lengths of whole pages."""

from __future__ import annotations

import collections
import mmap
import threading
import weakref

import torch
from torch import Tensor

from zfun.files import ALIGNMENT, aligned, pages


class Buffers:
    """Hands out memory to read into, which returns here when the last view dies.

    Args:
        max_free: the number of free buffers that are kept.
        pin: page-lock the memory. torch reuses page-locked memory by itself, after the copies to a
            device that are under way.

    Example:
        >>> buffers = Buffers(max_free=1, pin=False)
        >>> buffer = buffers.take(5000)
        >>> buffer.numel(), buffer.data_ptr() % 4096
        (8192, 0)
    """

    def __init__(self, *, max_free: int, pin: bool) -> None:
        self.pin = pin
        self._max_free = max_free
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        # Finalizers append here, at any moment and in any thread; the oldest go.
        self._dropped: collections.deque[mmap.mmap] = collections.deque(maxlen=max_free)

    def take(self, num_bytes: int, *, keep: bool = True) -> Tensor:
        """Return bytes of whole pages; ``keep`` says whether they are kept for reuse later."""
        length = aligned(num_bytes)
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        if self.pin:
            block = torch.empty(length + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            first = -block.data_ptr() % ALIGNMENT
            return block[first : first + length]
        block = self._take_block(length)
        # The storage holds this object, so the finalizer runs when the storage is freed.
        window = memoryview(block)[:length]
        if keep:
            weakref.finalize(window, self._dropped.append, block)
        return torch.frombuffer(window, dtype=torch.uint8)

    def _take_block(self, length: int) -> mmap.mmap:
        with self._lock:
            while self._dropped:
                self._free.append(self._dropped.popleft())
            del self._free[: max(0, len(self._free) - self._max_free)]
            # Not a much larger buffer, most of which would stay unused.
            fitting = [block for block in self._free if length <= len(block) <= 2 * length]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
                return block
        return pages(length)
