"""Collectives over several axes: one collective of one axis after the other.

[Note: several axes]

An *axis* is a group of its own. A collective over several axes is a chain of *hops*, each a
collective of one axis. The innermost axis is the fastest one, such as the ranks of one host, so no
byte crosses an outer axis twice:

==================  ===========================================================================
all-gather          outermost first: each shard crosses once to each row of the inner axis
reduce-scatter      innermost first: only the sums of a row cross
all-reduce          reduce-scatter inwards out, all-reduce outermost, all-gather back
all-to-all          innermost first: one message for each row
broadcast           outermost first, among the ranks that have the inner place of the root
reduce              innermost first, then among the ranks that have the inner place of the root
==================  ===========================================================================

**Sums are taken over the innermost axis first, in rank order, and then over the next one**, in
every collective, so all compositions over the same axes give the same bits. Other axes of as many
ranks, or a group without axes, add in another order, and differ by rounding.

Where a device waits and not the host, all hops start with the call, on a queue beside the one that
computes. Elsewhere the first hop starts with the call, the others when a rank waits for the result.
On each axis, hops start in the order of the calls, because all collectives of a mesh share one
queue for each stream: a wait first starts the hops that are left of the collectives before, and so
does a call whose first hop goes over an axis that one of these hops needs. So ranks may wait in any
order within a stream. A wait on the control stream also starts the hops that are left of the
gathers of parameters, because a rank that takes another branch may be waiting for them. A rank
waits on the control stream only after it has started all gathers that other ranks may need by then.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives._group import Aside, Group, Wrapper, own_part
from zfun.collectives._work import Work
from zfun.errors import OptionError

# Up to this size, one message less saves more time than fewer bytes.
_SHORT_BYTES = 4096

# Yields each hop once started, is sent its result, and returns the final result.
Hops: TypeAlias = Generator[Work, Tensor, Tensor]


@final
class Axis(Wrapper):
    """One axis of a mesh, whose collectives keep the order of the mesh's others.

    Attributes:
        home: the mesh.
    """

    home: Any

    def __init__(self, group: Group, name: str, numbers: Sequence[int], order: Order) -> None:
        super().__init__(group)
        self.axis = name
        self.axes = [self]
        self.global_ranks = numbers
        self._order = order
        self.home = None

    def start(self, call: _ops.Collective, x: Tensor, out: Tensor | None = None) -> Work:
        if call.stream is not _ops.Stream.CONTROL and not self._order.queues[call.stream]:
            return self.wrapped.start(call, x, out)

        def only() -> Hops:
            return (yield self.wrapped.start(call, x, out))

        return self._order.launch(call.stream, [self], only(), x)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        numbers = [self.global_ranks[rank] for rank in own_part(self, parts)]
        part = self.wrapped.subgroup(parts, name or self.axis)
        return Axis(part, name or self.axis, numbers, self._order)

    def __repr__(self) -> str:
        return f"<{self.axis} axis: rank {self.rank} of {self.size}>"


class Hop(NamedTuple):
    """A collective of one axis, as a part of one over several."""

    axis: Axis
    op: _ops.Op


def hops_of(op: _ops.Op, axes: Sequence[Axis], nbytes: int) -> list[Hop]:
    """Return the hops of this rank for an input of ``nbytes``; ``axes`` are innermost first."""
    if isinstance(op, _ops.Broadcast | _ops.Reduce):
        return _rooted(op, axes)
    if isinstance(op, _ops.UnequalAllToAll):
        raise OptionError(
            f"an all_to_all of unequal parts goes along one axis; got {len(axes)} axes; pass one, "
            "such as mesh['ep']"
        )
    hops = [Hop(axis, op) for axis in axes if axis.size > 1]
    if isinstance(op, _ops.AllReduce) and nbytes > _SHORT_BYTES and hops:
        *parts, last = hops
        there = [Hop(axis, _ops.ReduceScatter()) for axis, _ in parts]
        back = [Hop(axis, _ops.AllGather()) for axis, _ in reversed(parts)]
        return [*there, last, *back]
    return hops[::-1] if isinstance(op, _ops.AllGather) else hops


def _rooted(op: _ops.Broadcast | _ops.Reduce, axes: Sequence[Axis]) -> list[Hop]:
    """Return hops to or from a root: the outer ones are for ranks with the root's inner place."""
    places: list[int] = []
    left = op.root
    for axis in reversed(axes):
        left, place = divmod(left, axis.size)
        places.insert(0, place)
    hops: list[Hop] = []
    for axis, place in zip(axes, places, strict=True):
        if axis.size > 1:
            hops.append(Hop(axis, type(op)(place)))
        if axis.rank != place:
            break
    return hops[::-1] if isinstance(op, _ops.Broadcast) else hops


def chained(
    call: _ops.Collective,
    hops: Sequence[Hop],
    x: Tensor,
    out: Tensor | None,
    *,
    owned: bool = False,
) -> Hops:
    """Yield hops, each over the result of the last one.

    The result goes into ``out``; ``owned`` says that the hops may overwrite ``x``.
    """
    for index, (axis, op) in enumerate(hops):
        later = hops[index + 1 :]
        target = x if owned and isinstance(op, _ops.AllReduce) else None
        if out is not None and (not later or isinstance(call.op, _ops.AllGather)):
            target = _slot(out, later)
        # A permutation is one hop.
        is_shown = not isinstance(op, _ops.Permute)
        hop = _ops.Collective(op, call.name, call.part, call.stream, zero_copy=is_shown)
        x = yield axis.wrapped.start(hop, x, target)
        owned = isinstance(op, _ops.ReduceScatter)
    return x


