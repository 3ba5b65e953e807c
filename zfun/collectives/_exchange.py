"""[Note: collectives by direct exchange]

Every collective is written here once, over one primitive: ``exchange(sends, recvs)`` sends ``sends[j]`` to rank j and fills ``recvs[j]`` with
what rank j sent. Each payload crosses the wire once and goes where it is needed, (N-1)/N of the least possible total per rank, where a library's
reduce-scatter may be an all-reduce in disguise. Sums are taken by the receiver in rank order, so that every rank and every kind of group gets
the same bits.

The buffers of a collective, for N ranks and an input of n elements:

* all-gather: receives straight into the slices of ``out``; the own shard is copied there unless it already is that slice.
* reduce-scatter: receives N - 1 chunks of n/N elements each, adds them to the own chunk, into ``out``.
* all-reduce: a reduce-scatter into the own slice of ``out``, then an all-gather in place. The second phase can only start when the first has
  been summed, and must not depend on when the caller waits: ranks that wait for two such collectives in different orders would block each
  other. So its phases are to be run in the background, each lane on its own.
  Two ranks send each other everything and add, in one phase: the same bytes on the wire, and half the latency.
* the others receive straight into ``out``.

An exchange of nothing is skipped on both sides, since ranks agree on lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zfun.collectives._calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
)
from zfun.errors import OptionError
from zfun.ops._sums import sum_in_rank_order

__all__ = ["Exchange", "Phase", "Started", "Transfer", "start_exchange"]


class Transfer(Protocol):
    """Messages under way. It keeps the buffers alive that they use."""

    def wait(self) -> None:
        """Return when everything has been sent and received."""
        ...


class Exchange(Protocol):
    """Send ``sends[j]`` to rank j and receive from rank j into ``recvs[j]``; None and the own place mean no message."""

    def __call__(self, sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None], /) -> Transfer: ...


Phase = Callable[[], Transfer | None]
"""What follows a transfer: it uses what came in, and may start another transfer."""


class Started(NamedTuple):
    """A collective whose first transfer is under way.

    Attributes:
        transfer: the first transfer.
        phases: what follows, in order: when a transfer is through, the next phase is called.
        in_background: whether a phase starts another transfer, and so must not wait for the caller.
    """

    transfer: Transfer
    phases: Sequence[Phase] = ()
    in_background: bool = False

    def finish(self) -> None:
        """Run everything that remains."""
        self.transfer.wait()
        for phase in self.phases:
            transfer = phase()
            if transfer is not None:
                transfer.wait()


def start_exchange(op: Op, x: Tensor, out: Tensor, rank: int, size: int, exchange: Exchange) -> Started:
    """Start a collective.

    Args:
        op: the collective.
        x: 1-D input.
        out: 1-D output of the right length.
        rank: this rank.
        size: the number of ranks.
        exchange: the primitive.

    Returns:
        The started collective. When it is finished, the result is in ``out``.
    """
    others = [None if other == rank else x for other in range(size)]
    nobody: list[Tensor | None] = [None] * size
    match op:
        case AllGather():
            slices = _chunks(out, size)
            if not slices[rank].is_set_to(x):
                slices[rank].copy_(x)
            return Started(exchange(others, slices))
        case ReduceScatter():
            chunks = _chunks(x, size)
            received = _like_all_but(chunks, rank)
            return Started(exchange(chunks, received), (_Sum(received, out),))
        case AllReduce() if size == 2:
            received = _like_all_but([x] * size, rank)
            return Started(exchange(others, received), (_Sum(received, out),))
        case AllReduce():
            return _start_all_reduce(x, out, rank, size, exchange)
        case Broadcast(root) if rank == root:
            return Started(exchange(others, nobody), (_Copy(x, out),))
        case Broadcast(root):
            return Started(exchange(nobody, _only(root, out, size)))
        case Reduce(root) if rank == root:
            received = _like_all_but([x] * size, rank)
            return Started(exchange(nobody, received), (_Sum(received, out),))
        case Reduce(root):
            out.zero_()
            return Started(exchange(_only(root, x, size), nobody))
        case AllToAll():
            chunks, slices = _chunks(x, size), _chunks(out, size)
            slices[rank].copy_(chunks[rank])
            return Started(exchange(chunks, slices))
        case Permute(destinations) if destinations[rank] == rank:
            return Started(exchange(nobody, nobody), (_Copy(x, out),))
        case Permute(destinations):
            return Started(exchange(_only(destinations[rank], x, size), _only(op.sources[rank], out, size)))
        case _:
            raise OptionError(f"no group knows the collective {op!r}")


def _start_all_reduce(x: Tensor, out: Tensor, rank: int, size: int, exchange: Exchange) -> Started:
    numel = x.numel()
    padding = -numel % size
    whole = torch.cat([x, x.new_zeros(padding)]) if padding else x
    chunks = _chunks(whole, size)
    total = torch.empty_like(whole) if padding else out
    slices = _chunks(total, size)
    received = _like_all_but(chunks, rank)
    if slices[rank].is_set_to(chunks[rank]):
        received[rank] = chunks[rank].clone()

    def gather_sums() -> Transfer:
        sum_in_rank_order(received, slices[rank])
        received.clear()
        return exchange([None if other == rank else slices[rank] for other in range(size)], slices)

    return Started(exchange(chunks, received), (gather_sums, _Copy(total[:numel], out)) if padding else (gather_sums,), in_background=True)


class _Sum:
    """The phase that adds what has been received."""

    __slots__ = ("_out", "_terms")

    def __init__(self, terms: list[Tensor], out: Tensor) -> None:
        self._terms = terms
        self._out = out

    def __call__(self) -> None:
        aliased = any(term.is_set_to(self._out) for term in self._terms[1:])
        total = sum_in_rank_order(self._terms, None if aliased else self._out)
        if aliased:
            self._out.copy_(total)


class _Copy:
    """The phase that moves a tensor to where the caller wants it."""

    __slots__ = ("_out", "_source")

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source = source
        self._out = out

    def __call__(self) -> None:
        if not self._out.is_set_to(self._source):
            self._out.copy_(self._source)


def _chunks(x: Tensor, size: int) -> list[Tensor]:
    return list(x.view(size, x.numel() // size).unbind())


def _like_all_but(chunks: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Make room for a chunk of every rank; the own chunk stands for itself."""
    return [chunk if other == rank else torch.empty_like(chunk) for other, chunk in enumerate(chunks)]


def _only(rank: int, x: Tensor, size: int) -> list[Tensor | None]:
    return [x if other == rank else None for other in range(size)]
