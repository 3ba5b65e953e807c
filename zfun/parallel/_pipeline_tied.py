"""Leaves that several stages use: their gradients are summed over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zfun import stores
from zfun.collectives import AllReduce, Collective, Group, Stream, gather_json
from zfun.flat import Flat
from zfun.layout import LeafSlot
from zfun.placement import R, S
from zfun.transforms import redistribute


class TiedLeaves:
    """The leaves of this rank that other ranks of an axis hold too. All ranks of the axis make one.

    Args:
        axis: the ranks of the pipeline.
        holders: the ranks that hold a leaf, by path.
        slots: the leaves of this rank.
    """

    def __init__(
        self,
        axis: Group,
        holders: Callable[[str], tuple[int, ...]],
        slots: Sequence[LeafSlot],
    ) -> None:
        ranks_of = {slot.path: holders(slot.path) for slot in slots}
        mine = {path: ranks for path, ranks in ranks_of.items() if len(ranks) > 1}
        known = gather_json(sorted({*mine.values()}), axis, "tied leaves")
        everywhere = sorted({tuple(ranks) for ranks_here in known for ranks in ranks_here})
        groups = {ranks: group_of(axis, [ranks]) for ranks in everywhere}
        # By path, because the ranks have their leaves in orders of their own.
        self._tied = [(slot, groups[mine[slot.path]]) for slot in _by_path(slots, mine)]

    def sum(self, grads: Flat) -> Flat:
        """Return gradients in which tied leaves have the sum over the ranks that hold them.

        Args:
            grads: of this rank's leaves; the buffers change.
        """
        if not self._tied:
            return grads
        buffers = list(grads.buffers)
        for slot, group in self._tied:
            part = stores.resident(grads.with_buffers(buffers).select([slot.bucket]))
            (buffer,) = part.buffers
            whole = buffer
            if part.placement is S:
                (whole,) = redistribute(part, R, part.group, name="tied grads").buffers
            terms = whole[slot.offset : slot.offset + slot.numel].contiguous()
            call = Collective(AllReduce(), "tied grads", slot.path, Stream.CONTROL)
            total = group.start(call, terms).wait()
            begin, end = part.span(0)
            first = min(max(slot.offset, begin), end)
            last = max(first, min(slot.offset + slot.numel, end))
            buffer[first - begin : last - begin] = total[first - slot.offset : last - slot.offset]
            held = buffers[slot.bucket]
            if isinstance(held, stores.Stored):
                buffers[slot.bucket] = held.store.put(buffer, "grads")
        paths = {slot.path for slot, _ in self._tied}
        # A leaf that one of its stages uses is used.
        missed = {path: steps for path, steps in grads.missed.items() if path not in paths}
        return grads.with_buffers(buffers).with_missed(missed)


def _by_path(slots: Sequence[LeafSlot], paths: dict[str, tuple[int, ...]]) -> list[LeafSlot]:
    return sorted((slot for slot in slots if slot.path in paths), key=lambda slot: slot.path)


def group_of(axis: Group, parts: Sequence[Sequence[int]]) -> Group:
    """Return the group of the part with this rank in it; ranks in no part are alone."""
    if list(parts) == [tuple(range(axis.size))]:
        return axis
    inside = {rank for part in parts for rank in part}
    alone = [[rank] for rank in range(axis.size) if rank not in inside]
    return axis.subgroup([*map(list, parts), *alone])