def _slot(out: Tensor, later: Sequence[Hop]) -> Tensor:
    """Return the part of a gathered tensor that the later hops send."""
    for axis, _ in reversed(later):
        out = out.unflatten(0, (axis.size, out.numel() // axis.size))[axis.rank]
    return out


def summed(
    call: _ops.Collective,
    hops: Sequence[Hop],
    x: Tensor,
    out: Tensor | None,
    *,
    owned: bool = False,
) -> Hops:
    """Yield the hops of an all-reduce, as :func:`chained` does."""
    size = math.prod(hop.axis.size for hop in hops if isinstance(hop.op, _ops.ReduceScatter))
    numel = x.numel()
    if size == 1 or (out is not None and numel % size == 0):
        return (yield from chained(call, hops, x, out, owned=owned))
    # A gathered result may show other ranks' memory, so it is copied.
    total = yield from chained(
        call, hops, torch.nn.functional.pad(x, (0, -numel % size)), None, owned=owned
    )
    return (x.new_empty(numel) if out is None else out).copy_(total[:numel])


def _exchanged(call: _ops.Collective, hops: Sequence[Hop], x: Tensor, out: Tensor) -> Hops:
    """Yield the hops of an all-to-all: each exchanges one dim of the ranks' coordinates."""
    sizes = [hop.axis.size for hop in hops]
    chunks = x.unflatten(0, (*sizes, x.numel() // math.prod(sizes)))
    for dim, (axis, op) in enumerate(hops):
        rows = chunks.movedim(dim, 0)
        hop = _ops.Collective(op, call.name, call.part, call.stream, zero_copy=True)
        received = yield axis.wrapped.start(hop, rows.reshape(-1), None)
        chunks = received.view(rows.shape).movedim(0, dim)
    return out.copy_(chunks.reshape(-1))


def started(call: _ops.Collective, hops: Sequence[Hop], x: Tensor, out: Tensor) -> Hops:
    """Yield the hops of a collective of several axes."""
    if isinstance(call.op, _ops.AllToAll):
        return _exchanged(call, hops, x, out)
    return (summed if isinstance(call.op, _ops.AllReduce) else chained)(call, hops, x, out)


@final
class Order:
    """The collectives of a mesh under way, by stream; see [Note: several axes].

    Args:
        aside: the queue beside the one that computes, if a device waits and not the host.
    """

    def __init__(self, aside: Aside | None = None) -> None:
        self._aside = aside
        self.queues: dict[_ops.Stream, collections.deque[_Running]] = {
            stream: collections.deque() for stream in _ops.Stream
        }

    def launch(self, stream: _ops.Stream, axes: Sequence[Axis], hops: Hops, x: Tensor) -> Work:
        """Start the hops of a collective of ``x``; ``axes`` are those of the hops."""
        queue = self.queues[stream]
        if any(axes[0] in before.later for before in queue):
            self.bring_forward(stream)
        if self._aside is not None and len(axes) > 1 and not any(each.later for each in queue):
            aside = functools.partial(self._aside, stream, x.device)
            if (context := aside()) is not None:
                if stream is _ops.Stream.CONTROL:
                    self.bring_forward(_ops.Stream.PARAMS)
                with context:
                    # The memory of the input belongs to the caller's queue, which has not waited.
                    running = _Running(axes[1:], hops, kept=x)
                    running.bring_forward()
                return Work(functools.partial(_finished_aside, running, aside))
        running = _Running(axes[1:], hops)
        queue.append(running)

        def finish() -> Tensor:
            if stream is _ops.Stream.CONTROL:
                self.bring_forward(_ops.Stream.PARAMS)
            self.bring_forward(stream, running)
            return running.finish()

        return Work(finish)

    def bring_forward(self, stream: _ops.Stream, last: _Running | None = None) -> None:
        """Start the hops that are left, of all collectives or up to one."""
        queue = self.queues[stream]
        while queue if last is None else last in queue:
            queue[0].bring_forward()
            queue.popleft()


def _finished_aside(
    running: _Running, aside: Callable[[], AbstractContextManager[None] | None]
) -> Tensor:
    """Wait for the last hop, on both queues.

    The allocator gives memory back to the system when the queue that made it has passed, so the
    queue of the hops waits too, and knows that the caller's queue reads the result.
    """
    result = running.finish()
    context = aside()
    assert context is not None
    with context:
        pass
    if result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))
    return result


class _Running:
    """A collective under way.

    Attributes:
        later: the axes of the hops that are left.
        kept: a tensor that lives as long as this object.
    """

    __slots__ = ("_error", "_hops", "_pending", "kept", "later")

    def __init__(self, later: Sequence[Axis], hops: Hops, kept: Tensor | None = None) -> None:
        self.later = list(later)
        self.kept = kept
        self._hops = hops
        self._pending = next(hops)
        self._error: BaseException | None = None

    def bring_forward(self) -> None:
        """Start the last hop."""
        if self._error is not None:
            raise self._error
        try:
            while self.later:
                self._pending = self._hops.send(self._pending.wait())
                self.later.pop(0)
        except BaseException as error:
            self._error = error
            raise

    def finish(self) -> Tensor:
        self.bring_forward()
        try:
            self._hops.send(self._pending.wait())
        except StopIteration as end:
            result: Tensor = end.value
            return result
        raise AssertionError("a collective has as many hops as axes to go through")
