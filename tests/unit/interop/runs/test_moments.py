"""Moments that the optimizer of a script brings, saves and loads."""

from __future__ import annotations

import collections
import copy
import functools
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
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
from zfun.errors import CheckpointError, OptionError
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
        own.zero_grad()
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
    "get": lambda x: x.state.get(x.param_groups[0]["params"][0], {}).get("exp_avg"),
    "in": lambda x: "exp_avg" in x.state[x.param_groups[0]["params"][0]],
    "len": lambda x: len(x.state[x.param_groups[0]["params"][0]]),
    "list": lambda x: [list(entry) for entry in x.state.values()],
    "entry": lambda x: operator.setitem(x.state, x.param_groups[0]["params"][0], {}),
    "update of an entry": lambda x: x.state[x.param_groups[0]["params"][0]].update(step=0),
    "pop": lambda x: x.state.pop(x.param_groups[0]["params"][0], None),
    "update": lambda x: x.state.update({1: {}}),
    "setdefault": lambda x: x.state.setdefault(x.param_groups[0]["params"][0], {})["step"],
    "items": lambda x: [(param, dict(entry)) for param, entry in x.state.items()],
    "delete": lambda x: operator.delitem(x.state, x.param_groups[0]["params"][0]),
    "copy": lambda x: copy.copy(x.state),
    "deepcopy": lambda x: copy.deepcopy(x.state),
    "pickle": lambda x: pickle.dumps(x.state),
}


def trained(
    loop: str, stage: int, model: nn.Module, own: Any = None
) -> tuple[Any, Callable[[int, int], Any]]:
    """Return the optimizer of a loop, and a function that takes steps."""
    own = adamw(model) if own is None else own
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
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert len(optimizer.state) == len(params)
    assert all(param in optimizer.state for param in params)
    # As Lightning moves a state between devices.
    for param, entry in optimizer.state.items():
        optimizer.state[param] = apply_to_collection(entry, Tensor, lambda x: x + 1)
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


