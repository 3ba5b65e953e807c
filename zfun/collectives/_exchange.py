"""Every collective, written once over one primitive.

[Note: collectives by direct exchange]

``exchange(sends, recvs)`` sends ``sends[j]`` to rank j and fills ``recvs[j]`` with what rank j sent. Each payload crosses the wire once and
goes where it is needed, where a library's reduce-scatter may be an all-reduce in disguise. Sums are taken by the receiver in rank order, so
that every rank and every kind of group gets the same bits.

The buffers of a collective, for N ranks and an input of n elements:

* all-gather: receives straight into the slices of ``out``; the own shard is copied there unless it already is that slice.
* reduce-scatter: receives N - 1 chunks of n/N elements each, adds them to the own chunk, into ``out``.
* all-reduce: a reduce-scatter into the own slice of ``out``, then an all-gather in place. The second phase can only start when the first
  has been summed, and must not depend on when the caller waits: ranks that wait for two such collectives in different orders would block
  each other. So its phases are to be run in the background, each lane on its own.
  Two ranks send each other everything and add, in one phase: the same bytes on the wire, and half the latency.
* the others receive straight into ``out``.

What is received only to be added goes into buffers that are used again (:class:`Buffers`): fresh pages cost as much as the sum.

An exchange of nothing is skipped on both sides, since ranks agree on lengths.
"""

from __future__ import annotations

import threading
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
from zfun.ops._sums import sum_in_rank_order

__all__ = ["Buffers", "Exchange", "Phase", "Started", "Transfer", "start_exchange"]


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


class Buffers:
    """Room for what is received and added, kept for the next collective: at most what has been needed at one time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """Return a 1-D tensor of the length and dtype of another one."""
        nbytes = like.numel() * like.dtype.itemsize
        with self._lock:
            buffer = self._free.pop() if self._free else None
        # One that is too small makes room for one that is not.
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(like.dtype)

    def give(self, tensor: Tensor) -> None:
        """Take back what :meth:`take` returned; the largest goes out first again."""
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        with self._lock:
            self._free.append(whole)
            self._free.sort(key=Tensor.numel)


def start_exchange(op: Op, x: Tensor, out: Tensor, rank: int, size: int, exchange: Exchange, buffers: Buffers) -> Started:
    """Start a collective.

    Args:
        op: the collective.
        x: 1-D input.
        out: 1-D output of the right length.
        rank: this rank.
        size: the number of ranks.
        exchange: the primitive.
        buffers: where what is only added is received.

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
            received = _rooms(chunks, rank, buffers)
            return Started(exchange(chunks, received), (_Sum(received, out, rank, buffers),))
        case AllReduce() if size == 2:
            received = _rooms([x] * size, rank, buffers)
            return Started(exchange(others, received), (_Sum(received, out, rank, buffers),))
        case AllReduce():
            return _start_all_reduce(x, out, rank, size, exchange, buffers)
        case Broadcast(root):
            sends, recvs = (others, nobody) if rank == root else (nobody, _only(root, out, size))
            return Started(exchange(sends, recvs), (_Copy(x, out),) if rank == root else ())
        case Reduce(root) if rank == root:
            received = _rooms([x] * size, rank, buffers)
            return Started(exchange(nobody, received), (_Sum(received, out, rank, buffers),))
        case Reduce(root):
            out.zero_()
            return Started(exchange(_only(root, x, size), nobody))
        case AllToAll():
            chunks, slices = _chunks(x, size), _chunks(out, size)
            slices[rank].copy_(chunks[rank])
            return Started(exchange(chunks, slices))
        case Permute(destinations):
            transfer = exchange(_only(destinations[rank], x, size), _only(op.sources[rank], out, size))
            return Started(transfer, (_Copy(x, out),) if destinations[rank] == rank else ())


def _start_all_reduce(x: Tensor, out: Tensor, rank: int, size: int, exchange: Exchange, buffers: Buffers) -> Started:
    numel = x.numel()
    padding = -numel % size
    whole = torch.cat([x, x.new_zeros(padding)]) if padding else x
    chunks = _chunks(whole, size)
    total = torch.empty_like(whole) if padding else out
    slices = _chunks(total, size)
    received = _rooms(chunks, rank, buffers)
    add = _Sum(received, slices[rank], rank, buffers)

    def gather_sums() -> Transfer:
        add()
        return exchange([None if other == rank else slices[rank] for other in range(size)], slices)

    phases: tuple[Phase, ...] = (gather_sums, _Copy(total[:numel], out)) if padding else (gather_sums,)
    return Started(exchange(chunks, received), phases, in_background=True)


class _Sum:
    """The phase that adds what has been received."""

    __slots__ = ("_buffers", "_out", "_rank", "_terms")

    def __init__(self, terms: list[Tensor], out: Tensor, rank: int, buffers: Buffers) -> None:
        self._terms = terms
        self._out = out
        self._rank = rank
        self._buffers = buffers

    def __call__(self) -> None:
        own = self._terms[self._rank]
        if own.is_set_to(self._out) and self._rank > 0:
            # The sum starts with the first term, and would overwrite this one before its turn.
            self._out.copy_(sum_in_rank_order(self._terms))
        else:
            sum_in_rank_order(self._terms, self._out)
        for rank, term in enumerate(self._terms):
            if rank != self._rank:
                self._buffers.give(term)
        self._terms.clear()


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


def _rooms(chunks: Sequence[Tensor], rank: int, buffers: Buffers) -> list[Tensor]:
    """Make room for a chunk of every rank; the own chunk stands for itself."""
    return [chunk if other == rank else buffers.take(chunk) for other, chunk in enumerate(chunks)]


def _only(rank: int, x: Tensor, size: int) -> list[Tensor | None]:
    return [x if other == rank else None for other in range(size)]
