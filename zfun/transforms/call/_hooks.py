"""Communication hooks: the steps of a complete bucket of gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from zfun.collectives import (
    AllReduce,
    Collective,
    Group,
    ReduceScatter,
    Stream,
    Work,
    is_symmetric,
    sum_group,
)
from zfun.compression import Codec, start, sum_bucket
from zfun.layout import Layout
from zfun.placement import Placement, S


class Handle(Protocol):
    """A collective, or a move to a store, that has been started."""

    def wait(self) -> Any:
        """Wait for the result and return the result."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A handle whose result is there."""

    result: Any

    def wait(self) -> Any:
        """Return the result."""
        return self.result


class CommHook(Protocol):
    """One step of a complete bucket of gradients."""

    def start(self, buffer: Any, layout: Layout, bucket: int) -> Handle:
        """Take a bucket over; the handle returns the input of the next hook, or the result."""
        ...


@dataclass(frozen=True, slots=True)
class SumHook:
    """The hook of :func:`shard_grads` and :func:`replicate_grads`: sum a bucket over all ranks.

    Attributes:
        group: the ranks.
        placement: ``S`` to keep this rank's piece of the sum, ``R`` to keep the whole sum.
        codec: the format in which terms are sent; ``None`` for exactly.
    """

    group: Group
    placement: Placement
    codec: Codec | None = None

    def start(self, buffer: Tensor, layout: Layout, bucket: int) -> Work:
        """Start to sum a bucket; the hook owns the buffer."""
        group = self.group
        if group.size == 1 and sum_group(group).size == 1:
            return Work.done(buffer)
        call = _sum_of(layout, bucket, self.placement)
        if self.placement is S:
            return sum_bucket(call, buffer, group, layout.buckets[bucket], self.codec)
        if self.codec is not None:
            return start(call, buffer, group, self.codec)
        # In shared memory, peers may still read the buffer after this rank has the sum.
        return group.start(call, buffer, None if is_symmetric(group) else buffer)


@functools.lru_cache(maxsize=4096)
def _sum_of(layout: Layout, bucket: int, placement: Placement) -> Collective:
    """The collective that sums a bucket of gradients."""
    op = ReduceScatter() if placement is S else AllReduce()
    return Collective(op, "grads", layout.label(bucket), Stream.GRADS, zero_copy=True)
