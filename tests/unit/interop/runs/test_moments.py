"""Moments that the optimizer of a script brings, saves and loads."""

from __future__ import annotations

import collections
import copy
import functools
import operator
import pickle
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
from zfun.interop import Engine
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


def reset_entries(optimizer: Any) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()


def reset_by_parameter(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            for value in optimizer.state[param].values():
                value.zero_()


def reset_by_name(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["exp_avg"] = torch.zeros_like(param)


# Lines of scripts that reset, scale, read or copy moments.
USES: dict[str, Callable[[Any], Any]] = {
    "clear": lambda x: x.state.clear(),
    "values": reset_entries,
    "parameter": reset_by_parameter,
    "name": reset_by_name,
    "get": lambda x: x.state.get(x.param_groups[0]["params"][0], {}),
    "pop": lambda x: x.state.pop(x.param_groups[0]["params"][0], None),
    "update": lambda x: x.state.update({1: {}}),
    "setdefault": lambda x: x.state.setdefault(x.param_groups[0]["params"][0], {}),
    "items": lambda x: [(param, dict(entry)) for param, entry in x.state.items()],
    "delete": lambda x: operator.delitem(x.state, x.param_groups[0]["params"][0]),
    "copy": lambda x: copy.copy(x.state),
    "deepcopy": lambda x: copy.deepcopy(x.state),
    "pickle": lambda x: pickle.dumps(x.state),
}


def trained(loop: str, stage: int, model: nn.Module) -> tuple[Any, Callable[[int, int], Any]]:
    """Return the optimizer of a loop, and a function that takes steps."""
    own = adamw(model)
    if loop == "accelerate":
        accelerator = Accelerator(cpu=True, zero=stage)
        net, optimizer = accelerator.prepare(model, own)
        return optimizer, functools.partial(accelerated_steps, accelerator, net, optimizer)
    if loop == "initialize":
        engine = initialized(zf.process_group(), stage, model, optimizer=own)
        return engine.optimizer, functools.partial(engine_steps, engine)
    alone = Engine(model, own, zero=stage)
    train = lambda x, y: alone.backward(mse_loss(alone(x), y))
    return own, lambda first, count: steps(train, alone.step, first, count)


@EACH_STAGE
@pytest.mark.parametrize("loop", ["engine", "initialize", "accelerate"])
@pytest.mark.shows(
    "`optimizer.state` after a step, read, written or replaced",
    "refused",
    "call `state_dict()` or `load_state_dict()` of the optimizer, or "
    "`safe_get_full_optimizer_state`",
)
def test_moments_are_neither_read_nor_written_in_the_state_of_an_optimizer(
    loop: str, stage: int
) -> None:
    """A loop that resets them there would reset nothing."""
    optimizer, step = trained(loop, stage, runs.net())
    assert len(optimizer.state) == 0
    assert dict(optimizer.state) == copy.deepcopy(optimizer.state) == {}
    step(0, 1)
    assert len(optimizer.state) > 0
    for use in USES.values():
        with pytest.raises(OptionError, match=r"got a \w+ of optimizer\.state; call state_dict"):
            use(optimizer)
    step(1, 1)


@EACH_STAGE
@pytest.mark.parametrize("loop", ["engine", "accelerate"])
def test_another_state_of_an_optimizer_is_refused_at_the_next_step(loop: str, stage: int) -> None:
    optimizer, step = trained(loop, stage, runs.net())
    step(0, 1)
    optimizer.state = collections.defaultdict(dict)
    with pytest.raises(OptionError, match=r"got another optimizer\.state than the engine's; call"):
        step(1, 1)


def accelerated_steps(accelerator: Any, net: Any, optimizer: Any, first: int, count: int) -> None:
    def train(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(net(x), y))

    steps(train, optimizer.step, first, count)
