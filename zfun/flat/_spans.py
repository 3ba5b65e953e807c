"""The elements of each leaf in the buffers of a rank, and the pieces of whole buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.flat._flat import FLAT, Flat
from zfun.layout import BucketSlot
from zfun.options import integer, takes
from zfun.placement import S


class LeafSpan(NamedTuple):
    """The elements of one leaf that lie in a rank's buffers.

    Attributes:
        path: the tree path of the leaf; of tied leaves the first one.
        bucket: which of ``flat.buffers``.
        start: where the elements begin in this buffer.
        stop: where the elements end; equal to ``start`` on a rank without elements of the leaf.
        first: the element of the ravelled leaf at ``start``. A complex number is two
            elements.
    """

    path: str
    bucket: int
    start: int
    stop: int
    first: int


@takes(flat=FLAT, rank=integer(0) | None)
def leaf_spans(flat: Flat, rank: int | None = None) -> tuple[LeafSpan, ...]:
    """Return the elements of each leaf in a rank's buffers, for rules that work leaf by leaf.

    Args:
        flat: with any placement. Under ``R`` and ``P`` every rank holds whole leaves.
        rank: the rank whose buffers are meant; by default this one.

    Returns:
        One span for each leaf of ``flat.layout.leaves``, in their order.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(100), "b": torch.ones(8)}, group)
        ...     return [tuple(span) for span in leaf_spans(flat)]
        >>> for spans in zf.simulate(2, main):
        ...     print(spans)
        [('w', 0, 0, 96, 0), ('b', 0, 96, 96, 0)]
        [('w', 0, 0, 4, 96), ('b', 0, 32, 40, 0)]
    """
    rank = flat.group.rank if rank is None else rank
    if rank >= flat.group.size:
        raise OptionError(
            f"leaf_spans() takes a rank of the group; got rank {rank} of {flat.group.size} ranks; "
            "leave rank out for this rank"
        )
    spans = []
    for slot in flat.layout.leaves:
        begin, end = flat.span(slot.bucket, rank)
        start, stop = _cut(slot.offset, slot.offset + slot.numel, begin, end)
        first = min(max(begin - slot.offset, 0), slot.numel)
        spans.append(LeafSpan(slot.path, slot.bucket, start, stop, first))
    return tuple(spans)


def padding_spans(flat: Flat) -> list[list[tuple[int, int]]]:
    """Return for each buffer of this rank the ranges ``[start, stop)`` that belong to no leaf."""
    ends = [0] * len(flat.layout.buckets)
    found: list[list[tuple[int, int]]] = [[] for _ in ends]
    # Leaves follow each other within a bucket.
    for span in sorted(leaf_spans(flat), key=lambda span: span.start):
        if span.start < span.stop:
            if span.start > ends[span.bucket]:
                found[span.bucket].append((ends[span.bucket], span.start))
            ends[span.bucket] = span.stop
    for bucket, end in enumerate(ends):
        begin, stop = flat.span(bucket)
        if end < stop - begin:
            found[bucket].append((end, stop - begin))
    return found


def _cut(start: int, stop: int, begin: int, end: int) -> tuple[int, int]:
    """Intersect ``[start, stop)`` with ``[begin, end)``, counted from ``begin``."""
    first = min(max(start, begin), end)
    return first - begin, max(first, min(stop, end)) - begin


def local_shards(flat: Flat) -> tuple[Tensor, ...]:
    """Return this rank's piece of every bucket; under ``R`` and ``P`` a slice of the buffer."""
    if flat.placement is S:
        return flat.buffers
    return tuple(own_pieces(flat, flat.group))


def own_pieces(flat: Flat, group: Group) -> Iterator[Tensor]:
    """Yield this rank's piece, as one of a group, of every whole buffer."""
    for buffer, slot in zip(flat.buffers, flat.layout.buckets, strict=True):
        yield own_piece(buffer, slot, group)


def own_piece(buffer: Tensor, slot: BucketSlot, group: Group) -> Tensor:
    """Return this rank's piece of a whole buffer."""
    start, stop = slot.span(group.rank, group.size)
    return buffer[start:stop]
