"""Laws 5 to 7 and 10 under every precision policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim, tree
from zfun.testing import (
    Composition,
    assert_padding,
    assert_same_bits,
    assert_same_runs,
    bucket_sizes,
    compositions,
    same_bits,
    tensors,
    trees,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POLICIES: dict[str, Any] = {
    "none": None,
    "bfloat16": BF16,
    "float16": FP16,
    "compute": zf.Precision(compute=BF16),
    "wide masters": zf.Precision(param=FP16, compute=BF16, master=torch.float64),
    "float16 sums": zf.Precision(compute=FP16, reduce=FP16, loss_scale=1024.0),
    "no masters": zf.Precision(param=BF16, compute=FP32, reduce=BF16),
}


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).float().pow(2).mean()


def run(
    group: zf.Group,
    stage: int,
    precision: Any,
    num_steps: int = 4,
    num_micro_batches: int = 1,
    loss: Any = loss_fn,
    **options: Any,
) -> Any:
    """Train; return the values that all stages must agree on, and the bytes sent after step one."""
    group = zf.record(group)
    z = zf.zero(
        stage,
        loss,
        optim.adamw(0.01),
        group,
        precision=precision,
        num_micro_batches=num_micro_batches,
        **options,
    )
    state, infos = z.init(models.mlp(dtype=FP32)), []
    for step, batches in enumerate(models.mlp_batches(num_steps, group.size, rows=6, dtype=FP32)):
        if step:
            group.clear()
        state, info = z.step(state, batches[group.rank])
        infos.append((info.loss, info.grad_norm, info.skipped, info.loss_scale))
    assert_padding((state.params, state.opt_state))
    sent = {name: group.bytes_sent(name) for name in ("params", "grads")}
    return (
        (z.params(state), infos),
        sent,
        {(entry.name, entry.dtype) for entry in group.log if entry.name in sent},
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_all_stages_are_the_same_function(name: str, size: int) -> None:
    for num_micro_batches in (1, 3):
        results = [
            zf.simulate(
                size,
                run,
                stage,
                POLICIES[name],
                num_micro_batches=num_micro_batches,
                bucket_bytes=300,
            )
            for stage in range(4)
        ]
        for stage, result in enumerate(results):
            # Stages 2 and 3 reduce each micro-batch before the sum, which rounds differently.
            expected = results[2 if num_micro_batches > 1 and stage >= 2 else 0][0][0]
            for found, _, _ in result:
                assert_same_bits(found, expected, f"stage {stage} and the first")


def test_half_precision_gathers_half_as_many_bytes() -> None:
    for stage in (1, 2, 3):
        plain, half = (zf.simulate(3, run, stage, precision)[0][1:] for precision in (None, BF16))
        assert half[0]["params"] * 2 == plain[0]["params"] > 0
        assert half[0]["grads"] == plain[0]["grads"] > 0
        assert half[1] == {("params", BF16), ("grads", FP32)}
    kept, narrow = (
        zf.simulate(2, run, 3, precision)[0][1]
        for precision in (None, zf.Precision(compute=BF16, reduce=BF16))
    )
    assert {name: 2 * count for name, count in narrow.items()} == kept


def test_the_loss_curve_is_that_of_float32() -> None:
    def fit(params: Any, x: Tensor) -> Tensor:
        y = torch.sin(x.float()).mean(1)
        for layer in params["h"]:
            x = torch.tanh(0.5 * x @ layer["w"] + layer["b"])
        return ((x @ params["out"]).float() - y).pow(2).mean()

    def curve_of(precision: Any) -> Tensor:
        def main(group: zf.Group) -> Tensor:
            z = zf.zero(3, fit, optim.adamw(0.01), group, precision=precision)
            state, losses = z.init(tree.map(lambda x: 0.3 * x, models.mlp(dtype=FP32))), []
            for batches in models.mlp_batches(60, 2, rows=64, dtype=FP32):
                state, info = z.step(state, batches[group.rank])
                losses.append(info.loss)
            return torch.stack(losses)

        return zf.simulate(2, main)[0]

    curves = [curve_of(precision) for precision in (None, BF16, zf.Precision(compute=BF16))]
    assert float(curves[0][0] - curves[0][-1]) > 0.1
    for curve in curves[1:]:
        assert float((curve - curves[0]).abs().max()) < 1e-2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_power_of_two_changes_no_bit(stage: int) -> None:
    plain = zf.simulate(2, run, stage, zf.Precision())
    for scale in (2.0**-7, 2.0**12):
        # With a window of 2 the scale doubles between steps, and each gradient must be divided by
        # the scale that multiplied the loss of the same step.
        for rule in (scale, optim.dynamic_loss_scale(scale, window=2, min_scale=2.0**-10)):
            scaled = zf.simulate(2, run, stage, zf.Precision(loss_scale=rule))
            for mine, theirs in zip(scaled, plain, strict=True):
                assert_same_bits(mine[0][0], theirs[0][0])
                assert same_bits(
                    [info[:3] for info in mine[0][1]], [info[:3] for info in theirs[0][1]]
                )
    assert [info[3] for info in scaled[0][0][1]] == [2.0**12] * 3 + [2.0**13]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("donate", [True, False])
def test_an_overflow_skips_the_step_and_shrinks_the_scale(stage: int, donate: bool) -> None:
    def main(group: zf.Group) -> None:
        rule = optim.dynamic_loss_scale(1024.0, hysteresis=1)
        precision = zf.Precision(FP16, FP16, FP32, FP32, rule)
        z = zf.zero(stage, loss_fn, optim.adamw(0.01), group, precision=precision, donate=donate)
        state, scales = z.init(models.mlp(dtype=FP32)), []
        for step in range(5):
            x = models.mlp_batches(5, group.size, dtype=FP32)[step][group.rank]
            before = tree.map(torch.clone, (state.params, state.opt_state))
            # On one rank only: 1e5 is infinite in float16.
            overflow = step in (1, 2)
            state, info = z.step(
                state, x * 1e5 * float("inf") if overflow and group.rank == group.size - 1 else x
            )
            scales.append(info.loss_scale)
            assert info.skipped is overflow
            assert (info.bad_leaf is not None) is overflow
            assert (
                same_bits(tree.leaves(before), tree.leaves((state.params, state.opt_state)))
                is overflow
            )
        assert scales == [1024.0, 1024.0, 512.0, 256.0, 256.0]
        assert state.loss_scale is not None
        assert int(state.loss_scale.count) == 5
        assert int(state.opt_state.inner.count) == 3

    zf.simulate(2, main)


def test_float16_gradients_survive_only_when_scaled() -> None:
    def tiny(params: Any, x: Tensor) -> Tensor:
        return loss_fn(params, x) * 1e-8

    def norm(precision: Any) -> float:
        return max(
            float(info[1])
            for info in zf.simulate(2, run, 3, precision, num_steps=1, loss=tiny)[0][0][1]
        )

    exact = norm(None)
    for reduce in (FP32, FP16):
        assert norm(zf.Precision(compute=FP16, reduce=reduce)) < 0.5 * exact
        assert norm(zf.Precision(compute=FP16, reduce=reduce, loss_scale=2.0**20)) == pytest.approx(
            exact, rel=0.02
        )


# Every composition, on any tree of mixed dtypes.

MIXED = (FP32, torch.float64, BF16, FP16, torch.complex64)
RULES = [
    optim.with_master(optim.adamw(0.05, eps=1e-3)),
    optim.with_master(optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.05, momentum=0.8))),
    optim.chain(optim.clip_by_global_norm(0.1), optim.with_master(optim.sgd(0.05), torch.float64)),
]


@settings(max_examples=examples(24))
@given(
    params=trees(tensors(MIXED), nodes=models.NODES),
    size=st.sampled_from([1, 2, 3, 4]),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from([None, BF16, FP16, FP32]),
    buckets=st.lists(bucket_sizes(), min_size=1, max_size=3),
    num_micro_batches=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_tree_trains(
    params: Any,
    size: int,
    rule: Any,
    dtype: Any,
    buckets: list[int],
    num_micro_batches: int,
    seed: int,
    data: st.DataObject,
) -> None:
    loss = models.tree_loss if dtype is None else zf.cast(models.tree_loss, dtype)
    drawn = data.draw(
        st.lists(compositions(num_micro_batches=num_micro_batches), min_size=3, max_size=4)
    )
    batches = models.tree_batches(2, size, 4, seed)
    found = assert_same_runs(
        loss,
        rule,
        params,
        batches,
        [Composition(), *drawn],
        num_micro_batches=num_micro_batches,
        bucket_bytes=buckets,
    )
    for before, after in zip(tree.leaves(params), tree.leaves(found.params), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
