"""The protocol of stores, which keep parts of the state between uses."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.errors import OffloadError
from zfun.flat import Flat

__all__ = ["Crossing", "Offload", "Store", "Stored", "fetch", "resident"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """One transfer between the device and a store.

    Attributes:
        kind: ``"put"`` (into the store) or ``"get"`` (out of it).
        name: the part of the state: ``"params"``, ``"grads"`` or ``"state"``.
        num_bytes: bytes transferred.
    """

    kind: str
    name: str
    num_bytes: int


class Stored(abc.ABC):
    """A handle that stands for a tensor in a store.

    ``get`` starts the transfer and returns a work handle, whose ``wait()`` returns the tensor. Call
    ``get`` early to prefetch.

    Attributes:
        store: the store that keeps the tensor.
        name: the part of the state, for messages.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
    """

    store: Store
    name: str
    dtype: torch.dtype
    shape: torch.Size

    @abc.abstractmethod
    def get(self, device: torch.device) -> Work:
        """Start the transfer to a device."""

    def __repr__(self) -> str:
        return f"Stored({self.name}, {self.shape.numel()} x {self.dtype}, {self.store!r})"


class Store(Protocol):
    """A place that keeps tensors between uses.

    ``put`` takes ownership: the caller must not write to the tensor afterwards. ``device`` is the
    device that computes on the stored tensors.
    """

    @property
    def device(self) -> torch.device:
        """The device that computes on the stored tensors."""
        ...

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Keep a tensor."""
        ...

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        """Record a transfer that a transform made on behalf of the store."""
        ...


def fetch(value: Any, device: torch.device) -> Tensor:
    """Return a tensor unchanged, or fetch the tensor of a handle to ``device``."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, Stored):
        raise OffloadError(
            f"a buffer must be a tensor or a handle of a store; got {type(value).__name__}"
        )
    return value.get(device).wait()


def resident(flat: Flat, device: torch.device | None = None) -> Flat:
    """Fetch the buffers of a flat that are in a store.

    Args:
        flat: any flat.
        device: the target device; by default the device of the leaves.

    Returns:
        A flat of tensors; the same flat if no buffer is in a store.
    """
    if all(isinstance(buffer, Tensor) for buffer in flat.buffers):
        return flat
    return flat.with_buffers(fetch(buffer, device or flat.layout.device) for buffer in flat.buffers)


@dataclass(frozen=True, slots=True)
class Offload:
    """Stores for the parts of the training state; ``None`` keeps a part on the device.

    Attributes:
        params: for the parameters; stage 3 only.
        grads: for the gradients.
        optimizer: for the optimizer's state.

    Example:
        >>> from zfun.stores import host
        >>> Offload(optimizer=host()).params is None
        True
    """

    params: Store | None = None
    grads: Store | None = None
    optimizer: Store | None = None
