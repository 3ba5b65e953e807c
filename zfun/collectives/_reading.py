"""What a rank reads of the others: copies and sums, taken straight out of their segments.

[Note: sums that are owed]

A sum whose result is borrowed has two phases ([Note: borrowed results]), and this is the first: each rank adds up its own slice over its
own input. Such sums stand in a queue for each lane, and are taken as soon as the others have come to them: when the next one is started,
or in any wait. So nobody is waited for by a rank that could have gone on.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping

from torch import Tensor

from zfun.collectives._board import Board
from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Lane, Permute, Reduce, ReduceScatter
from zfun.collectives._segment import Peer, Segment
from zfun.collectives._sent import PACKED, Disagreement, Sent, chunks
from zfun.ops._sums import sum_in_rank_order

__all__ = ["Reader"]

# Mappings of less are not worth a call of the system.
_UNMAPPED_BYTES = 1 << 18


class Reader:
    """Computes results of what this rank and the others have sent.

    Args:
        segment: what this rank writes.
        peers: what the others write.
        board: where they say what it is.
        rank: this rank.
    """

    def __init__(self, segment: Segment, peers: Mapping[int, Peer], board: Board, rank: int) -> None:
        self._segment = segment
        self._peers = peers
        self._board = board
        self._rank = rank
        self._size = len(peers) + 1
        self._owed: list[collections.deque[Sent]] = [collections.deque() for _ in Lane]

    def compute(self, sent: Sent, out: Tensor) -> None:
        """Wait for the others' calls and write the result."""
        match sent.call.op:
            case AllGather() | AllToAll():
                self._gather(sent, out)
            case ReduceScatter() | AllReduce():
                self._sum(sent, out)
            case Reduce(root) if root == self._rank:
                self._sum(sent, out)
            case Reduce():
                self._move(sent, None, out)
            case Broadcast(root):
                self._move(sent, root, out)
            case Permute() as op:
                self._move(sent, op.sources[self._rank], out)

    # Copies.

    def _move(self, sent: Sent, source: int | None, out: Tensor) -> None:
        """Take the input of one rank as the result; that of no rank is zero."""
        for peer in sent.plan.partners:
            if peer != source:
                self._board.record(sent, peer)
        if source is None:
            out.zero_()
        elif source != self._rank:
            self._copy(sent, source, out)
        elif not out.is_set_to(sent.x):
            out.copy_(sent.x)

    def _gather(self, sent: Sent, out: Tensor) -> None:
        slices = chunks(out, self._size)
        own = chunks(sent.x, self._size)[self._rank] if sent.call.op.splits_input else sent.x
        if not slices[self._rank].is_set_to(own):
            slices[self._rank].copy_(own)
        for peer in sent.plan.partners:
            self._copy(sent, peer, slices[peer])

    def _copy(self, sent: Sent, peer: int, out: Tensor) -> None:
        if out.numel():
            found = self._input(sent, peer, out.numel())
            out.copy_(found)
            self._unmap(peer, found)
        else:
            self._board.record(sent, peer)

    # Sums.

    def _sum(self, sent: Sent, out: Tensor) -> None:
        if not out.numel():
            for peer in sent.plan.partners:
                self._board.record(sent, peer)
            return
        self._add_up(sent, self._own_term(sent), out)

    def _add_up(self, sent: Sent, own: Tensor, out: Tensor) -> None:
        inputs = {peer: self._input(sent, peer, out.numel()) for peer in sent.plan.partners}
        terms = {**inputs, self._rank: own}
        sum_in_rank_order([terms[rank] for rank in range(self._size)], out)
        for peer, read in inputs.items():
            self._unmap(peer, read)

    def _own_term(self, sent: Sent) -> Tensor:
        x = sent.x
        if isinstance(sent.call.op, AllReduce):
            # The result may go where the input was, so that the term is the one that the others read.
            return self._segment.view(sent.offset, x.numel(), x.dtype)
        return chunks(x, self._size)[self._rank] if sent.call.op.splits_input else x

    # Sums that are owed.

    def owe(self, sent: Sent) -> None:
        """Note that this rank has to take a sum, the first of which may be there already."""
        self._owed[sent.call.lane].append(sent)
        self.help()

    def help(self) -> None:
        """Take the sums of which all terms are there: the others may have to come on before this rank can."""
        # If others have started something else, the wait for that call says so.
        with contextlib.suppress(Disagreement):
            for lane, queue in zip(Lane, self._owed, strict=True):
                while queue and self._board.is_published(lane, queue[0].index):
                    self._take_next(queue)

    def sum_up_to(self, sent: Sent) -> None:
        """Take a sum that is owed, unless that is done, and those before it in its lane."""
        for peer in sent.plan.partners:
            # Meanwhile some of them are taken.
            self._board.record(sent, peer)
        queue = self._owed[sent.call.lane]
        while queue and queue[0].index <= sent.index:
            self._take_next(queue)

    def await_slices(self, sent: Sent) -> None:
        """Wait until the others have summed their slices of a borrowed sum."""
        for peer in sent.plan.partners:
            self._board.await_summed(sent, peer)

    def _take_next(self, queue: collections.deque[Sent]) -> None:
        """Take the first sum of a queue. All its terms are there, so that nothing waits, or helps, before it is done."""
        sent = queue.popleft()
        own = chunks(self._segment.view(sent.offset, sent.x.numel(), sent.x.dtype), self._size)[self._rank]
        try:
            self._add_up(sent, own, own)
        except Disagreement:
            queue.appendleft(sent)
            raise
        self._board.note_summed(sent)

    # Where it lies.

    def _input(self, sent: Sent, peer: int, numel: int) -> Tensor:
        """Return what another rank sends to this one, where it lies. ``numel`` is its length, not 0."""
        form, offset = self._board.record(sent, peer)
        if sent.call.op.splits_input or sent.out is None:
            position = self._rank - (form == PACKED and self._rank > peer)
            offset += position * numel * sent.x.dtype.itemsize
        return self._peers[peer].view(offset, numel, sent.x.dtype)

    def _unmap(self, peer: int, read: Tensor) -> None:
        """Let go of what another rank has sent, now that it has been read: mapped pages count as memory of this rank, too."""
        if read.nbytes >= _UNMAPPED_BYTES:
            other = self._peers[peer]
            other.unmap(read.data_ptr() - other.address, read.nbytes)
