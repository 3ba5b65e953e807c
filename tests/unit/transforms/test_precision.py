"""Precision: casts, the dtype of gradients, master weights, loss scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import LeafError, NonFiniteError, OptionError, PlacementError
from zfun.testing import assert_same_bits, same_bits
from zfun.transforms import probe

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).float().pow(2).mean()


def params_of(dtype: torch.dtype = FP32, **options: Any) -> dict[str, Any]:
    return models.mlp(dtype=dtype, **options)


def mixed(num_layers: int = 2) -> dict[str, Any]:
    """Matrices in bfloat16, vectors in float32."""
    return tree.map(lambda x: x.to(BF16) if x.ndim == 2 else x, params_of(num_layers=num_layers))


def batch_of(group: zf.Group, step: int = 0) -> Tensor:
    return models.mlp_batches(step + 1, group.size, dtype=FP32)[step][group.rank]


def hidden(function: Any) -> Any:
    """A function that no transform can look into."""

    def user(params: Any, batch: Any) -> Any:
        return function(params, batch)

    return user


# Loss scales: the traces are those of DeepSpeed's rule.


def trace(rule: optim.LossScale, steps: str) -> tuple[list[int], list[int]]:
    state, scales, left = rule.init(), [], []
    for step in steps:
        state = rule.update(state, step == ".")
        scales.append(int(state.scale))
        left.append(int(state.hysteresis))
    return scales, left


def test_a_dynamic_scale_follows_the_rule_of_deepspeed() -> None:
    rule = optim.dynamic_loss_scale(256.0, window=2, hysteresis=2)
    scales, left = trace(rule, "xx.x...x..xx")
    assert scales == [256, 128, 128, 64, 64, 64, 128, 128, 128, 128, 64, 32]
    assert left == [1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1]


def test_consecutive_hysteresis_restores_the_count_after_a_good_step() -> None:
    rule = optim.dynamic_loss_scale(256.0, window=2, hysteresis=2, consecutive_hysteresis=True)
    assert trace(rule, "x.x.xx...")[0] == [256, 256, 256, 256, 256, 128, 128, 128, 256]


def test_a_dynamic_scale_doubles_after_each_window_without_overflow() -> None:
    assert trace(optim.dynamic_loss_scale(256.0, window=2), "........")[0] == [
        256,
        256,
        512,
        512,
        1024,
        1024,
        2048,
        2048,
    ]
    assert trace(optim.dynamic_loss_scale(256.0, window=2, hysteresis=1), "xx...x")[0] == [
        128,
        64,
        64,
        64,
        128,
        64,
    ]


def test_a_scale_stops_at_the_minimum() -> None:
    assert trace(optim.dynamic_loss_scale(4.0, hysteresis=1, min_scale=1.0), "xxxx")[0] == [
        2,
        1,
        1,
        1,
    ]
    rule = optim.dynamic_loss_scale(2.0, hysteresis=1, raise_at_min=True)
    state = rule.update(rule.init(), False)
    with pytest.raises(NonFiniteError, match="at some loss scale"):
        rule.update(state, False)


def test_a_static_scale_stays_and_counts_skipped_steps() -> None:
    rule = optim.static_loss_scale(128)
    assert trace(rule, "x.xx")[0] == [128] * 4
    assert int(rule.update(rule.init(), torch.tensor(True)).count) == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_scale_of_1_has_the_bits_of_one_of_2(stage: int) -> None:
    """Gradients of 16 bit are clipped in float32 under any loss scale."""

    def train(group: zf.Group, scale: float) -> Any:
        precision = zf.Precision(reduce=BF16, loss_scale=optim.static_loss_scale(scale))
        rule = optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(0.1))
        zero = zf.zero(stage, loss_fn, rule, group, precision=precision)
        state = zero.init(params_of())
        for step in range(2):
            state, info = zero.step(state, batch_of(group, step))
        return zero.params(state), info.grad_norm

    assert_same_bits(zf.simulate(2, train, 1.0)[0], zf.simulate(2, train, 2.0)[0])


@pytest.mark.parametrize(
    "bad", [True, 0.0, -1.0, 1e-50, 1e39, 2.0**128, float("inf"), float("nan"), "dynamic"]
)
def test_a_scale_is_a_number_of_float32_above_zero(bad: Any) -> None:
    for make in (
        optim.static_loss_scale,
        optim.dynamic_loss_scale,
        lambda scale: optim.dynamic_loss_scale(min_scale=scale),
    ):
        with pytest.raises(OptionError, match=r"number of at least 1\.1.*e-38, below 3\.4.*e\+38"):
            make(bad)


def test_a_scale_does_not_grow_to_infinity() -> None:
    rule = optim.dynamic_loss_scale(2.0**126, window=1, hysteresis=1)
    state = rule.init()
    for _ in range(4):
        state = rule.update(state, True)
    assert state.scale == 2.0**127
    assert rule.update(state, False).scale == 2.0**126


def test_scale_loss_scales_gradients_and_not_the_loss() -> None:
    params, x = params_of(), models.mlp_batches(1, 1, dtype=FP32)[0][0]
    vg = zf.value_and_grad(loss_fn)
    loss, grads = vg(params, x)
    scaled_loss, scaled = zf.transforms.scale_loss(zf.transforms.scale_loss(vg, 16.0), 4.0)(
        params, x
    )
    assert same_bits(loss, scaled_loss)
    assert same_bits(tree.map(lambda g: g * 64.0, grads), scaled)
    with pytest.raises(OptionError, match="inside of accumulate"):
        zf.transforms.scale_loss(zf.accumulate(vg, 2), 2.0)


# Master weights.


def test_a_small_update_to_a_half_model_is_not_lost() -> None:
    grads = {"w": torch.ones(4)}

    def after(optimizer: Any) -> Tensor:
        params = {"w": torch.ones(4, dtype=BF16)}
        state = optimizer.init(params)
        for _ in range(100):
            params, state = optimizer.apply(grads, state, params)
        return params["w"]

    assert after(optim.sgd(1e-4)).eq(1.0).all()
    found = after(optim.with_master(optim.sgd(1e-4)))
    assert found.dtype == BF16
    assert_same_bits(found, torch.full((4,), 0.99).to(BF16))


def test_master_weights_are_float32_training() -> None:
    wide, half = params_of(BF16), params_of(BF16)
    wide = tree.map(lambda x: x.float(), wide)
    plain, mastered = optim.adamw(1e-2), optim.with_master(optim.adamw(1e-2))
    state, both = plain.init(wide), mastered.init(half)
    for seed in range(5):
        grads = params_of(seed=seed)
        wide, state = plain.apply(grads, state, wide)
        half, both = mastered.apply(grads, both, half)
        assert_same_bits(half, tree.map(lambda x: x.to(BF16), wide))
        assert_same_bits(both.master, wide)
        assert_same_bits(both.inner, state)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.complex64])
def test_update_and_then_add_is_apply(dtype: torch.dtype) -> None:
    optimizer = optim.with_master(optim.adam(0.1), torch.float64)
    params = {
        "w": (torch.randn(300) * torch.logspace(-3, 3, 300)).to(dtype),
        "b": torch.randn(3, dtype=torch.float64),
    }
    state = optimizer.init(params)
    for _ in range(4):
        grads = tree.map(torch.randn_like, params)
        updates, updated = optimizer.update(grads, state, params)
        new, state = optimizer.apply(grads, state, params)
        assert_same_bits(optim.apply_updates(params, updates), new)
        assert_same_bits(updated, state)
        params = new


def test_only_narrow_leaves_have_masters() -> None:
    params = mixed()
    state = optim.with_master(optim.adamw(0.1)).init(params)
    assert set(tree.paths(state.master)) == {"h.0.w", "h.1.w"}
    assert {x.dtype for x in tree.leaves(state.inner.mu)} == {FP32}
    assert tree.leaves(optim.with_master(optim.sgd(0.1)).init(params_of()).master) == []

    def flat(group: zf.Group) -> Any:
        state = zf.shard_optimizer(
            optim.with_master(optim.adamw(0.1)), group, bucket_bytes=100
        ).init(params)
        return state.master, zf.unshard(state.master), zf.describe(state)

    for master, whole, description in zf.simulate(2, flat):
        assert isinstance(master, zf.Flat)
        assert master.placement is zf.S
        assert tree.paths(whole) == ["h.0.w", "h.1.w"]
        assert_same_bits(tree.leaves(whole), [params["h"][i]["w"].float() for i in range(2)])
        assert {row.dtype for row in description.rows if row.placement == "S"} == {FP32}


def test_donated_parameters_are_written_in_place() -> None:
    optimizer = optim.with_master(optim.sgd(0.5))
    params = {"w": torch.ones(8, dtype=BF16), "b": torch.ones(2)}
    state = optimizer.init(params)
    new, after = optimizer.apply(
        {"w": torch.ones(8), "b": torch.ones(2)}, state, params, donate=True
    )
    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert new["b"].data_ptr() == params["b"].data_ptr()
    assert after.master["w"].data_ptr() == state.master["w"].data_ptr()
    assert new["w"].eq(0.5).all()


def test_master_weights_are_probed_and_stand_inside_of_shards() -> None:
    probe(optim.with_master(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))))

    def main(group: zf.Group) -> None:
        with pytest.raises(PlacementError, match=r"write shard_optimizer\(with_master"):
            optim.with_master(zf.shard_optimizer(optim.sgd(0.1), group))

    zf.simulate(1, main)
    with pytest.raises(OptionError, match=r"a floating torch\.dtype; got torch\.int32"):
        optim.with_master(optim.sgd(0.1), torch.int32)


# The dtype of gradients.


@pytest.mark.parametrize(
    ("dtype", "chosen", "expected"),
    [
        (BF16, None, FP32),
        (FP16, None, FP32),
        (FP32, None, FP32),
        (FP32, BF16, BF16),
        (BF16, BF16, BF16),
    ],
)
def test_gradients_have_the_dtype_of_data_parallel(
    dtype: torch.dtype, chosen: Any, expected: torch.dtype
) -> None:
    params = params_of(dtype)

    def main(group: zf.Group) -> Any:
        x = batch_of(group).to(dtype)
        vg = zf.data_parallel(zf.value_and_grad(loss_fn), group, reduce_dtype=chosen)
        for form in (params, zf.replicate(params, group)):
            partial = vg(form, x)[1]
            sharded = zf.shard_grads(vg, group)(form, x)[1]
            assert_same_bits(sharded.buffers, zf.redistribute(partial, zf.S, group).buffers)
            assert {buffer.dtype for buffer in (*partial.buffers, *sharded.buffers)} == {expected}
            assert {row.dtype for row in zf.describe(partial).rows} == {expected}
            assert {leaf.dtype for leaf in tree.leaves(zf.unshard(sharded))} == {expected}
        opaque = zf.data_parallel(hidden(zf.value_and_grad(loss_fn)), group, reduce_dtype=chosen)
        assert_same_bits(opaque(params, x)[1].buffers, partial.buffers)
        # Without a group autograd's gradients are returned unchanged.
        assert {g.dtype for g in tree.leaves(zf.value_and_grad(loss_fn)(params, x)[1])} == {dtype}
        return zf.unshard(partial)

    terms = zf.simulate(2, main)
    assert same_bits(*terms)


def test_half_gradients_are_summed_and_accumulated_in_float32() -> None:
    params = {"w": torch.zeros((), dtype=BF16)}

    def main(group: zf.Group) -> float:
        vg = zf.data_parallel(
            zf.value_and_grad(lambda p, x: (p["w"] * x).sum()), group, reduce="sum"
        )
        grads = zf.accumulate(vg, 2)(params, torch.tensor([256.0, 1.0], dtype=BF16))[1]
        return float(zf.unshard(grads)["w"])

    assert zf.simulate(2, main) == [257.0] * 2  # in bfloat16 256 + 1 is 256


def test_reduce_dtype_is_checked() -> None:
    def main(group: zf.Group) -> None:
        vg = zf.value_and_grad(lambda p, x: p["w"].abs().sum())
        with pytest.raises(OptionError, match=r"a floating torch\.dtype or None; got torch\.int8"):
            zf.data_parallel(vg, group, reduce_dtype=torch.int8)
        with pytest.raises(LeafError, match="no complex numbers in bfloat16"):
            zf.data_parallel(vg, group, reduce_dtype=BF16)(
                {"w": torch.ones(2, dtype=torch.complex64)}, None
            )

    zf.simulate(1, main)


def test_a_half_loss_is_averaged_in_float32() -> None:
    def main(group: zf.Group) -> Tensor:
        vg = zf.data_parallel(
            zf.value_and_grad(lambda p, x: zf.weighted_mean((p["w"] * x).sum(), 257)), group
        )
        loss, _ = vg(
            {"w": torch.ones(1, dtype=BF16)}, torch.tensor([256.0 + 2.0 * group.rank], dtype=BF16)
        )
        return loss.mean

    expected = torch.tensor((256.0 + 258.0) / (2 * 257))
    assert all(same_bits(found, expected) for found in zf.simulate(2, main))


# Casts.


def test_a_cast_loss_sees_the_compute_dtype_and_gradients_keep_theirs() -> None:
    seen: list[Any] = []

    def loss(params: Any, batch: Any) -> Tensor:
        seen.append((tree.map(lambda x: x.dtype, params), tree.map(lambda x: x.dtype, batch)))
        return (params["w"] * batch["x"]).sum() + params["c"].abs().sum()

    params = {"w": torch.ones(3), "c": torch.ones(1, dtype=torch.complex64)}
    batch = {"x": torch.ones(3), "i": torch.ones(3, dtype=torch.int64)}
    value, grads = zf.value_and_grad(zf.cast(loss, BF16))(params, batch)
    assert seen[-1] == ({"w": BF16, "c": torch.complex64}, {"x": BF16, "i": torch.int64})
    assert (value.dtype, grads["w"].dtype, grads["c"].dtype) == (FP32, FP32, torch.complex64)
    zf.value_and_grad(zf.cast(loss, BF16, batch=False))(params, batch)
    assert seen[-1][1]["x"] == FP32
    with pytest.raises(OptionError, match=r"floating torch\.dtype; got torch\.int64"):
        zf.cast(loss, torch.int64)


def through(vg: Any, group: zf.Group, form: Any) -> Any:
    """Gradients of two steps (the second follows the order of use of the first) and the gathered
    dtypes.
    """
    recorded = group
    out = []
    for step in range(2):
        if isinstance(recorded, zf.collectives.Recorder):
            recorded.clear()
        loss, grads = vg(form, batch_of(group, step))
        out.append((loss, zf.unshard(grads)))
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kept", [FP32, torch.float64, BF16])
def test_cast_on_either_side_of_shard_params_is_the_same(
    size: int, kept: torch.dtype, dtype: torch.dtype
) -> None:
    params = params_of(kept, num_layers=3)
    params["h"].append(params["h"][0])  # tied, and used at both ends
    schedule = zf.ScheduleOptions(reuse_distance=10**9)  # each bucket is gathered once

    def main(group: zf.Group) -> Any:
        group = zf.record(group)
        whole = through(
            zf.data_parallel(zf.value_and_grad(zf.cast(loss_fn, dtype)), group, bucket_bytes=100),
            group,
            params,
        )
        shards = zf.shard(params, group, bucket_bytes=100)
        sent = []
        for loss in (
            zf.cast(zf.shard_params(loss_fn, group, schedule=schedule), dtype),
            zf.shard_params(zf.cast(loss_fn, dtype), group, schedule=schedule),
            zf.shard_params(hidden(zf.cast(loss_fn, dtype)), group, schedule=schedule),
        ):
            found = through(zf.data_parallel(zf.value_and_grad(loss), group), group, shards)
            assert_same_bits(found, whole)
            gathers = [
                entry
                for entry in group.log
                if entry.kind == "all_gather" and entry.name == "params"
            ]
            sent.append(
                (sum(entry.sent_bytes for entry in gathers), {entry.dtype for entry in gathers})
            )
        return sent

    narrow = kept if kept.itemsize < dtype.itemsize else dtype
    for outside, inside, unseen in zf.simulate(size, main):
        assert outside == inside
        if size > 1:
            assert outside[1] == {narrow}
            assert outside[0] * kept.itemsize == unseen[0] * narrow.itemsize


def test_complex_leaves_may_stand_beside_cast_leaves() -> None:
    params = {"w": torch.randn(4), "c": torch.randn(4, dtype=torch.complex64), "v": torch.randn(3)}

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).float().sum() * params["c"].abs().sum() + (
            params["v"] ** 2
        ).sum() * params["w"].sum()

    def main(group: zf.Group) -> None:
        x = torch.arange(4.0) + group.rank
        whole = zf.data_parallel(zf.value_and_grad(zf.cast(loss, BF16)), group)(params, x)
        shards = zf.shard(params, group)
        found = zf.data_parallel(
            zf.value_and_grad(zf.cast(zf.shard_params(loss, group), BF16)), group
        )(shards, x)
        assert_same_bits((found[0], zf.unshard(found[1])), (whole[0], zf.unshard(whole[1])))

    zf.simulate(2, main)


def test_cast_works_with_recomputation() -> None:
    params = params_of(num_layers=4)

    def recomputed(params: Any, x: Tensor) -> Tensor:
        for layer in params["h"]:
            x = checkpoint(
                lambda x, layer=layer: torch.tanh(x @ layer["w"] + layer["b"]),
                x,
                use_reentrant=False,
            )
        return (x @ params["out"]).float().pow(2).mean()

    def main(group: zf.Group) -> None:
        whole = through(
            zf.data_parallel(zf.value_and_grad(zf.cast(loss_fn, BF16)), group), group, params
        )
        shards = zf.shard(params, group, bucket_bytes=100)
        for loss in (
            zf.shard_params(zf.cast(recomputed, BF16), group),
            zf.shard_params(hidden(zf.cast(recomputed, BF16)), group),
        ):
            assert_same_bits(
                through(zf.data_parallel(zf.value_and_grad(loss), group), group, shards), whole
            )

    zf.simulate(2, main)


def test_cast_works_under_torch_func() -> None:
    params = params_of()

    def main(group: zf.Group) -> None:
        x = models.mlp_batches(1, 1, dtype=FP32)[0][0]
        shards = zf.shard(params, group)
        expected = zf.value_and_grad(zf.cast(loss_fn, BF16))(params, x)[1]
        for loss in (
            zf.cast(zf.shard_params(loss_fn, group), BF16),
            zf.shard_params(zf.cast(loss_fn, BF16), group),
        ):
            grads = torch.func.grad(lambda p: loss(p, x) / group.size)(shards)
            assert {buffer.dtype for buffer in grads.buffers} == {FP32}
            for found, wanted in zip(
                tree.leaves(zf.unshard(grads)), tree.leaves(expected), strict=True
            ):
                torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)

    zf.simulate(2, main)


# The recipe.


def test_precision_is_checked() -> None:
    def main(group: zf.Group) -> None:
        for bad in (torch.int8, "bf16", FP32):
            with pytest.raises(
                OptionError, match=r"a zf\.Precision, torch\.bfloat16, torch\.float16 or"
            ):
                zf.zero(0, loss_fn, optim.sgd(0.1), group, precision=bad)  # pyrefly: ignore[bad-argument-type]
        with pytest.raises(OptionError, match=r"reduce of Precision\(\) must be a floating"):
            zf.zero(0, loss_fn, optim.sgd(0.1), group, precision=zf.Precision(reduce=torch.int8))
        with pytest.raises(OptionError, match="finite number above 0"):
            zf.zero(0, loss_fn, optim.sgd(0.1), group, precision=zf.Precision(loss_scale=0.0))

    zf.simulate(1, main)


def test_tied_leaves_stay_tied_and_frozen_leaves_keep_dtypes() -> None:
    params = params_of(num_layers=2)
    # a tie: another tensor object, the same memory
    params["h"].append({"w": params["h"][0]["w"].detach(), "b": torch.zeros(5)})
    params["count"] = torch.arange(3)
    params["scale"] = torch.ones(1)

    def loss(params: Any, batch: Tensor) -> Tensor:
        assert params["scale"].dtype == BF16
        return loss_fn(params, batch) * params["scale"] * params["count"].sum().clamp(max=1)

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(
            stage,
            loss,
            optim.adamw(0.01),
            group,
            precision=BF16,
            trainable=lambda path, leaf: path not in ("count", "scale"),
        )
        state = z.init(params)
        for step in range(2):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    runs = [zf.simulate(2, main, stage) for stage in range(4)]
    for run in runs:
        assert_same_bits(run[0], runs[0][0])
    found = runs[3][0]
    assert found["h"][0]["w"] is found["h"][2]["w"]
    assert same_bits(found["count"], params["count"])
    assert found["scale"].dtype == BF16


def test_describe_shows_every_dtype() -> None:
    def main(group: zf.Group) -> Any:
        state = zf.zero(3, loss_fn, optim.adamw(0.1), group, precision=FP16).init(params_of())
        return zf.describe(state._asdict()), state

    description, state = zf.simulate(2, main)[0]
    dtypes = {
        row.path.split("h.0.w")[0]: row.dtype
        for row in description.rows
        if row.path.endswith("h.0.w")
    }
    assert list(dtypes.values()) == [FP16, FP32, FP32, FP32]
    rows = {row.path: row.dtype for row in description.rows}
    assert rows["loss_scale.scale"] == FP32
    held = sum(
        buffer.nbytes
        for flat in (state.params, *zf.flat.flats(state.opt_state))
        for buffer in flat.buffers
    )
    assert f"{held + 8 + 4 + 3 * 8:,} bytes" in str(description)


def test_master_weights_may_be_offloaded() -> None:
    def main(group: zf.Group, **options: Any) -> Any:
        z = zf.zero(2, loss_fn, optim.adamw(0.01), group, precision=BF16, **options)
        state = z.init(params_of())
        for step in range(3):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state), {type(x) for x in state.opt_state.master.buffers}

    plain = zf.simulate(2, main)
    stored = zf.simulate(
        2, main, offload=zf.stores.Offload(optimizer=zf.stores.host(), grads=zf.stores.host())
    )
    assert same_bits([run[0] for run in plain], [run[0] for run in stored])
    assert all(issubclass(kind, zf.stores.Stored) for _, kinds in stored for kind in kinds)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("init", ["check", "broadcast"])
def test_master_weights_start_from_the_unrounded_parameters(stage: int, init: str) -> None:
    def made(factor: float) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        tied = torch.randn(7, generator=generator) * factor
        return {
            "w": torch.randn(40, 3, generator=generator) * factor,
            "tied": tied,
            "again": tied,
            "frozen": torch.randn(5) * factor,
        }

    params = made(1.0)

    def run(group: zf.Group) -> Any:
        trainable = lambda path, leaf: path != "frozen"
        zero = zf.zero(
            stage,
            loss_fn,
            optim.adamw(0.1),
            group,
            precision=BF16,
            bucket_bytes=100,
            trainable=trainable,
        )
        state = zero.init(params if init == "check" or group.rank == 0 else made(2.0), init=init)
        master = state.opt_state.master
        spare = [buffer.untyped_storage().nbytes() - buffer.nbytes for buffer in master.buffers]
        return zf.unshard(master) if stage else zf.flat.unravel(master), zero.params(state), spare

    trained = {path: leaf for path, leaf in params.items() if path != "frozen"}
    for size in (1, 3):
        for master, kept, spare in zf.simulate(size, run):
            assert_same_bits(
                [leaf for leaf in tree.leaves(master) if leaf is not None], tree.leaves(trained)
            )
            assert_same_bits(kept, {path: leaf.bfloat16() for path, leaf in params.items()})
            # A master weight that is a view would keep the whole parameters alive.
            assert spare == [0] * len(spare)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_of_dtypes_names_the_cast_and_the_remedies(stage: int) -> None:
    """A constant that the loss makes is float32, beside parameters in bfloat16."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"] @ torch.ones(3, 3)).sum()

    def main(group: zf.Group) -> None:
        zero = zf.zero(stage, loss, zf.optim.sgd(0.1), group, precision=torch.bfloat16)
        state = zero.init({"w": torch.ones(3, 3)})
        with pytest.raises(RuntimeError) as found:
            zero.step(state, torch.ones(2, 3))
        note = "".join(found.value.__notes__)
        assert "runs this loss in torch.bfloat16" in note
        assert "dtype=x.dtype" in note
        assert "torch.autocast" in note

    zf.simulate(2, main)
