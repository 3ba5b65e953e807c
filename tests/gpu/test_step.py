"""Steps on one GPU, one rank: every stage alike, and near the CPU's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from zfun import tree
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.cuda


def train(stage: int, device: str, **options: Any) -> tuple[Any, list[float]]:
    def main(group: zf.Group) -> tuple[Any, list[float]]:
        params = tree.map(lambda leaf: leaf.to(device), models.mlp())
        z = zf.zero(
            stage, models.mlp_loss, zf.optim.adamw(0.05), group, bucket_bytes=300, **options
        )
        state = z.init(params)
        losses = []
        for step in models.mlp_batches(3, 1):
            state, info = z.step(state, step[0].to(device))
            losses.append(float(info.loss))
        return z.params(state), losses

    return main(zf.process_group())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_on_the_gpu_is_near_the_cpu(stage: int) -> None:
    there, losses = train(stage, "cuda")
    here, expected = train(stage, "cpu")
    assert losses == pytest.approx(expected, rel=1e-9)
    for a, b, start in zip(
        tree.leaves(there), tree.leaves(here), tree.leaves(models.mlp()), strict=True
    ):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu() - start, b - start, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_agree_on_the_gpu(stage: int) -> None:
    assert_same_bits(train(stage, "cuda"), train(0, "cuda"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_the_device_leaves_out_has_the_bits_of_the_host(stage: int) -> None:
    def run(max_skipped: int | None) -> Any:
        z = zf.zero(
            stage,
            models.mlp_loss,
            zf.optim.chain(zf.optim.clip_by_global_norm(0.1), zf.optim.adamw(0.05)),
            zf.process_group(),
            bucket_bytes=300,
            precision=zf.Precision(loss_scale=zf.optim.dynamic_loss_scale(256.0)),
            max_skipped=max_skipped,
        )
        state = z.init(tree.map(lambda leaf: leaf.to("cuda"), models.mlp()))
        skipped = []
        for place, (batch, *_) in enumerate(models.mlp_batches(5, 1)):
            batch = batch.to("cuda") * (torch.inf if place == 1 else 1.0)
            # The first steps compile kernels and allocate.
            if place == 4 and max_skipped is None:
                torch.cuda.set_sync_debug_mode("error")
            try:
                state, info = z.step(state, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            skipped.append(info.skipped)
        assert list(map(bool, skipped)) == [False, True, False, False, False]
        return z.params(state), [x.cpu() for x in tree.leaves(state.opt_state)]

    assert_same_bits(run(None), run(9))


def test_offload_moves_the_state_to_host_memory() -> None:
    kept = zf.stores.host()
    stores = zf.stores.Offload(params=kept, grads=zf.stores.host(), optimizer=zf.stores.host())
    there, losses = train(3, "cuda", offload=stores)
    here, expected = train(3, "cuda")
    assert losses == pytest.approx(expected, rel=1e-9)
    for a, b, start in zip(
        tree.leaves(there), tree.leaves(here), tree.leaves(models.mlp()), strict=True
    ):
        torch.testing.assert_close(a.cpu() - start, b.cpu() - start, rtol=1e-6, atol=1e-9)
    assert kept.bytes_moved("put") > 0
