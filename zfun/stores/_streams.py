"""Copies between a device and host memory, beside the work of the device.

[Note: copy queues]

A device has a queue of copies in each direction, beside the queue that computes. A copy starts
behind the work that is queued when it starts, and runs beside the work that is queued later. Memory
is used again only after its copy:

- Copies hold the tensors of the device until a transfer after their end, or until the queue that
  computes waits for them. At most ``MAX_UNDER_WAY`` copies to the host are under way; before one
  more, that queue waits for the first.
- The host waits before it reads host memory, and nowhere else. The allocator of page-locked memory
  keeps a block until the copies from it and to it are complete.
- A :class:`Ring` uses one of its buffers again after the host has emptied it.

The CPU has no such queue, so nothing here runs there.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

MAX_UNDER_WAY = 4
_NUM_SLOTS, _SLOT_BYTES = 3, 2**24


class CopyQueue:
    """The copies of a device in one direction; see [Note: copy queues]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, out: Tensor, x: Tensor, after: Any = None) -> Any:
        """Start a copy behind the work that is queued and an event; return the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            out.copy_(x, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the queue that computes wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def slot(self, num_bytes: int) -> Tensor:
        """Return page-locked bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def has_queues(device: torch.device) -> bool:
    """Whether copies from a device are complete only later."""
    return device.type == "cuda" and torch.cuda.is_available()


def queue_of(device: torch.device) -> CopyQueue | None:
    """Make a queue of copies of a device; ``None`` for a device without such queues."""
    return CopyQueue(device) if has_queues(device) else None


@final
class QueuedCopy:
    """A copy under way, which holds its tensors until a wait."""

    __slots__ = ("_held", "_queue", "event")

    def __init__(self, queue: CopyQueue, out: Tensor, x: Tensor, after: Any = None) -> None:
        self._queue = queue
        self._held: tuple[Tensor, Tensor] | None = (out, x)
        self.event = queue.start(out, x, after)

    @property
    def is_over(self) -> bool:
        """Whether the tensors may be used again."""
        return self._held is None or self.event.query()

    def wait(self) -> None:
        """Let the queue that computes wait."""
        self._queue.wait(self.event)
        self._held = None

    def wait_on_host(self) -> None:
        """Let the host wait."""
        self.event.synchronize()
        self._held = None


@final
class QueuedCopies:
    """The queues of a store, and the copies that are under way in them; threads may share it."""

    def __init__(self) -> None:
        self._queues: dict[tuple[torch.device, str], CopyQueue | None] = {}
        self._lock = threading.Lock()
        self._under_way: dict[str, collections.deque[QueuedCopy]] = {
            kind: collections.deque() for kind in ("put", "get")
        }
        settling = weakref.finalize(self, _settle, self._under_way)
        settling.atexit = False  # type: ignore[attr-defined]

    def queue(self, device: torch.device, kind: str) -> CopyQueue | None:
        """Return the queue of a device for ``"put"`` (to the host) or ``"get"``, or None."""
        if (device, kind) not in self._queues:
            self._queues[device, kind] = queue_of(device)
        return self._queues[device, kind]

    def put(self, queue: CopyQueue, out: Tensor, x: Tensor) -> QueuedCopy:
        """Start to copy a tensor of a device into host memory."""
        self.release()
        with self._lock:
            under_way = self._under_way["put"]
            if len(under_way) == MAX_UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(QueuedCopy(queue, out, x))
            return under_way[-1]

    def get(self, queue: CopyQueue, out: Tensor, x: Tensor, after: Any) -> QueuedCopy:
        """Start to copy host memory to a device, after the event of a copy into this memory."""
        self.release()
        with self._lock:
            # Nobody may wait for the copy, so its target is held here too.
            self._under_way["get"].append(QueuedCopy(queue, out, x, after))
            return self._under_way["get"][-1]

    def release(self) -> None:
        """Let go of the tensors whose copies are over."""
        with self._lock:
            for under_way in self._under_way.values():
                while under_way and under_way[0].is_over:
                    under_way.popleft()

    def __reduce__(self) -> Any:
        # A copy of a store has queues of its own.
        return QueuedCopies, ()


def _settle(under_way: dict[str, collections.deque[QueuedCopy]]) -> None:
    """Let the queues that compute wait for what is under way."""
    for copies in under_way.values():
        while copies:
            copy = copies.popleft()
            if not copy.is_over:
                copy.wait()


@final
class Ring:
    """Copies from a device to host memory that is not page-locked, through a few buffers that are.

    The host empties a buffer while the device fills the next ones.
    """

    def __init__(self, num_slots: int = _NUM_SLOTS, slot_bytes: int = _SLOT_BYTES) -> None:
        self._copies = QueuedCopies()
        self._slot_bytes = slot_bytes
        self._num_unmade = num_slots
        self._free: list[Tensor] = []
        # Copy, full part of a buffer, target and buffer.
        self._full: collections.deque[tuple[QueuedCopy, Tensor, Tensor, Tensor]] = (
            collections.deque()
        )
        self._num_started = self._num_emptied = 0

    def start(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Start to copy a tensor; return a function that waits for the copy and returns it.

        Returns:
            ``None`` for a tensor of a device without queues of copies.
        """
        queue = self._copies.queue(x.device, "put")
        if queue is None:
            return None
        out = torch.empty(x.shape, dtype=x.dtype)
        step = max(1, self._slot_bytes // x.dtype.itemsize)
        for part, target in zip(x.reshape(-1).split(step), out.view(-1).split(step), strict=True):
            slot = self._slot(queue)
            room = slot[: part.nbytes].view(x.dtype)
            self._full.append((self._copies.put(queue, room, part), room, target, slot))
            self._num_started += 1
        return functools.partial(self._finished, out, self._num_started)

    def _slot(self, queue: CopyQueue) -> Tensor:
        if not self._free and self._num_unmade:
            self._num_unmade -= 1
            return queue.slot(self._slot_bytes)
        if not self._free:
            self._empty()
        return self._free.pop()

    def _empty(self) -> None:
        copy, room, target, slot = self._full.popleft()
        copy.wait_on_host()
        target.copy_(room)
        self._free.append(slot)
        self._num_emptied += 1

    def _finished(self, out: Tensor, number: int) -> Tensor:
        while self._num_emptied < number:
            self._empty()
        return out


@final
class LateValues:
    """0-dim integers of a device on their way to the host, which waits only if they are late.

    Attributes:
        tensors: the last ones, of one device and dtype.
    """

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        self._queue: CopyQueue | None = None
        self._copy: QueuedCopy | None = None

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy some integers to the host."""
        self.tensors, self._copy = tuple(tensors), None
        if not self.tensors:
            return
        self._queue = self._queue or queue_of(self.tensors[0].device)
        if self._queue is not None:
            together = torch.stack(self.tensors)
            self._host = self._queue.slot(together.nbytes).view(together.dtype)
            self._copy = QueuedCopy(self._queue, self._host, together)

    def read(self) -> list[int]:
        """Return the integers. The host waits if the copy is not complete."""
        if self._copy is None:
            return [int(x) for x in self.tensors]
        self._copy.wait_on_host()
        return self._host.tolist()


def hosted(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield tensors in host memory; one of a device is copied while the one before is in use."""
    ring = Ring()
    before: Callable[[], Tensor] | None = None
    for x in tensors:
        started = ring.start(x)
        if before is not None:
            yield before()
        if started is None:
            yield x.cpu()
        before = started
        del x  # before the next one is read
    if before is not None:
        yield before()
