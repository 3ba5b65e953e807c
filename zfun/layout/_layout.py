"""Lay a tree out: which leaf goes into which bucket, and where."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zfun import tree
from zfun.errors import LeafError
from zfun.layout._leaves import alias_sets, check_leaf
from zfun.layout._slots import ALIGNMENT, BucketSlot, Layout, LeafSlot, aligned
from zfun.layout._units import DEFAULT_BUCKET_BYTES, FUSED_BYTES, bucket_cuts, units_of
from zfun.options import NAMES, integer, takes

# Shards of large buckets are whole pages, so that ranks of one host share a bucket without a copy.
_PAGE_BYTES = 4096
_MAX_WASTE = 0.02

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True, slots=True)
class _LeafKey:
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _TreeKey(NamedTuple):
    """A tree as far as a layout depends on it."""

    leaves: tuple[_LeafKey, ...]
    positions: tuple[int, ...]
    paths: tuple[str, ...]
    spec: tree.Spec
    device: torch.device


@takes(size=integer(1), bucket_bytes=integer(1), persistence=integer(0), order=NAMES | None)
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
    is a unit of the tree that occurs several times (``h.0``, ``h.1``, ...): the shortest path up to
    a number such that another number at that place has equal leaves below it, and that fits
    ``bucket_bytes``. Small units share a bucket of at most 26 MiB, and so do neighbours outside
    every unit. A bucket also closes before a leaf that would exceed ``bucket_bytes``. A leaf is
    never cut.

    Args:
        params: any tree of tensors and deferred leaves (:class:`zfun.sources.Deferred`). Leaves
            that are the same view of the same memory are tied and share a slot.
        size: number of ranks that share each bucket.
        bucket_bytes: the most bytes of a bucket, unless a single leaf has more.
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
        check_leaf(path, leaf)
    devices = {leaf.device for leaf in values}
    if len(devices) > 1:
        where = {path: str(leaf.device) for path, leaf in zip(paths, values, strict=True)}
        raise LeafError(f"leaves of one tree must be on one device; got {where}; move them first")
    firsts, positions = alias_sets(paths, values)
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
    key = _TreeKey(keys, tuple(positions), tuple(paths), spec, device)
    # A size of numpy would stay in the cached layout.
    return _layout(key, int(size), bucket_bytes, persistence, turns)


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
    of: _TreeKey, size: int, bucket_bytes: int, persistence: int, turns: tuple[int, ...] | None
) -> Layout:
    keys = of.leaves
    numels = [math.prod(key.shape) * (2 if key.dtype.is_complex else 1) for key in keys]
    units = units_of(
        [(key.path, (key.shape, key.dtype)) for key in keys],
        [math.prod(key.shape) * key.dtype.itemsize for key in keys],
        bucket_bytes,
    )
    # Leaves of one dtype share buckets, small ones apart from the others.
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    turn = turns or tuple(range(len(keys)))
    for index in turn:
        key, is_small = keys[index], persistence > 0 and numels[index] <= persistence
        kinds.setdefault((_REAL.get(key.dtype, key.dtype), is_small), []).append(index)
    found: list[tuple[torch.dtype, list[int]]] = []
    for (dtype, _), members in kinds.items():
        bound = bucket_bytes // dtype.itemsize
        cuts = bucket_cuts(
            [numels[index] for index in members],
            [units[index] for index in members],
            bound,
            min(bound, FUSED_BYTES // dtype.itemsize),
        )
        found += [
            (dtype, members[start:stop])
            for start, stop in itertools.pairwise([*cuts, len(members)])
        ]
    place = {index: at for at, index in enumerate(turn)}
    found.sort(key=lambda bucket: place[bucket[1][0]])
    slots: dict[int, LeafSlot] = {}
    ends: list[int] = []
    for bucket, (_, members) in enumerate(found):
        end = 0
        for index in members:
            key = keys[index]
            slots[index] = LeafSlot(key.path, key.shape, key.dtype, bucket, end, numels[index])
            end += aligned(numels[index])
        ends.append(end)
    buckets = tuple(
        BucketSlot(
            dtype, tuple(leaves), sum(slots[i].numel for i in leaves), _padded(end, dtype, size)
        )
        for (dtype, leaves), end in zip(found, ends, strict=True)
    )
    leaves = tuple(slots[i] for i in range(len(keys)))
    return Layout(leaves, buckets, size, of.spec, of.positions, of.paths, of.device)


def _padded(numel: int, dtype: torch.dtype, size: int) -> int:
    """Round up to whole cache lines per shard, or whole pages if that adds little padding."""
    page = size * (_PAGE_BYTES // dtype.itemsize)
    unit = page if page <= _MAX_WASTE * numel else ALIGNMENT * size
    return -(-numel // unit) * unit