def halved(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with half of the first moments."""
    entries = {
        key: {name: 0.5 * x if name == "exp_avg" else x for name, x in entry.items()}
        for key, entry in state["state"].items()
    }
    return {**state, "state": entries}


HOOKS: dict[str, Callable[[Any], Any]] = {
    "saves": lambda x: x.register_state_dict_post_hook(halved),
    "loads": lambda x: x.register_load_state_dict_pre_hook(halved),
}


@EACH_STAGE
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("loop", ["engine", "accelerate"])
def test_hooks_of_an_optimizer_change_the_state_as_in_torch(
    loop: str, hook: str, stage: int
) -> None:
    expected = runs.net()
    plain = adamw(expected)
    HOOKS[hook](plain)
    plain_steps(expected, plain, 0, 2)
    plain.load_state_dict(plain.state_dict())
    plain_steps(expected, plain, 2, 2)

    model = runs.net()
    optimizer, step = trained(loop, stage, model)
    HOOKS[hook](getattr(optimizer, "optimizer", optimizer))
    step(0, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    step(2, 2)
    assert_same(model.state_dict(), expected)


def test_hooks_run_once_for_each_state() -> None:
    called: list[Any] = []
    optimizer, step = trained("engine", 1, runs.net())
    optimizer.register_state_dict_pre_hook(lambda _: called.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, x: called.append(len(x["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda _, x: called.append(len(x["state"])))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    step(0, 1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    count = len(saved["state"])
    assert called == ["save", count, count, "loaded"]


# Functions that scripts put in place of an optimizer's own.
def with_step(optimizer: Any) -> None:
    own = optimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        nn.utils.clip_grad_value_(self.param_groups[0]["params"], 0.1)
        return own(closure)

    optimizer.step = types.MethodType(step, optimizer)


def with_step_beneath_a_scheduler(optimizer: Any) -> None:
    with_step(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def with_wrapped_step(optimizer: Any) -> None:
    """The wrapper looks like the one of a scheduler."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    own = optimizer.step
    optimizer.step = functools.wraps(own)(lambda closure=None: own(closure))


REPLACED: dict[str, Callable[[Any], Any]] = {
    "step": with_step,
    "a step beneath a scheduler": with_step_beneath_a_scheduler,
    "a step around a scheduler's": with_wrapped_step,
    "a partial": lambda x: setattr(x, "step", functools.partial(x.step)),
    "zero_grad": lambda x: setattr(x, "zero_grad", lambda set_to_none=True: None),
    "state_dict": lambda x: setattr(x, "state_dict", functools.partial(x.state_dict)),
    "load_state_dict": lambda x: setattr(x, "load_state_dict", lambda state: None),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize("loop", ["engine", "initialize", "accelerate"])
@pytest.mark.shows(
    "a function in place of `optimizer.step` or others of one optimizer",
    "refused",
    "override it in a subclass, or use the hooks of torch, which are right",
)
def test_a_function_in_place_of_an_optimizers_own_is_refused(loop: str, case: str) -> None:
    """The class steps, so the function would not run."""
    model = runs.net()
    own = adamw(model)
    REPLACED[case](own)
    with pytest.raises(OptionError, match=r"got a function in place of \w+\(\) of one AdamW"):
        trained(loop, 1, model, own)


def test_a_function_that_comes_later_is_refused_at_the_next_step() -> None:
    model = runs.net()
    own = adamw(model)
    _, step = trained("engine", 1, model, own)
    step(0, 1)
    with_step(own)
    with pytest.raises(OptionError, match=r"got a function in place of step\(\) of one AdamW"):
        step(1, 1)


class Clipped(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)
        return super().step(closure)


@EACH_STAGE
@pytest.mark.parametrize("loop", ["engine", "accelerate"])
def test_the_step_of_a_subclass_and_the_wrapper_of_a_scheduler_are_right(
    loop: str, stage: int
) -> None:
    expected, model = runs.net(), runs.net()
    plain, own = (Clipped(x.parameters(), lr=1e-2) for x in (expected, model))
    torch.optim.lr_scheduler.StepLR(own, 1)
    plain_steps(expected, plain, 0, 3)
    _, step = trained(loop, stage, model, own)
    step(0, 3)
    assert_same(model.state_dict(), expected)


# Lines that take a parameter out of the groups of an optimizer.
REMOVED: dict[str, Callable[[Any], Any]] = {
    "pop": lambda x: x.param_groups.pop(),
    "fewer": lambda x: setattr(x, "param_groups", x.param_groups[:1]),
    "clear": lambda x: x.param_groups[-1]["params"].clear(),
    "another list": lambda x: x.param_groups[-1].update(params=[]),
}


@EACH_STAGE
@pytest.mark.parametrize("case", REMOVED)
@pytest.mark.parametrize("loop", ["engine", "initialize", "accelerate"])
@pytest.mark.shows(
    "a parameter that leaves the groups of its optimizer",
    "refused",
    "at the next step; freeze it with `requires_grad_(False)`",
)
def test_a_parameter_that_leaves_its_group_is_refused(loop: str, case: str, stage: int) -> None:
    """It trained on, silently."""
    model = runs.net()
    first, *rest = model.parameters()
    own = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)
    _, step = trained(loop, stage, model, own)
    step(0, 1)
    REMOVED[case](own)
    # Again, if the script goes on.
    for _ in range(2):
        with pytest.raises(OptionError, match=r"got groups without leaf '\S+'; freeze it with"):
            step(1, 1)


def with_keyword(model: nn.Module, optimizer: Any, again: Callable[[], Any]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    again()
    optimizer.load_state_dict(state_dict=saved)


def with_other_keys(model: nn.Module, optimizer: Any, again: Callable[[], Any]) -> None:
    """As in torch, the keys are those in the groups."""
    saved = copy.deepcopy(optimizer.state_dict())
    again()
    optimizer.load_state_dict(
        {
            "state": {f"p{key}": entry for key, entry in saved["state"].items()},
            "param_groups": [
                {**group, "params": [f"p{key}" for key in group["params"]]}
                for group in saved["param_groups"]
            ],
        }
    )


def with_functions_of_dcp(model: nn.Module, optimizer: Any, again: Callable[[], Any]) -> None:
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    again()
    set_optimizer_state_dict(model, optimizer, saved)


def with_one_function_of_dcp(model: nn.Module, optimizer: Any, again: Callable[[], Any]) -> None:
    values, moments = copy.deepcopy(get_state_dict(model, optimizer))
    again()
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments)


LOADS: dict[str, Callable[[nn.Module, Any, Callable[[], Any]], None]] = {
    "keyword": with_keyword,
    "other keys": with_other_keys,
    "dcp": with_functions_of_dcp,
    "dcp, both": with_one_function_of_dcp,
}


@EACH_STAGE
@pytest.mark.parametrize("load", LOADS)
def test_every_way_to_load_a_state_is_that_of_torch(load: str, stage: int) -> None:
    expected = runs.net()
    plain = adamw(expected)
    plain_steps(expected, plain, 0, 2)
    LOADS[load](expected, plain, lambda: plain_steps(expected, plain, 2, 1))
    plain_steps(expected, plain, 3, 2)

    model = runs.net()
    own, step = trained("engine", stage, model)
    step(0, 2)
    LOADS[load](model, own, lambda: step(2, 1))
    step(3, 2)
    assert_same(model.state_dict(), expected)


def test_an_entry_of_no_group_is_refused() -> None:
    optimizer, step = trained("engine", 1, runs.net())
    step(0, 1)
    saved = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="got an entry for 'x', which is in no group; pass"):
        optimizer.load_state_dict({**saved, "state": {**saved["state"], "x": {}}})


def accelerated_steps(accelerator: Any, net: Any, optimizer: Any, first: int, count: int) -> None:
    def train(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(net(x), y))

    steps(train, optimizer.step, first, count)
