"""Hypothesis strategies: trees, layouts, group sizes, compositions, schedules, splits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from zfun import tree
from zfun.layout import Layout, layout_of
from zfun.options import FUNCTION, each, instance, integer, takes
from zfun.placement import UNIT, Aligned, Owned, Piece, S, Sharded
from zfun.testing._compositions import Composition, all_compositions
from zfun.transforms import ScheduleOptions

# Zero, one, primes, lengths below the number of ranks, and a length above a padded piece.
_SIDES = (0, 1, 2, 3, 5, 7, 13, 31)


@st.composite
def tensors(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (torch.float64,), *, max_dims: int = 2
) -> Tensor:
    """Draw tensors of normal numbers, contiguous or not, with 0 to a few hundred elements.

    Args:
        draw: passed by hypothesis.
        dtypes: the dtypes to draw from.
        max_dims: largest number of dims.

    Returns:
        A strategy.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(tensors())
        ... def test(x):
        ...     assert x.dtype is torch.float64
        >>> test()
    """
    shape = draw(st.lists(st.sampled_from(_SIDES), max_size=max_dims))
    seed = draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from(list(dtypes)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(seed)
    view = draw(st.sampled_from(["contiguous", "transposed", "strided"]))
    if view == "transposed" and len(shape) == 2:
        return torch.randn(shape[::-1], generator=generator, dtype=wide).to(dtype).t()
    if view == "strided" and shape:
        # A view with an offset and gaps, in a larger storage.
        return torch.randn([*shape[:-1], 2 * shape[-1] + 1], generator=generator, dtype=wide).to(
            dtype
        )[..., 1::2]
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _dict(children: list[Any]) -> Any:
    # Not in alphabetical order, because trees keep the order of insertion.
    return dict(zip("wbkaxcyz", children, strict=False))


_NODES: tuple[Callable[[list[Any]], Any], ...] = (_dict, list, tuple)


@takes(
    leaves=instance(st.SearchStrategy, "a strategy", "tensors()") | None,
    nodes=each(FUNCTION, "a sequence of functions", "(list, tuple)"),
    max_leaves=integer(1),
)
@st.composite
def trees(
    draw: st.DrawFn,
    leaves: st.SearchStrategy[Any] | None = None,
    *,
    nodes: Sequence[Callable[[list[Any]], Any]] = _NODES,
    max_leaves: int = 6,
    ties: bool = True,
) -> tree.Tree:
    """Draw nested trees with at least one leaf; some leaves are tied.

    Args:
        draw: passed by hypothesis.
        leaves: a strategy; by default :func:`tensors`.
        nodes: functions that make a node from a list of one to three children; by default dicts,
            lists and tuples.
        max_leaves: largest number of leaves.
        ties: whether one tensor may stand at two places.

    Returns:
        A strategy.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(trees())
        ... def test(params):
        ...     assert tree.leaves(params)
        >>> test()
    """
    chosen = tensors() if leaves is None else leaves

    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        grown = st.lists(children, min_size=1, max_size=3)
        return st.builds(lambda make, parts: make(parts), st.sampled_from(list(nodes)), grown)

    found = draw(st.recursive(extend(chosen), extend, max_leaves=max_leaves))
    values, spec = tree.flatten(found)
    if ties and len(values) > 1:
        places = st.integers(0, len(values) - 1)
        for a, b in draw(st.lists(st.tuples(places, places), max_size=2)):
            values[b] = values[a]
    return tree.unflatten(spec, values)


def bucket_sizes() -> st.SearchStrategy[int]:
    """Draw values of ``bucket_bytes``: one leaf, a few leaves, or all leaves per bucket.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(bucket_sizes())
        ... def test(bucket_bytes):
        ...     assert bucket_bytes >= 1
        >>> test()
    """
    return st.one_of(st.sampled_from([1, 256, 2**24]), st.integers(1, 2**14))


@takes()
def compositions(*, num_micro_batches: int = 1) -> st.SearchStrategy[Composition]:
    """Draw compositions, some with ``remat``, some with ``replicate_grads`` for ``shard_grads``.

    Args:
        num_micro_batches: with more than one, every composition has ``"accumulate"``.

    Example:
        >>> import dataclasses
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(compositions())
        ... def test(composition):
        ...     assert composition.donate <= (composition.flat or bool(composition.loss))
        >>> test()
    """
    every = st.sampled_from(all_compositions(num_micro_batches=num_micro_batches))
    return st.builds(
        _varied,
        every,
        st.booleans(),
        st.sampled_from(["shard_grads", "shard_grads", "replicate_grads"]),
    )


def _varied(composition: Composition, remat: bool, sums: str) -> Composition:
    grads = tuple(sums if name == "shard_grads" else name for name in composition.grads)
    return dataclasses.replace(composition, remat=remat, grads=grads)


def group_sizes() -> st.SearchStrategy[int]:
    """Draw numbers of ranks: one, powers of two, primes.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(group_sizes())
        ... def test(size):
        ...     assert 1 <= size <= 8
        >>> test()
    """
    return st.sampled_from([1, 2, 3, 4, 5, 7, 8])


@takes(params=instance(st.SearchStrategy, "a strategy", "trees()") | None)
def layouts(params: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Layout]:
    """Draw layouts of trees, for any number of ranks and any size of buckets.

    Args:
        params: a strategy of trees; by default :func:`trees`.

    Returns:
        A strategy.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(layouts())
        ... def test(layout):
        ...     assert all(bucket.padded_numel % layout.size == 0 for bucket in layout.buckets)
        >>> test()
    """
    return st.builds(
        layout_of, trees() if params is None else params, group_sizes(), bucket_sizes()
    )


@dataclasses.dataclass(frozen=True)
class Drawn(Sharded):
    """Pieces of random lengths, some empty, in a random order."""

    seed: int

    def pieces(
        self, leaves: Sequence[Any], numel: int, size: int, held: Sequence[int]
    ) -> Sequence[Piece]:
        """Cut at random places; see :meth:`zfun.placement.Sharded.pieces`."""
        del leaves, held
        # The same pieces on every rank and in every process.
        chance = random.Random(f"{self.seed} {numel} {size}")
        cuts = sorted(UNIT * chance.randint(0, numel // UNIT) for _ in range(size - 1))
        pieces = list(itertools.pairwise([0, *cuts, numel]))
        chance.shuffle(pieces)
        return [(start, stop) if start < stop else (0, 0) for start, stop in pieces]


def placements() -> st.SearchStrategy[Sharded]:
    """Draw ways to cut buckets: equal pieces, whole leaves, rows, blocks, or any pieces.

    Example:
        >>> from hypothesis import given
        >>> from zfun.layout import layout_of, place
        >>> @given(placements())
        ... def test(placement):
        ...     layout = place(layout_of({"w": torch.zeros(70)}, 3), placement, 3)
        ...     assert layout.buckets[0].span(2, 3)[1] <= layout.buckets[0].padded_numel
        >>> test()
    """
    seeds = st.integers(0, 2**16)
    return st.one_of(
        st.sampled_from([S, Owned(), Aligned(rows=True), Aligned(block=96)]), seeds.map(Drawn)
    )


def schedules() -> st.SearchStrategy[ScheduleOptions]:
    """Draw schedules of stage 3: how far ahead to gather, and how much to keep.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(schedules())
        ... def test(schedule):
        ...     assert schedule.prefetch >= 0
        >>> test()
    """
    lengths = st.sampled_from([0, 1, 100, 10**6])
    return st.builds(
        ScheduleOptions,
        prefetch=st.integers(0, 3),
        # A bound holds the largest bucket and all that persist, in any small model.
        max_live=st.sampled_from([None, 10**6, 10**7]),
        reuse_distance=st.none() | lengths,
        persistence=lengths,
        read_ahead=st.integers(0, 2),
    )


@takes(rows=integer(1))
def micro_batch_splits(rows: int) -> st.SearchStrategy[int]:
    """Draw numbers of micro-batches that divide a rank's batch.

    Args:
        rows: the number of rows of the batch.

    Returns:
        A strategy.

    Example:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3, database=None)
        ... @given(micro_batch_splits(12))
        ... def test(num_micro_batches):
        ...     assert 12 % num_micro_batches == 0
        >>> test()
    """
    return st.sampled_from([count for count in range(1, rows + 1) if rows % count == 0])
