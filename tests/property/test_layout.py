"""Law 1: ravel and unravel are inverses, and padding is zero; the documented invariants of a
layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import tree
from zfun.errors import AliasChanged, LeafError, OptionError, SpecMismatch
from zfun.flat import change_layout, leaf_spans, ravel
from zfun.layout import ALIGNMENT, DEFAULT_BUCKET_BYTES, FUSED_BYTES, unique_leaves
from zfun.testing import (
    Composition,
    assert_padding,
    assert_round_trip,
    assert_same_bits,
    bucket_sizes,
    compositions,
    tensors,
    train,
    trees,
)

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int8,
    torch.bool,
)


def some_of(paths: Any, random: Any) -> list[str]:
    return random.sample(paths, random.randint(0, len(paths)))


ANY_TREE = trees(tensors(DTYPES), nodes=models.NODES)
SIZES = st.sampled_from([1, 2, 3, 4, 7, 16])


@settings(max_examples=examples(60))
@given(ANY_TREE, SIZES, bucket_sizes())
def test_leaves_and_buffers_are_inverses(params: Any, size: int, bucket_bytes: int) -> None:
    zf.simulate(size, lambda group: assert_round_trip(params, group, bucket_bytes=bucket_bytes))


@settings(max_examples=examples(40))
@given(ANY_TREE, SIZES, bucket_sizes())
def test_the_spans_of_all_ranks_put_each_leaf_together(
    params: Any, size: int, bucket_bytes: int
) -> None:
    def main(group: zf.Group) -> Any:
        flat = zf.shard(params, group, bucket_bytes=bucket_bytes)
        spans = leaf_spans(flat)
        assert spans == leaf_spans(flat, group.rank)
        whole = zf.replicate(params, group, bucket_bytes=bucket_bytes)
        pieces = [flat.buffers[span.bucket][span.start : span.stop].clone() for span in spans]
        return (
            spans,
            pieces,
            leaf_spans(whole),
            [whole.buffers[span.bucket][span.start : span.stop] for span in leaf_spans(whole)],
        )

    ranks = zf.simulate(size, main)
    layout = zf.layout.layout_of(params, size, bucket_bytes)
    for place, slot in enumerate(layout.leaves):
        _, _, whole_spans, leaves = ranks[0]
        assert (whole_spans[place].path, whole_spans[place].first, leaves[place].numel()) == (
            slot.path,
            0,
            slot.numel,
        )
        end = 0
        for spans, pieces, _, _ in ranks:
            assert spans[place].path == slot.path
            assert spans[place].first == end
            end += pieces[place].numel()
        assert_same_bits(
            torch.cat([pieces[place] for _, pieces, _, _ in ranks]), leaves[place], slot.path
        )


@settings(max_examples=examples(100))
@given(ANY_TREE, SIZES, bucket_sizes(), st.one_of(st.none(), st.randoms(use_true_random=False)))
def test_layouts_keep_the_documented_invariants(
    params: Any, size: int, bucket_bytes: int, random: Any
) -> None:
    order = None if random is None else some_of(tree.paths(params), random)
    layout = zf.layout.layout_of(params, size, bucket_bytes, order=order)
    assert layout == zf.layout.layout_of(params, size, bucket_bytes, order=order)
    # Leaves of one dtype lie in the given order, after the leaves without an entry in tree order.
    slots = dict(zip(layout.paths, layout.positions, strict=True))
    named = list(dict.fromkeys(slots[path] for path in order or ()))
    turns = [*(slot for slot in range(len(layout.leaves)) if slot not in named), *named]
    for dtype in {bucket.dtype for bucket in layout.buckets}:
        lying = [
            leaf for bucket in layout.buckets for leaf in bucket.leaves if bucket.dtype == dtype
        ]
        assert lying == [leaf for leaf in turns if leaf in lying]
    assert layout.paths == tuple(tree.paths(params))
    leaves = tree.leaves(params)
    for path, leaf, position in zip(layout.paths, leaves, layout.positions, strict=True):
        slot = layout.leaves[position]
        assert (slot.shape, slot.dtype) == (tuple(leaf.shape), leaf.dtype), path
        assert slot.numel == leaf.numel() * (2 if leaf.is_complex() else 1)
    # Tied leaves, and only tied leaves, share a slot.
    for i, x in enumerate(leaves):
        for j, y in enumerate(leaves):
            assert (layout.positions[i] == layout.positions[j]) == (
                i == j or (x is y and x.numel() > 0)
            )
    assert sorted(leaf for bucket in layout.buckets for leaf in bucket.leaves) == list(
        range(len(layout.leaves))
    )
    for index, bucket in enumerate(layout.buckets):
        slots = [layout.leaves[leaf] for leaf in bucket.leaves]
        assert {slot.bucket for slot in slots} == {index}
        assert {torch.empty(0, dtype=slot.dtype).real.dtype for slot in slots} == {bucket.dtype}
        assert bucket.padded_numel % (size * ALIGNMENT) == 0
        assert bucket.span(size - 1, size)[1] == bucket.padded_numel
        assert bucket.numel == sum(slot.numel for slot in slots)
        end = 0
        for slot in slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            end = slot.offset + slot.numel
        assert end <= bucket.padded_numel
        # A bucket exceeds bucket_bytes only if the bucket has a single leaf.
        assert (
            len([slot for slot in slots if slot.numel]) <= 1
            or end * bucket.dtype.itemsize <= bucket_bytes + ALIGNMENT * bucket.dtype.itemsize
        )
        # Padding beyond the alignment of the leaves: less than one unit per rank.
        assert (
            bucket.padded_numel - sum(-(-slot.numel // ALIGNMENT) * ALIGNMENT for slot in slots)
            < size * ALIGNMENT
        )


@settings(max_examples=examples(15))
@given(
    trees(nodes=models.NODES),
    SIZES,
    bucket_sizes(),
    compositions(),
    st.sampled_from([zf.optim.adamw(0.1), zf.optim.sgd(0.1, momentum=0.9)]),
)
def test_padding_stays_zero(
    params: Any, size: int, bucket_bytes: int, composition: Composition, optimizer: Any
) -> None:
    batches = models.tree_batches(4, size, 3)

    def main(group: zf.Group) -> None:
        assert_padding(
            train(
                composition,
                group,
                models.tree_loss,
                optimizer,
                params,
                batches,
                bucket_bytes=bucket_bytes,
            ).final
        )

    zf.simulate(size, main)


def test_check_padding_finds_padding_that_is_not_zero() -> None:
    def main(group: zf.Group) -> None:
        flat = zf.shard({"w": torch.ones(5)}, group)
        if group.rank == 1:
            flat.buffers[0][3] = 1.0
        assert_padding(flat)

    with pytest.raises(AssertionError, match="in bucket 0: w it is not, from element 35"):
        zf.simulate(2, main)


def test_buckets_close_at_blocks_and_keep_the_order_of_use() -> None:
    params = {
        "wte": torch.zeros(64, 8),
        "h": [{"b": torch.zeros(32), "a": torch.zeros(64)} for _ in range(3)],
        "out": torch.zeros(32),
    }
    layout = zf.layout.layout_of(params, 2, bucket_bytes=600)
    names = [[layout.leaves[leaf].path for leaf in bucket.leaves] for bucket in layout.buckets]
    # The last leaf joins the last block, because the leaf fits.
    assert names == [["wte"], ["h.0.b", "h.0.a"], ["h.1.b", "h.1.a"], ["h.2.b", "h.2.a", "out"]]
    names = [
        [layout.leaves[leaf].path for leaf in bucket.leaves]
        for bucket in zf.layout.layout_of(params, 2, bucket_bytes=500).buckets
    ]
    assert names == [["wte"], ["h.0.b", "h.0.a"], ["h.1.b", "h.1.a"], ["h.2.b", "h.2.a"], ["out"]]
    assert [len(bucket.leaves) for bucket in zf.layout.layout_of(params, 2).buckets] == [8]
    assert len(zf.layout.layout_of(params, 2, bucket_bytes=1).buckets) == 8


def test_a_layout_keeps_the_device_beside_an_equal_one_of_another() -> None:
    params = {"w": torch.ones(4, 4), "b": torch.ones(4)}
    planned = {name: leaf.to("meta") for name, leaf in params.items()}

    def num_dims(path: str, leaf: Any) -> int:
        return leaf.ndim

    for leaves, device in ((planned, "meta"), (params, "cpu")):
        layout = zf.layout.layout_of(leaves)
        split = zf.layout.split_by_label(layout, num_dims)
        assert len(split.buckets) == 2
        for found in (layout, split, split.select([1])):
            assert found.device.type == device


def test_an_order_names_leaves_by_path() -> None:
    w = torch.ones(3)
    params = {"in": w, "b": torch.ones(2), "out": w}
    assert zf.layout.layout_of(params, order=["b", "out"]).buckets[0].leaves == (1, 0)
    # An order may name leaves outside this tree; the tree's own order changes nothing.
    assert zf.layout.layout_of(params, order=["x.y", "b", "out"]) is zf.layout.layout_of(
        params, order=["b", "in"]
    )
    assert (
        zf.layout.layout_of(params, order=["out", "b", "in"])
        is zf.layout.layout_of(params, order=["b"])
        is zf.layout.layout_of(params)
    )
    for order in ("in", [0, 1]):
        with pytest.raises(
            OptionError,
            match=r"order of layout_of\(\) must be a sequence of the paths of leaves or None; got ",
        ):
            zf.layout.layout_of(params, order=order)  # pyrefly: ignore[bad-argument-type]


def test_non_contiguous_leaves_are_copied_once_and_keep_their_values() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    params = {"t": base.t(), "columns": base[:, 1::3], "row": base[2]}
    with pytest.raises(LeafError, match="'t' and 'columns' share part of their memory"):
        zf.layout.layout_of(params)
    parts = {"left": base[:, :3], "right": base[:, 3:], "bottom": torch.ones(3)[1::2]}
    flat = zf.simulate(3, lambda group: zf.unshard(zf.shard(parts, group)))
    for found in flat:
        assert_same_bits(found, parts)
        assert all(leaf.is_contiguous() for leaf in tree.leaves(found))


def test_interleaved_views_are_not_tied() -> None:
    base = torch.arange(10.0)
    layout = zf.layout.layout_of({"even": base[0::2], "odd": base[1::2]})
    assert layout.positions == (0, 1)


def test_a_view_that_shows_each_element_once_has_a_layout() -> None:
    base = torch.arange(12.0)
    for view in (base.view(3, 4).T, base[1::2], base.unfold(0, 3, 3), base.view(1, 12)):
        assert zf.layout.layout_of({"w": view}).leaves[0].numel == view.numel()
    # The dims interleave: elements 0, 2, 4 and 3, 5, 7.
    assert zf.layout.layout_of({"w": base.as_strided((2, 3), (3, 2))}).leaves[0].numel == 6


def test_one_view_twice_is_a_tie() -> None:
    base = torch.arange(12.0)
    assert zf.layout.layout_of({"a": base[:6], "b": base[:6], "c": base[6:]}).positions == (0, 0, 1)
    # Another shape of the same memory is an overlap and not a tie.
    with pytest.raises(LeafError, match="'a' and 'b' share part of their memory"):
        zf.layout.layout_of({"a": base, "b": base.view(3, 4)})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            torch.ones(1).expand(3),
            r"leaf 'h\.0\.w' shows an element twice, .*expand.*strides .0,..; call clone",
        ),
        (torch.ones(2, 1).expand(2, 3), r"leaf 'h\.0\.w' shows an element twice"),
        (
            torch.ones(5).unfold(0, 3, 1),
            r"leaf 'h\.0\.w' shows an element twice, .*strides .1, 1..; call",
        ),
        (torch.ones(13).as_strided((3, 3), (4, 2)), r"leaf 'h\.0\.w' shows an element twice"),
        (3.0, r"leaf 'h\.0\.w' is float"),
        ("name", r"leaf 'h\.0\.w' is str"),
        (
            torch.ones(2, 2).to_sparse(),
            r"leaf 'h\.0\.w' is torch.sparse_coo; convert it with to_dense",
        ),
    ],
    ids=["expanded", "expanded dim", "unfolded", "strided", "float", "str", "sparse"],
)
def test_leaves_that_cannot_be_laid_out_are_named(leaf: Any, message: str) -> None:
    with pytest.raises(LeafError, match=message) as caught:
        zf.layout.layout_of({"h": [{"w": leaf}], "ok": torch.ones(2)})
    assert caught.value.leaf == "h.0.w"
    assert isinstance(caught.value, TypeError)


def test_a_dim_of_one_may_have_any_stride() -> None:
    assert (
        zf.layout.layout_of({"w": torch.ones(1).expand(1), "b": torch.ones(3, 1).expand(3, 1)})
        .leaves[1]
        .numel
        == 3
    )


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(OptionError, match=r"an integer of at least 1, .*; got 0"):
        zf.layout.layout_of({"w": torch.ones(1)}, bucket_bytes=0)


def test_empty_trees_have_a_layout() -> None:
    for params in ({}, [], {"a": None}, {"a": torch.zeros(0)}):
        for found in zf.simulate(
            3, lambda group, params=params: zf.unshard(zf.shard(params, group))
        ):
            assert_same_bits(found, params)


def test_a_number_of_ranks_of_numpy_leaves_plain_integers_in_a_layout() -> None:
    one: Any = np.int64(1)
    layout = zf.layout.layout_of({"only in this test": torch.ones(7)}, one + one)
    assert type(layout.size) is int
    assert all(type(bucket.padded_numel) is int for bucket in layout.buckets)
    group = zf.collectives.abstract_group(one + one, one)
    assert (type(group.size), type(group.rank)) == (int, int)


def test_a_tree_that_does_not_fit_is_named() -> None:
    w = torch.ones(2)
    layout = zf.layout.layout_of({"a": w, "b": w, "c": torch.ones(3)})
    assert len(unique_leaves({"a": w, "b": w, "c": torch.zeros(3)}, layout)) == 2
    with pytest.raises(
        AliasChanged, match=r"'a' and 'b' shared one tensor and are now two"
    ) as caught:
        unique_leaves({"a": w, "b": w.clone(), "c": torch.ones(3)}, layout)
    assert caught.value.leaf == "b"
    square = torch.arange(4.0).view(2, 2)
    tied = zf.layout.layout_of({"a": square, "b": square})
    for other in (square.T, square[:1]):  # the same address, other values
        with pytest.raises(AliasChanged, match=r"are now two"):
            unique_leaves({"a": square, "b": other}, tied)
    with pytest.raises(SpecMismatch, match=r"missing \['b'\], unexpected \['d'\]"):
        unique_leaves({"a": w, "d": w, "c": torch.ones(3)}, layout)
    with pytest.raises(
        SpecMismatch,
        match=r"leaf 'c' was laid out as torch.float32 \(3,\) and is now torch.float32 \(4,\)",
    ):
        unique_leaves({"a": w, "b": w, "c": torch.ones(4)}, layout)
    with pytest.raises(
        SpecMismatch,
        match=r"leaf 'c' was laid out as torch.float32 \(3,\) and is now torch.float64 \(3,\)",
    ):
        unique_leaves({"a": w, "b": w, "c": torch.ones(3, dtype=torch.float64)}, layout)


@pytest.mark.parametrize("dtypes", [None, [torch.float64]])
def test_a_leaf_that_is_no_tensor_does_not_fit_a_layout(dtypes: Any) -> None:
    group = zf.collectives.single_group()
    layout = zf.layout.layout_of({"w": torch.ones(2), "b": torch.ones(1)})
    for leaf in (3.0, "name", np.ones(1, dtype=np.float32)):
        with pytest.raises(LeafError, match=r"every leaf must be a tensor; leaf 'b' is") as caught:
            ravel({"w": torch.ones(2), "b": leaf}, layout, group, dtypes=dtypes)
        assert caught.value.leaf == "b"


def test_a_module_in_place_of_parameters_names_functional() -> None:
    zero = zf.zero(3, lambda params, x: x.sum(), zf.optim.sgd(0.1), zf.process_group())
    module = torch.nn.Linear(2, 2)
    for params in (module, {"encoder": module}):
        with pytest.raises(LeafError, match=r"is Linear; apply = zf\.functional\(module\)"):
            zero.init(params)


def test_ravel_takes_one_dtype_for_each_bucket() -> None:
    group = zf.collectives.single_group()
    params = {"w": torch.ones(2), "scale": torch.ones(1, dtype=torch.float64)}
    layout = zf.layout.layout_of(params)
    flat = ravel(params, layout, group, dtypes=[torch.float64, torch.float32])
    assert [buffer.dtype for buffer in flat.buffers] == [torch.float64, torch.float32]
    for count in (0, 1, 3):
        expected = f"one dtype for each bucket .* got {count} dtypes for 2 buckets; leave dtypes"
        with pytest.raises(OptionError, match=expected):
            ravel(params, layout, group, dtypes=[torch.float64] * count)


def test_a_layout_of_more_leaves_takes_no_flat() -> None:
    params = {"w": torch.ones(2)}
    flat = ravel(params, zf.layout.layout_of(params), zf.collectives.single_group())
    more = zf.layout.layout_of({**params, "b": torch.ones(1)}, bucket_bytes=1)
    with pytest.raises(SpecMismatch, match="got a layout of 2 leaves for a Flat with 1; make"):
        change_layout(flat, more)


def test_a_shared_bucket_holds_some_megabytes_and_a_block_fits_in_one() -> None:
    assert 2**20 <= FUSED_BYTES <= 2**28 <= DEFAULT_BUCKET_BYTES <= 2**31
    assert FUSED_BYTES % 2**20 == DEFAULT_BUCKET_BYTES % 2**20 == 0
