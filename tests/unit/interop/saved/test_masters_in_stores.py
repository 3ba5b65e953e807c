"""Master weights that a store keeps follow what code writes into parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.interop.deepspeed_runs import ADAMW, WIDTH, config, net, ranks, weights
from zfun.interop import deepspeed
from zfun.interop._resumed import load_parts

DEVICES = ["none", "cpu", "nvme"]


def engine_of(group: zf.Group, stage: int, device: str, path: Path, seed: int = 0) -> Any:
    made = config(stage, optimizer=ADAMW, bf16={"enabled": True})
    place = {"device": device, "nvme_path": str(path)}
    made["zero_optimization"]["offload_optimizer"] = place
    return deepspeed.initialize(model=net(seed), config=made, mpu=ranks(group))[0]


def step(engine: Any) -> None:
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean())
        engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    get: Any = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(param) for name, param in engine.module.named_parameters()}


def load_16_bits(engine: Any) -> None:
    engine.module.load_state_dict({name: x + 0.5 for name, x in weights(engine).items()})


def load_32_bits(engine: Any) -> None:
    engine.module.load_state_dict(
        {name: x + 0.3 for name, x in masters(engine).items()}, strict=False
    )


def write_data(engine: Any) -> None:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        for param in params:
            param.data.add_(0.5)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("write", [load_16_bits, load_32_bits, write_data])
def test_writes_last_beyond_the_next_step(stage: int, write: Any, tmp_path: Path) -> None:
    def main(group: zf.Group, device: str) -> Any:
        engine = engine_of(group, stage, device, tmp_path)
        step(engine)
        before = masters(engine)
        write(engine)
        step(engine)
        after = masters(engine)
        assert all((after[name] - x).mean() > 0.2 for name, x in before.items())
        return after, weights(engine)

    expected, *others = [zf.simulate(2, partial(main, device=x))[0] for x in DEVICES]
    for found in others:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_loaded_alone_have_their_master_weights(
    stage: int, device: str, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        saved = engine_of(group, stage, device, tmp_path)
        step(saved)
        saved._core.save(tmp_path / "saved")
        engine = engine_of(group, stage, device, tmp_path, seed=5)
        step(engine)
        load_parts(engine._core, tmp_path / "saved", weights=True, moments=False)
        expected = weights(saved)
        for name, value in masters(engine).items():
            assert value.bfloat16().equal(expected[name]), name

    zf.simulate(2, main)
