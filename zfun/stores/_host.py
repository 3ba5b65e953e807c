"""Host memory as a store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.options import takes
from zfun.stores._base import Counts, Stored
from zfun.stores._streams import QueuedCopies, QueuedCopy


class _HostTensor(Stored):
    """A tensor in host memory, and the copy into it, if that is under way."""

    def __init__(
        self, store: HostStore, tensor: Tensor, name: str, copy: QueuedCopy | None = None
    ) -> None:
        super().__init__(store, tensor, name)
        self.tensor, self.device = tensor, tensor.device
        self._copies = store.copies
        # The end of the last copy from or to the tensor, for which the host has not waited.
        self._event: Any = None if copy is None else copy.event
        self._put = copy

    def flush(self) -> None:
        """Let the device wait for the copy, so that its memory may be used again."""
        copy, self._put = self._put, None
        if copy is not None:
            copy.wait()
            self._copies.release()

    def get(self, device: torch.device) -> Work:
        """Start the copy to a device; for the CPU, nothing is copied."""
        self.store.crossed("get", self.name, self.tensor.nbytes)
        queue = self._copies.queue(device, "get")
        if queue is not None:
            out = torch.empty_like(self.tensor, device=device)
            copy = self._copies.get(queue, out, self.tensor, self._event)
            self._event = copy.event
            return Work(lambda: (copy.wait(), out)[1])
        if self._event is not None:
            return Work(self._on_host)
        return Work.done(self.tensor.to(device, non_blocking=True))

    def _on_host(self) -> Tensor:
        event = self._event
        if event is not None:
            event.synchronize()
            self._copies.release()
            # Not earlier, because another thread may read the tensor too.
            if self._event is event:
                self._event = None
        return self.tensor


@takes()
class HostStore(Counts):
    """Keeps tensors in host memory, page-locked if there is a device to copy to."""

    def __init__(self, *, pin: bool, log: bool = False) -> None:
        super().__init__(log=log)
        self.pin = pin
        self.copies = QueuedCopies()

    @property
    def device(self) -> torch.device:
        """The CPU, which computes on the stored tensors."""
        return torch.device("cpu")

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Keep a tensor; a tensor in host memory is kept without a copy."""
        self.crossed("put", name, tensor.nbytes)
        tensor = tensor.detach()
        queue = self.copies.queue(tensor.device, "put")
        if queue is None:
            return _HostTensor(self, self._to_host(tensor), name)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        return _HostTensor(self, out, name, self.copies.put(queue, out, tensor))

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and (tensor.is_pinned() or not self.pin):
            return tensor
        out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        return out.copy_(tensor)

    def __repr__(self) -> str:
        return "host()"


@takes()
def host(*, pin: bool | None = None, log: bool = False) -> HostStore:
    """Make a store in host memory.

    Args:
        pin: page-lock the memory, for faster copies; by default if CUDA is available.
        log: keep a list of all transfers, ``store.log``, which grows with every step. The sums of
            ``bytes_moved`` are always kept.

    Returns:
        The store. On a machine without a device nothing is copied, because host memory is the only
        memory.

    Example:
        >>> store = host()
        >>> handle = store.put(torch.ones(2), "state")
        >>> handle.get(torch.device("cpu")).wait(), store.bytes_moved("put")
        (tensor([1., 1.]), 8)
    """
    return HostStore(pin=torch.cuda.is_available() if pin is None else pin, log=log)
