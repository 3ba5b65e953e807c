"""Layout: the place of every leaf of a tree in a few flat buffers, as static integers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import AliasChanged, LeafError, OptionError, PlacementError, SpecMismatch
from zfun.options import ANY, BOOL, DTYPE, NAMES, OF_LEAVES, instance, integer, takes
from zfun.placement import UNIT, PlacementRule, S, Sharded
from zfun.sources.deferred import Deferred, memory_of, spec_of

__all__ = [
    "ALIGNMENT",
    "DEFAULT_BUCKET_BYTES",
    "BucketSlot",
    "LabelFn",
    "Layout",
    "LeafSlot",
    "layout_of",
    "place",
    "split_by_label",
    "unique_leaves",
]

# ``label(path, leaf)`` returns the label of a leaf from path, shape and dtype. The leaf may be a
# meta tensor, because a layout has no numbers.
LabelFn: TypeAlias = Callable[[str, Any], Hashable]

DEFAULT_BUCKET_BYTES = 26 * 2**20

# Shards of large buckets are whole pages, so that ranks of one host share a bucket without a copy.
_PAGE_BYTES = 4096
_MAX_WASTE = 0.02

# Leaves begin and shards end at multiples of this many elements: whole vector registers, and whole
# cache lines for all dtypes from float16 on.
ALIGNMENT = UNIT

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


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
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: int
    offset: int
    numel: int


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
            >>> layout_of({"w": torch.zeros(3), "b": torch.zeros(1)}, size=2).label(0)
            'bucket 0: w … b (2 leaves)'
        """
        names = [self.leaves[leaf].path for leaf in self.buckets[bucket].leaves]
        if len(names) == 1:
            return f"bucket {bucket}: {names[0]}"
        return f"bucket {bucket}: {names[0]} … {names[-1]} ({len(names)} leaves)"


PLACEMENT = instance(Sharded, "a placement", "zf.placement.Owned()") | OF_LEAVES
LAYOUT = instance(Layout, "a layout", "zf.layout.layout_of(params, group.size)")


