"""Start and finish collectives through symmetric memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives.shm._mailbox import INLINE_BYTES, Letter, Mailbox
from zfun.collectives.shm._pages import PAGE
from zfun.collectives.shm._segment import Peer, Segment
from zfun.collectives.shm._symmetric import MemoryBlock, Symmetric, chunks
from zfun.errors import OptionError
from zfun.ops._sums import sum_in_rank_order

# Below this size, unmapping after a read is not worth a system call.
_UNMAPPED_BYTES = 1 << 18
# Below this size, mapping takes longer than copying.
_WINDOW_BYTES = 1 << 15


class SharedMemory:
    """The segments of all ranks of a host. See [Note: collectives through symmetric memory].

    Args:
        segment: memory that this rank writes.
        peers: memory that the peers write.
        rank: this rank.
        timeout_s: how long a wait may take, in seconds.
    """

    def __init__(
        self, segment: Segment, peers: dict[int, Peer], rank: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._segment = segment
        self._peers = peers
        self._mailbox = Mailbox(segment, peers, timeout_s)
        self._symmetric = Symmetric(segment, peers, self._mailbox, rank)

    def watch(self, waiting: Callable[[_ops.Stream, int], AbstractContextManager[None]]) -> None:
        """Enter a context, made of stream and index, for each wait that takes long."""
        self._mailbox.watch = waiting

    def interrupt(self) -> None:
        """End all waits, now and from now on."""
        self._mailbox.interrupted = True

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised tensor in the segment, or None if there is no memory."""
        if numel == 0 or not self._peers:
            return None
        try:
            block = self._symmetric.allocate(numel * dtype.itemsize)
        except OSError:
            return None
        return self._symmetric.tensor(block, numel, dtype)

    def send(self, call: _ops.Collective, text: str, x: Tensor, out: Tensor | None) -> Letter:
        """Publish this rank's next collective of a stream.

        Args:
            call: the collective.
            text: compared across ranks.
            x: the input.
            out: the caller's output, if any.

        Raises:
            OptionError: there is no memory for the input. Nothing has been published then.
        """
        # Without counts, of which each step has others.
        op = _ops.AllToAll() if isinstance(call.op, _ops.UnequalAllToAll) else call.op
        readers = _readers(op, self.rank, self.size)
        sent = self._mailbox.prepare(call, text, readers, x, out)
        try:
            block = self._place(sent, x, out)
            self._mailbox.publish(sent)
        except OSError as error:
            raise OptionError(
                f"the system has no shared memory for {x.nbytes} bytes ({error}); pass "
                "shared_memory=False"
            ) from error
        if block is not None:
            self._symmetric.note_use(block, sent)
        return sent

    def finish(self, sent: Letter) -> Tensor:
        """Wait for the peers' inputs and return the result.

        Raises:
            Mismatch: a peer started another collective.
            TransportError: a peer started none.
        """
        if not self._peers:
            raise OptionError("a closed group finishes no collectives; wait before you close it")
        self._mailbox.await_records(sent)
        x, out = sent.x, sent.out
        assert x is not None
        sent.x = sent.out = None
        if out is None:
            found = self._window(sent, x)
            if found is not None:
                return found
            numel = sent.call.op.output_numel(x.numel(), self.size)
            # Only large zero-copy results lie in the segment, because a fork cannot read the
            # segment (see [Note: pages in a fork]).
            is_large = numel * x.dtype.itemsize >= PAGE
            found = self.allocate(numel, x.dtype) if sent.call.zero_copy and is_large else None
            out = x.new_empty(numel) if found is None else found
        self._compute(sent, x, out)
        self._mailbox.finish(sent)
        return out

    def release_for(self, x: Tensor) -> list[Letter]:
        """Finish this rank's windows over a tensor; return the records that peers must finish."""
        return self._symmetric.release_for(x)

    def await_readers(self, sent: Letter) -> None:
        """Wait until the readers have finished a collective.

        Raises:
            TransportError: a reader did not.
        """
        self._mailbox.await_finished(sent)

    def close(self) -> None:
        """Close the connections and release the memory."""
        if self._peers:
            self._symmetric.close()
            self._segment.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # Inputs.

    def _place(self, sent: Letter, x: Tensor, out: Tensor | None) -> MemoryBlock | None:
        """Find or make the place in the segment where the readers find an input.

        Return the block of the place, unless the place is the record itself.
        """
        if not sent.readers or not x.numel():
            return None
        block, sent.offset = self._symmetric.find(x)
        if block is None or not self._stays(sent.call.op, x, out):
            if x.nbytes <= INLINE_BYTES:
                sent.offset = self._mailbox.inline(sent)
                self._segment.view(sent.offset, x.numel(), x.dtype).copy_(x)
                return None
            block = self._symmetric.allocate(x.nbytes)
            sent.offset = block.offset
            self._segment.view(sent.offset, x.numel(), x.dtype).copy_(x)
            self._symmetric.retire(block)
        return block

    def _stays(self, op: _ops.Op, x: Tensor, out: Tensor | None) -> bool:
        """Whether readers may read an input in place, because no output overwrites the input."""
        # Peers read raw memory, which a lazy conjugate or negative shares with the original.
        if x.is_conj() or x.is_neg():
            return False
        if out is None or out.data_ptr() + out.nbytes <= x.data_ptr():
            return True
        if isinstance(op, _ops.AllGather) and x.data_ptr() == out.data_ptr() + self.rank * x.nbytes:
            return True
        return x.data_ptr() + x.nbytes <= out.data_ptr()

    # Results.

    def _window(self, sent: Letter, x: Tensor) -> Tensor | None:
        call, block = sent.call, self._symmetric.block_at(sent.offset)
        if not call.zero_copy or not isinstance(call.op, _ops.AllGather):
            return None
        if block is None or not all(_fits(at, x) for at in (sent.offset, *sent.inputs())):
            return None
        return self._symmetric.window(sent, block, x.numel(), x.dtype)

    def _compute(self, sent: Letter, x: Tensor, out: Tensor) -> None:
        op = sent.call.op
        match op:
            case _ops.AllGather() | _ops.AllToAll():
                inputs = chunks(x, self.size) if op.splits_input else [x] * self.size
                for rank, piece in enumerate(chunks(out, self.size)):
                    self._copy(sent, inputs[self.rank], rank, piece)
            case _ops.UnequalAllToAll():
                own = x.split(op.sent)[self.rank]
                for rank, piece in enumerate(out.split(op.received)):
                    self._copy(sent, own, rank, piece)
            case _ops.ReduceScatter():
                self._sum(sent, chunks(x, self.size)[self.rank], out)
            case _ops.AllReduce():
                # The output may be the input, so this rank too reads its term where the peers do.
                place = sent.offset
                self._sum(sent, self._segment.view(place, x.numel(), x.dtype) if place else x, out)
            case _ops.Reduce(root) if root == self.rank:
                self._sum(sent, x, out)
            case _ops.Reduce():
                out.zero_()
            case _ops.Broadcast(root):
                self._copy(sent, x, root, out)
            case _ops.Permute():
                self._copy(sent, x, op.sources[self.rank], out)

    def _copy(self, sent: Letter, own: Tensor, source: int, out: Tensor) -> None:
        if source != self.rank:
            found = self._input(sent, source, out)
            out.copy_(found)
            self._unmap(sent, source, out)
        elif not out.is_set_to(own):
            out.copy_(own)

    def _sum(self, sent: Letter, own: Tensor, out: Tensor) -> None:
        terms = [
            own if rank == self.rank else self._input(sent, rank, out) for rank in range(self.size)
        ]
        sum_in_rank_order(terms, out)
        for peer in self._peers:
            self._unmap(sent, peer, out)

    def _place_of(self, sent: Letter, peer: int, out: Tensor) -> int:
        (_, offset), op = sent.peers[peer], sent.call.op
        if isinstance(op, _ops.UnequalAllToAll):
            return offset + sum(op.counts[peer][: self.rank]) * out.dtype.itemsize
        return offset + (self.rank * out.nbytes if op.splits_input else 0)

    def _input(self, sent: Letter, peer: int, out: Tensor) -> Tensor:
        """Return the input of a peer for this rank, in place."""
        if not out.numel():
            return out
        return self._peers[peer].view(self._place_of(sent, peer, out), out.numel(), out.dtype)

    def _unmap(self, sent: Letter, peer: int, out: Tensor) -> None:
        if out.nbytes >= _UNMAPPED_BYTES:
            self._peers[peer].unmap(self._place_of(sent, peer, out), out.nbytes)


def _fits(offset: int, x: Tensor) -> bool:
    """Whether an input can be a piece of a window."""
    return x.nbytes >= _WINDOW_BYTES and x.nbytes % PAGE == 0 and offset % PAGE == 0


@functools.lru_cache(maxsize=1024)
def _readers(op: _ops.Op, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks that read the input of a rank."""
    others: Sequence[int] = [peer for peer in range(size) if peer != rank]
    match op:
        case _ops.Broadcast(root):
            others = others if rank == root else []
        case _ops.Reduce(root):
            others = [] if rank == root else [root]
        case _ops.Permute(destinations):
            others = [peer for peer in others if destinations[rank] == peer]
        case _:
            pass
    return tuple(others)
