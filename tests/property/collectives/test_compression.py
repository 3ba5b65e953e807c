"""Compressed communication: bytes by formula, errors within bounds, exact error feedback, and one
result on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models, reference
from tests.conftest import examples
from zfun import tree
from zfun.collectives import AllGather, AllReduce, AllToAll, Collective, Op, ReduceScatter
from zfun.compression import BlockCodec
from zfun.errors import OptionError, PlacementError
from zfun.testing import assert_same_bits

SIZES = st.integers(2, 5)
CODECS = st.builds(BlockCodec, st.sampled_from([4, 8]), st.sampled_from([2, 32, 100, 256]))
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def term(rank: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (
        torch.randn(numel, generator=generator, dtype=torch.float64)
        .mul_(10.0 ** (seed % 5 - 2))
        .to(dtype)
    )


@given(SIZES, CODECS, st.integers(0, 600), FLOATS, st.integers(0, 99))
def test_a_gather_sends_by_formula_and_is_the_same_within_the_bound_everywhere(
    size: int, codec: BlockCodec, numel: int, dtype: torch.dtype, seed: int
) -> None:
    def main(group: zf.Group) -> tuple[Tensor, int]:
        group = zf.record(group)
        return zf.compression.all_gather(
            term(group.rank, numel, seed, dtype), group, codec, name="x"
        ), group.bytes_sent("x")

    results = zf.simulate(size, main)
    exact = torch.cat([term(rank, numel, seed, dtype) for rank in range(size)])
    for out, sent in results:
        assert torch.equal(out, results[0][0])
        assert out.dtype == dtype
        assert sent == (size - 1) * (
            4 * math.ceil(numel / codec.block) + 4 * math.ceil(numel * codec.bits / 32)
        )
    out = results[0][0]
    for mine, theirs in zip(out.split(numel or 1), exact.split(numel or 1), strict=True):
        for a, b in zip(
            mine.double().split(codec.block), theirs.double().split(codec.block), strict=True
        ):
            largest = float(b.abs().max()) if b.numel() else 0.0
            rounding = largest * torch.finfo(dtype).eps
            assert bool(((a - b).abs() <= codec.bound(largest) + rounding).all())


@given(
    SIZES,
    CODECS,
    st.integers(0, 300),
    FLOATS,
    st.integers(0, 99),
    st.sampled_from([ReduceScatter(), AllReduce()]),
)
def test_a_sum_sends_by_formula_and_is_within_the_bound(
    size: int, codec: BlockCodec, piece: int, dtype: torch.dtype, seed: int, op: Op
) -> None:
    numel = piece * size if isinstance(op, ReduceScatter) else piece

    def main(group: zf.Group) -> tuple[Tensor, int]:
        group = zf.record(group)
        return zf.compression.start(
            Collective(op, "x"), term(group.rank, numel, seed, dtype), group, codec
        ).wait(), group.bytes_sent("x")

    results = zf.simulate(size, main)
    terms = torch.stack([term(rank, numel, seed, dtype).double() for rank in range(size)])
    exact, largest = terms.sum(0), float(terms.abs().max()) if terms.numel() else 0.0
    message = codec.message_bytes(math.ceil(numel / size))
    if isinstance(op, ReduceScatter):
        out, hops = torch.cat([part for part, _ in results]), 1
    else:
        out, hops = results[0][0], 2
        for other, _ in results:
            assert torch.equal(other, out)
    assert [sent for _, sent in results] == [hops * (size - 1) * message] * size
    assert out.dtype == dtype
    bound = size * codec.bound(largest)
    if hops == 2:
        bound += codec.bound(float(exact.abs().max()) + bound if exact.numel() else 0.0)
    assert bool(
        ((out.double() - exact).abs() <= bound + size * largest * torch.finfo(dtype).eps).all()
    )


@given(st.sampled_from([4, 8]), st.integers(1, 4), st.integers(0, 99), FLOATS)
def test_sent_values_and_feedback_add_up_to_the_input(
    bits: int, num_steps: int, seed: int, dtype: torch.dtype
) -> None:
    """Over any number of steps the equality holds to the last bit, because nothing is rounded
    between.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def main(group: zf.Group) -> None:
        feedback = zf.compression.error_feedback(err_beta=0.0, reset=0)
        codec = BlockCodec(bits, 32, feedback)
        carried = torch.zeros(96, dtype=wide)
        for step in range(num_steps):
            x = term(0, 96, seed + step, dtype)
            full = carried + x
            # One rank of two gathers the rank's own message too, so the message is returned
            # decoded.
            sent = zf.compression.all_gather(x.to(wide), group, codec, name="x")[:96]
            (kept,) = [
                value
                for place, value in feedback.kept(group.rank).items()
                if not place.endswith("count")
            ]
            assert torch.equal(sent + kept[0], full)
            assert torch.equal((sent.double() + kept[0].double()).to(wide), full)
            carried = kept[0].clone()

    zf.simulate(2, main)


