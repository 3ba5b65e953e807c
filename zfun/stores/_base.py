"""What a store is: a place that keeps parts of the state between uses."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun.collectives import Pending
from zfun.errors import OffloadError
from zfun.flat import Flat

__all__ = ["Crossing", "Store", "Stored", "fetch", "resident"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """One movement between the device and a store.

    Attributes:
        kind: ``"put"`` (into the store) or ``"get"`` (out of it).
        name: what moved: ``"params"``, ``"grads"`` or ``"state"``.
        num_bytes: how much.
    """

    kind: str
    name: str
    num_bytes: int


class Stored(abc.ABC):
    """A tensor in a store: the handle that stands for it in a tree.

    ``get`` starts to bring it back and returns a handle; waiting on that gives the tensor. To prefetch is to call ``get`` early.

    Attributes:
        store: where it is.
        name: what it is, for messages.
        dtype: its dtype.
        shape: its shape.
    """

    store: Store
    name: str
    dtype: torch.dtype
    shape: torch.Size

    @abc.abstractmethod
    def get(self, device: torch.device) -> Pending:
        """Start to bring it to a device."""

    def __repr__(self) -> str:
        return f"Stored({self.name}, {self.shape.numel()} x {self.dtype}, {self.store!r})"


class Store(Protocol):
    """A place that keeps tensors between uses.

    ``put`` takes a tensor over: the caller must not write to it afterwards. ``device`` is where work on what it keeps is done.
    """

    @property
    def device(self) -> torch.device:
        """Where work on what it keeps is done."""
        ...

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Keep a tensor."""
        ...

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        """Note a movement that a transform made on the store's behalf."""
        ...


def fetch(value: Any, device: torch.device) -> Tensor:
    """Return a tensor as it is, and what a handle stands for on ``device``."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, Stored):
        raise OffloadError(f"a buffer must be a tensor or a handle of a store; got {type(value).__name__}")
    return value.get(device).wait()


def resident(flat: Flat, device: torch.device | None = None) -> Flat:
    """Return a flat whose buffers are tensors: itself, unless some are in a store.

    Args:
        flat: any flat.
        device: where buffers of a store go; by default where the leaves came from.

    Returns:
        A flat of tensors.
    """
    if all(isinstance(buffer, Tensor) for buffer in flat.buffers):
        return flat
    return flat.with_buffers(fetch(buffer, device or flat.layout.device) for buffer in flat.buffers)
