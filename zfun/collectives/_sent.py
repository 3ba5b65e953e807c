"""What is sent through shared memory: plain data that all parts of [Note: collectives through shared memory] have in common.

A call that a rank has started is ``Sent``. Its input lies in an ``Area`` of the rank's segment; a ``Use`` says for how long others may read
it there. What the rank does in a collective, and with whom, is its ``Plan``.
"""

from __future__ import annotations

import collections
import functools
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Lane, Op, Permute, Reduce, ReduceScatter

__all__ = [
    "NOTHING",
    "PACKED",
    "WHOLE",
    "Area",
    "Disagreement",
    "Plan",
    "Sent",
    "TransportError",
    "Use",
    "Watch",
    "chunks",
    "plan_of",
    "watched",
]


class TransportError(Exception):
    """A message that did not come or could not be sent. ``peer`` is the other rank."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Disagreement(Exception):
    """Another rank has started something else at this place. ``text`` says what."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.text = text


# How an input lies in the segment: not at all, as it is, or without the owner's own chunk.
NOTHING, WHOLE, PACKED = range(3)


class Plan(NamedTuple):
    """The part of a rank in a collective.

    Attributes:
        form: how its input is laid out for the others.
        readers: the ranks that read it.
        partners: the ranks that it sends to or reads from.
    """

    form: int
    readers: tuple[int, ...]
    partners: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def plan_of(op: Op, rank: int, size: int) -> Plan:
    """Return the part of a rank in a collective."""
    # Neighbours first, each rank its own, so that not all of them read from rank 0 at once.
    others = tuple((rank + step) % size for step in range(1, size))
    match op:
        case AllGather() | AllReduce():
            return Plan(WHOLE, others, others)
        case ReduceScatter() | AllToAll():
            return Plan(PACKED, others, others)
        case Broadcast(root):
            return Plan(WHOLE, others, others) if rank == root else Plan(NOTHING, (), (root,))
        case Reduce(root):
            return Plan(NOTHING, (), others) if rank == root else Plan(WHOLE, (root,), (root,))
        case Permute(destinations):
            target, source = destinations[rank], op.sources[rank]
            if target == rank:
                return Plan(NOTHING, (), ())
            return Plan(WHOLE, (target,), (source,) if source == target else (source, target))


@dataclass(slots=True)
class Use:
    """A call whose data others read; a borrowed result counts as read until it is given back."""

    lane: Lane
    index: int
    readers: tuple[int, ...]
    text: str
    borrowed: bool = False


class Watch(weakref.ref[memoryview]):
    """Says when a window is gone, under a number: that of a lease, or where a buffer lies."""

    __slots__ = ("number",)

    number: int


def watched(window: memoryview, gone: collections.deque[Watch], number: int) -> Watch:
    """Let the end of a window be noted in a queue, which may happen at any moment and in any thread."""
    watch = Watch(window, gone.append)
    watch.number = number
    return watch


@dataclass(slots=True, eq=False)
class Area:
    """A piece of the segment: room for an input, or a buffer that the caller holds.

    Attributes:
        uses: the calls in which others may still read it.
        num_leases: how many borrowed results show it to this rank.
        is_parked: whether the end of those is waited for before it is taken back.
        watch: says when the caller lets go of a buffer.
    """

    offset: int
    nbytes: int
    uses: list[Use] = field(default_factory=list)
    num_leases: int = 0
    is_parked: bool = False
    watch: Watch | None = None


class Sent(NamedTuple):
    """A call that this rank has published: what is needed to finish it.

    Attributes:
        x: the input.
        out: where the result goes; ``None`` to borrow it.
        is_owed: whether it is a sum in the queue of [Note: sums that are owed].
    """

    call: Call
    index: int
    identity: int
    plan: Plan
    slot: int
    offset: int
    area: Area | None
    x: Tensor
    out: Tensor | None
    is_owed: bool = False


def chunks(x: Tensor, size: int) -> list[Tensor]:
    """Cut a tensor into as many equal pieces as there are ranks."""
    return list(x.view(size, x.numel() // size).unbind())