def test_slow_error_feedback_keeps_the_mean_of_many_sums() -> None:
    """Error feedback keeps (1 - err_beta) times the error so far, so the mean of many sums is near
    the exact sum.
    """
    steps, beta = 60, 0.8

    def main(group: zf.Group) -> tuple[Tensor, Tensor]:
        feedback = zf.compression.error_feedback(err_beta=beta, reset=0)
        plain, codec = (
            zf.compression.int4(block=64),
            zf.compression.int4(block=64, feedback=feedback),
        )
        x = term(group.rank, 128, 3)
        return (
            torch.stack(
                [zf.compression.reduce_scatter(x, group, codec, name="x") for _ in range(steps)]
            ).mean(0),
            zf.compression.reduce_scatter(x, group, plain),
        )

    results = zf.simulate(2, main)
    exact = term(0, 128, 3) + term(1, 128, 3)
    with_feedback = float((torch.cat([mean for mean, _ in results]) - exact).norm())
    without = float((torch.cat([once for _, once in results]) - exact).norm())
    assert with_feedback < without / 5


def test_feedback_is_reset_after_a_number_of_messages_and_in_blocks_that_are_not_finite() -> None:
    def main(group: zf.Group) -> list[Tensor]:
        codec = zf.compression.int4(
            block=64, feedback=zf.compression.error_feedback(err_beta=0.0, reset=3)
        )
        x = term(group.rank, 128, 1)
        out = [zf.compression.reduce_scatter(x, group, codec, name="x") for _ in range(6)]
        bad = x.clone()
        bad[64] = math.inf
        last = [zf.compression.reduce_scatter(value, group, codec, name="y") for value in (bad, x)]
        return [*out, *last]

    first, second = zf.simulate(2, main)
    for out in (first, second):
        assert torch.equal(torch.stack(out[:3]), torch.stack(out[3:6]))
        assert not torch.equal(out[0], out[1])
    assert bool(second[6].isnan().all())
    assert bool(first[6].isfinite().all())
    assert torch.equal(second[7], second[0])  # The feedback of the bad block was dropped.


def test_a_plan_leaves_the_errors_of_real_steps_alone() -> None:
    feedback = zf.compression.error_feedback(reset=0)
    compression = zf.compression.Compression(grads=zf.compression.int4(feedback=feedback))
    batches = models.mlp_batches(1, 2, rows=6, width=8, dtype=torch.float32)[0]

    def recipe(group: zf.Group, bucket_bytes: int) -> zf.recipes.Zero:
        return zf.zero(
            2,
            models.mlp_loss,
            zf.optim.adamw(0.02),
            group,
            bucket_bytes=bucket_bytes,
            compression=compression,
        )

    def plan(bucket_bytes: int) -> None:
        zf.planner.plan(
            lambda group: recipe(group, bucket_bytes), models.mlp(8), batches[0], group=2
        )

    def main(group: zf.Group) -> dict[str, Tensor]:
        zero = recipe(group, 300)
        zero.step(zero.init(models.mlp(8, dtype=torch.float32)), batches[group.rank])
        return feedback.kept(group.rank)

    plan(300)
    assert not feedback.kept(0)
    plan(100)  # The plan of another layout has errors of other shapes.
    before = zf.simulate(2, main)[0]
    assert before
    plan(300)
    assert_same_bits(feedback.kept(0), before)