@dataclass(frozen=True, slots=True)
class _LeafKey:
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@takes(
    params=ANY,
    size=integer(1),
    bucket_bytes=integer(1),
    persistence=integer(0),
    order=NAMES | None,
    dtype=DTYPE | None,
)
def layout_of(
    params: tree.Tree,
    size: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    order: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Layout:
    """Lay a tree of tensors out in flat buckets.

    Buckets follow the insertion order of the tree, or ``order``, and hold one dtype each. A bucket
    closes before a leaf that would exceed ``bucket_bytes``. A bucket that is half full also closes
    at the end of a block (``h.0``, ``h.1``, ...), so that buckets tend to match blocks, unless all
    remaining leaves fit. A leaf is never cut.

    Args:
        params: any tree of tensors and deferred leaves (:class:`zfun.sources.Deferred`). Leaves
            that are the same view of the same memory are tied and share a slot.
        size: number of ranks that share each bucket.
        bucket_bytes: size in bytes at which a bucket closes.
        persistence: leaves of at most this many elements lie in separate buckets, which
            :func:`zfun.shard_params` may keep gathered.
        order: paths of leaves in order of first use, as returned by
            :func:`zfun.planner.order_of_use`. Leaves without an entry come first, because gradients
            are reduced from the last bucket on, and a leaf without a gradient must not delay the
            others. Paths that are not in this tree are ignored, so that both parts of a partition
            can use one order.
        dtype: the dtype of floating leaves in the buckets; by default that of each leaf.

    Returns:
        The layout. Equal arguments give the same object.

    Raises:
        LeafError: a leaf is not a tensor, shows an element twice (as after ``expand``), or overlaps
            another leaf.

    Example:
        >>> layout = layout_of({"w": torch.zeros(5, 3), "b": torch.zeros(3)}, size=2)
        >>> layout.buckets[0].padded_numel, layout.leaves[1].offset
        (64, 32)
        >>> params = {"head": torch.zeros(3), "unused": torch.zeros(3), "w": torch.zeros(3)}
        >>> [layout_of(params, 1, 1, order=["w", "head"]).label(bucket) for bucket in range(3)]
        ['bucket 0: unused', 'bucket 1: w', 'bucket 2: head']
    """
    values, spec = tree.flatten(params)
    paths = tree.paths(params)
    for path, leaf in zip(paths, values, strict=True):
        _check_leaf(path, leaf)
    devices = {leaf.device for leaf in values}
    if len(devices) > 1:
        where = {path: str(leaf.device) for path, leaf in zip(paths, values, strict=True)}
        raise LeafError(f"leaves of one tree must be on one device; got {where}; move them first")
    firsts, positions = _alias_sets(paths, values)
    turns = None if order is None else _turns(order, paths, positions)
    keys = tuple(
        _LeafKey(
            paths[i],
            tuple(values[i].shape),
            values[i].dtype if dtype is None or not values[i].dtype.is_floating_point else dtype,
        )
        for i in firsts
    )
    device = devices.pop() if devices else torch.device("cpu")
    return _layout(
        keys,
        tuple(positions),
        tuple(paths),
        spec,
        int(size),  # of numpy too, which would stay in the cached layout
        bucket_bytes,
        persistence,
        device,
        turns,
    )


def _turns(
    order: Sequence[str], paths: Sequence[str], positions: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the slots in the order of the layout; ``None`` for the order of the tree."""
    slots = dict(zip(paths, positions, strict=True))
    named = [slots[path] for path in order if path in slots]
    used = set(named)
    turns = tuple(dict.fromkeys([*(slot for slot in positions if slot not in used), *named]))
    return None if turns == tuple(range(len(turns))) else turns


@functools.lru_cache(maxsize=256)
def _layout(
    keys: tuple[_LeafKey, ...],
    positions: tuple[int, ...],
    paths: tuple[str, ...],
    spec: tree.Spec,
    size: int,
    bucket_bytes: int,
    persistence: int,
    device: torch.device,
    turns: tuple[int, ...] | None,
) -> Layout:
    slots: dict[int, LeafSlot] = {}
    members: list[list[int]] = []
    ends: list[int] = []
    dtypes: list[torch.dtype] = []
    open_buckets: dict[tuple[torch.dtype, bool], int] = {}
    numels = [math.prod(key.shape) * (2 if key.dtype.is_complex else 1) for key in keys]
    kinds = [
        (_REAL.get(key.dtype, key.dtype), persistence > 0 and numel <= persistence)
        for key, numel in zip(keys, numels, strict=True)
    ]
    # Elements of each kind that have no bucket yet.
    left: collections.Counter[tuple[torch.dtype, bool]] = collections.Counter()
    for kind, numel in zip(kinds, numels, strict=True):
        left[kind] += _aligned(numel)
    block = None
    for index in turns or range(len(keys)):
        key, numel, kind = keys[index], numels[index], kinds[index]
        dtype = kind[0]
        if (here := _block_of(key.path)) != block:
            block = here
            for other, b in list(open_buckets.items()):
                itemsize = other[0].itemsize
                # Avoid a small last bucket, because every bucket costs the same time in Python.
                is_last = (ends[b] + left[other]) * itemsize <= bucket_bytes
                if 2 * ends[b] * itemsize >= bucket_bytes and not is_last:
                    del open_buckets[other]
        bucket = open_buckets.get(kind)
        if bucket is None or (
            ends[bucket] and (ends[bucket] + numel) * dtype.itemsize > bucket_bytes
        ):
            bucket = open_buckets[kind] = len(members)
            members.append([])
            ends.append(0)
            dtypes.append(dtype)
        slots[index] = LeafSlot(key.path, key.shape, key.dtype, bucket, ends[bucket], numel)
        members[bucket].append(index)
        ends[bucket] += _aligned(numel)
        left[kind] -= _aligned(numel)
    buckets = tuple(
        BucketSlot(
            dtype, tuple(leaves), sum(slots[i].numel for i in leaves), _padded(end, dtype, size)
        )
        for dtype, leaves, end in zip(dtypes, members, ends, strict=True)
    )
    return Layout(
        tuple(slots[i] for i in range(len(keys))), buckets, size, spec, positions, paths, device
    )


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _padded(numel: int, dtype: torch.dtype, size: int) -> int:
    """Round up to whole cache lines per shard, or whole pages if that adds little padding."""
    page = size * (_PAGE_BYTES // dtype.itemsize)
    unit = page if page <= _MAX_WASTE * numel else ALIGNMENT * size
    return -(-numel // unit) * unit


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


@functools.lru_cache(maxsize=256)
def labels_of(layout: Layout, label: LabelFn) -> tuple[Hashable, ...]:
    """Return the label of each slot of a layout."""
    return tuple(
        label(slot.path, torch.empty(slot.shape, dtype=slot.dtype, device="meta"))
        for slot in layout.leaves
    )


@takes(layout=LAYOUT, label=OF_LEAVES)
def split_by_label(layout: Layout, label: LabelFn) -> Layout:
    """Cut buckets so that each holds leaves of one label.

    Args:
        layout: any layout.
        label: ``label(path, leaf)``; the leaf is a meta tensor with shape and dtype.

    Returns:
        A layout of the same leaves in the same order; the same object if no bucket mixes labels.

    Example:
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
                end += _aligned(slots[leaf].numel)
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


def _block_of(path: str) -> tuple[str, ...]:
    """Return the path up to the first number: ``h.3.attn.w`` lies in block ``h.3``."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return tuple(parts[: i + 1])
    return ()


def _check_leaf(path: str, leaf: object) -> None:
    leaf = spec_of(leaf)
    if not isinstance(leaf, Tensor):
        raise _no_tensor(path, leaf)
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise LeafError(
            f"every leaf must be a dense tensor; leaf {path!r} is {leaf.layout}; convert it with "
            "to_dense()",
            leaf=path,
        )
    if leaf.numel() > 1 and not leaf.is_contiguous() and _repeats(leaf):
        raise LeafError(
            f"a leaf must own each of its elements; leaf {path!r} shows an element twice, as after "
            f"expand() or unfold() (strides {tuple(leaf.stride())}); call clone() on it first",
            leaf=path,
        )


def _repeats(view: Tensor) -> bool:
    """Whether a view shows an element of its storage more than once."""
    last = 0
    for stride, dim in sorted(zip(view.stride(), view.shape, strict=True)):
        if dim == 1:
            continue
        if stride <= last:
            # The steps along this dim are shorter than the dims before it. Only a count can tell.
            return stride == 0 or _overlap([view])
        last += (dim - 1) * stride
    return False


def _no_tensor(path: str, leaf: object) -> LeafError:
    return LeafError(
        f"every leaf must be a tensor; leaf {path!r} is {type(leaf).__name__}; keep other values "
        "in the batch or in a closure",
        leaf=path,
    )


def _alias_sets(
    paths: Sequence[str], values: Sequence[Tensor | Deferred]
) -> tuple[list[int], list[int]]:
    """Group leaves that are the same view of the same memory; raise for partial overlaps."""
    seen: dict[object, int] = {}
    firsts: list[int] = []
    positions: list[int] = []
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i, leaf in enumerate(values):
        key = memory_of(leaf) if leaf.numel() else i
        slot = seen.setdefault(key, len(firsts))
        if slot == len(firsts):
            firsts.append(i)
            if leaf.numel() and isinstance(leaf, Tensor):
                start = int(leaf.storage_offset()) * leaf.element_size()
                last = int(
                    sum(
                        (dim - 1) * stride
                        for dim, stride in zip(leaf.shape, leaf.stride(), strict=True)
                    )
                )
                spans.setdefault(leaf.untyped_storage()._cdata, []).append(
                    (start, start + (last + 1) * leaf.element_size(), i)
                )
        positions.append(slot)
    for pieces in spans.values():
        pieces.sort()
        for (_, end, a), (start, _, b) in itertools.pairwise(pieces):
            if start < end and _overlap([spec_of(values[i]) for _, _, i in pieces]):
                raise LeafError(
                    f"leaves may be tied (one view) or apart, not overlap; {paths[a]!r} and "
                    f"{paths[b]!r} share part of their memory; clone() one of them, or tie them "
                    "in the loss function",
                    leaf=paths[b],
                )
    return firsts, positions


def _overlap(views: Sequence[Tensor]) -> bool:
    """Whether views of one storage share an element; columns of a matrix share none."""
    if len({view.dtype for view in views}) > 1:
        return True
    first = min(view.storage_offset() for view in views)
    last = max(
        view.storage_offset()
        + sum((d - 1) * s for d, s in zip(view.shape, view.stride(), strict=True))
        for view in views
    )
    counts = torch.zeros(last - first + 1, dtype=torch.int32)
    for view in views:
        counts.as_strided(view.shape, view.stride(), view.storage_offset() - first).add_(1)
    return bool((counts > 1).any())


@takes(params=ANY, layout=LAYOUT, any_dtype=BOOL)
def unique_leaves(params: tree.Tree, layout: Layout, *, any_dtype: bool = False) -> list[Tensor]:
    """Return one tensor for each slot of a layout.

    Args:
        params: a tree that fits the layout.
        layout: the layout.
        any_dtype: accept other dtypes, because gradients and optimizer states may be wider than
            parameters.

    Returns:
        The tensors in the order of ``layout.leaves``.

    Raises:
        SpecMismatch: the tree has another structure, or a leaf another shape or dtype.
        LeafError: a leaf is not a tensor.
        AliasChanged: leaves that are tied in the layout are now different tensors.

    Example:
        >>> w = torch.ones(2)
        >>> layout = layout_of({"in": w, "out": w})
        >>> len(unique_leaves({"in": w, "out": w}, layout))
        1
    """
    values = tree.leaves_like(layout.spec, params)
    if values is None:
        now, then = set(tree.paths(params)), set(layout.paths)
        raise SpecMismatch(
            "a tree must keep the structure that it was laid out with; missing "
            f"{sorted(then - now)}, unexpected {sorted(now - then)}; lay the new tree out with "
            "shard() or replicate()"
        )
    chosen: list[Tensor | None] = [None] * len(layout.leaves)
    for path, leaf, position in zip(layout.paths, values, layout.positions, strict=True):
        slot = layout.leaves[position]
        first = chosen[position]
        if first is None:
            if not isinstance(spec_of(leaf), Tensor):
                raise _no_tensor(path, leaf)
            if tuple(leaf.shape) != slot.shape or not (any_dtype or leaf.dtype == slot.dtype):
                raise SpecMismatch(
                    f"a leaf must keep its shape and dtype; leaf {path!r} was laid out as "
                    f"{slot.dtype} {slot.shape} and is now {leaf.dtype} {tuple(leaf.shape)}; lay "
                    "the new tree out with shard() or replicate()",
                    leaf=path,
                )
            chosen[position] = leaf
        elif leaf is not first and (
            not isinstance(leaf, Tensor) or memory_of(leaf) != memory_of(first)
        ):
            raise AliasChanged(
                f"tied leaves must stay tied; {slot.path!r} and {path!r} shared one tensor and "
                "are now two; tie them again, or shard the new tree",
                leaf=path,
            )
    return [leaf for leaf in chosen if leaf is not None]
