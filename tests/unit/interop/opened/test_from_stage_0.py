"""Runs go on from directories that DeepSpeed wrote without ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.fixtures.deepspeed.write import Model
from tests.interop.deepspeed_runs import ranks, weights
from zfun.errors import CheckpointError

Rule = Callable[[Any], torch.optim.Optimizer]
RULES: dict[str, Rule] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}
TAG, LATE_RATE = "global_step3", 0.02


def groups_of(model: nn.Module, trains_scale: bool = False) -> list[dict[str, Any]]:
    params = [x for x in model.parameters() if x.requires_grad or trains_scale]
    return [
        {"params": [x for x in params if x.ndim > 1], "weight_decay": 0.1},
        {"params": [x for x in params if x.ndim < 2], "weight_decay": 0.0},
    ]


def loss_of(model: Any, step: int) -> Tensor:
    tokens = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def written(path: Path, rule: Rule, half: bool, frozen: bool) -> tuple[Any, Any]:
    """Write what DeepSpeed writes at stage 0; return the weights there and after two steps.

    With parameters of 16 bits, DeepSpeed steps parameters of 32 bits, and rounds these.
    """
    torch.manual_seed(0)
    exact, model = Model(), Model()
    model = model.bfloat16() if half else model
    model.offset = exact.offset
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    optimizer = rule(groups_of(exact, frozen))

    def step(number: int) -> None:
        model.zero_grad()
        loss_of(model, number).backward()
        for param, own in zip(exact.parameters(), model.parameters(), strict=True):
            param.grad = None if own.grad is None else own.grad.float()
        optimizer.step()
        for param, own in zip(exact.parameters(), model.parameters(), strict=True):
            own.data.copy_(param.detach())

    for number in range(3):
        step(number)
    for group in optimizer.param_groups:
        group["lr"] = LATE_RATE
    state: dict[str, Any] = optimizer.state_dict()
    if half:
        masters = [list(group["params"]) for group in optimizer.param_groups]
        scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3}
        state = {**scale, "optimizer_state_dict": state, "fp32_groups": masters}
    counters = {"global_steps": 3, "skipped_steps": 0, "global_samples": 6, "dp_world_size": 1}
    names = {"buffer_names": ["offset"], "param_shapes": None, "shared_params": None}
    (path / TAG).mkdir(parents=True)
    module = {"module": model.state_dict(), "optimizer": state, "epoch": 4}
    torch.save(counters | names | module, path / TAG / "mp_rank_00_model_states.pt")
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    step(3)
    step(4)
    return saved, model.state_dict()


def engine_of(
    group: zf.Group, stage: int, rule: Rule, half: bool = False, frozen: bool = False
) -> Any:
    torch.manual_seed(5)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": half},
    }
    optimizer = rule(groups_of(model, frozen))
    options = {"config": config, "mpu": ranks(group)}
    return deepspeed.initialize(model=model, optimizer=optimizer, **options)[0]


def goes_on(group: zf.Group, path: Path, **options: Any) -> Any:
    engine = engine_of(group, **options)
    _, client = engine.load_checkpoint(path, TAG)
    assert client["epoch"] == 4
    found = engine.global_steps, engine.global_samples, engine.get_lr()
    before = weights(engine)
    for step in (3, 4):
        engine.backward(loss_of(engine, step))
        engine.step()
    return found, before, weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_goes_on_where_deepspeed_was_without_zero(
    stage: int, half: bool, rule: str, frozen: bool, tmp_path: Path
) -> None:
    saved, after = written(tmp_path, RULES[rule], half, frozen)
    options = {"stage": stage, "rule": RULES[rule], "half": half, "frozen": frozen}
    for found, before, ours in zf.simulate(2, partial(goes_on, path=tmp_path, **options)):
        assert found == (3, 6, [LATE_RATE, LATE_RATE])
        torch.testing.assert_close(before, dict(saved), rtol=0, atol=0)
        for name, value in ours.items():
            change, wanted = (x.float() - saved[name].float() for x in (value, after[name]))
            torch.testing.assert_close(change, wanted, rtol=2e-2 if half else 1e-4, atol=1e-6)
        assert not torch.equal(ours["inner.weight"], before["inner.weight"])


def test_master_weights_become_the_weights_of_32_bits(tmp_path: Path) -> None:
    saved, _ = written(tmp_path, RULES["adamw"], True, False)

    def main(group: zf.Group) -> None:
        engine = engine_of(group, 2, RULES["adamw"])
        engine.load_checkpoint(tmp_path, TAG)
        own = weights(engine)["inner.weight"]
        assert torch.equal(own.bfloat16(), saved["inner.weight"])
        assert not torch.equal(own, saved["inner.weight"].float())

    zf.simulate(1, main)


@pytest.mark.parametrize("way", ["moments", "parameters", "groups", "flat", "converted"])
def test_another_optimizer_than_that_of_stage_0_is_refused(way: str, tmp_path: Path) -> None:
    rule = RULES["sgd" if way == "moments" else "adamw"]
    written(tmp_path, rule, way == "flat", way == "parameters")
    file, folder = tmp_path / TAG / "mp_rank_00_model_states.pt", tmp_path
    if way == "flat":
        content = torch.load(file, weights_only=False)
        content["optimizer"]["fp32_groups_flat"] = content["optimizer"].pop("fp32_groups")
        torch.save(content, file)
    if way == "converted":
        folder = tmp_path / "converted"
        zf.checkpoint.convert(zf.sources.deepspeed(tmp_path / TAG), folder / TAG)
    problem = {
        "moments": "none named 'exp_avg'",
        "parameters": "6 parameters in groups for 5",
        "groups": "2 parameter groups for 1",
        "flat": "parameter by parameter; got flat ones",
        "converted": "without an optimizer",
    }[way]

    def alone(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([x for group in params for x in group["params"]], lr=0.01)

    def main(group: zf.Group) -> None:
        engine = engine_of(group, 2, alone if way == "groups" else RULES["adamw"])
        before = weights(engine)
        with pytest.raises(CheckpointError, match=rf"{problem}.*load_optimizer_states=False"):
            engine.load_checkpoint(folder, TAG)
        torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)

    zf.simulate(1, main)
