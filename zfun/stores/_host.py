"""Host memory as a store."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.options import BOOL, takes
from zfun.stores._base import Counts, Stored


class _HostTensor(Stored):
    """A tensor in host memory."""

    def __init__(self, store: HostStore, tensor: Tensor, name: str) -> None:
        super().__init__(store, tensor, name)
        self.tensor, self.device = tensor, tensor.device

    def get(self, device: torch.device) -> Work:
        """Start the copy to a device; for the CPU, nothing is copied."""
        self.store.crossed("get", self.name, self.tensor.nbytes)
        return Work.done(self.tensor.to(device, non_blocking=True))


@takes(pin=BOOL, log=BOOL)
class HostStore(Counts):
    """Keeps tensors in host memory, page-locked if there is a device to copy to."""

    def __init__(self, *, pin: bool, log: bool = False) -> None:
        super().__init__(log=log)
        self.pin = pin

    @property
    def device(self) -> torch.device:
        """The CPU, which computes on the stored tensors."""
        return torch.device("cpu")

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Keep a tensor; a tensor in host memory is kept without a copy."""
        self.crossed("put", name, tensor.nbytes)
        return _HostTensor(self, self._to_host(tensor.detach()), name)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and (tensor.is_pinned() or not self.pin):
            return tensor
        out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        return out.copy_(tensor)

    def __repr__(self) -> str:
        return "host()"


@takes(pin=BOOL | None, log=BOOL)
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
