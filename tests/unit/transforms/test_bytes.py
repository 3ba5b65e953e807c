"""Bytes of every step: 2Ψ(N−1)/N for stages 0 to 2, 3Ψ(N−1)/N for stage 3, padding included.

From the second step on, stage 3 sends less by the buckets that stay gathered from forward to
backward, unless ``reuse_distance`` is 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models


def skips_layers(params: Any, x: Tensor) -> Tensor:
    """Uses layers 0 and 2 only."""
    for layer in params["h"][::2]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).pow(2).mean()


def uses_twice(params: Any, x: Tensor) -> Tensor:
    """Uses the first layer early and late, as tied embeddings are."""
    for layer in [*params["h"], params["h"][0]]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).pow(2).mean()


def uses_one_leaf(params: Any, x: Tensor) -> Tensor:
    return x.sum() + params["out"].sum()


def chain(params: Any, x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.sum()


SLOW = pytest.mark.slow
NOTHING_STAYS = zf.ScheduleOptions(reuse_distance=0)
LOSSES = [models.mlp_loss, skips_layers, uses_one_leaf]


def sent_by_step(
    group: zf.Group, stage: int, loss_fn: Any, num_steps: int, bucket_bytes: int, **options: Any
) -> tuple[int, list[dict[str, int]]]:
    recorded = zf.record(group)
    options.setdefault("schedule", NOTHING_STAYS if stage == 3 else None)
    z = zf.zero(
        stage, loss_fn, zf.optim.adamw(1e-3), recorded, bucket_bytes=bucket_bytes, **options
    )
    state = z.init(models.mlp(num_layers=5, dtype=torch.float32))
    psi = sum(bucket.padded_numel * bucket.dtype.itemsize for bucket in state.params.layout.buckets)
    steps = []
    for batches in models.mlp_batches(num_steps, group.size, dtype=torch.float32):
        recorded.clear()
        state, _ = z.step(state, batches[group.rank])
        steps.append(
            {name: recorded.bytes_sent(name) for name in ("params", "grads")}
            | {"all": recorded.bytes_sent()}
        )
    return psi, steps


@pytest.mark.parametrize("bucket_bytes", [1, 400, 2**24])
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW), 7])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_a_step_follow_the_formula(
    stage: int, size: int, loss_fn: Any, bucket_bytes: int
) -> None:
    for psi, steps in zf.simulate(size, sent_by_step, stage, loss_fn, 3, bucket_bytes):
        once = psi * (size - 1) // size
        params, grads = {0: (0, 2), 1: (1, 1), 2: (1, 1), 3: (2, 1)}[stage]
        # The first step of stage 3 gathers in layout order and learns the order of use: the bytes
        # equal those of later steps.
        for step in steps:
            assert (step["params"], step["grads"]) == (params * once, grads * once)


@pytest.mark.parametrize("bucket_bytes", [1, 400])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_by_default_all_ranks_send_as_much_in_every_step(loss_fn: Any, bucket_bytes: int) -> None:
    schedule = zf.ScheduleOptions()
    found = zf.simulate(3, sent_by_step, 3, loss_fn, 4, bucket_bytes, schedule=schedule)
    for psi, (first, *steps) in found:
        once = psi * 2 // 3
        assert first["params"] <= 2 * once
        for step in steps:
            assert step == steps[0] == found[0][1][1]
            assert once <= step["params"] <= 2 * once
            assert step["grads"] == once


@pytest.mark.parametrize("bucket_bytes", [1, 512, 2**24])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_last_buckets_of_forward_stay_for_backward(prefetch: int, bucket_bytes: int) -> None:
    """Gathers are left out, and the most gathered at once is what it was."""

    def main(group: zf.Group, **options: Any) -> Any:
        recorded = zf.record(group)
        schedule = zf.ScheduleOptions(prefetch=prefetch, **options)
        loss = zf.shard_params(chain, recorded, schedule=schedule)
        params = zf.shard(
            [torch.eye(8).clone() for _ in range(6)], recorded, bucket_bytes=bucket_bytes
        )
        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), recorded), recorded)
        for _ in range(3):
            recorded.clear()
            vg(params, torch.ones(2, 8))
        gathers = [record for record in recorded.log if record.name == "params"]
        (found,) = loss.schedules  # pyrefly: ignore[missing-attribute]
        return gathers, max(found.live()), len(params.layout.buckets)

    (gathers, most, count), (again, least, _) = (
        zf.simulate(2, main, **options)[0] for options in ({}, {"reuse_distance": 0})
    )
    assert len(again) == 2 * count
    assert len(gathers) == 2 * count - min(count, prefetch + 1)
    assert most == least


@pytest.mark.parametrize("size", [2, 3])
def test_a_leaf_that_is_used_early_and_late_is_gathered_once_from_the_second_step_on(
    size: int,
) -> None:
    layout = zf.layout.layout_of(models.mlp(num_layers=5, dtype=torch.float32), size, 1)
    # "out" stays for backward. The bias before is not needed there.
    stay = layout.buckets[-1].padded_numel * 4 * (size - 1) // size
    assert layout.label(10) == "bucket 10: out"
    found = zf.simulate(size, sent_by_step, 3, uses_twice, 3, 1, schedule=zf.ScheduleOptions())
    for psi, steps in found:
        once = psi * (size - 1) // size
        assert steps[0]["params"] >= 2 * once
        assert [step["params"] for step in steps[1:]] == [2 * once - stay] * 2
        assert [step["grads"] for step in steps] == [once] * 3


def test_a_pass_without_gradients_gathers_nothing_for_backward() -> None:
    def main(group: zf.Group) -> tuple[int, int]:
        recorded = zf.record(group)
        loss = zf.shard_params(models.mlp_loss, recorded, schedule=zf.ScheduleOptions(prefetch=2))
        params = zf.shard(models.mlp(), recorded, bucket_bytes=1)
        vg = zf.data_parallel(zf.value_and_grad(loss), recorded)
        batch = models.mlp_batches(1, 1)[0][0]
        for _ in range(2):  # after which the schedule is known
            vg(params, batch)
        recorded.clear()
        loss(params, batch)
        return recorded.bytes_sent("params"), sum(
            bucket.padded_numel * bucket.dtype.itemsize for bucket in params.layout.buckets
        )

    for sent, psi in zf.simulate(2, main):
        assert sent == psi // 2


def test_a_bucket_that_the_loss_still_holds_is_gathered_for_backward() -> None:
    """The gather of a bucket for backward is due while the loss still holds the bucket."""

    def holds(params: Any, x: Tensor) -> Tensor:
        *before, last = params["h"]
        for layer in before:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        held = zf.gather(before[-1])
        x = torch.tanh(x @ last["w"]) * held["b"]
        del held
        return ((x + last["b"]) @ params["out"]).pow(2).mean()

    size = 2
    for psi, steps in zf.simulate(
        size, sent_by_step, 3, holds, 4, 1, schedule=zf.ScheduleOptions(prefetch=3)
    ):
        once, each = psi * (size - 1) // size, 2**7
        assert [step["grads"] for step in steps] == [once] * 4
        # From the second step on, the last three buckets stay.
        assert [step["params"] for step in steps] == [2 * once, *[2 * once - 3 * each] * 3]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_little_beside_parameters_and_gradients(stage: int) -> None:
    for _, steps in zf.simulate(4, sent_by_step, stage, models.mlp_loss, 3, 400):
        # The loss, the norm, and the order of use once.
        assert all(step["all"] - step["params"] - step["grads"] < 4096 for step in steps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_micro_batches_follow_the_formula(stage: int) -> None:
    size = 2
    for psi, steps in zf.simulate(
        size, sent_by_step, stage, models.mlp_loss, 2, 400, num_micro_batches=2
    ):
        once = psi * (size - 1) // size
        # Stages 2 and 3 reduce every micro-batch, and stage 3 gathers for each; stages 0 and 1
        # reduce the sum.
        params, grads = {0: (0, 2), 1: (1, 1), 2: (1, 2), 3: (4, 2)}[stage]
        assert [(step["params"], step["grads"]) for step in steps] == [
            (params * once, grads * once)
        ] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_leaves_have_no_gradient_and_no_optimizer_bytes(stage: int) -> None:
    size = 3

    def trainable(path: str, leaf: Tensor) -> bool:
        return path.startswith(("h.0", "h.3"))

    def main(group: zf.Group) -> None:
        recorded = zf.record(group)
        z = zf.zero(
            stage,
            models.mlp_loss,
            zf.optim.adamw(1e-3),
            recorded,
            bucket_bytes=200,
            trainable=trainable,
            schedule=NOTHING_STAYS if stage == 3 else None,
        )
        state = z.init(models.mlp(dtype=torch.float32))
        assert state.frozen is not None
        trained, frozen = (
            sum(bucket.padded_numel * bucket.dtype.itemsize for bucket in flat.layout.buckets)
            for flat in (state.params, state.frozen)
        )
        for batches in models.mlp_batches(2, size, dtype=torch.float32):
            recorded.clear()
            state, _ = z.step(state, batches[group.rank])
            params = {0: 0, 1: trained, 2: trained, 3: 2 * (trained + frozen)}[stage]
            assert recorded.bytes_sent("params") == params * (size - 1) // size
            assert (
                recorded.bytes_sent("grads")
                == (2 if stage == 0 else 1) * trained * (size - 1) // size
            )
        held = sum(zf.describe(state.opt_state.mu).bytes_by_place.values())
        assert held == (trained if stage == 0 else trained // size)
        assert sum(zf.describe(state.frozen).bytes_by_place.values()) == (
            frozen // size if stage == 3 else frozen
        )

    zf.simulate(size, main)
