"""The loop drops the gradients of a step, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE, steps
from zfun.errors import OptionError
from zfun.interop.accelerate import Accelerator


def by_parameter(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


# Lines that drop gradients: of the optimizer and the model, before backward or after the step.
DROPS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(),
    "optimizer, to zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "by parameter": lambda optimizer, model: by_parameter(model),
    "in place": lambda optimizer, model: in_place(model),
}


def trained(
    accelerator: Any, drop: Callable[[Any, Any], Any], *, first: bool, every: int = 1
) -> dict[str, Tensor]:
    """Take four steps, and drop the gradients of each ``every``-th."""
    model = runs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net, optimizer = accelerator.prepare(model, optimizer)
    turn = 0

    def train(x: Tensor, y: Tensor) -> None:
        if first and turn % every == 0:
            drop(optimizer, model)
        accelerator.backward(mse_loss(net(x), y))

    def step() -> None:
        nonlocal turn
        optimizer.step()
        turn += 1
        if not first and turn % every == 0:
            drop(optimizer, model)

    steps(train, step, 0, 4)
    return dict(model.state_dict())


@EACH_STAGE
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("drop", DROPS)
def test_gradients_are_dropped_by_the_loop(drop: str, first: bool, stage: int) -> None:
    expected = trained(accelerate.Accelerator(cpu=True), DROPS[drop], first=first)
    found = trained(Accelerator(cpu=True, zero=stage), DROPS[drop], first=first)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@EACH_STAGE
@pytest.mark.parametrize("every", [2, 9])
@pytest.mark.shows(
    "two steps without `zero_grad()` between them, in accelerate and Lightning",
    "refused",
    "torch would add to the old gradients, which are gone",
)
def test_gradients_that_nobody_drops_are_refused(every: int, stage: int) -> None:
    """torch adds to them; they were dropped in silence."""
    with pytest.raises(OptionError, match=r"got two steps without zero_grad\(\) between; call"):
        trained(Accelerator(cpu=True, zero=stage), DROPS["optimizer"], first=True, every=every)
