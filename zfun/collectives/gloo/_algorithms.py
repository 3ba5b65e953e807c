"""Every collective, written once over one primitive.

[Note: collectives by direct exchange]

``exchange(sends, recvs)`` sends ``sends[j]`` to rank j and fills ``recvs[j]`` with what rank j
sent. Each payload crosses the wire once and goes where it is needed, where a library's
reduce-scatter may be an all-reduce in disguise. Sums are taken by the receiver in rank order, so
that every rank and every kind of group gets the same bits.

The buffers of a collective, for N ranks and an input of n elements:

* all-gather: receives straight into the slices of ``out``; the own shard is copied there unless it
  already is that slice.
* reduce-scatter: receives N - 1 chunks of n/N elements each, the first of them into ``out``, where
  they are added to the own chunk.
* all-reduce: a reduce-scatter into the own slice of ``out``, of which each piece is gathered in
  place as soon as it is summed. That must not depend on when the caller waits: ranks that wait for
  two such collectives in different orders would block each other. So its phases are to be run in
  the background, each stream on its own. Two ranks send each other a short input, or one of odd
  length, and both add it: the same bytes on the wire, half the latency, and no padding.
* the others receive straight into ``out``.

What is received only to be added goes into room that is used again. It comes in pieces, each a
message of its own, so that a piece is added while the next ones are on their way. Pieces are long:
to add one from memory costs less than to start and to end a message, with what two threads on both
sides have to do for it, and to wait for the interpreter.

An exchange of nothing is skipped on both sides, since ranks agree on lengths.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zfun.collectives._ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
)
from zfun.collectives.gloo._buffer_pool import BufferPool
from zfun.ops._sums import sum_in_rank_order

__all__ = ["Exchange", "Phase", "Started", "Transfer", "num_transfers", "start_exchange"]

# Of what is added: the message of a piece costs little beside it.
_PIECE_BYTES = 1 << 23
_MOST_PIECES = 64
# Pieces begin at multiples of so many elements, as vectors do.
_UNIT = 32
# What two ranks may both add whole.
_SHORT_BYTES = 1 << 20


class Transfer(Protocol):
    """Messages under way. It keeps the buffers alive that they use."""

    def wait(self) -> None:
        """Return when everything has been sent and received."""
        ...


class Exchange(Protocol):
    """Send ``sends[j]`` to rank j and receive from rank j into ``recvs[j]``; None and the own place mean no message."""

    def __call__(
        self, sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None], /
    ) -> Transfer: ...


Phase = Callable[[], Transfer | None]
"""What follows a transfer: it uses what came in, and may start another transfer."""


class Started(NamedTuple):
    """A collective whose first transfer is under way.

    Attributes:
        transfer: the first transfer.
        phases: what follows, in order: when a transfer is through, the next phase is called.
        in_background: whether a phase starts another transfer, and so must not wait for the caller.
        meanwhile: what this rank has to do by itself. It comes before the wait and after what else
            can be sent by then.
    """

    transfer: Transfer
    phases: Sequence[Phase] = ()
    in_background: bool = False
    meanwhile: Callable[[], None] | None = None

    def steps(self) -> Iterator[None]:
        """Run everything that remains, one transfer at a time."""
        if self.meanwhile is not None:
            self.meanwhile()
        self.transfer.wait()
        for phase in self.phases:
            yield
            transfer = phase()
            if transfer is not None:
                transfer.wait()

    def finish(self) -> None:
        """Run everything that remains, at once."""
        for _ in self.steps():
            pass


def num_transfers(op: Op, numel: int, itemsize: int, size: int) -> int:
    """Return how many times a collective of so many elements calls its exchange."""
    match op:
        case ReduceScatter():
            return len(_spans(numel // size, itemsize))
        case AllReduce():
            return (
                1
                if _is_added_twice(numel, itemsize, size)
                else 2 * len(_spans(-(-numel // size), itemsize))
            )
        case _:
            return 1


def start_exchange(
    call: Collective,
    x: Tensor,
    out: Tensor,
    rank: int,
    size: int,
    exchange: Exchange,
    pool: BufferPool,
) -> Started:
    """Start a collective.

    Args:
        call: what is done.
        x: 1-D input.
        out: 1-D output of the right length.
        rank: this rank.
        size: the number of ranks.
        exchange: the primitive.
        pool: where what is only added is received.

    Returns:
        The started collective. When it is finished, the result is in ``out``.
    """
    op = call.op
    here = _Here(rank, size, exchange, pool)
    others, nobody = here.to_others(x), list[Tensor | None]([None] * size)
    match op:
        case AllGather():
            slices = _chunks(out, size)
            return Started(exchange(others, slices), meanwhile=_Copy(x, slices[rank]))
        case ReduceScatter():
            return Started(*_start_sum(here, _chunks(x, size), out))
        case AllReduce() if _is_added_twice(x.numel(), x.dtype.itemsize, size):
            return Started(*_start_sum(here, [x, x], out))
        case AllReduce():
            return _start_all_reduce(here, x, out)
        case Broadcast(root):
            sends, recvs = (others, nobody) if rank == root else (nobody, _only(root, out, size))
            return Started(exchange(sends, recvs), (_Copy(x, out),) if rank == root else ())
        case Reduce(root) if rank == root:
            received = _rooms(here, x, out)
            return Started(
                exchange(nobody, received), (functools.partial(_Sum(received, out), slice(None)),)
            )
        case Reduce(root):
            out.zero_()
            return Started(exchange(_only(root, x, size), nobody))
        case AllToAll():
            chunks, slices = _chunks(x, size), _chunks(out, size)
            return Started(exchange(chunks, slices), meanwhile=_Copy(chunks[rank], slices[rank]))
        case Permute(destinations):
            transfer = exchange(
                _only(destinations[rank], x, size), _only(op.sources[rank], out, size)
            )
            return Started(transfer, (_Copy(x, out),) if destinations[rank] == rank else ())


class _Here(NamedTuple):
    """This rank and its means; what :func:`start_exchange` is given."""

    rank: int
    size: int
    exchange: Exchange
    pool: BufferPool

    def to_others(self, x: Tensor) -> list[Tensor | None]:
        return [None if other == self.rank else x for other in range(self.size)]


def _start_all_reduce(here: _Here, x: Tensor, out: Tensor) -> Started:
    numel = x.numel()
    padding = -numel % here.size
    whole = torch.cat([x, x.new_zeros(padding)]) if padding else x
    chunks = _chunks(whole, here.size)
    if not padding:
        return _sum_and_gather(here, chunks, out)
    total = torch.empty_like(whole)
    started = _sum_and_gather(here, chunks, total)
    return started._replace(phases=[*started.phases, _Copy(total[:numel], out)])


def _sum_and_gather(here: _Here, chunks: Sequence[Tensor], out: Tensor) -> Started:
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


def _start_sum(here: _Here, chunks: Sequence[Tensor], out: Tensor) -> tuple[Transfer, list[Phase]]:
    """Start to send each rank its chunk, and to receive and add what is this rank's."""
    received = _rooms(here, chunks[here.rank], out)
    spans = _spans(out.numel(), out.dtype.itemsize)
    transfers = [here.exchange(_cut(chunks, span), _cut(received, span)) for span in spans]
    add = _Sum(received, out)
    return transfers[0], [
        functools.partial(add, span, *transfers[n : n + 1]) for n, span in enumerate(spans, 1)
    ]


def _cut(tensors: Sequence[Tensor], span: slice) -> list[Tensor]:
    return [x[span] for x in tensors]


class _Sum:
    """The phases that add what has been received, a piece each; they return the transfer of the next piece."""

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
    """The phase that moves a tensor to where the caller wants it."""

    __slots__ = ("_out", "_source")

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source = source
        self._out = out

    def __call__(self) -> None:
        if not self._out.is_set_to(self._source):
            # The sum of one term. What is long it writes past the caches, which belong to the
            # computation beside it.
            sum_in_rank_order([self._source], self._out)


def _spans(numel: int, itemsize: int) -> list[slice]:
    """Cut what is added into pieces; every rank cuts alike."""
    length = max(_PIECE_BYTES // itemsize, 1)
    if numel > length * _MOST_PIECES:
        length = -(-numel // (_MOST_PIECES * _UNIT)) * _UNIT
    return [slice(first, min(first + length, numel)) for first in range(0, max(numel, 1), length)]


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    return list(x.view(size, x.numel() // size).unbind())


def _rooms(here: _Here, own: Tensor, out: Tensor) -> list[Tensor]:
    """Make room for a term of every rank.

    The own term stands for itself, and the first of the others may come to where the sum goes.
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