def test_feedback_can_be_saved_and_restored() -> None:
    def main(group: zf.Group) -> None:
        first, x = zf.compression.error_feedback(reset=5), term(group.rank, 64, 2)
        for _ in range(3):
            zf.compression.reduce_scatter(x, group, zf.compression.int4(feedback=first), name="x")
        second = zf.compression.error_feedback(reset=5)
        second.restore(first.kept(group.rank), group.rank)
        for _ in range(4):
            a, b = (
                zf.compression.reduce_scatter(
                    x, group, zf.compression.int4(feedback=feedback), name="x"
                )
                for feedback in (first, second)
            )
            assert torch.equal(a, b)

    zf.simulate(2, main)


def train(
    group: zf.Group, stage: int, num_steps: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[float], Any, zf.collectives.Recorder]:
    recorder = zf.record(group)
    z = zf.zero(stage, models.mlp_loss, zf.optim.adamw(0.02), recorder, bucket_bytes=300, **options)
    state, losses = z.init(models.mlp(8, dtype=dtype)), []
    batches = models.mlp_batches(3, group.size, rows=6, width=8, dtype=dtype)
    for step in range(num_steps):
        if step == num_steps - 1:
            recorder.clear()
        state, info = z.step(state, batches[step % 3][group.rank])
        losses.append(float(info.loss))
    sent = zf.record(group)
    sent.log = list(recorder.log)
    return losses, z.params(state), sent


