"""unshard() of chosen leaves gathers their buckets only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.conftest import examples
from zfun import tree
from zfun.testing import assert_same_bits, bucket_sizes, tensors, trees

DTYPES = (torch.float32, torch.float64, torch.complex64)


@settings(max_examples=examples(40))
@given(
    params=trees(tensors(DTYPES), max_leaves=8),
    data=st.data(),
    bucket_bytes=bucket_sizes(),
    size=st.integers(1, 3),
    make=st.sampled_from([zf.shard, zf.replicate]),
    is_stored=st.booleans(),
)
def test_the_part_is_that_of_the_whole(
    params: Any, data: Any, bucket_bytes: int, size: int, make: Any, is_stored: bool
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(tree.paths(params))))
    select = lambda path, leaf: path in chosen

    def main(group: zf.Group) -> Any:
        flat = make(params, group, bucket_bytes=bucket_bytes)
        flat = zf.offload(flat, zf.stores.host()) if is_stored else flat
        return zf.unshard(flat, select)

    expected, _ = zf.partition(params, select)
    assert_same_bits(zf.simulate(size, main), [expected] * size)


def test_only_the_buckets_of_chosen_leaves_are_gathered() -> None:
    def main(group: zf.Group) -> list[tuple[str, str]]:
        recorded = zf.record(group)
        params = {name: torch.ones(64) for name in "abcd"} | {"frozen": torch.ones(3)}
        z = zf.zero(
            3,
            lambda params, batch: params["a"].sum(),
            zf.optim.sgd(0.1),
            recorded,
            bucket_bytes=1,
            trainable=lambda path, leaf: path != "frozen",
            buffers=lambda path, leaf: "mean" if path == "d" else None,
        )
        state = z.init(params)
        recorded.clear()
        found = z.params(state, lambda path, leaf: path in "bd" and leaf.shape == (64,))
        assert [path for path, leaf in found.items() if leaf is not None] == ["b", "d"]
        return [(entry.name, entry.part) for entry in recorded.log]

    assert zf.simulate(2, main) == [[("unshard", "bucket 0: b")]] * 2


def test_a_part_shares_no_memory_with_the_rest() -> None:
    def main(group: zf.Group) -> None:
        flat = zf.replicate({"a": torch.ones(64), "b": torch.ones(2)}, group)
        part = zf.unshard(flat, lambda path, leaf: path == "b")["b"]
        assert part.untyped_storage().nbytes() == part.nbytes
        part.zero_()
        assert zf.unshard(flat)["b"].sum() == 2

    zf.simulate(2, main)


def test_a_selection_is_a_function() -> None:
    name: Any = "a"
    with pytest.raises(zf.errors.OptionError, match=r"select of unshard\(\) must be a function"):
        zf.simulate(1, lambda group: zf.unshard(zf.shard([torch.ones(1)], group), name))
