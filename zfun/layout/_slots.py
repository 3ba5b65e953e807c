"""The place of every leaf of a tree in a few flat buffers, as static integers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from zfun import tree
from zfun.errors import PlacementError
from zfun.options import OF_LEAVES, instance
from zfun.placement import UNIT, Cut, Held, S, Sharded

# ``label(path, leaf)`` returns the label of a leaf from path, shape and dtype. The leaf may be a
# meta tensor, because a layout has no numbers.
LabelFn: TypeAlias = Callable[[str, Any], Hashable]

# Leaves begin and shards end at multiples of this many elements: whole vector registers, and whole
# cache lines for all dtypes from float16 on.
ALIGNMENT = UNIT


def aligned(numel: int) -> int:
    """Round a number of elements up to the next place where a leaf may begin."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LeafSlot:
    """The place of one leaf.

    Attributes:
        path: tree path of the leaf; for tied leaves the first path.
        shape: shape of the leaf.
        dtype: dtype of the leaf.
        bucket: index of the bucket.
        offset: start of the leaf, in elements of the bucket.
        numel: number of elements in the bucket; a complex number counts as two.
        spread: how the leaf comes from one of the logical tree, for each model axis; ``None`` for
            an axis along which every rank has the whole leaf.
        whole: shape of the logical leaf, where an axis cuts it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: int
    offset: int
    numel: int
    spread: tuple[Cut | Held | None, ...] = ()
    whole: tuple[int, ...] = ()


def logical_leaf(slot: LeafSlot) -> torch.Tensor:
    """Return a meta tensor for the leaf of the logical tree, as functions of leaves get it."""
    return torch.empty(slot.whole or slot.shape, dtype=slot.dtype, device="meta")


def logical_path(slot: LeafSlot) -> str:
    """Return the path of the first of the leaves that are tied to this one, on any rank.

    Ranks of a model axis may have a tied leaf under different paths. Whatever is said by path, such
    as a label or a number of steps, goes by this one, so that all copies take the same steps.
    """
    ties = (kind.tied_to for kind in slot.spread if isinstance(kind, Held) and kind.tied_to)
    return next(ties, slot.path)


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """One flat buffer.

    Attributes:
        dtype: dtype of the buffer; buckets never mix dtypes.
        leaves: indices of the leaves in the buffer, by offset.
        numel: number of elements of all leaves.
        padded_numel: length of the buffer, a multiple of the group size. Padding is zero and stays
            zero.
        placement: how the ranks divide the buffer under ``S``.
        pieces: the piece ``(start, stop)`` of each rank; empty where all pieces are equal.
    """

    dtype: torch.dtype
    leaves: tuple[int, ...]
    numel: int
    padded_numel: int
    placement: Sharded = S
    pieces: tuple[tuple[int, int], ...] = ()

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """Return where the piece of a rank begins and ends under ``S``, among ``size`` ranks.

        Raises:
            PlacementError: the bucket was divided among another number of ranks.

        Example:
            >>> from zfun.layout import layout_of
            >>> layout_of({"w": torch.zeros(70)}, size=2).buckets[0].span(1, 2)
            (64, 128)
        """
        if not self.pieces:
            share = self.padded_numel // size
            return rank * share, (rank + 1) * share
        if len(self.pieces) != size:
            raise PlacementError(
                f"{self.placement!r} divides a bucket among the ranks that it was laid out for; "
                f"got {size} ranks for {len(self.pieces)} pieces; unshard() the value and shard it "
                "over the other group"
            )
        return self.pieces[rank]


@dataclass(frozen=True, eq=False)
class Layout:
    """The place of every leaf of a tree in a few flat buffers.

    Attributes:
        leaves: one slot per leaf; tied leaves share a slot.
        buckets: the buffers.
        size: a divisor of every bucket's length: the number of ranks, of the whole mesh if there is
            one.
        spec: the structure of the tree.
        positions: the index of the slot of each leaf, in tree order.
        paths: the path of each leaf, in tree order.
        device: the device of the leaves.
    """

    leaves: tuple[LeafSlot, ...]
    buckets: tuple[BucketSlot, ...]
    size: int
    spec: tree.Spec
    positions: tuple[int, ...]
    paths: tuple[str, ...]
    device: torch.device
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.leaves, self.size, self.positions)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (self.leaves, self.buckets, self.positions, self.spec) == (
            other.leaves,
            other.buckets,
            other.positions,
            other.spec,
        )

    def select(self, buckets: Sequence[int]) -> Layout:
        """Return the layout of some of the buckets; the tree has holes (``None``) for the rest.

        Args:
            buckets: ascending indices of buckets.

        Returns:
            A layout with these buckets unchanged; this layout if all buckets are chosen.

        Example:
            >>> from zfun.layout import layout_of
            >>> scale = torch.zeros(1, dtype=torch.float64)
            >>> layout = layout_of({"w": torch.zeros(3), "scale": scale})
            >>> layout.select([1]).paths
            ('scale',)
        """
        return (
            self
            if len(buckets) == len(self.buckets)
            else _select(self, tuple(buckets), self.device)
        )

    def label(self, bucket: int) -> str:
        """Name a bucket after the leaves, for messages.

        Example:
            >>> from zfun.layout import layout_of
            >>> layout_of({"w": torch.zeros(3), "b": torch.zeros(1)}, size=2).label(0)
            'bucket 0: w … b (2 leaves)'
        """
        return self._labels[bucket]

    @functools.cached_property
    def _labels(self) -> list[str]:
        found = []
        for bucket, slot in enumerate(self.buckets):
            first, last, count = slot.leaves[0], slot.leaves[-1], len(slot.leaves)
            name = self.leaves[first].path
            name += f" … {self.leaves[last].path} ({count} leaves)" if count > 1 else ""
            found.append(f"bucket {bucket}: {name}")
        return found


PLACEMENT = instance(Sharded, "a placement", "zf.placement.Owned()") | OF_LEAVES
LAYOUT = instance(Layout, "a layout", "zf.layout.layout_of(params, group.size)")


@functools.lru_cache(maxsize=64)
def _select(layout: Layout, buckets: tuple[int, ...], device: torch.device) -> Layout:
    # Layouts that differ in the device alone are equal, so the cache has the device too.
    kept = [i for i, slot in enumerate(layout.leaves) if slot.bucket in buckets]
    place = {old: new for new, old in enumerate(kept)}
    slots = tuple(
        dataclasses.replace(layout.leaves[i], bucket=buckets.index(layout.leaves[i].bucket))
        for i in kept
    )
    chosen = tuple(
        dataclasses.replace(
            layout.buckets[b], leaves=tuple(place[leaf] for leaf in layout.buckets[b].leaves)
        )
        for b in buckets
    )
    spec = tree.structure(
        tree.unflatten(
            layout.spec, [True if position in place else None for position in layout.positions]
        )
    )
    positions = tuple(place[position] for position in layout.positions if position in place)
    paths = tuple(
        path
        for path, position in zip(layout.paths, layout.positions, strict=True)
        if position in place
    )
    return Layout(slots, chosen, layout.size, spec, positions, paths, device)
