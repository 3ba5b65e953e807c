"""Checkpoints of engines without an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import ADAMW, config, net, ranks, trained, weights
from zfun.errors import CheckpointError

FP32 = deepspeed.utils.zero_to_fp32


def made(group: zf.Group, stage: int, seed: int, *, frozen: bool = False, **more: Any) -> Any:
    model = net(seed)
    model.body.requires_grad_(not frozen)
    own = config(stage, **more)
    return deepspeed.initialize(model=model, config=own, mpu=ranks(group))[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"load_module_only": True}])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_engine_without_an_optimizer_loads_what_it_has_saved(
    stage: int, options: dict[str, Any], frozen: bool, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, 1, frozen=frozen)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        other = made(group, 3 - stage, 2)
        path, client = other.load_checkpoint(tmp_path, **options)
        assert (path, client) == (str(tmp_path / "global_step0"), {"epoch": 3})
        torch.testing.assert_close(weights(other), net(1).state_dict(), rtol=0, atol=0)

    zf.simulate(2, main)
    found = FP32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    torch.testing.assert_close(found, dict(net(1).state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_cross_between_engines_with_and_without_an_optimizer(
    stage: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        bare, full = made(group, stage, 1), made(group, stage, 2, optimizer=ADAMW)
        bare.save_checkpoint(tmp_path / "bare")
        before = weights(full)
        with pytest.raises(CheckpointError, match=r"without an optimizer.*load_optimizer_states="):
            full.load_checkpoint(tmp_path / "bare")
        torch.testing.assert_close(weights(full), before, rtol=0, atol=0)
        full.load_checkpoint(tmp_path / "bare", load_optimizer_states=False)
        torch.testing.assert_close(weights(full), weights(bare), rtol=0, atol=0)
        trained(full, group, 0, 1)
        full.save_checkpoint(tmp_path / "full")
        bare.load_checkpoint(tmp_path / "full")
        torch.testing.assert_close(weights(bare), weights(full), rtol=0, atol=0)
        assert not torch.equal(weights(bare)["scale"], net(1).scale)

    zf.simulate(2, main)
