"""Split buckets by label, and cut them into the pieces of a placement."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import torch

from zfun.errors import OptionError
from zfun.layout._slots import (
    ALIGNMENT,
    LAYOUT,
    PLACEMENT,
    BucketSlot,
    LabelFn,
    Layout,
    LeafSlot,
    aligned,
    logical_leaf,
    logical_path,
)
from zfun.options import OF_LEAVES, integer, takes
from zfun.placement import UNIT, PlacementRule, Sharded


@functools.lru_cache(maxsize=256)
def labels_of(layout: Layout, label: LabelFn) -> tuple[Hashable, ...]:
    """Return the label of each slot of a layout, one for all copies of a tied leaf."""
    return tuple(label(logical_path(slot), logical_leaf(slot)) for slot in layout.leaves)


@takes(layout=LAYOUT, label=OF_LEAVES)
def split_by_label(layout: Layout, label: LabelFn) -> Layout:
    """Cut buckets so that each holds leaves of one label.

    Args:
        layout: any layout.
        label: ``label(path, leaf)``; the leaf is a meta tensor with shape and dtype.

    Returns:
        A layout of the same leaves in the same order; the same object if no bucket mixes labels.

    Example:
        >>> from zfun.layout import layout_of
        >>> w, b, v = torch.zeros(5, 3), torch.zeros(3), torch.zeros(3, 2)
        >>> layout = split_by_label(layout_of({"w": w, "b": b, "v": v}), lambda path, x: x.ndim)
        >>> [bucket.leaves for bucket in layout.buckets]
        [(0, 2), (1,)]
    """
    return _split_by_label(layout, label, layout.device)


@functools.lru_cache(maxsize=256)
def _split_by_label(layout: Layout, label: LabelFn, device: torch.device) -> Layout:
    labels = labels_of(layout, label)
    slots = list(layout.leaves)
    buckets: list[BucketSlot] = []
    held: dict[int, list[int]] = {}
    unit = ALIGNMENT * layout.size
    for bucket in layout.buckets:
        for chosen in dict.fromkeys(labels[leaf] for leaf in bucket.leaves):
            members = tuple(leaf for leaf in bucket.leaves if labels[leaf] == chosen)
            end = 0
            for leaf in members:
                slots[leaf] = dataclasses.replace(slots[leaf], bucket=len(buckets), offset=end)
                end += aligned(slots[leaf].numel)
            numel = sum(slots[leaf].numel for leaf in members)
            one = BucketSlot(bucket.dtype, members, numel, -(-end // unit) * unit, bucket.placement)
            if bucket.pieces:
                size = len(bucket.pieces)
                one = _cut(one, slots, size, held.setdefault(size, [0] * size))
            buckets.append(one)
    if len(buckets) == len(layout.buckets):
        return layout
    return dataclasses.replace(layout, leaves=tuple(slots), buckets=tuple(buckets), device=device)


@takes(layout=LAYOUT, placement=PLACEMENT, size=integer(1))
def place(layout: Layout, placement: Sharded | PlacementRule, size: int) -> Layout:
    """Choose how the ranks cut each bucket under ``S``.

    Args:
        layout: with equal pieces; of an optimizer by label, with buckets of one label each.
        placement: one of :mod:`zfun.placement` for all leaves, or a rule ``(path, leaf) ->
            placement``; leaves of different placements go into different buckets.
        size: the number of ranks that share the value: of an inner axis, the ranks of a row.

    Returns:
        A layout of the same leaves.

    Raises:
        OptionError: a rule returns no placement, or the pieces do not hold each element once.

    Example:
        >>> from zfun.layout import layout_of
        >>> from zfun.placement import Owned
        >>> from zfun.placement import Owned
        >>> params = {"w": torch.zeros(96), "b": torch.zeros(3)}
        >>> place(layout_of(params, 2), Owned(), 2).buckets[0].pieces
        ((0, 96), (96, 128))
    """
    if isinstance(placement, Sharded):
        labelled, chosen = layout, (placement,) * len(layout.leaves)
    else:
        chosen = labels_of(layout, placement)
        for slot, found in zip(layout.leaves, chosen, strict=True):
            if not isinstance(found, Sharded):
                raise OptionError(
                    "a rule for placements returns one, such as zf.S or zf.placement.Owned(); got "
                    f"{found!r} for leaf {slot.path!r}; return zf.S for equal pieces",
                    leaf=slot.path,
                )
        labelled = _split_by_label(layout, placement, layout.device)
    held = [0] * size
    buckets: list[BucketSlot] = []
    for bucket in labelled.buckets:
        of = chosen[bucket.leaves[0]]
        assert isinstance(of, Sharded)
        one = dataclasses.replace(bucket, placement=of)
        buckets.append(_cut(one, labelled.leaves, size, held))
    return dataclasses.replace(labelled, buckets=tuple(buckets))


def _cut(bucket: BucketSlot, slots: Sequence[LeafSlot], size: int, held: list[int]) -> BucketSlot:
    """Return a bucket with the pieces of its placement, and count what the ranks hold."""
    numel = bucket.padded_numel
    leaves = [slots[leaf] for leaf in bucket.leaves]
    found = bucket.placement.pieces(leaves, numel, size, tuple(held))
    pieces = tuple((int(start), int(stop)) for start, stop in found)
    filled = sorted(piece for piece in pieces if piece[0] != piece[1])
    ends = [0, *(stop for _, stop in filled)]
    is_cover = len(pieces) == size and [*(start for start, _ in filled), numel] == ends
    if not is_cover or any(end % UNIT for end in ends):
        raise OptionError(
            "the pieces of a placement, one for each rank, hold each element of a bucket once, and "
            f"begin at multiples of {UNIT}; got {found!r} from {bucket.placement!r} for {numel} "
            f"elements on {size} ranks; cover 0 to numel without gaps, at multiples of {UNIT}"
        )
    for rank, (start, stop) in enumerate(pieces):
        held[rank] += stop - start
    share = numel // size
    is_equal = pieces == tuple((rank * share, (rank + 1) * share) for rank in range(size))
    return dataclasses.replace(bucket, pieces=() if is_equal else pieces)
