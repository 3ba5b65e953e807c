"""Law 3: placements, and the bytes of each change of placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import tree
from zfun.errors import PlacementError
from zfun.testing import assert_redistribution, assert_same_bits, bucket_sizes, tensors, trees

SIZES = st.sampled_from([1, 2, 3, 4, 7, 16])
PLACEMENTS = st.sampled_from([zf.R, zf.P, zf.S])
TREES = trees(
    tensors((torch.float32, torch.float64, torch.complex64, torch.bfloat16)), nodes=models.NODES
)


def partial(params: Any, group: zf.Group, bucket_bytes: int) -> zf.Flat:
    """A different term on every rank: small whole numbers, whose sums are exact in any order and
    dtype.
    """

    def term(path: str, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.numel()).reshape(x.shape)
        return ((numbers * (group.rank + 1) + len(path)) % 5).to(x.dtype)

    terms = tree.unflatten(
        tree.structure(params),
        [term(p, x) for p, x in zip(tree.paths(params), tree.leaves(params), strict=True)],
    )
    flat = zf.replicate(params, group, bucket_bytes=bucket_bytes)
    positions = flat.layout.positions
    leaves = tree.leaves(terms)
    tied = [leaves[positions.index(position)] for position in positions]
    return zf.flat.ravel(tree.unflatten(tree.structure(params), tied), flat.layout, group, zf.P)


@settings(max_examples=examples(60))
@given(TREES, SIZES, bucket_sizes(), PLACEMENTS, st.lists(PLACEMENTS, min_size=1, max_size=5))
def test_redistribution_through_any_placements_equals_redistribution_at_once(
    params: Any, size: int, bucket_bytes: int, start: Any, path: Any
) -> None:
    def main(group: zf.Group) -> None:
        value = partial(params, group, bucket_bytes)
        assert_redistribution(zf.redistribute(value, start, group), path)

    zf.simulate(size, main)


@settings(max_examples=examples(30))
@given(TREES, SIZES, bucket_sizes())
def test_a_partial_value_is_the_sum_of_the_terms(params: Any, size: int, bucket_bytes: int) -> None:
    def main(group: zf.Group) -> tuple[Any, Any]:
        value = partial(params, group, bucket_bytes)
        return zf.flat.unravel(value), zf.unshard(zf.redistribute(value, zf.S, group))

    results = zf.simulate(size, main)
    for path, found, *terms in zip(
        tree.paths(params),
        tree.leaves(results[0][1]),
        *(tree.leaves(mine) for mine, _ in results),
        strict=True,
    ):
        expected = sum(
            term.to(torch.complex128 if term.is_complex() else torch.float64) for term in terms
        )
        assert_same_bits(found, torch.as_tensor(expected).to(found.dtype), path)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_redistribution_sends_the_bytes_of_the_placements(size: int) -> None:
    params = models.mlp(dtype=torch.float32)

    def main(group: zf.Group) -> None:
        recorded = zf.record(group)
        whole = zf.replicate(params, recorded, bucket_bytes=256)
        psi = sum(bucket.padded_numel for bucket in whole.layout.buckets) * 4
        assert len(whole.buffers) > 2
        once = psi * (size - 1) // size

        def sent(value: zf.Flat, placement: zf.placement.Placement) -> int:
            recorded.clear()
            zf.redistribute(value, placement, recorded, name="it")
            assert recorded.bytes_sent() == recorded.bytes_sent("it")
            return recorded.bytes_sent()

        shards = zf.redistribute(whole, zf.S, recorded)
        terms = zf.redistribute(whole, zf.P, recorded)
        assert [sent(whole, p) for p in (zf.R, zf.P, zf.S)] == [0, 0, 0]
        assert [sent(shards, p) for p in (zf.R, zf.P, zf.S)] == [once, 0, 0]
        assert [sent(terms, p) for p in (zf.R, zf.P, zf.S)] == [2 * once, 0, once]

    zf.simulate(size, main)


def test_a_shard_shares_no_memory_with_the_parameters() -> None:
    params = {"w": torch.ones(40)}

    def main(group: zf.Group) -> None:
        for flat in (
            zf.shard(params, group),
            zf.replicate(params, group),
            zf.shard(zf.replicate(params, group), group),
        ):
            flat.buffers[0].fill_(7.0)
        zf.unshard(zf.replicate(params, group))["w"].fill_(7.0)

    zf.simulate(2, main)
    assert bool((params["w"] == 1).all())


def test_unshard_returns_new_tensors() -> None:
    def main(group: zf.Group) -> None:
        for make in (zf.replicate, zf.shard):
            flat = make({"w": torch.ones(40)}, group)
            zf.unshard(flat)["w"].fill_(7.0)
            assert bool((zf.unshard(flat)["w"] == 1).all())

    zf.simulate(1, main)
    zf.simulate(2, main)


def test_two_groups_do_not_mix() -> None:
    def main(group: zf.Group) -> None:
        flat = zf.shard({"w": torch.ones(4)}, group)
        other = zf.record(group)
        with pytest.raises(
            PlacementError, match="must be given the group of the value; got another one; unshard"
        ):
            zf.redistribute(flat, zf.R, other)
        with pytest.raises(PlacementError, match="belongs to the group that it was made over"):
            zf.shard(zf.replicate({"w": torch.ones(4)}, group), other)

    zf.simulate(2, main)


def test_only_flats_have_a_placement() -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(
            PlacementError,
            match=r"redistribute\(\) takes a Flat; got dict; make one with shard\(\) or "
            r"replicate\(\)",
        ):
            zf.redistribute({"w": torch.ones(4)}, zf.S, group)  # type: ignore[arg-type]
        with pytest.raises(PlacementError, match=r"unshard\(\) takes a Flat; got dict"):
            zf.unshard({"w": torch.ones(4)})  # type: ignore[arg-type]

    zf.simulate(1, main)


@settings(max_examples=examples(20))
@given(TREES, st.sampled_from([2, 3, 4]), bucket_sizes(), st.sampled_from([zf.R, zf.S]))
def test_norms_of_values_reached_in_two_ways_have_equal_bits(
    params: Any, size: int, bucket_bytes: int, placement: Any
) -> None:
    def main(group: zf.Group) -> None:
        value, same = (partial(params, group, bucket_bytes) for _ in range(2))
        expected = zf.redistribute(same, placement, group, donate=True)
        found = zf.redistribute(value, placement, group, donate=True)
        assert_same_bits(zf.reductions.global_norm(found), zf.reductions.global_norm(expected))
        # A norm reads the current values.
        for flat in (found, expected):
            flat.buffers[0].mul_(2.0)
        assert_same_bits(zf.reductions.global_norm(found), zf.reductions.global_norm(expected))

    zf.simulate(size, main)
