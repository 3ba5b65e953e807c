"""Leaves that several stages use: their gradients are summed over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zfun import stores
from zfun.collectives import AllReduce, Collective, Group, Stream
from zfun.flat import Flat
from zfun.layout import LeafSlot
from zfun.placement import Cut, Held, R, S
from zfun.transforms import redistribute


class TiedLeaves:
    """The leaves of this rank that other ranks of an axis hold too.

    Args:
        slots: the leaves of this rank; the first axis of their spreads is that of the pipeline.
        groups: the group of the ranks that hold a leaf, by these ranks.

    Attributes:
        count: of these leaves.
    """

    def __init__(self, slots: Sequence[LeafSlot], groups: Mapping[tuple[int, ...], Group]) -> None:
        # Ranks have their leaves in orders of their own, and tied leaves may have other paths.
        found = [
            (kind.tied_to or slot.path, slot, groups[kind.ranks])
            for slot in slots
            if (kind := tied(slot.spread)) is not None
        ]
        self._tied = sorted(found, key=lambda x: x[0])
        self.count = len(found)

    def sum(self, grads: Flat) -> Flat:
        """Return gradients in which tied leaves have the sum over the ranks that hold them.

        Args:
            grads: of this rank's leaves; the buffers change.
        """
        buffers = list(grads.buffers)
        missed = dict(grads.missed)
        for name, slot, group in self._tied:
            part = stores.resident(grads.with_buffers(buffers).select([slot.bucket]))
            (buffer,) = part.buffers
            whole = buffer
            if part.placement is S:
                (whole,) = redistribute(part, R, part.group, name="tied grads").buffers
            terms = whole[slot.offset : slot.offset + slot.numel]
            is_used = terms.new_tensor([0.0 if slot.path in missed else 1.0])
            call = Collective(AllReduce(), "tied grads", name, Stream.CONTROL)
            total = group.start(call, torch.cat([terms, is_used])).wait()
            # A leaf that one of its stages uses is used.
            if slot.path in missed and float(total[-1]) > 0:
                del missed[slot.path]
            begin, end = part.span(0)
            first = min(max(slot.offset, begin), end)
            last = max(first, min(slot.offset + slot.numel, end))
            buffer[first - begin : last - begin] = total[first - slot.offset : last - slot.offset]
            held = buffers[slot.bucket]
            if isinstance(held, stores.Stored):
                buffers[slot.bucket] = held.store.put(buffer, "grads")
        return grads.with_buffers(buffers).with_missed(missed)


def tied(spread: Sequence[Cut | Held | None]) -> Held | None:
    """Return which ranks of the pipeline hold a leaf, if these are several."""
    kind = spread[0] if spread else None
    return kind if isinstance(kind, Held) and len(kind.ranks) > 1 else None


def group_of(axis: Group, parts: Sequence[Sequence[int]]) -> Group:
    """Return the group of the part with this rank in it; ranks in no part are alone."""
    if list(parts) == [tuple(range(axis.size))]:
        return axis
    inside = {rank for part in parts for rank in part}
    alone = [[rank] for rank in range(axis.size) if rank not in inside]
    return axis.subgroup([*map(list, parts), *alone])


def pair_groups(axis: Group, pairs: Sequence[tuple[int, int]]) -> dict[int, Group]:
    """Return the group of two for each rank that this rank has messages with."""
    found: dict[int, Group] = {}
    left = list(pairs)
    while left:
        # Pairs without a common rank are made together.
        parts: list[tuple[int, int]] = []
        for pair in left:
            if not any(set(pair) & set(other) for other in parts):
                parts.append(pair)
        left = [pair for pair in left if pair not in parts]
        group = group_of(axis, parts)
        for low, high in parts:
            if axis.rank in (low, high):
                found[high if axis.rank == low else low] = group
    return found
