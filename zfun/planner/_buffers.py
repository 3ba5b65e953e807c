"""The buffers that live at every moment of a step, by name and place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zfun.planner._parts import PLACES, Bytes, Instant
from zfun.stores import Stored

STATE = ("params", "masters", "moments")
# Stands for an operation where the course of a step is cut.
MARK = ""
# The names of stored tensors, by the parts of the state that stores are told.
_STORED = {"params": "params", "grads": "grads", "state": "moments"}


@dataclass(eq=False, slots=True)
class Buffer:
    """A storage, or a tensor on a disk.

    Attributes:
        nbytes: the size.
        place: one of the fields of :class:`Instant`.
        name: a field of :class:`Bytes`, or empty where the buffer is not counted.
        detail: ``"communication"`` or ``"staging"`` for a buffer of that use, or empty.
        references: the weak references that keep the address and tell of the end.
    """

    nbytes: int
    place: str
    name: str
    detail: str = ""
    references: tuple[Any, ...] = ()

    @property
    def category(self) -> str:
        """The field of Bytes that the buffer counts in."""
        if self.detail == "communication" and self.name in ("gathered", "grads"):
            return "communication"
        return "staging" if (self.name, self.detail) == ("work", "staging") else self.name


class _MemoryEvent(NamedTuple):
    what: str
    made: Buffer | None
    freed: tuple[Buffer, ...]


class WatchedBuffers:
    """The buffers that live, and the events in which these were made and freed.

    Args:
        device: the type of the device where the loss is computed.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._live: dict[int, Buffer] = {}
        # The handles of tensors on a disk that live, by identity; the keys of freed buffers.
        self._stored: dict[int, Buffer] = {}
        self._dead: list[int] = []
        self._kept: tuple[Buffer, ...] = ()
        self._events: list[_MemoryEvent] = []

    def find(self, x: Tensor | Stored) -> Buffer | None:
        """Return the buffer of a tensor, or of a handle of a tensor on a disk."""
        return self._live.get(storage_of(x)) if isinstance(x, Tensor) else self._stored.get(id(x))

    def follow(self, x: Tensor, name: str, device: torch.device) -> Buffer:
        """Return the buffer of a tensor, under a name; the buffer is new if not yet known."""
        key = storage_of(x)
        buffer = self._live.get(key)
        if buffer is None:
            storage = x.untyped_storage()
            place = "device" if device.type == self._device else "host"
            # Torch's weak reference keeps the address from being given to another storage, and
            # Python's tells when the storage is freed.
            ended = functools.partial(_append, self._dead, key)
            references = StorageWeakRef(storage), weakref.ref(storage, ended)
            buffer = self._live[key] = Buffer(storage.nbytes(), place, name, "", references)
        buffer.name = name
        return buffer

    def follow_stored(self, handle: Stored) -> Buffer:
        """Return the new buffer of a tensor on a disk, which lives as long as the handle."""
        nbytes = handle.shape.numel() * handle.dtype.itemsize
        buffer = Buffer(nbytes, "disk", _STORED.get(handle.name, "activations"))
        # No address is negative.
        key = ~id(buffer)
        self._live[key] = self._stored[id(handle)] = buffer
        ended = functools.partial(self._drop, id(handle), key)
        buffer.references = (weakref.ref(handle, ended),)
        return buffer

    def made(self, what: str, buffer: Buffer, freed: tuple[Buffer, ...]) -> None:
        """Note that a buffer was made after others were freed."""
        self._events.append(_MemoryEvent(what, buffer, freed))

    def mark(self) -> None:
        """Cut the course of the step here."""
        self._events.append(_MemoryEvent(MARK, None, self.bury()))

    def bury(self) -> tuple[Buffer, ...]:
        """Let go of the buffers that nothing refers to any more, and return these."""
        # Another thread may append.
        keys = [self._dead.pop() for _ in range(len(self._dead))]
        return tuple(self._live.pop(key) for key in keys)

    def begin(self) -> None:
        """Forget all events; the buffers that live now are those between steps."""
        self.bury()
        self._events.clear()
        self._kept = tuple(self._live.values())

    @property
    def num_events(self) -> int:
        """The buffers made since the beginning."""
        return len(self._events)

    def replay(self) -> Iterator[Instant]:
        """Yield the bytes between steps, and at every moment and mark after."""
        # Names are final only now: the new state is known.
        held = {place: dict.fromkeys(Bytes._fields, 0) for place in PLACES}
        shown = dict.fromkeys(PLACES, Bytes())

        def add(buffers: Sequence[Buffer], sign: int) -> None:
            changed = [buffer for buffer in buffers if buffer.name]
            for buffer in changed:
                held[buffer.place][buffer.category] += sign * buffer.nbytes
            for place in {buffer.place for buffer in changed}:
                shown[place] = Bytes(**held[place])

        add(self._kept, 1)
        yield Instant("between steps", **shown)
        for what, made, freed in self._events:
            add(freed, -1)
            if made is not None:
                add((made,), 1)
            if made is None or made.name:
                yield Instant(what, **shown)
        # Buffers that are freed after the last event are gone at the end.
        add(self.bury(), -1)
        yield Instant("the end", **shown)

    def _drop(self, handle: int, key: int, _: Any) -> None:
        self._stored.pop(handle, None)
        self._dead.append(key)


def _append(dead: list[int], key: int, _: Any) -> None:
    dead.append(key)


def storage_of(x: Tensor) -> int:
    """Return the identity of the storage of a tensor."""
    return int(x.untyped_storage()._cdata)
