"""Checkpoints of engines without an optimizer, and of parameters that no optimizer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import ADAMW, config, net, ranks, trained, weights
from zfun.errors import CheckpointError, SpecMismatch
from zfun.interop.deepspeed.pipe import LayerSpec, PipelineModule

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


def part(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer trains; others require a gradient, and some do not."""
    model.get_submodule("body.0").requires_grad_(False)
    return [*model.get_submodule("body.3").parameters()]


@pytest.mark.shows(
    "`save_checkpoint(exclude_frozen_parameters=True)`",
    "right",
    "leaves out the parameters that require no gradient, as in DeepSpeed; a load of the rest takes "
    "`load_module_strict=False`",
)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("has_optimizer", [False, True])
@pytest.mark.parametrize("options", [{}, {"load_optimizer_states": False}])
def test_parameters_that_require_a_gradient_stay_in_a_checkpoint(
    stage: int, has_optimizer: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    def engine_of(group: zf.Group, seed: int) -> Any:
        model = net(seed)
        own = part(model)
        optimizer = torch.optim.AdamW(own, 0.1) if has_optimizer else None
        options = {"config": config(stage), "mpu": ranks(group)}
        return deepspeed.initialize(model=model, optimizer=optimizer, **options)[0]

    def main(group: zf.Group) -> None:
        engine = engine_of(group, 1)
        if has_optimizer:
            trained(engine, group, 0, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = weights(engine)
        other = engine_of(group, 2)
        before = weights(other)
        with pytest.raises(SpecMismatch, match=r"without 'body\.0\.bias'.*load_module_strict="):
            other.load_checkpoint(tmp_path, **options)
        torch.testing.assert_close(weights(other), before, rtol=0, atol=0)
        other.load_checkpoint(tmp_path, load_module_strict=False, **options)
        for name, value in weights(other).items():
            source = before if name.startswith("body.0.") else saved
            torch.testing.assert_close(value, source[name], rtol=0, atol=0)

    zf.simulate(2, main)
    found: dict[str, Tensor] = FP32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert net().state_dict().keys() - found.keys() == {"body.0.weight", "body.0.bias"}


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_pipeline_saves_all_frozen_parameters_where_one_requires_a_gradient(
    has_optimizer: bool, tmp_path: Path
) -> None:
    def engine_of(group: zf.Group, seed: int) -> Any:
        torch.manual_seed(seed)
        layers = [LayerSpec(nn.Linear, 3, 3) for _ in range(4)]
        options = {"num_stages": 2, "loss_fn": nn.functional.mse_loss, "group": group}
        model = PipelineModule(layers, partition_method="uniform", **options)
        own = [x for name, x in model.named_parameters() if name[0] in "13"]
        optimizer = torch.optim.AdamW(own, 0.1) if has_optimizer else None
        if group.rank == 0:
            model.get_submodule("0").requires_grad_(False)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config(1))[0]

    def main(group: zf.Group) -> None:
        engine, other = engine_of(group, 1), engine_of(group, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        assert not torch.equal(weights(other)["2.weight"], weights(engine)["2.weight"])
        other.load_checkpoint(tmp_path)
        torch.testing.assert_close(weights(other), weights(engine), rtol=0, atol=0)

    zf.simulate(2, main)
