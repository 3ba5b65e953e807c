"""``torch.distributed.checkpoint.state_dict`` of an engine's module and optimizer of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zfun as zf
from zfun.interop.engine import Engine

WIDTH = 3
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.3),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.3),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.3),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, initial_accumulator_value=0.2),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
    "tensor": lambda params: torch.optim.Adam(params, torch.tensor(0.1), foreach=False),
}


class Run(NamedTuple):
    """A model and its optimizer, with an engine or without one."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    engine: Engine | None

    def train(self, first: int, count: int) -> None:
        for index in range(first, first + count):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
            loss = self.model(x).square().mean()
            if self.engine is None:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.engine.backward(loss)
                self.engine.step()

    def values(self) -> list[Tensor]:
        return [x.detach().clone() for x in self.model.parameters()]

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return get_state_dict(self.model, self.optimizer)


def run_of(rule: str, seed: int, stage: int | None, group: zf.Group | None, warm: bool) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    optimizer = RULES[rule](model.parameters())
    if warm:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine = None if stage is None else Engine(model, optimizer, zero=stage, group=group)
    return Run(model, optimizer, engine)


def resumed(
    group: zf.Group | None, rule: str, stage: int | None, warm: bool = False
) -> tuple[Any, ...]:
    """Save after two steps, and go on in a new run, from a state that is asked for first."""
    make = partial(run_of, rule, stage=stage, group=group, warm=warm)
    first = make(seed=0)
    first.train(0, 2)
    model, optimizer = copy.deepcopy(first.state())
    second = make(seed=1)
    begun = copy.deepcopy(second.state()[1]["state"])
    rates, grads = (
        [x["lr"] for x in second.optimizer.param_groups],
        next(second.model.parameters()).grad,
    )
    before = second.values()
    set_state_dict(
        second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    second.train(2, 2)
    third = make(seed=1)
    third.state()
    third.train(0, 2)
    return begun, rates, grads, before, second.values(), third.values()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_state_before_the_first_step_is_that_of_torch(rule: str, stage: int) -> None:
    expected = resumed(None, rule, None)
    for found in zf.simulate(2, partial(resumed, rule=rule, stage=stage)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(found[3][0], found[4][0])


def test_a_scheduler_counts_the_steps_of_an_optimizer_that_an_engine_has() -> None:
    expected = resumed(None, "adamw", None, warm=True)
    (found,) = zf.simulate(1, partial(resumed, rule="adamw", stage=2, warm=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_of_the_optimizer_itself_is_refused() -> None:
    run = run_of("adamw", 0, 2, None, False)
    next(run.model.parameters()).grad = torch.ones(WIDTH, WIDTH)
    before = run.values()
    with pytest.raises(zf.errors.OptionError, match=r"sharded; got a read.*engine's step\(\)"):
        run.optimizer.step()
    torch.testing.assert_close(run.values(), before, rtol=0, atol=0)
