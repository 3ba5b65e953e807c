"""Models that Fabric makes without values, beside the same models with their own values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zfun.errors import OptionError

pytest.importorskip("lightning")

from tests.interop import fabrics

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
]


def scaled(module: nn.Module, std: float) -> None:
    nn.init.normal_(module.weight, std=std)  # type: ignore[arg-type]
    nn.init.constant_(module.bias, 3.0)  # type: ignore[arg-type]


class Convolved(nn.Module):
    """Resets its part, and then itself, as the layers of graph libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.bias = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        self.lin.reset_parameters()
        nn.init.constant_(self.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.bias


class Scale(nn.Module):
    """Has no method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Scale(), nn.Linear(4, 4))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.part[0].scale, 2.0)  # pyrefly: ignore[bad-argument-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Forgets(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0)


def made(build: Callable[[], nn.Module], act: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """Return the values after the setup of a model on which a script has acted before."""
    fabric = fabrics.fabric_of("zfun_stage_3")
    with fabric.init_module(empty_init=True):
        net = build()
    assert next(net.parameters()).is_meta
    act(net)
    fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    assert all(type(param) is not nn.Parameter for param in net.parameters())
    return net.state_dict()


def nothing(net: nn.Module) -> None:
    pass


def partial_in_place(net: nn.Module) -> None:
    """As litgpt does, which calls it too."""
    for part in net.modules():
        if isinstance(part, nn.Linear):
            scaled_part = functools.partial(scaled, part, std=0.02)
            part.reset_parameters = scaled_part  # pyrefly: ignore[method-assign]
            part.reset_parameters()


def test_a_function_in_place_of_reset_parameters_makes_the_values() -> None:
    """It wrote into the module on meta, and the state took memory as it was, silently."""
    found = made(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), partial_in_place)
    for name, value in found.items():
        if name.endswith("bias"):
            assert value.tolist() == [3.0] * 64
        else:
            assert 0.015 < value.std() < 0.025
    assert not torch.equal(found["0.weight"], found["1.weight"])


def test_a_module_resets_its_parts_too() -> None:
    found = made(Convolved, nothing)
    assert found["bias"].tolist() == [3.0] * 4
    assert 0 < found["lin.weight"].abs().max() <= 0.5


def test_the_nearest_module_around_makes_values() -> None:
    found = made(Around, nothing)
    assert found["part.0.scale"].tolist() == [2.0] * 4
    assert 0 < found["part.1.weight"].abs().max() <= 0.5


def test_values_that_nobody_makes_are_refused() -> None:
    with pytest.raises(OptionError, match=r"Forgets that leaves elements of leaf 'bias'"):
        made(lambda: Forgets(4, 4), nothing)
    with pytest.raises(OptionError, match=r"leaf 'scale' belongs to Scale, which has no such"):
        made(Scale, nothing)


def filled(net: nn.Module) -> None:
    with torch.no_grad():
        net.weight.fill_(4.0)  # type: ignore[operator]


def one_row(net: nn.Module) -> None:
    with torch.no_grad():
        net.weight[0] = 1.0  # type: ignore[index]


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "fill_": filled,
    "a row": one_row,
    "nn.init": lambda net: net.apply(lambda part: nn.init.constant_(part.weight, 5.0)),  # type: ignore[arg-type]
    "xavier": lambda net: nn.init.xavier_uniform_(net.weight),  # type: ignore[arg-type]
    "orthogonal": lambda net: nn.init.orthogonal_(net.weight),  # type: ignore[arg-type]
    "data": lambda net: net.weight.data.mul_(2.0),  # type: ignore[operator]
    "foreach": lambda net: torch._foreach_zero_([*net.parameters()]),
    "load_state_dict": lambda net: net.load_state_dict(nn.Linear(4, 4).state_dict()),
    "copy": lambda net: filled(copy.deepcopy(net)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_setup_is_refused(write: str) -> None:
    """It wrote nothing, and the values were those of reset_parameters(), silently."""
    with pytest.raises((OptionError, RuntimeError), match=r"makes the values of a module on meta"):
        made(lambda: nn.Linear(4, 4), WRITES[write])


def test_other_code_before_the_setup_runs() -> None:
    def act(net: nn.Module) -> None:
        net.bias.requires_grad_(False)  # type: ignore[operator]
        net.to(torch.float64)
        assert sum(param.numel() for param in net.parameters()) == 20
        net.reset_parameters()  # type: ignore[operator]

    found = made(lambda: nn.Linear(4, 4), act)
    assert found["weight"].dtype is torch.float64
    assert 0 < found["weight"].abs().max() <= 0.5
