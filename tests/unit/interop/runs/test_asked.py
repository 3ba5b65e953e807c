"""Code of ``forward`` gets the answers of plain torch about class and attributes of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun import optim
from zfun.errors import OptionError, ZfunError
from zfun.interop import Engine

RANKS, WIDTH = 2, 4
EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def by_class(net: Asks) -> Any:
    return net.scale if isinstance(net.scale, nn.Parameter) else 1.0


def by_path(net: Asks) -> Any:
    return net.get_parameter("scale") * net.get_parameter("layer.weight").mean()


def by_an_attribute_of_the_module(net: Any) -> Any:
    net.kept = net.scale
    kept = torch.sin(net.kept)
    del net.kept
    return kept


def by_attribute(net: Asks) -> Any:
    return getattr(net.scale, "times", 1.0)


def by_attribute_of_a_part(net: Asks) -> Any:
    return 3.0 if hasattr(net.layer.weight, "is_wide") else 1.0


def by_attribute_of_a_frozen_one(net: Asks) -> Any:
    return getattr(net.still, "times", 1.0) * net.still


ASKED: dict[str, Callable[[Asks], Any]] = {
    f.__name__: f
    for f in (
        by_class,
        by_path,
        by_an_attribute_of_the_module,
        by_attribute,
        by_attribute_of_a_part,
        by_attribute_of_a_frozen_one,
    )
}


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Asks], Any], *, checkpoints: bool = False) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=g))
        self.still = nn.Parameter(torch.randn(WIDTH, generator=g), requires_grad=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=g))
            self.layer.bias.zero_()
        self.scale.times = 2.0  # pyrefly: ignore[missing-attribute]
        self.layer.weight.is_wide = True  # pyrefly: ignore[missing-attribute]
        self.ask, self.checkpoints = ask, checkpoints

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.ask(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


def step(loss: Tensor, rule: torch.optim.Optimizer, engine: Engine | None) -> None:
    """Step the engine, or the optimizer where there is none."""
    if engine is not None:
        engine.backward(loss)
        engine.step()
        return
    loss.backward()
    rule.step()
    rule.zero_grad()


def trained(net: Any, stage: int | None, group: Any = None, between: Any = None) -> list[Tensor]:
    """Train three steps, the last one after ``between``, and evaluate."""
    engine: Any = None
    rule = torch.optim.SGD([x for x in net.parameters() if x.requires_grad], 0.5)
    if stage is not None:
        engine = Engine(net, optim.sgd(0.5), zero=stage, group=group)
    for turn in range(3):
        if turn == 2 and between is not None:
            between(net)
        loss = net(torch.full((3, WIDTH), 0.5 + turn)).square().mean()
        step(loss, rule, engine)
    with torch.no_grad():
        out = net(torch.ones(2, WIDTH))
    return [x.detach().clone() for x in (out, *net.state_dict().values())]


def check(stage: int, between: Any = None, **options: Any) -> None:
    expected = trained(Asks(**options), None, between=between)

    def main(group: zf.Group) -> list[Tensor]:
        return trained(Asks(**options), stage, group, between)

    for found in zf.simulate(RANKS, main):
        torch.testing.assert_close(found, expected)


@EACH_STAGE
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("ask", ASKED)
def test_forward_asks_a_parameter_for_its_class_and_attributes(
    ask: str, checkpoints: bool, stage: int
) -> None:
    """A parameter of a call was no ``nn.Parameter``, and had none of its attributes."""
    check(stage, ask=ASKED[ask], checkpoints=checkpoints)


@EACH_STAGE
def test_an_attribute_that_is_set_between_the_steps_is_seen(stage: int) -> None:
    def between(net: Asks) -> None:
        net.scale.times = 5.0  # pyrefly: ignore[missing-attribute]
        net.still.times = 0.5  # pyrefly: ignore[missing-attribute]
        delattr(net.layer.weight, "is_wide")

    def both(net: Asks) -> Any:
        return by_attribute(net) * by_attribute_of_a_frozen_one(net) * by_attribute_of_a_part(net)

    check(stage, between, ask=both)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_code_asks_for_them_too(stage: int) -> None:
    torch.compiler.reset()
    expected = trained(Asks(by_class), None)
    net: Any = Asks(by_class)
    net.compile(backend="aot_eager")
    found = trained(net, stage, zf.process_group())
    torch.testing.assert_close(found, expected)


class Twice(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight + self.delta


class Adapted(nn.Module):
    """Adapts frozen parameters in each forward pass, as PEFT does for ``target_parameters``."""

    def __init__(self, names: tuple[str, ...], *, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.deltas = nn.ParameterDict({x: torch.randn(WIDTH) for x in names})
        self.names, self.checkpoints = names, checkpoints

    def block(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x)) + self.base(x)
        for name in self.names:
            parametrize.register_parametrization(self.base, name, Twice(self.deltas[name]))
        try:
            with parametrize.cached():
                return self.base(x) + self.base(x.sin())
        finally:
            for name in self.names:
                parametrize.remove_parametrizations(self.base, name, leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)


@EACH_STAGE
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("names", [("weight",), ("weight", "bias")])
def test_a_parametrization_comes_and_goes_in_a_forward_pass(
    names: tuple[str, ...], checkpoints: bool, stage: int
) -> None:
    """It was refused as a write of the parameter."""

    def run(stage: int | None, group: Any = None) -> list[Tensor]:
        def evaluate(net: Any) -> None:
            with torch.no_grad():
                net(torch.ones(1, WIDTH))

        return trained(Adapted(names, checkpoints=checkpoints), stage, group, evaluate)

    expected = run(None)
    for found in zf.simulate(RANKS, lambda group: run(stage, group)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_write_beside_such_a_parametrization_is_refused_by_name(stage: int) -> None:
    class Writes(Adapted):
        def block(self, x: Tensor) -> Tensor:
            self.base.weight.mul_(0.5)
            return super().block(x)

    def main(group: zf.Group) -> None:
        net = Writes(("weight",), checkpoints=False)
        engine = Engine(net, optim.sgd(0.5), zero=stage, group=group)
        with pytest.raises(ZfunError, match=r"leaf 'base\.weight'"):
            engine.backward(net(torch.ones(2, WIDTH)).sum())

    zf.simulate(RANKS, main)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("form", ["scripted", "traced", "the whole model"])
def test_a_script_module_is_refused_where_it_would_read_no_values(form: str) -> None:
    """Its code reads the memory, which is empty at stage 3, so the loss was not a number."""

    def of(form: str) -> nn.Module:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        if form == "scripted":
            net[2] = torch.jit.script(net[2])
        elif form == "traced":
            net[2] = torch.jit.trace(net[2], torch.ones(1, WIDTH))
        elif form == "the whole model":
            return torch.jit.script(net)
        return net

    def step(net: Any, stage: int) -> Tensor:
        engine = Engine(net, optim.sgd(0.5), zero=stage, group=zf.process_group())
        engine.backward(net(torch.ones(2, WIDTH)).square().mean())
        engine.step()
        return torch.cat([x.detach().flatten() for x in net.state_dict().values()])

    torch.testing.assert_close(step(of(form), 2), step(of("plain"), 2))
    place = "" if form == "the whole model" else " as '2'"
    refused = rf"got a torch\.jit\.ScriptModule{place}; pass the module that torch\.jit compiled"
    with pytest.raises(OptionError, match=refused):
        step(of(form), 3)
