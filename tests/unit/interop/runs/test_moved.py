"""Modules whose parts move, get another name or assign buffers after the engine was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError, ZfunError
from zfun.interop import Engine


class Net(nn.Module):
    """Two equal parts, and a head without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        # Before a batch norm, the gradient of a bias is noise.
        self.second = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x).tanh())) + self.shift


def pruned(net: Any) -> None:
    prune.l1_unstructured(net.first, "weight", 0.5)


def pruned_for_good(net: Any) -> None:
    prune.l1_unstructured(net.first, "weight", 0.5)
    prune.remove(net.first, "weight")


def pruned_twice(net: Any) -> None:
    parts = [(net.first, "weight"), (net.second, "weight")]
    for _ in range(2):
        prune.global_unstructured(parts, pruning_method=prune.L1Unstructured, amount=0.3)


def wrapped(net: Any) -> None:
    net.first = nn.Sequential(net.first, nn.Tanh())


def exchanged(net: Any) -> None:
    net.first, net.second = net.second, net.first


CHANGES: dict[str, Callable[[Any], None]] = {
    "pruned": pruned,
    "pruned for good": pruned_for_good,
    "pruned twice": pruned_twice,
    "wrapped": wrapped,
    "exchanged": exchanged,
}


def halve(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(0.5)


def assign(net: Any, optimizer: Any) -> None:
    for param in net.parameters():
        param.data = param.data * 0.5


def load(net: Any, optimizer: Any) -> None:
    net.load_state_dict({name: x * 0.5 for name, x in net.state_dict().items()})


WRITES: dict[str, Callable[[Any, Any], None]] = {"in place": halve, "data": assign, "load": load}


def trained(
    stage: int | None, change: Callable[[Any], None], write: Callable[[Any, Any], None]
) -> dict[str, Tensor]:
    net, x = Net(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    engine = None if stage is None else Engine(net, optimizer, zero=stage)

    def step() -> None:
        loss = net(x).square().sum()
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()

    step()
    change(net)
    step()
    write(net, optimizer)
    step()
    if engine is not None:
        found = {name: x.clone() for name, x in engine.state_dict().items()}
        engine.close()
        torch.testing.assert_close(net.state_dict(), found)
    return {name: x.clone() for name, x in net.state_dict().items()}


@EACH_STAGE
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("change", CHANGES)
def test_writes_reach_parameters_with_other_names(change: str, write: str, stage: int) -> None:
    """By name, they were lost in silence."""
    expected = trained(None, CHANGES[change], WRITES[write])
    torch.testing.assert_close(trained(stage, CHANGES[change], WRITES[write]), expected)


def read_and_write(net: Any, engine: Engine, folder: Path) -> None:
    with torch.no_grad():
        net.first.weight.mul_(1.0)


def save_and_load(net: Any, engine: Engine, folder: Path) -> None:
    engine.save(folder)
    net.shift = torch.full((4,), 7.0)
    engine.load(folder)


def assign_the_state(net: Any, engine: Engine, folder: Path) -> None:
    engine.state = engine.state


AFTER: dict[str, Callable[[Any, Engine, Path], Any]] = {
    "a write": read_and_write,
    "a load": lambda net, engine, folder: net.load_state_dict(net.state_dict()),
    "a load of the engine": lambda net, engine, folder: engine.load_state_dict(engine.state_dict()),
    "a checkpoint": save_and_load,
    "the state": assign_the_state,
    "a step": lambda net, engine, folder: engine.step(),
}


@EACH_STAGE
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_assigned_buffer_stays(ranks: int, after: str, stage: int, tmp_path: Path) -> None:
    """A write of any parameter brought the old one back."""

    def body(group: zf.Group) -> list[float]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        for _ in range(2):
            engine.backward(net(torch.ones(3, 4)).square().sum())
            engine.step()
        engine.backward(net(torch.ones(3, 4)).square().sum())
        net.shift = torch.arange(4.0)
        AFTER[after](net, engine, tmp_path)
        return net.shift.tolist()

    for found in zf.simulate(ranks, body):
        assert found == [0.0, 1.0, 2.0, 3.0]


EXPORTS: dict[str, Callable[[Any], Any]] = {
    "export": lambda net: torch.export.export(net, (torch.ones(2, 4),)).module(),
    "script": torch.jit.script,
}


@EACH_STAGE
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("export", EXPORTS)
def test_a_live_module_is_exported_from_a_copy(export: str, stage: int) -> None:
    net, x = Net().eval(), torch.ones(2, 4)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), zero=stage)
    with pytest.raises(ZfunError, match=r"take a plain module; .*pass copy\.deepcopy\(\)"):
        EXPORTS[export](net)
    with torch.no_grad():
        torch.testing.assert_close(EXPORTS[export](copy.deepcopy(net))(x), engine(x))


@EACH_STAGE
def test_a_load_that_assigns_parameters_is_refused(stage: int) -> None:
    net = Net()
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), zero=stage)
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    loss = net(torch.ones(3, 4)).sum()
    with pytest.raises(OptionError, match=r"got another one at 'first\.weight'; write values"):
        engine.backward(loss)
