"""Loss scales that a script or a checkpoint changes, by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import batch, config, net, ranks, weights
from zfun.errors import OptionError

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])
DYNAMIC = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
SLOW = {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2}


def made(group: zf.Group, stage: int, section: dict[str, Any], micros: int = 1) -> Any:
    model = net()
    more: dict[str, Any] = {"fp16": {"enabled": True, **section}} if section else {}
    more |= {"gradient_accumulation_steps": micros, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {"model": model, "optimizer": optimizer, "config": config(stage, **more)}
    return deepspeed.initialize(**options, mpu=ranks(group))[0]


def pass_of(engine: Any, group: zf.Group, step: int, factor: float = 1.0) -> None:
    x, y = batch(step, group.rank, group.size)
    dtype = engine.module.scale.dtype
    engine.backward((engine(x.to(dtype)).float() - y).square().mean() * factor)


def scales(
    engine: Any, group: zf.Group, steps: range, overflows: Collection[int] = ()
) -> list[float]:
    """Train; return the scales after the steps."""
    found = []
    for step in steps:
        pass_of(engine, group, step, torch.inf if step in overflows else 1.0)
        engine.step()
        found.append(engine.optimizer.loss_scale)
    return found


@pytest.mark.shows(
    "a checkpoint of another rule of the loss scale",
    "right",
    "the rule of the saved run goes on, whatever `fp16` says now",
)
@STAGES
@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
@pytest.mark.parametrize(
    ("before", "now"),
    [(DYNAMIC, {"loss_scale": 16}), ({"loss_scale": 16}, DYNAMIC), (DYNAMIC, SLOW)],
    ids=["constant", "dynamic", "window"],
)
def test_the_rule_of_the_saved_run_goes_on(
    before: dict[str, Any], now: dict[str, Any], way: str, stage: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        first, second = made(group, stage, before), made(group, stage, now)
        scales(first, group, range(4), {2})
        if way == "checkpoint":
            first.save_checkpoint(tmp_path)
            second.load_checkpoint(tmp_path)
        else:
            second.load_module_state_dict(weights(first))
            second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        train = functools.partial(scales, group=group, steps=range(4, 14), overflows={5, 6, 7})
        expected = train(first)
        assert train(second) == expected
        assert (len(set(expected)) > 1) is second.optimizer.dynamic_loss_scale
        assert second.optimizer.dynamic_loss_scale is ("loss_scale" not in before)
        torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=0)

    zf.simulate(2, main)


@STAGES
def test_weights_alone_leave_the_rule_of_the_configuration(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        first, second = made(group, stage, DYNAMIC), made(group, stage, {"loss_scale": 16})
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert set(scales(second, group, range(4), {1})) == {16.0}

    zf.simulate(2, main)


@pytest.mark.shows(
    "`optimizer.loss_scale = x`, `optimizer.override_loss_scale(x)`",
    "right",
    "steps go on from the first, and keep the second",
)
@STAGES
@pytest.mark.parametrize("name", ["loss_scale", "cur_scale"])
def test_steps_go_on_from_a_scale_that_code_sets(name: str, stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, DYNAMIC)
        scales(engine, group, range(2))
        setattr(engine.optimizer, name, 32.0)
        assert engine.optimizer.cur_scale == engine.cur_scale == 32.0
        # As DeepSpeed 0.19.8, where two clean steps after the overflow double the scale.
        assert scales(engine, group, range(2, 8), {3}) == [64, 32, 32, 32, 64, 64]
        constant = made(group, stage, {"loss_scale": 64})
        setattr(constant.optimizer, name, 8.0)
        assert set(scales(constant, group, range(4), {2})) == {8.0}

    zf.simulate(2, main)


@STAGES
def test_an_override_stays(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine, plain = made(group, stage, DYNAMIC), made(group, stage, {"loss_scale": 32})
        engine.save_checkpoint(tmp_path)
        engine.optimizer.override_loss_scale(32.0)
        assert set(scales(engine, group, range(6), {3})) == {32.0}
        engine.optimizer.loss_scale = 8.0
        assert engine.optimizer.loss_scale == 32.0
        scales(plain, group, range(6), {3})
        torch.testing.assert_close(weights(engine), weights(plain), rtol=0, atol=0)
        engine.load_checkpoint(tmp_path)
        assert set(scales(engine, group, range(4), {2})) == {32.0}
        engine.optimizer.override_loss_scale(4.0)
        assert set(scales(engine, group, range(4, 6))) == {4.0}

    zf.simulate(2, main)


@STAGES
def test_a_scale_counts_where_it_is_set_before_backward(stage: int) -> None:
    def main(group: zf.Group, other: float | None) -> Any:
        engine = made(group, stage, {"loss_scale": 64})
        x, y = batch(0, group.rank, group.size)
        loss = (engine(x.half()).float() - y).square().mean()
        if other is not None:
            engine.optimizer.loss_scale = other
        engine.backward(loss)
        engine.step()
        return weights(engine), float(engine.get_global_grad_norm())

    found = [zf.simulate(2, functools.partial(main, other=x)) for x in (None, 16.0)]
    torch.testing.assert_close(found[1], found[0])


def test_a_scale_that_cannot_be_set_is_refused() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 2, DYNAMIC, micros=2)
        pass_of(engine, group, 0)
        engine.step()
        with pytest.raises(OptionError, match=r"got 8\.0 between two of them; set it after"):
            engine.optimizer.loss_scale = 8.0
        engine = made(group, 2, DYNAMIC)
        with pytest.raises(OptionError, match=r"scale.*got -1"):
            engine.optimizer.override_loss_scale(-1.0)
        plain = made(group, 2, {})
        plain.optimizer.loss_scale = 1.0
        with pytest.raises(OptionError, match=r"goes with fp16; got 8\.0 for an engine"):
            plain.optimizer.override_loss_scale(8.0)

    zf.simulate(2, main)


@STAGES
def test_an_overflow_is_told_until_the_next_boundary(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, SLOW, micros=2)
        found = []
        for step in range(8):
            pass_of(engine, group, step, torch.inf if step == 2 else 1.0)
            engine.step()
            found.append((engine.optimizer.overflow, engine.was_step_applied()))
        told = [False, False, False, True, True, False, False, False]
        applied = [False, True, False, False, False, True, False, True]
        assert found == list(zip(told, applied, strict=True))

    zf.simulate(2, main)
