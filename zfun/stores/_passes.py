"""Passes over the buffers of a flat, of which a few at a time are in memory."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.flat import FLAT, Flat
from zfun.options import instance, takes
from zfun.stores._base import Stored, finished, locating, start_read

# Reads that are under way while a bucket is in use: one to hide the time of a read, and one more
# because reads and computations vary.
READ_AHEAD = 2


class Derived(Stored):
    """A handle of a function of a stored tensor; :func:`derived` makes one."""

    def __init__(self, source: Stored, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__(source.store, source, source.name)
        self.source, self.fn = source, fn
        self.dtype, self.can_fail = dtype, source.can_fail

    def get(self, device: torch.device) -> Work:
        """Start to fetch the stored tensor; ``wait()`` computes the function."""
        started, fn = self.source.get(device), self.fn
        return Work(lambda: fn(started.wait()))

    def prefetch(self) -> None:
        """Start to fetch the stored tensor."""
        self.source.prefetch()

    def flush(self) -> None:
        """Wait until the store keeps the tensor."""
        self.source.flush()


@takes(source=instance(Stored, "a handle of a store", "store.put(x, 'state')"))
def derived(source: Stored, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Derived:
    """Return a handle of a function of a stored tensor, computed anew by each ``get``.

    Args:
        source: the handle of the stored tensor.
        fn: returns a new tensor of the same shape, and does not write to the stored one.
        dtype: the dtype of the result.

    Example:
        >>> from zfun.stores import host
        >>> half = derived(host().put(torch.ones(2), "grads"), lambda x: x * 0.5, torch.float32)
        >>> half.get(torch.device("cpu")).wait()
        tensor([0.5000, 0.5000])
    """
    return Derived(source, fn, dtype)


@takes(flat=FLAT, device=instance(torch.device, "a torch.device", "torch.device('cpu')") | None)
def reading(flat: Flat, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield the buffers of a flat one after the other, and read the next two meanwhile.

    Args:
        flat: any flat.
        device: the target device of stored buffers; by default the device of each store.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     params = zf.offload(zf.shard({"w": torch.ones(2)}, group), zf.stores.host())
        ...     return [buffer.numel() for buffer in reading(params)]
        >>> zf.simulate(1, main)
        [[32]]
    """
    buffers, label = flat.buffers, flat.layout.label
    if all(isinstance(buffer, Tensor) for buffer in buffers):
        yield from buffers
        return
    started: collections.deque[Work | Tensor] = collections.deque()
    for index in range(len(buffers) + READ_AHEAD):
        if index < len(buffers):
            buffer = buffers[index]
            to = device
            if to is None:
                to = buffer.store.device if isinstance(buffer, Stored) else flat.layout.device
            with locating(leaf=label(index)):
                started.append(start_read(buffer, to))
        if index >= READ_AHEAD:
            # No name refers to the tensor here, so the caller may free the tensor.
            with locating(leaf=label(index - READ_AHEAD)):
                started[0] = finished(started[0])
            yield started.popleft()  # type: ignore[misc]


@takes(flat=FLAT, device=instance(torch.device, "a torch.device", "torch.device('cpu')") | None)
def by_bucket(fn: Callable[[Flat], Flat], flat: Flat, device: torch.device | None = None) -> Flat:
    """Apply a function to a flat of one bucket after the other; results go where the buckets were.

    Args:
        fn: takes and returns a flat with one buffer.
        flat: a flat of tensors and handles.
        device: where the function runs; by default on the device of the leaves.

    Returns:
        The results as one flat, each in the store of the bucket if the bucket was in one.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.offload(zf.replicate({"w": torch.ones(2)}, group), zf.stores.host())
        ...     return by_bucket(lambda one: zf.redistribute(one, zf.S, group), flat)
        >>> zf.simulate(2, main)[0]
        Flat(S, rank 0 of 2: 1 leaf, 2 elements in 1 bucket; here 32 of 64 padded elements)
    """
    found: list[Any] = []
    result = flat
    old = flat.buffers
    for index, buffer in enumerate(reading(flat, device or flat.layout.device)):
        result = fn(flat.select([index]).with_buffers([buffer]))
        where = old[index]
        with locating(leaf=flat.layout.label(index)):
            found.append(
                where.store.put(result.buffers[0], where.name)
                if isinstance(where, Stored)
                else result.buffers[0]
            )
    return flat.with_buffers(found, result.placement, result.group)
