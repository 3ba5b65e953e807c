"""Every collective, written once over one primitive.

[Note: collectives by direct exchange]

``exchange(sends, recvs)`` sends ``sends[j]`` to rank j and receives from rank j into ``recvs[j]``.
Each payload is sent once, directly to the rank that needs the payload; a library's reduce-scatter
may be an all-reduce in disguise. The receiver adds the terms in rank order, so that every rank and
every kind of group computes the same bits.

The buffers of a collective, for N ranks and an input of n elements:

* all-gather: receives into the slices of ``out``. The own shard is copied unless the input already
  is that slice.
* reduce-scatter: receives N - 1 chunks of n/N elements each. The first of the chunks arrives in
  ``out``, where the sum is taken.
* all-reduce: a reduce-scatter into the own slice of ``out``, and an all-gather of each segment as
  soon as the segment is summed. The phases run on a background thread of the stream, because ranks
  that wait for two such collectives in different orders would otherwise block each other. Two ranks
  exchange a short input, or an input of odd length, whole: the same bytes, half the latency, and no
  padding.
* the other collectives receive into ``out``.

Terms of a sum arrive in buffers of the pool, in segments. Each segment is a message, so that a rank
adds one segment while the next is on its way. Segments are long, because starting and ending a
message (two threads on both sides, and the interpreter's lock) costs more than the addition.

Both sides skip empty messages, because the ranks agree on the lengths.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives.gloo._buffer_pool import BufferPool
from zfun.ops._sums import sum_in_rank_order

# Bytes of a segment: starting a message costs little beside adding this much.
_PIECE_BYTES = 1 << 23
_MOST_PIECES = 64
# Segments begin at multiples of this many elements, for vector instructions.
_UNIT = 32
# Up to this many bytes, two ranks exchange and add the whole input.
_SHORT_BYTES = 1 << 20


class Transfer(Protocol):
    """Messages under way. A transfer keeps the buffers of the messages alive."""

    def wait(self) -> None:
        """Return when everything has been sent and received."""
        ...


class Exchange(Protocol):
    """Send ``sends[j]`` to rank j, receive from rank j into ``recvs[j]``; None sends nothing."""

    def __call__(
        self, sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None], /
    ) -> Transfer: ...


Phase = Callable[[], Transfer | None]
"""The step after a transfer: uses the received data, and may start the next transfer."""


class Started(NamedTuple):
    """A collective whose first transfer is under way.

    Attributes:
        transfer: the first transfer.
        phases: the steps after the transfers, in order: one phase runs when a transfer is complete.
        in_background: whether a phase starts another transfer, and so must not wait for the caller.
        meanwhile: local work, such as copies. The work runs before the wait, and after the start of
            all messages that can start by then.
    """

    transfer: Transfer
    phases: Sequence[Phase] = ()
    in_background: bool = False
    meanwhile: Callable[[], None] | None = None

    def steps(self) -> Iterator[None]:
        """Run the remaining phases, one transfer at a time."""
        if self.meanwhile is not None:
            self.meanwhile()
        self.transfer.wait()
        for phase in self.phases:
            yield
            transfer = phase()
            if transfer is not None:
                transfer.wait()

    def finish(self) -> None:
        """Run all remaining phases."""
        for _ in self.steps():
            pass


def num_transfers(op: _ops.Op, numel: int, itemsize: int, size: int) -> int:
    """Return how many times a collective of so many elements calls its exchange."""
    match op:
        case _ops.ReduceScatter():
            return len(_spans(numel // size, itemsize))
        case _ops.AllReduce():
            if _is_added_twice(numel, itemsize, size):
                return len(_spans(numel, itemsize))
            return 2 * len(_spans(-(-numel // size), itemsize))
        case _:
            return 1


def start_exchange(
    call: _ops.Collective,
    x: Tensor,
    out: Tensor,
    rank: int,
    size: int,
    exchange: Exchange,
    pool: BufferPool,
) -> Started:
    """Start a collective.

    Args:
        call: the collective.
        x: 1-D input.
        out: 1-D output of the right length.
        rank: this rank.
        size: the number of ranks.
        exchange: the primitive.
        pool: buffers for the terms of a sum.

    Returns:
        The started collective. When it is finished, the result is in ``out``.
    """
    op = call.op
    here = _RankPlace(rank, size, exchange, pool)
    others, nobody = here.to_others(x), list[Tensor | None]([None] * size)
    match op:
        case _ops.AllGather():
            slices = _chunks(out, size)
            return Started(exchange(others, slices), meanwhile=_Copy(x, slices[rank]))
        case _ops.ReduceScatter():
            return Started(*_start_sum(here, _chunks(x, size), out))
        case _ops.AllReduce() if _is_added_twice(x.numel(), x.dtype.itemsize, size):
            return Started(*_start_sum(here, [x, x], out))
        case _ops.AllReduce():
            return _start_all_reduce(here, x, out)
        case _ops.Broadcast(root):
            sends, recvs = (others, nobody) if rank == root else (nobody, _only(root, out, size))
            return Started(exchange(sends, recvs), (_Copy(x, out),) if rank == root else ())
        case _ops.Reduce(root) if rank == root:
            received = _receive_buffers(here, x, out)
            return Started(
                exchange(nobody, received), (functools.partial(_Sum(received, out), slice(None)),)
            )
        case _ops.Reduce(root):
            out.zero_()
            return Started(exchange(_only(root, x, size), nobody))
        case _ops.AllToAll():
            chunks, slices = _chunks(x, size), _chunks(out, size)
            return Started(exchange(chunks, slices), meanwhile=_Copy(chunks[rank], slices[rank]))
        case _ops.UnequalAllToAll():
            parts, slices = x.split(op.sent), out.split(op.received)
            return Started(exchange(parts, slices), meanwhile=_Copy(parts[rank], slices[rank]))
        case _ops.Permute(destinations):
            transfer = exchange(
                _only(destinations[rank], x, size), _only(op.sources[rank], out, size)
            )
            return Started(transfer, (_Copy(x, out),) if destinations[rank] == rank else ())


class _RankPlace(NamedTuple):
    """This rank and the arguments of :func:`start_exchange`."""

    rank: int
    size: int
    exchange: Exchange
    pool: BufferPool

    def to_others(self, x: Tensor) -> list[Tensor | None]:
        return [None if other == self.rank else x for other in range(self.size)]


def _start_all_reduce(here: _RankPlace, x: Tensor, out: Tensor) -> Started:
    numel = x.numel()
    padding = -numel % here.size
    whole = torch.cat([x, x.new_zeros(padding)]) if padding else x
    chunks = _chunks(whole, here.size)
    if not padding:
        return _sum_and_gather(here, chunks, out)
    total = torch.empty_like(whole)
    started = _sum_and_gather(here, chunks, total)
    return started._replace(phases=[*started.phases, _Copy(total[:numel], out)])


def _sum_and_gather(here: _RankPlace, chunks: Sequence[Tensor], out: Tensor) -> Started:
    slices = _chunks(out, here.size)
    own = slices[here.rank]
    transfer, sums = _start_sum(here, chunks, own)
    gathers: collections.deque[Transfer] = collections.deque()

    def sum_and_send(add: Phase, span: slice) -> Transfer | None:
        following = add()
        gathers.append(here.exchange(here.to_others(own[span]), [x[span] for x in slices]))
        return following

    spans = _spans(own.numel(), out.dtype.itemsize)
    phases: list[Phase] = [
        functools.partial(sum_and_send, add, span) for add, span in zip(sums, spans, strict=True)
    ]
    phases += [gathers.popleft] * len(spans)
    return Started(transfer, phases, in_background=True)


def _is_added_twice(numel: int, itemsize: int, size: int) -> bool:
    return size == 2 and (numel * itemsize <= _SHORT_BYTES or numel % 2 == 1)


def _start_sum(
    here: _RankPlace, chunks: Sequence[Tensor], out: Tensor
) -> tuple[Transfer, list[Phase]]:
    """Start to send each rank its chunk, and to receive the terms of the own chunk."""
    received = _receive_buffers(here, chunks[here.rank], out)
    spans = _spans(out.numel(), out.dtype.itemsize)
    transfers = [here.exchange(_cut(chunks, span), _cut(received, span)) for span in spans]
    add = _Sum(received, out)
    return transfers[0], [
        functools.partial(add, span, *transfers[n : n + 1]) for n, span in enumerate(spans, 1)
    ]


def _cut(tensors: Sequence[Tensor], span: slice) -> list[Tensor]:
    return [x[span] for x in tensors]


class _Sum:
    """The phases that add one segment each, and return the transfer of the next segment."""

    __slots__ = ("_out", "_terms")

    def __init__(self, terms: list[Tensor], out: Tensor) -> None:
        self._terms = terms
        self._out = out

    def __call__(self, span: slice, following: Transfer | None = None) -> Transfer | None:
        sum_in_rank_order([term[span] for term in self._terms], self._out[span])
        if following is None:
            self._terms.clear()
        return following


class _Copy:
    """The phase that copies a tensor into the caller's output."""

    __slots__ = ("_out", "_source")

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source = source
        self._out = out

    def __call__(self) -> None:
        if not self._out.is_set_to(self._source):
            # The sum of one term. The kernel writes long results past the caches, which hold data
            # of the computation.
            sum_in_rank_order([self._source], self._out)


def _spans(numel: int, itemsize: int) -> list[slice]:
    """Cut a sum into segments, the same ones on every rank."""
    length = max(_PIECE_BYTES // itemsize, 1)
    if numel > length * _MOST_PIECES:
        length = -(-numel // (_MOST_PIECES * _UNIT)) * _UNIT
    return [slice(first, min(first + length, numel)) for first in range(0, max(numel, 1), length)]


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    return list(x.view(size, x.numel() // size).unbind())


def _receive_buffers(here: _RankPlace, own: Tensor, out: Tensor) -> list[Tensor]:
    """Return a buffer for the term of every rank.

    The own term needs no buffer, and the first of the other terms may arrive in the output.
    """
    free: list[Tensor] = [] if own.is_set_to(out) else [out]
    return [
        own
        if other == here.rank
        else free.pop()
        if free
        else here.pool.take(own.numel(), own.dtype)
        for other in range(here.size)
    ]


def _only(rank: int, x: Tensor, size: int) -> list[Tensor | None]:
    return [x if other == rank else None for other in range(size)]