@pytest.mark.parametrize(("stage", "bits", "near"), [(0, 8, 0.03), (0, 4, 0.1), (3, 4, 0.1)])
def test_a_model_learns_with_a_codec_as_without(stage: int, bits: int, near: float) -> None:
    def main(group: zf.Group) -> tuple[list[float], list[float], Any]:
        compression = zf.compression.Compression(
            zf.compression.int8(block=64) if stage == 3 else None,
            BlockCodec(bits, 64, zf.compression.error_feedback()),
        )
        losses, params, _ = train(group, stage, 20, compression=compression)
        return train(group, stage, 20)[0], losses, params

    results = zf.simulate(2, main)
    for exact, losses, params in results:
        assert_same_bits((losses, params), results[0][1:], "ranks")
        assert losses != exact
        assert losses[-1] < exact[0] / 4  # The model learns,
        for a, b in zip(losses, exact, strict=True):  # and stays near the exact run.
            assert abs(a - b) < near * exact[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_by_formula(stage: int) -> None:
    def main(group: zf.Group) -> None:
        grads, params = zf.compression.int4(block=64), zf.compression.int8(block=100)
        layout = zf.layout.layout_of(models.mlp(8, dtype=torch.float32), group.size, 300)
        pieces = [bucket.padded_numel // layout.size for bucket in layout.buckets]
        _, _, sent = train(
            group,
            stage,
            2,
            compression=zf.compression.Compression(params if stage == 3 else None, grads),
            schedule=zf.ScheduleOptions(reuse_distance=0) if stage == 3 else None,
        )
        assert len(pieces) > 2
        hops = 2 if stage == 0 else 1
        assert sent.bytes_sent("grads") == sum(
            hops * (group.size - 1) * grads.message_bytes(n) for n in pieces
        )
        gathered = {0: 0, 1: 4, 2: 4, 3: 0}[stage]
        if stage == 3:
            assert sent.bytes_sent("params") == sum(
                2 * (group.size - 1) * params.message_bytes(n) for n in pieces
            )
        else:
            assert sent.bytes_sent("params") == sum(gathered * (group.size - 1) * n for n in pieces)
        assert {entry.kind for entry in sent.log if entry.name == "grads"} == (
            {"all_to_all", "all_gather"} if stage == 0 else {"all_to_all"}
        )

    zf.simulate(3, main)


def test_every_composition_with_one_codec_has_the_same_bits() -> None:
    """Every stage takes the sum over the ranks once and in one format."""
    codec = zf.compression.int4(block=64)

    def main(group: zf.Group) -> None:
        found = [
            train(
                group, stage, 3, torch.float64, compression=zf.compression.Compression(grads=codec)
            )[:2]
            for stage in (1, 2, 3)
        ]
        assert_same_bits(found[1], found[0], "stages 2 and 1")
        assert_same_bits(found[2], found[0], "stages 3 and 1")

    zf.simulate(2, main)


@given(st.sampled_from([(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)]), CODECS, st.integers(0, 99))
@settings(max_examples=15)
def test_over_a_mesh_a_compressed_sum_takes_two_hops(
    axes: tuple[int, int], codec: BlockCodec, seed: int
) -> None:
    """Rows exchange pieces of the row sums, encoded again; the result has the layout of the exact
    result.
    """
    (inner, outer), numel = axes, 60 * math.prod(axes)

    def main(group: zf.Group) -> tuple[Tensor, Tensor, Tensor]:
        mesh = zf.record(zf.split(group, inner=inner))
        x = term(group.rank, numel, seed)
        out = zf.compression.start(Collective(ReduceScatter(), "x"), x, mesh, codec).wait()
        hops = [
            (size - 1) * codec.message_bytes(n)
            for size, n in ((inner, numel // inner), (outer, numel // inner // outer))
        ]
        assert mesh.bytes_sent("x") == sum(hops)
        whole = zf.compression.start(Collective(AllReduce(), "y"), x, mesh, codec).wait()
        over = zf.compression.start_over(
            Collective(ReduceScatter(), "z"), x, mesh.inner, codec
        ).wait()
        exact = mesh.start(Collective(ReduceScatter()), x).wait()
        bound = 3 * inner * outer * codec.bound(inner * outer * 10.0 ** (seed % 5 - 2) * 6)
        assert float((out - exact).abs().max()) <= bound
        assert float((whole.view(mesh.size, -1)[mesh.rank] - exact).abs().max()) <= bound
        assert float((over.view(outer, -1)[mesh.outer.rank] - exact).abs().max()) <= bound
        return whole, over, torch.tensor(mesh.inner.rank)

    results = zf.simulate(inner * outer, main)
    for whole, over, place in results:
        assert torch.equal(whole, results[0][0])
        assert all(torch.equal(over, other) for _, other, there in results if there == place)


def test_a_model_learns_over_a_mesh() -> None:
    def main(group: zf.Group) -> Any:
        mesh = zf.split(group, inner=2)
        found = []
        for over, secondary in ((mesh, True), (mesh.inner, False)):
            codecs = zf.compression.Compression(
                grads=BlockCodec(4, 64, zf.compression.error_feedback()),
                params=zf.compression.int8(),
            )
            z = zf.zero(
                3,
                models.mlp_loss,
                zf.optim.adamw(0.02),
                over,
                bucket_bytes=300,
                schedule=zf.ScheduleOptions(secondary=secondary),
                compression=codecs,
            )
            state, losses = z.init(models.mlp(8, dtype=torch.float32)), []
            batches = models.mlp_batches(3, group.size, rows=6, width=8, dtype=torch.float32)
            for step in range(12):
                state, info = z.step(state, batches[step % 3][group.rank])
                losses.append(float(info.loss))
            assert losses[-1] < losses[0] / 2
            found.append((losses, z.params(state)))
        return found

    results = zf.simulate(4, main)
    for other in results:
        assert_same_bits(other, results[0])


def test_gradients_of_micro_batches_are_compressed() -> None:
    """The sum of the micro-batches is sent in the codec of one micro-batch."""

    def main(group: zf.Group) -> list[int]:
        group, found = zf.record(group), []
        vg = zf.data_parallel(
            zf.value_and_grad(lambda p, x: (p["w"] * x).sum()),
            group,
            compression=zf.compression.int8(),
        )
        for num_micro_batches in (1, 2):
            _, grads = zf.accumulate(vg, num_micro_batches)(
                zf.replicate({"w": torch.ones(4096)}, group), torch.ones(2, 4096)
            )
            group.clear()
            zf.redistribute(grads, zf.R, group)
            found.append(group.bytes_sent())
        return found

    for once, twice in zf.simulate(2, main):
        assert 0 < twice == once < 4096 * 2


@pytest.mark.parametrize("is_kept", [False, True], ids=["gathered twice", "with a secondary shard"])
def test_backward_sees_the_numbers_of_forward(is_kept: bool) -> None:
    """A secondary shard is a part of the bucket that forward decoded, and is sent exactly within a
    row.
    """
    generator = torch.Generator().manual_seed(0)
    exact = {name: torch.randn(32, 32, generator=generator) for name in ("x", "w")}
    # Used last, so that no other bucket stays for backward.
    exact["last"] = torch.zeros(32)
    codec = zf.compression.int4(block=32)

    def main(group: zf.Group) -> None:
        mesh = zf.record(zf.split(group, inner=2))
        seen: list[Tensor] = []

        def loss_fn(params: Any, batch: Tensor) -> Tensor:
            seen.append(params["w"].clone())
            return (params["x"] @ params["w"] * batch).sum() + params["last"].sum()

        params = zf.shard(exact, mesh, bucket_bytes=1)
        loss = zf.shard_params(
            loss_fn,
            mesh,
            compression=codec,
            schedule=zf.ScheduleOptions(secondary=is_kept, prefetch=0),
        )
        vg = zf.data_parallel(zf.value_and_grad(loss), mesh, reduce="sum")
        for _ in range(2):
            seen.clear()
            mesh.clear()
            _, grads = vg(params, torch.eye(32))
            # The gradient of x equals the weight that backward uses, to the last bit.
            backward = zf.flat.unravel(grads)["x"].T
            assert_same_bits(backward, seen[0])
            assert not torch.equal(backward, exact["w"])
            sent = [e for e in mesh.log if e.name == "params" and "last" not in e.part]
            written = sum(entry.sent_bytes for entry in sent if entry.dtype != torch.float32)
            exactly = [
                (entry.axis, entry.sent_bytes) for entry in sent if entry.dtype == torch.float32
            ]
            assert written == (2 if is_kept else 4) * (mesh.size - 1) * codec.message_bytes(
                32 * 32 // 4
            )
            assert exactly == ([("inner", 4 * 32 * 32 // 2)] * 2 if is_kept else [])

    zf.simulate(4, main)


def test_one_rank_sends_nothing_and_rounds_nothing() -> None:
    group = zf.process_group()
    codecs = zf.compression.Compression(grads=zf.compression.int4(), params=zf.compression.int8())
    assert_same_bits(
        train(group, 3, 4, compression=codecs)[:2],
        train(group, 3, 4)[:2],
        "with and without a codec on one rank",
    )
    x = torch.randn(7)
    assert torch.equal(zf.compression.all_reduce(x, group, zf.compression.int4()), x)


def test_micro_batches_and_casts_go_through_a_codec() -> None:
    def main(group: zf.Group) -> Any:
        codecs = zf.compression.Compression(
            grads=zf.compression.int8(), params=zf.compression.int8()
        )
        losses, params, sent = train(
            group, 3, 12, precision=torch.bfloat16, compression=codecs, num_micro_batches=2
        )
        assert (
            sent.bytes_sent("params")
            < sum(entry.numel for entry in sent.log if entry.name == "params")
            * (group.size - 1)
            * 1.1
        )
        return losses, params

    results = zf.simulate(2, main)
    assert_same_bits(results[0], results[1])
    losses = results[0][0]
    assert losses[-1] < losses[0]


# torch warns at the first import of the formulas for forward-mode derivatives.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_the_derivative_is_that_of_the_exact_collective() -> None:
    codec = zf.compression.int4(block=2)

    def main(group: zf.Group) -> None:
        weights = torch.arange(4.0) * (group.rank + 1)
        for compressed, exact, numel in (
            (zf.compression.all_gather, zf.collectives.all_gather, 2),
            (zf.compression.reduce_scatter, zf.collectives.reduce_scatter, 8),
            (zf.compression.all_reduce, zf.collectives.all_reduce, 4),
        ):
            x = term(group.rank, numel, 1)
            found = torch.func.grad(lambda x, fn=compressed: (fn(x, group, codec) * weights).sum())(
                x
            )
            expected = torch.func.grad(lambda x, fn=exact: (fn(x, group) * weights).sum())(x)
            assert torch.equal(found, expected)
            pushed: Any = torch.func.jvp(lambda x, fn=compressed: fn(x, group, codec), (x,), (x,))
            assert torch.equal(pushed[1], exact(x, group))

    zf.simulate(2, main)


def test_sharded_parameters_with_a_codec_under_torch_func() -> None:
    """Under ``torch.func`` the parameters are gathered by another function; the values are the
    same.
    """

    def main(group: zf.Group) -> None:
        loss = zf.shard_params(models.mlp_loss, group, compression=zf.compression.int8())
        params = zf.shard(models.mlp(dtype=torch.float32), group)
        batch = models.mlp_batches(1, group.size, dtype=torch.float32)[0][group.rank]
        value, grads = zf.value_and_grad(loss)(params, batch)
        other, again = torch.func.grad_and_value(loss)(params, batch)[::-1]
        assert torch.equal(value, other)
        for a, b in zip(tree.leaves(grads), tree.leaves(again), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        exact = zf.shard_params(models.mlp_loss, group)(params, batch)
        assert 0 < abs(float(value - exact)) < 0.05 * float(exact)

    zf.simulate(2, main)


@given(SIZES, st.integers(0, 200), FLOATS, st.integers(0, 99), st.booleans())
@settings(max_examples=examples(20))
def test_one_bit_all_reduce_follows_the_paper(
    size: int, numel: int, dtype: torch.dtype, seed: int, on_a_mesh: bool
) -> None:
    """The packed exchange in two hops has the bits of the paper's on any group, and error feedback
    sends every rounding error later.
    """
    size, steps = 4 if on_a_mesh else size, 5
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def main(group: zf.Group) -> tuple[int, list[Any]]:
        group = zf.record(zf.split(group, inner=2) if on_a_mesh else group)
        found: list[Any] = []
        worker = server = None
        for step in range(steps):
            group.clear()
            x = term(group.rank, numel, seed + step, dtype)
            mean, worker, server = zf.compression.compressed_all_reduce(
                x, worker, server, group, name="x"
            )
            assert mean.dtype == dtype
            found.append((mean, worker, server))
            hop = (size - 1) * (wide.itemsize + math.ceil(numel / (8 * size)))
            if not on_a_mesh:
                assert [(entry.kind, entry.sent_bytes) for entry in group.log] == [
                    ("all_to_all", hop),
                    ("all_gather", hop),
                ]
            assert_same_bits(
                x, term(group.rank, numel, seed + step, dtype), "an input must not change"
            )
        return group.rank, found

    results = [found for _, found in sorted(zf.simulate(size, main), key=lambda result: result[0])]
    chunk = 8 * math.ceil(numel / (8 * size))
    kept = [torch.zeros(numel, dtype=wide) for _ in range(size)]
    answers = [
        torch.zeros(max(min(numel - rank * chunk, chunk), 0), dtype=wide) for rank in range(size)
    ]
    given_in, came_out = (
        torch.zeros(numel, dtype=torch.float64),
        torch.zeros(numel, dtype=torch.float64),
    )
    for step in range(steps):
        terms = [term(rank, numel, seed + step, dtype).to(wide) for rank in range(size)]
        mean, kept, answers = reference.one_bit(terms, kept, answers, zf.reductions.global_norm)
        for rank in range(size):
            assert_same_bits(
                results[rank][step],
                (mean.to(dtype), kept[rank], answers[rank]),
                f"rank {rank}, step {step}",
            )
        given_in += torch.stack(terms).double().mean(0)
        came_out += mean.double()
    pending = torch.stack(kept).double().mean(0) + torch.cat(answers).double()
    largest = float(torch.stack([given_in, came_out]).abs().max()) if numel else 0.0
    assert bool(
        (
            (came_out + pending - given_in).abs()
            <= 8 * steps * torch.finfo(wide).eps * (largest + 1)
        ).all()
    )
    assert numel < 2 or not torch.equal(came_out, given_in)


def test_one_bit_all_reduce_keeps_the_rounding_error() -> None:
    """Nothing is rounded if the scale has few digits: sent and kept numbers add up to the input to
    the last bit.
    """

    def main(group: zf.Group) -> None:
        x = torch.tensor([1.0, 7.0, -7.0, -1.0])  # The norm is 10.
        mean, worker, server = zf.compression.compressed_all_reduce(x, None, None, group)
        assert_same_bits(mean, torch.tensor([5.0, 5.0, -5.0, -5.0]))
        assert_same_bits(worker, x - mean)
        assert_same_bits(server, torch.zeros(4 if group.rank == 0 else 0))
        mean, worker, _ = zf.compression.compressed_all_reduce(
            torch.tensor([3.0, -1.0, 2.0 - 2.0**-20, -3.0]), worker, server, group
        )
        assert_same_bits(mean + worker, torch.tensor([-1.0, 1.0, -(2.0**-20), 1.0]))

    zf.simulate(3, main)


def test_one_bit_all_reduce_on_one_rank_is_exact_and_nan_reaches_all_ranks() -> None:
    x = torch.tensor([1.0, 0.3, -2.0])
    one = zf.simulate(
        1,
        lambda group: zf.compression.compressed_all_reduce(
            x, torch.full((3,), 0.5), torch.full((3,), 0.25), group
        ),
    )[0]
    assert_same_bits(one, (x + 0.75, torch.zeros(3), torch.zeros(3)))

    def main(group: zf.Group) -> Tensor:
        return zf.compression.compressed_all_reduce(
            torch.full((32,), math.nan if group.rank else 1.0), None, None, group
        )[0]

    assert all(bool(mean.isnan().all()) for mean in zf.simulate(2, main))


def test_compressed_collectives_take_meta_tensors() -> None:
    group = zf.record(zf.collectives.abstract_group(64))
    codec = zf.compression.int4()
    for op, length in ((AllGather(), 64 * 640), (ReduceScatter(), 10), (AllReduce(), 640)):
        assert zf.compression.start(
            Collective(op), torch.empty(640, device="meta"), group, codec
        ).wait().shape == (length,)
    assert group.log[1].kind == AllToAll().kind
    assert group.log[1].sent_bytes == 63 * codec.message_bytes(10)


def test_a_codec_refuses_rows_and_messages_of_another_form() -> None:
    codec = zf.compression.int8()
    for rows in (torch.zeros(4), torch.zeros(1, 4, dtype=torch.int64)):
        with pytest.raises(
            OptionError, match=r"a codec encodes floating rows, \[m, n\]; got a tens"
        ):
            codec.encode(rows)
    for messages in (
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros(1, codec.message_bytes(1000)),
    ):
        for read in (codec.decode, codec.decode_sum):
            with pytest.raises(
                OptionError, match=r"1000 numbers are torch.uint8 of shape \[m, 1016\]; got a tens"
            ):
                read(messages, 1000, torch.float32)
    with pytest.raises(
        OptionError, match=r"at least one message; got a tensor of shape \(0, 1016\)"
    ):
        codec.decode_sum(torch.zeros(0, 1016, dtype=torch.uint8), 1000, torch.float32)


def test_wrong_options_are_refused() -> None:
    group = zf.collectives.abstract_group(2)
    with pytest.raises(OptionError, match=r"must be an even integer from 2 to 16384; got 3"):
        zf.compression.int8(block=3)
    with pytest.raises(OptionError, match=r"int8\(\) has no option 'blocks'; did you mean 'block'"):
        zf.compression.int8(blocks=2)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"bits of BlockCodec\(\) must be 4 or 8; got 3"):
        BlockCodec(3, 32)
    with pytest.raises(
        OptionError, match=r"for floating numbers; got all_gather of torch.int64; send it exactly"
    ):
        zf.compression.all_gather(torch.zeros(4, dtype=torch.int64), group, zf.compression.int8())
    with pytest.raises(
        OptionError,
        match=r"reduce_scatter with a codec takes a 1-D tensor that the 2 ranks divide; got "
        r"shape \(3,\)",
    ):
        zf.compression.reduce_scatter(torch.zeros(3), group, zf.compression.int8())
    with pytest.raises(
        OptionError, match=r"is for all_gather, reduce_scatter and all_reduce; got all_to_all"
    ):
        zf.compression.start(Collective(AllToAll()), torch.zeros(4), group, zf.compression.int8())
    with pytest.raises(
        OptionError,
        match=r"compression of data_parallel\(\) must be a codec or None; got 'int8'",
    ):
        zf.data_parallel(zf.value_and_grad(models.mlp_loss), group, compression="int8")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"compression of shard_params\(\) must be a codec"):
        zf.shard_params(models.mlp_loss, group, compression=8)  # type: ignore[arg-type]
    with pytest.raises(
        OptionError,
        match=r"shard_params\(\) gathers parameters in forward and again in backward.*leave "
        r"feedback to gradients",
    ):
        zf.shard_params(
            models.mlp_loss,
            group,
            compression=zf.compression.int8(feedback=zf.compression.error_feedback()),
        )
    with pytest.raises(
        OptionError,
        match=r"Compression.params is for stage 3, whose shards stay exact; got stage 2",
    ):
        zf.zero(
            2,
            models.mlp_loss,
            zf.optim.sgd(0.1),
            group,
            compression=zf.compression.Compression(params=zf.compression.int8()),
        )
    with pytest.raises(OptionError, match=r"must be a number of at least 0, below 1; got 1"):
        zf.compression.error_feedback(err_beta=1)
    with pytest.raises(
        OptionError, match=r"takes a 1-D floating tensor; got torch.int64 of shape \(4,\)"
    ):
        zf.compression.compressed_all_reduce(torch.zeros(4, dtype=torch.int64), None, None, group)
    with pytest.raises(
        OptionError,
        match=r"the server_error of 20 numbers of torch.bfloat16 has 16 of torch.float32 on "
        r"this rank",
    ):
        zf.compression.compressed_all_reduce(
            torch.zeros(20, dtype=torch.bfloat16), torch.zeros(20), torch.zeros(20), group
        )
    with pytest.raises(OptionError, match=r"no vmap rule"):
        torch.vmap(lambda x: zf.compression.all_gather(x, group, zf.compression.int8()))(
            torch.zeros(2, 4)
        )
    with pytest.raises(
        OptionError, match=r"is for all_gather, reduce_scatter and all_reduce; got all_to_all"
    ):
        zf.compression.start(
            Collective(AllToAll()), torch.zeros(4), zf.process_group(), zf.compression.int8()
        )
    mesh = zf.split(zf.collectives.abstract_group(4), inner=2)
    for over in (mesh, mesh.inner):
        with pytest.raises(OptionError, match=r"is for reduce_scatter; got all_gather"):
            zf.compression.start_over(
                Collective(AllGather()), torch.zeros(4), over, zf.compression.int8()
            )
    with pytest.raises(PlacementError, match=r"over a mesh or its inner axis; got its outer"):
        zf.compression.start_over(
            Collective(ReduceScatter()), torch.zeros(4), mesh.outer, zf.compression.int8()
        )
    feedback = zf.compression.error_feedback()
    with pytest.raises(
        OptionError, match=r"restore\(\) takes what kept\(\) returned; got 'x' without 'x count'"
    ):
        feedback.restore({"x": torch.zeros(4)})
    zf.compression.all_gather(torch.zeros(4), group, zf.compression.int8(feedback=feedback))
    with pytest.raises(
        OptionError,
        match=r"an error feedback is for the gradients of one layout; got 6 numbers in 1 messages",
    ):
        zf.compression.all_gather(torch.zeros(6), group, zf.compression.int8(feedback=feedback))
