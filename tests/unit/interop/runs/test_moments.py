"""Moments that the optimizer of a script brings, saves and loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zfun as zf
from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import (
    EACH_STAGE,
    adamw,
    assert_same,
    engine_steps,
    initialized,
    plain_steps,
    steps,
)
from zfun.errors import OptionError
from zfun.interop.accelerate import Accelerator


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    # Has a state before the first step.
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


@EACH_STAGE
@pytest.mark.parametrize("make", [adamw, sgd, adagrad])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.shows(
    "an optimizer that has taken steps, or has loaded a state",
    "right",
    "its moments go on",
)
def test_an_optimizer_brings_its_moments(make: Any, count: int, stage: int) -> None:
    expected = runs.net()
    optimizer = make(expected)
    plain_steps(expected, optimizer, 0, count + 3)

    def body(group: zf.Group) -> dict[str, Tensor]:
        model = runs.net()
        own = make(model)
        plain_steps(model, own, 0, count)
        engine = initialized(group, stage, model, optimizer=own)
        engine_steps(engine, count, 3)
        return dict(engine.module_state_dict())

    for found in zf.simulate(2, body):
        assert_same(found, expected)


@EACH_STAGE
@pytest.mark.shows(
    "`optimizer.state[param]`",
    "refused",
    "call `optimizer.state_dict()`, or `safe_get_full_optimizer_state`",
)
def test_the_optimizer_of_a_script_saves_and_loads_moments(stage: int) -> None:
    expected = runs.net()
    optimizer = adamw(expected)
    plain_steps(expected, optimizer, 0, 2)
    saved = optimizer.state_dict()
    second = runs.net(seed=1)
    plain_steps(second, adamw(second), 0, 1)

    def body(group: zf.Group) -> None:
        model = runs.net()
        own = adamw(model)
        engine = initialized(group, stage, model, optimizer=own)
        engine_steps(engine, 0, 2)
        found = own.state_dict()
        for index, entry in saved["state"].items():
            for name, value in entry.items():
                torch.testing.assert_close(found["state"][index][name], value)
        with pytest.raises(OptionError, match=r"got a read of optimizer\.state; call"):
            engine.optimizer.state[model.scale]["exp_avg"]
        for write in (engine.optimizer.state.clear, lambda: engine.optimizer.state.update({1: 2})):
            with pytest.raises(OptionError, match=r"got a write of optimizer\.state; call"):
                write()

    zf.simulate(2, body)


@EACH_STAGE
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_a_loop_of_accelerate_saves_and_loads_moments(when: str, stage: int) -> None:
    def run(make: Callable[[], Any]) -> nn.Module:
        accelerator, model = make(), runs.net()
        net, optimizer = accelerator.prepare(model, adamw(model))
        train = functools.partial(accelerated_steps, accelerator, net, optimizer)
        train(0, 2)
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        moments = optimizer.state_dict()
        accelerator, model = make(), runs.net(seed=1)
        own = adamw(model)
        if when == "before prepare":
            model.load_state_dict(weights)
            own.load_state_dict(moments)
        net, optimizer = accelerator.prepare(model, own)
        if when == "after prepare":
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
        accelerated_steps(accelerator, net, optimizer, 2, 2)
        return model

    expected = run(lambda: accelerate.Accelerator(cpu=True))
    assert_same(run(lambda: Accelerator(cpu=True, zero=stage)).state_dict(), expected)


def accelerated_steps(accelerator: Any, net: Any, optimizer: Any, first: int, count: int) -> None:
    def train(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(net(x), y))

    steps(train, optimizer.step, first, count)
