"""Collectives of the CPU ranks of one host, through memory that all of them have mapped.

The protocol has parts, each of which knows those before it: ``_sent`` (what a call is made of), ``_board`` (what the ranks tell each other,
and how they wait), ``_room`` (where inputs lie), ``_reading`` (copies and sums) and ``_leases`` (borrowed results). Here they are put
together. Beneath them are ``_segment``, the memory itself, and ``_region``, pieces of several segments as one.

[Note: collectives through shared memory]

Every rank owns a segment, which only it writes and which the others have mapped for reading. The ``k``-th call of a rank in a lane leaves a
record there: what it is (a hash and the text it was made of) and where its data begin. Then the lane's counter of published calls goes to
``k + 1``. Who needs the data waits for that counter, compares the hash with that of its own ``k``-th call, and reads what it needs straight
out of the segment. When it has finished all calls before ``d``, its own counter of finished calls says ``d``: the owner may use the room of
those calls again. So each word has one writer, and what it announces has been written before it: x86-64 keeps the order of stores, and of
loads, which is all that is asked of it (and why other machines are refused). Kernels that write past the caches, where that does not hold,
see to it before they return.

* There is no thread. ``start`` copies the input into the segment (unless it lies there already, see ``buffer``), ``wait`` reads. Neither
  waits for another rank to *finish* anything: not for its readers, and not for room, since the segment grows instead. So ranks may wait in
  any order, and lanes do not know of each other. A rank waits for those that it sends to as well, but only until they have started the
  call: that bounds how far it runs ahead of them, and it is how both sides notice that they started different things. Borrowed sums are
  taken before they are waited for ([Note: sums that are owed]), but never before all of their terms are there.
* Records stand in a ring of slots per lane. If the next slot is still in use, the lane goes on in a ring of twice the size. What is small
  lies in the slot itself.
* An all-reduce reads everything from everybody, in one phase: two phases would need a thread, or depend on the order of waits.

[Note: borrowed results]

A result that is only read (``Call.borrow``) need not be copied. If the inputs of an all-gather are whole pages, the result is a region of
addresses in which those very pages stand one after the other, and costs nothing: regions are kept, for the same inputs come again at every
step. A borrowed all-reduce has two phases: each rank sums its own slice over its own input, where nobody else reads it, and says so; then
the slices are borrowed. The first is owed ([Note: sums that are owed]): who waits for anything sums its slices of whatever has come
meanwhile, so that waits may still be in any order.

Who borrows says in the record of its own call when it has given the result back: when the last view of it is gone, or when it is about to
write to its own part (``give_up``). A view that somebody has kept in spite of that gets pages of its own then. So the owner knows when it
may write to what it has lent, and its old values never change under anybody's feet.

[Note: whose memory it is]

The system counts a page as memory of everybody who has it mapped, once for each mapping. A rank's own pages count where it writes them.
What it has read of the others, and regions that nobody looks at, are unmapped. That changes no page, and where they are huge ([Note: huge
pages]) it takes no time either. Small pages the next access finds again, 16 at a time when it reads; so a few regions of these stay mapped.
A write finds one at a time, so what was unmapped of a segment is mapped as a whole where a buffer is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zfun.collectives._board import Board
from zfun.collectives._calls import AllGather, AllReduce, Call, Lane, Op
from zfun.collectives._leases import Leases
from zfun.collectives._mapping import PAGE
from zfun.collectives._reading import Reader
from zfun.collectives._room import Room
from zfun.collectives._segment import Peer, Segment
from zfun.collectives._sent import Area, Disagreement, Sent, TransportError, Use, plan_of
from zfun.errors import OptionError

__all__ = ["Disagreement", "Sent", "SharedMemory", "TransportError", "Use"]


class SharedMemory:
    """The segments of all ranks, and the protocol over them. See [Note: collectives through shared memory].

    Args:
        segment: what this rank writes.
        peers: what the others write.
        rank: this rank.
        timeout_s: how long a wait may last.
    """

    def __init__(self, segment: Segment, peers: dict[int, Peer], rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._segment = segment
        self._peers = peers
        self._board = Board(segment, peers, timeout_s)
        self._room = Room(segment, self._board, rank, self.size)
        self._reader = Reader(segment, peers, self._board, rank)
        self._leases = Leases(segment, peers, self._board, self._room, rank)
        self._board.help = self._reader.help

    def watch(self, waiting: Callable[[Lane, int], AbstractContextManager[None]]) -> None:
        """Enter a context, of a lane and the number of a call, for every wait that takes long."""
        self._board.watch = waiting

    def interrupt(self) -> None:
        """Let all waits end, now and from now on."""
        self._board.interrupted = True

    def send(self, call: Call, text: str, x: Tensor, out: Tensor | None) -> Sent:
        """Publish this rank's next call of a lane.

        Args:
            call: what is done.
            text: what the ranks compare.
            x: the input.
            out: where the result goes; None to borrow it.

        Raises:
            OptionError: there is no memory for the input. Nothing has been published then.
        """
        self._leases.end()
        plan = plan_of(call.op, self.rank, self.size)
        borrowed = out is None
        try:
            index, slot = self._board.next_call(call.lane)
            use = Use(call.lane, index, plan.readers, text, borrowed)
            form, offset, area = self._room.lay_out(call.op, plan, x, out, slot, use, self._find(x))
        except OSError as error:
            nbytes = x.numel() * x.dtype.itemsize
            raise OptionError(f"the system has no shared memory for {nbytes} bytes ({error}); pass shared_memory=False") from error
        # All partners compare the record, whether or not they need what it points to.
        identity = self._board.publish(Use(call.lane, index, plan.partners, text, borrowed), slot, form, offset)
        is_owed = borrowed and isinstance(call.op, AllReduce)
        sent = Sent(call, index, identity, plan, slot, offset, area, x, out, is_owed)
        if is_owed:
            self._reader.owe(sent)
        return sent

    def finish(self, sent: Sent) -> Tensor:
        """Wait for the others' calls and return the result.

        Raises:
            Disagreement: one of them is another call.
            TransportError: one did not come.
        """
        if not self._peers:
            raise OptionError("a closed group finishes no collectives; wait for them before it is closed")
        self._board.begin_wait()
        if sent.is_owed:
            self._reader.sum_up_to(sent)
        if sent.out is None:
            if sent.is_owed:
                self._reader.await_slices(sent)
            result = self._leases.borrow(sent)
        else:
            if not sent.is_owed:
                self._reader.compute(sent, sent.out)
            result = sent.out
        self._board.note_finished(sent.call.lane, sent.index)
        return result

    def can_borrow(self, op: Op, x: Tensor) -> bool:
        """Whether a result can be borrowed: the same on all ranks."""
        nbytes = x.numel() * x.dtype.itemsize
        if isinstance(op, AllGather):
            return nbytes > 0 and nbytes % PAGE == 0
        return isinstance(op, AllReduce) and nbytes > 0 and x.numel() % self.size == 0 and nbytes % (PAGE * self.size) == 0

    def shows(self, x: Tensor) -> bool:
        """Whether a borrowed all-gather of a tensor shows it where it lies."""
        area, offset = self._find(x)
        return area is not None and self._room.can_show(offset) and self.can_borrow(AllGather(), x)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor in the segment, uninitialised, or None if there is no memory for it."""
        if numel == 0:
            return None
        self._reclaim()
        return self._room.buffer(numel, dtype)

    def give_up(self, x: Tensor) -> list[Use]:
        """Say that this rank reads no result any more which it has borrowed and which shows a buffer; see [Note: borrowed results].

        Args:
            x: a view of a buffer, or of this rank's own part of a borrowed result. It is going to be written. Where it shows parts of
                others, all of the result becomes memory of this rank alone.

        Returns:
            The calls in which others may still read it.
        """
        self._leases.end()
        area, _ = (None, 0) if self._leases.own_all(x) else self._find(x)
        if area is None:
            return []
        self._leases.give_up(area, x)
        self._room.forget_uses(area)
        return list(area.uses)

    def await_readers(self, use: Use) -> None:
        """Return when nobody reads the data of a call any more.

        Raises:
            TransportError: a reader did not finish it.
        """
        self._board.await_readers(use)

    def rest(self, x: Tensor) -> None:
        """Let go of what the region of a borrowed result shows of others; they keep it. Room that has become free is let go of, too."""
        self._reclaim()
        self._leases.rest(x)

    @property
    def in_use(self) -> int:
        """Bytes of the segment that hold something now."""
        self._reclaim()
        return self._segment.in_use

    @property
    def reserved(self) -> int:
        """Bytes of memory that the segment has taken."""
        return self._segment.reserved

    def close(self) -> None:
        """Hang up and let go of the memory."""
        if self._peers:
            self._segment.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._leases.forget_all()

    def _find(self, x: Tensor) -> tuple[Area | None, int]:
        """Return the area that a tensor lies in, directly or as this rank's part of a borrowed result, and where in the segment."""
        area, offset = self._room.find(x)
        return (area, offset) if area is not None else self._leases.find(x)

    def _reclaim(self) -> None:
        """Take back what nobody looks at or reads any more."""
        self._leases.end()
        self._room.reclaim()
