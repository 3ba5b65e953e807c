"""Laws over drawn placements: cuts, owners and alignments change no bit, and nothing else."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.conftest import examples
from zfun import compression, optim, stores
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.layout import LeafSlot, layout_of, place
from zfun.placement import Aligned, Owned, PlacementRule, Sharded
from zfun.testing import assert_padding, assert_same_bits, placements, trees

SHAPES: dict[str, tuple[int, ...]] = {
    "in": (9, 16),
    "h.0.w": (16, 16),
    "h.0.b": (16,),
    "h.1.w": (16, 16),
    "h.1.b": (16,),
    "scale": (),
    "out": (16, 3),
}


def params() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=chance) / 4 for name, shape in SHAPES.items()}


def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(x @ p["in"])
    for block in ("h.0", "h.1"):
        x = x + torch.tanh(x @ p[f"{block}.w"] + p[f"{block}.b"]) * p["scale"]
    return (x @ p["out"]).square().mean()


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.01, weight_decay=0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, momentum=0.9)),
    "lamb": lambda: optim.lamb(0.01),
    "muon": lambda: optim.muon(0.01, optim.adamw(0.01)),
    "onebit": lambda: optim.onebit_adam(0.01, freeze_step=1),
    "labels": lambda: optim.by_label(
        {"matrix": optim.lion(0.01), "rest": optim.sgd(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "rest",
    ),
}
OFFLOADS: dict[str, Callable[[int], Any]] = {
    "none": lambda stage: None,
    "state": lambda stage: stores.Offload(optimizer=stores.host(), fraction=0.5),
    "all": lambda stage: stores.Offload(
        optimizer=stores.host(), grads=stores.host(), params=stores.host() if stage == 3 else None
    ),
}


def train(
    group: zf.Group, placement: Any, stage: int, optimizer: str, offload: str, **options: Any
) -> tuple[list[Any], zf.recipes.ZeroState]:
    """Take three steps; return losses, norms and parameters, and the state."""
    z = zf.zero(
        stage,
        loss_fn,
        OPTIMIZERS[optimizer](),
        group,
        offload=OFFLOADS[offload](stage),
        placement=placement,
        **options,
    )
    state, told = z.init(params()), []
    for step in range(3):
        batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(9 * step + group.rank))
        state, info = z.step(state, batch)
        told += [info.loss, info.grad_norm]
    return [*told, z.params(state)], state


@st.composite
def by_leaf(draw: st.DrawFn) -> PlacementRule | Sharded:
    """Draw one placement for all leaves, or one for each."""
    if draw(st.booleans()):
        return draw(placements())
    drawn = draw(st.lists(placements(), min_size=3, max_size=3))
    chosen = {path: drawn[draw(st.integers(0, 2))] for path in SHAPES}
    return lambda path, leaf: chosen[path]


def over(group: zf.Group, axis: str) -> zf.Group:
    return (
        group
        if axis == "none"
        else zf.split(group, 2)
        if axis == "mesh"
        else (zf.split(group, 2).inner)
    )


@settings(max_examples=examples(20))
@given(
    placement=by_leaf(),
    stage=st.sampled_from([1, 2, 3]),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    offload=st.sampled_from(list(OFFLOADS)),
    ranks=st.sampled_from([(2, "none"), (3, "none"), (4, "none"), (4, "mesh"), (4, "inner")]),
    bucket_bytes=st.sampled_from([64, 2048, 1 << 20]),
    precision=st.sampled_from([None, torch.bfloat16]),
    num_micro_batches=st.sampled_from([1, 2]),
)
def test_no_bit_depends_on_the_cuts(
    placement: Any,
    stage: int,
    optimizer: str,
    offload: str,
    ranks: tuple[int, str],
    bucket_bytes: int,
    precision: torch.dtype | None,
    num_micro_batches: int,
) -> None:
    if optimizer == "onebit" and (stage == 3 or offload != "none" or num_micro_batches > 1):
        optimizer = "adamw"
    size, axis = ranks

    def main(group: zf.Group, cut: Any) -> Any:
        group = over(group, axis)
        told, state = train(
            group,
            cut,
            stage,
            optimizer,
            offload,
            bucket_bytes=bucket_bytes,
            precision=precision,
            num_micro_batches=num_micro_batches,
        )
        assert_padding(stores.resident(state.params))
        return told

    expected = zf.simulate(size, main, None)
    found = zf.simulate(size, main, placement)
    for rank in range(size):
        assert_same_bits(found[rank], expected[rank], f"rank {rank} with cuts and without")


@settings(max_examples=examples(8))
@given(first=by_leaf(), second=by_leaf(), stages=st.permutations([1, 2, 3]))
def test_a_checkpoint_crosses_placements(first: Any, second: Any, stages: list[int]) -> None:
    with tempfile.TemporaryDirectory() as where:

        def write(group: zf.Group) -> Any:
            told, state = train(group, first, stages[0], "muon", "none")
            zf.save(Path(where), state, step=3)
            return told[-1]

        def read(group: zf.Group) -> Any:
            _, state = train(group, second, stages[1], "muon", "none")
            return zf.unshard(zf.load(Path(where), like=state).state.params)

        expected = zf.simulate(2, write)[0]
        for found in zf.simulate(3, read):
            assert_same_bits(found, expected, "parameters before and after the checkpoint")


@settings(max_examples=examples(40))
@given(tree=trees(), placement=placements(), size=st.sampled_from([1, 2, 3, 4]))
def test_values_go_round(tree: Any, placement: Sharded, size: int) -> None:
    def main(group: zf.Group) -> None:
        flat = zf.shard(tree, group, placement=placement)
        assert_padding(flat)
        assert_same_bits(zf.unshard(flat), tree, "a tree and unshard(shard(tree))")
        whole = zf.redistribute(flat, zf.R, group)
        assert_same_bits(zf.redistribute(whole, zf.S, group).buffers, flat.buffers, "shards")
        term = zf.redistribute(flat, zf.P, group)
        assert_same_bits(zf.redistribute(term, zf.S, group).buffers, flat.buffers, "sums")
        assert_same_bits(zf.redistribute(term, zf.R, group).buffers, whole.buffers, "whole sums")

    zf.simulate(size, main)


@pytest.mark.parametrize("placement", [Owned(), Aligned(rows=True)])
def test_a_gather_differentiates(placement: Sharded) -> None:
    def main(group: zf.Group, cut: Any) -> Any:
        flat = zf.shard(params(), group, placement=cut)
        loss = lambda p: loss_fn(zf.gather(p), torch.ones(2, 9)) / group.size
        return zf.unshard(torch.func.grad(loss)(flat))

    expected, found = zf.simulate(3, main, None), zf.simulate(3, main, placement)
    assert_same_bits(found[0], expected[0], "gradients with cuts and without")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("placement", [Owned(), Aligned(rows=True)])
def test_codecs_send_unequal_pieces(placement: Sharded, stage: int) -> None:
    codecs = compression.Compression(
        grads=compression.int8(block=32), params=compression.int8(block=32) if stage == 3 else None
    )

    def main(group: zf.Group, cut: Any) -> Any:
        return train(group, cut, stage, "adamw", "none", compression=codecs)[0][-1]

    equal, found = zf.simulate(3, main, None), zf.simulate(3, main, placement)
    assert_same_bits(found[0], found[1], "ranks")
    # Blocks of 32 elements begin at the same elements, wherever the pieces are cut.
    assert_same_bits(found[0], equal[0], "parameters with cuts and without")


def test_muon_exchanges_nothing_where_leaves_are_whole() -> None:
    def main(group: zf.Group, cut: Any) -> dict[str, int]:
        recorded = zf.record(group)
        train(recorded, cut, 2, "muon", "none", bucket_bytes=64)
        return {name: recorded.bytes_sent(name) for name in ("grads", "leaves")}

    assert all(sent["leaves"] > 0 for sent in zf.simulate(4, main, None))
    assert all(sent["leaves"] == 0 for sent in zf.simulate(4, main, Owned()))


def test_owned_leaves_are_whole_and_spread_evenly() -> None:
    tree = {f"w{i}": torch.zeros(64, 8 + i % 3) for i in range(24)}
    for bucket_bytes in (1, 16384, 1 << 20):
        layout = place(layout_of(tree, 4, bucket_bytes), Owned(), 4)
        held = [0] * 4
        for slot in layout.leaves:
            bucket = layout.buckets[slot.bucket]
            spans = [bucket.span(rank, 4) for rank in range(4)]
            owners = [r for r, (a, b) in enumerate(spans) if a <= slot.offset < b]
            (owner,) = owners
            assert slot.offset + slot.numel <= spans[owner][1]
            held[owner] += slot.numel
        assert max(held) <= 1.35 * sum(held) / 4


@pytest.mark.parametrize("block", [32, 48, 256])
def test_aligned_pieces_begin_at_blocks(block: int) -> None:
    tree = {"w": torch.zeros(1000, 3), "b": torch.zeros(7)}
    layout = place(layout_of(tree, 3), Aligned(block=block), 3)
    starts = [layout.buckets[0].span(rank, 3)[0] for rank in range(3)]
    assert [start % block for start in starts] == [0, 0, 0]
    assert len(set(starts)) == 3


# A placement of a user: everything on the last rank but the first rows of each bucket.


@dataclass(frozen=True)
class Lopsided(Sharded):
    """The first unit of each bucket on rank 0, the rest on the last rank."""

    def pieces(self, leaves: Any, numel: int, size: int, held: Any) -> list[tuple[int, int]]:
        if size == 1:
            return [(0, numel)]
        return [(0, 32), *[(0, 0)] * (size - 2), (32, numel)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_placement_of_a_user_changes_no_bit(stage: int) -> None:
    main = functools.partial(_told, stage=stage)
    found, expected = zf.simulate(3, main, Lopsided()), zf.simulate(3, main, None)
    assert_same_bits(found, expected, "with cuts and without")


def _told(group: zf.Group, cut: Any, stage: int) -> Any:
    return train(group, cut, stage, "lamb", "none")[0]


# Refusals.


@dataclass(frozen=True)
class Gap(Sharded):
    """Leaves the last unit out."""

    def pieces(self, leaves: Any, numel: int, size: int, held: Any) -> list[tuple[int, int]]:
        return [(0, numel - 32), *[(0, 0)] * (size - 1)]


@dataclass(frozen=True)
class Odd(Sharded):
    """Cuts inside a unit."""

    def pieces(self, leaves: Any, numel: int, size: int, held: Any) -> list[tuple[int, int]]:
        return [(0, 7), (7, numel), *[(0, 0)] * (size - 2)]


@pytest.mark.parametrize("placement", [Gap(), Odd()])
def test_pieces_that_do_not_cover_are_refused(placement: Sharded) -> None:
    main = lambda group: zf.shard(params(), group, placement=placement)
    with pytest.raises(OptionError, match=r"hold each element of a bucket once.*cover 0 to numel"):
        zf.simulate(2, main)


def test_wrong_rules_are_refused() -> None:
    main = lambda group, cut: zf.shard(params(), group, placement=cut)
    with pytest.raises(OptionError, match=r"got 'rows' for leaf 'in'; return zf.S"):
        zf.simulate(2, main, lambda path, leaf: "rows")
    with pytest.raises(OptionError, match=r"placement"):
        zf.simulate(2, main, "rows")
    with pytest.raises(OptionError, match=r"Aligned\(\) cuts at rows or at blocks"):
        Aligned()
    with pytest.raises(OptionError, match=r"Aligned\(\) cuts at rows or at blocks"):
        Aligned(rows=True, block=4)
    with pytest.raises(OptionError, match=r"stage 0 cuts none"):
        zf.simulate(2, lambda group: train(group, Owned(), 0, "adamw", "none"))


def test_ranks_that_cut_otherwise_are_named() -> None:
    def main(group: zf.Group) -> None:
        zf.shard(params(), group, placement=Owned() if group.rank else Aligned(rows=True))

    with pytest.raises(SpecMismatch, match=r"placement"):
        zf.simulate(2, main)


def test_a_cut_is_for_its_ranks() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.split(group, 2)
        flat = zf.shard(params(), mesh.inner, placement=Lopsided())
        zf.redistribute(flat, zf.S, mesh)

    with pytest.raises(PlacementError, match=r"Lopsided\(\) divides a bucket among the ranks"):
        zf.simulate(4, main)


def test_a_schedule_of_unequal_pieces_is_not_priced_as_equal() -> None:
    def main(group: zf.Group) -> None:
        flat = zf.shard(params(), group, placement=Lopsided())
        loss = zf.shard_params(loss_fn, group)
        zf.data_parallel(zf.value_and_grad(loss), group)(flat, torch.ones(2, 9))
        zf.planner.explain(loss.schedules[0])  # pyrefly: ignore[missing-attribute]

    with pytest.raises(OptionError, match=r"priced for equal pieces; got bucket 0.*Lopsided"):
        zf.simulate(2, main)


def test_a_leaf_slot_is_all_that_a_placement_sees() -> None:
    seen: list[LeafSlot] = []

    @dataclass(frozen=True)
    class Seeing(Sharded):
        def pieces(self, leaves: Any, numel: int, size: int, held: Any) -> Any:
            seen.extend(leaves)
            return super().pieces(leaves, numel, size, held)

    place(layout_of(params(), 2), Seeing(), 2)
    assert [(slot.path, slot.shape) for slot in seen] == list(SHAPES.items())
