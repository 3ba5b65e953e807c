"""Where buckets close: at the repeated unit of a tree, within a bound."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.conftest import examples
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.testing import assert_same_bits


def llama(num_blocks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The leaves of Llama 3 8B, under the names of transformers."""
    empty = functools.partial(torch.empty, device="meta", dtype=dtype)
    width, hidden, kv, vocab = 4096, 14336, 1024, 128256
    shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    return {
        "model.embed_tokens.weight": empty(vocab, width),
        **{
            f"model.layers.{i}.{name}.weight": empty(*shape)
            for i in range(num_blocks)
            for name, shape in shapes.items()
        },
        "model.norm.weight": empty(width),
        "lm_head.weight": empty(vocab, width),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_of_a_large_model_is_a_block(dtype: torch.dtype) -> None:
    layout = zf.layout.layout_of(llama(32, dtype), 8)
    blocks = [
        {layout.leaves[leaf].path.split(".")[2] for leaf in bucket.leaves}
        for bucket in layout.buckets[1:-1]
    ]
    # The norm before the head goes with the last block.
    assert blocks == [{str(i)} for i in range(31)] + [{"31", "weight"}]
    assert [len(bucket.leaves) for bucket in layout.buckets] == [1, *[9] * 31, 10, 1]


MIB = 2**18  # elements of float32


def buckets_of(numels: list[int], paths: list[str], bucket_bytes: int | None = None) -> Any:
    """Return the paths in each bucket."""
    params = {
        path: torch.empty(numel, device="meta") for path, numel in zip(paths, numels, strict=True)
    }
    layout = zf.layout.layout_of(params, bucket_bytes=bucket_bytes or DEFAULT_BUCKET_BYTES)
    return [[layout.leaves[leaf].path for leaf in bucket.leaves] for bucket in layout.buckets]


@pytest.mark.parametrize(
    "expected",
    [
        [["wte"], ["h.0.w", "h.0.v"], ["h.1.w", "h.1.v"], ["out"]],
        # The whole tree is no unit, because the other part of the pair is not equal to it.
        [["0.h.0.w", "0.h.0.v"], ["0.h.1.w", "0.h.1.v"], ["1.w"], ["1.v"]],
        [["0.wte"], ["0.h.0.w", "0.h.0.v"], ["0.h.1.w", "0.h.1.v"]],
        # A block without an equal is one of the blocks, and experts are parts of a block.
        [["h.0.w", "h.0.v"], ["h.1.e.0.w", "h.1.e.1.w"], ["h.2.e.0.w", "h.2.e.1.w"]],
        # One block is no unit, but its experts are.
        [["h.0.e.0.w", "h.0.e.0.v"], ["h.0.e.1.w", "h.0.e.1.v"], ["h.0.w"]],
        [["en.0.w", "en.0.v"], ["en.1.w", "en.1.v"], ["de.0.w"], ["de.0.v"]],
        [["0"], ["1"], ["2"]],
    ],
)
def test_a_unit_is_the_shortest_prefix_with_an_equal_beside(expected: list[list[str]]) -> None:
    paths = [path for bucket in expected for path in bucket]
    # Leaves of 20 MiB, so that two leaves share a bucket in a unit alone.
    assert buckets_of([20 * MIB] * len(paths), paths) == expected


def test_a_unit_larger_than_the_bound_gives_way_to_the_units_in_it() -> None:
    paths = [f"{model}.h.{block}.{leaf}" for model in "01" for block in "01" for leaf in "vw"]
    by_model, by_block = [paths[:4], paths[4:]], [paths[i : i + 2] for i in (0, 2, 4, 6)]
    assert buckets_of([20 * MIB] * 8, paths) == by_model
    assert buckets_of([20 * MIB] * 8, paths, 79 * 2**20) == by_block
    # A model of the two is larger than the bound, and its blocks too: leaf by leaf.
    assert buckets_of([20 * MIB] * 8, paths, 39 * 2**20) == [[path] for path in paths]


@settings(max_examples=examples(200))
@given(
    st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from([None, 1, 10, 26, 40, 120]),
)
@example([[30, 10], [10]], 26)
@example([[90, 1], [1]], 40)
def test_no_bucket_cuts_a_unit_that_the_bound_allows(
    sizes: list[list[int]], bound: int | None
) -> None:
    numels = [numel * MIB for unit in sizes for numel in unit]
    paths = [f"h.{i}.{j}w" for i, unit in enumerate(sizes) for j in range(len(unit))]
    # One more unit, equal to the first.
    paths += [f"h.{len(sizes)}.{j}w" for j in range(len(sizes[0]))]
    numels += [numel * MIB for numel in sizes[0]]
    buckets = buckets_of(numels, paths, bound and bound * 2**20)
    assert [path for bucket in buckets for path in bucket] == paths
    most = bound or DEFAULT_BUCKET_BYTES >> 20
    mib = {path: numel // MIB for path, numel in zip(paths, numels, strict=True)}
    for bucket in buckets:
        total = sum(mib[path] for path in bucket)
        units = {path.split(".")[1] for path in bucket}
        assert len(bucket) == 1 or total <= most
        # Units share a bucket only if the bucket is small.
        assert len(units) == 1 or total <= 26
        for unit in units:
            whole = [path for path in paths if path.split(".")[1] == unit]
            is_whole = {*whole} <= {*bucket}
            assert is_whole or sum(mib[path] for path in whole) > most
            # No part of a unit that the bound cuts lies with another unit.
            assert is_whole or len(units) == 1


def test_leaves_outside_every_unit_share_little() -> None:
    w = 20 * MIB
    assert buckets_of([w, w, w], ["a", "b", "c"]) == [["a"], ["b"], ["c"]]
    assert buckets_of([w // 4] * 6, list("abcdef")) == [["a", "b", "c", "d", "e"], ["f"]]
    # Small leaves go with the block before, until they add up to something.
    blocks, sizes = ["h.0.w", "h.0.v", "h.1.w", "h.1.v"], [w, w, w, w]
    small = ["norm", "scale", "bias", "head"]
    assert buckets_of([*sizes, 1, 1, 1, w], blocks + small) == [
        blocks[:2],
        [*blocks[2:], "norm", "scale", "bias"],
        ["head"],
    ]
    assert buckets_of([*sizes, MIB // 2, MIB // 2, MIB // 2, w], blocks + small) == [
        blocks[:2],
        [*blocks[2:], "norm"],
        ["scale", "bias", "head"],
    ]
    # No leaf joins a bucket that would exceed the bound.
    assert buckets_of([*sizes, 1], [*blocks, "norm"], 40 * 2**20)[-1] == ["norm"]


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None)
@given(st.sampled_from([0, 1, 3]), st.integers(0, 40), st.sampled_from([1, 2, 3]))
def test_buckets_of_whole_blocks_change_no_bit(stage: int, mib: int, size: int) -> None:
    """Blocks of 28 MiB do not share a bucket; bounds cut them into leaves, or leave them whole."""
    numbers = torch.linspace(-1, 1, 20 * MIB)
    params = {"h": [{"w": numbers * i, "v": numbers[: 8 * MIB] + i} for i in (1, 2)]}

    def main(group: zf.Group, **options: Any) -> Any:
        def loss(params: Any, x: torch.Tensor) -> Any:
            return sum((block["w"] * x[0]).sum() + (block["v"] * x[1]).sum() for block in params)

        rule = zf.optim.chain(zf.optim.clip_by_global_norm(0.1), zf.optim.sgd(0.1))
        z = zf.zero(stage, lambda p, x: loss(p["h"], x).square() * 1e-9, rule, group, **options)
        state = z.init(params)
        for step in range(2):
            state, info = z.step(state, torch.tensor([0.5 + group.rank, 0.25 + step]))
        return len(state.params.layout.buckets), info.loss, z.params(state)

    count, *expected = zf.simulate(size, main)[0]
    assert count == 2
    _, *found = zf.simulate(size, main, bucket_bytes=max(1, mib * 2**20))[0]
    assert_same_bits(found, expected)
