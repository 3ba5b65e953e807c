"""Collectives of whole trees: one message for each dtype, and the values and derivatives of the
leaves one by one.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import zfun as zf
from zfun import tree
from zfun.errors import LeafError, PlacementError
from zfun.testing import assert_same_bits


def _small_tree(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    floats = [torch.randn(4, 2 * i, generator=generator, dtype=torch.float64) for i in range(5)]
    return {
        "floats": floats,
        "ints": (torch.arange(8) + rank, torch.full((4, 1), rank)),
        "half": torch.ones(4, 3).bfloat16(),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("collective", "started"),
    [
        (zf.collectives.all_reduce, zf.collectives.start_all_reduce),
        (zf.collectives.all_gather, zf.collectives.start_all_gather),
        (zf.collectives.reduce_scatter, zf.collectives.start_reduce_scatter),
        (zf.collectives.all_to_all, zf.collectives.start_all_to_all),
        (
            functools.partial(zf.collectives.broadcast, root=0),
            functools.partial(zf.collectives.start_broadcast, root=0),
        ),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"],
)
def test_a_tree_is_sent_as_one_message_for_each_dtype(
    collective: Any, started: Any, size: int
) -> None:
    """The values and derivatives of a tree equal those of a collective for each leaf."""

    def main(group: zf.Group) -> None:
        group = zf.record(group)
        x = _small_tree(group.rank)
        together, later = collective(x, group, name="tree"), started(x, group).wait()
        assert [entry.part for entry in group.log] == ["5 leaves", "2 leaves", "1 leaf"] * 2
        apart = tree.map(lambda leaf: collective(leaf, group), x)
        assert_same_bits(together, apart)
        assert_same_bits(later, apart)
        for leaf in tree.leaves(together):
            leaf.zero_()  # no other rank shares this memory
        assert_same_bits(x, _small_tree(group.rank))
        weigh = lambda values: sum(
            (i + 1.0 + group.rank) * value.square().sum() for i, value in enumerate(values)
        )
        whole = torch.func.grad(lambda floats: weigh(collective(floats, group)))(x["floats"])
        single = torch.func.grad(
            lambda floats: weigh([collective(leaf, group) for leaf in floats])
        )(x["floats"])
        assert_same_bits(whole, single)

    zf.simulate(size, main)


def test_trees_that_cannot_be_sent_are_refused() -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(LeafError, match="leaf 'b' is int"):
            zf.collectives.all_reduce({"a": torch.ones(1), "b": 3}, group)
        with pytest.raises(
            PlacementError,
            match=r"got a Flat, which has a placement to go to; call zf.redistribute\(\)",
        ):
            zf.collectives.all_reduce({"a": zf.replicate({"w": torch.ones(1)}, group)}, group)
        assert zf.collectives.all_reduce({}, group) == {}

    zf.simulate(2, main)
