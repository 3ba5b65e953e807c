"""``.grad`` of live parameters, and ``state_dict()`` of the optimizer of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zfun as zf
from zfun.errors import OptionError, SpecMismatch
from zfun.interop import Engine
from zfun.testing import assert_same_bits

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
RANKS = 2
SEEDING = threading.Lock()
Change = Callable[[int, nn.Module], Any]


def net() -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batches(steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(steps, 2 * RANKS, 3, generator=generator, dtype=torch.float64))


def loss_of(model: nn.Module, batch: Tensor, group: Any = None) -> Tensor:
    rows = batch if group is None else batch.chunk(group.size)[group.rank]
    return model(rows).square().mean()


def clips_and_scales(index: int, model: Any) -> Any:
    norm = clip_grad_norm_(model.parameters(), 0.05)
    for param in model[2].parameters():
        param.grad *= 2.0
    return norm


def clips_values(index: int, model: Any) -> Any:
    clip_grad_value_(model.parameters(), 0.01)


def replaces(index: int, model: Any) -> Any:
    model[0].bias.grad = torch.full((4,), 0.1, dtype=torch.float64)
    model[2].weight.grad.zero_()


def drops_one_batch(index: int, model: Any) -> Any:
    if index == 1:
        model[0].weight.grad = None
    return [p.grad is None for p in model.parameters()]


CHANGES = [clips_and_scales, clips_values, replaces, drops_one_batch]


@EACH_STAGE
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.shows(
    "hooks that change `.grad` before the step",
    "right",
    "whole gradients are shown, and stepped as they are left",
)
def test_what_code_makes_of_the_gradients_is_stepped(change: Change, stage: int) -> None:
    plain, expected = net(), []
    optimizer = torch.optim.Adam(plain.parameters(), 0.1)
    for index, batch in enumerate(batches()):
        for part in batch.chunk(2, -2):
            (loss_of(plain, part) / 2).backward()
        expected.append(change(index, plain))
        optimizer.step()
        optimizer.zero_grad()

    def main(group: Any) -> Any:
        model, found = net(), []
        engine = Engine(
            model, torch.optim.Adam(model.parameters(), 0.1), zero=stage, group=group, clip_norm=9.0
        )
        for index, batch in enumerate(batches()):
            for part in batch.chunk(2, -2):
                engine.backward(loss_of(model, part, group) / 2, scale=1.0)
            if index == 2:
                # The step has summed over the ranks already.
                engine.norm()
            found.append(change(index, model))
            engine.step(boundary=True)
            assert all(p.grad is None for p in model.parameters())
        return found, engine.state_dict()

    for found, values in zf.simulate(RANKS, main):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(values, dict(plain.state_dict()))


@EACH_STAGE
def test_a_loop_without_calls_reads_the_gradients_of_all_ranks(stage: int) -> None:
    def penalty(model: Any, weight: float) -> Any:
        return weight * sum(p.square().sum() for p in model.parameters())

    plain = net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    penalty(plain, (1.0 + 2.0) / 2).backward()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain_optimizer.step()

    def main(group: Any) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = Engine(model, optimizer, zero=stage, group=group)
        penalty(model, 1.0 + group.rank).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        again = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert_same_bits(found, again)
        engine.step(boundary=True)
        return found, engine.state_dict()

    for found, values in zf.simulate(RANKS, main):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(values, dict(plain.state_dict()))


def test_a_read_leaves_the_bits_of_a_step() -> None:
    def main(group: Any, *, reads: bool) -> Any:
        model = net()
        engine = Engine(model, torch.optim.Adam(model.parameters(), 0.1), zero=3, group=group)
        for batch in batches():
            engine.backward(loss_of(model, batch, group))
            assert not reads or model[0].weight.grad is not None
            engine.step()
        return engine.state_dict()

    read = zf.simulate(RANKS, lambda group: main(group, reads=True))
    assert_same_bits(read, zf.simulate(RANKS, lambda group: main(group, reads=False)))


class Counting(torch.optim.Optimizer):
    """Writes a number into the group in each step, and may decay the rate there."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] *= group["decay"]
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "counting": Counting,
    "decaying": lambda params: Counting(params, decay=0.5),
    "adam": lambda params: torch.optim.Adam(params, 0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, 0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, 0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.1, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    weights = [model[0].weight, model[2].weight]
    return [{"params": weights}, {"params": [model[2].bias, model[0].bias], "lr": 0.03}]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_goes_to_torch_and_back(name: str, stage: int) -> None:
    plain = net()
    optimizer = OPTIMIZERS[name](groups_of(plain))
    states = []
    for batch in batches():
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
        values = {key: x.clone() for key, x in plain.state_dict().items()}
        states.append((values, torch.optim.Optimizer.state_dict(optimizer)))
        # torch steps its state in place.
        states[-1] = zf.tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, states[-1])

    def main(group: Any) -> Any:
        model = net()
        inner = OPTIMIZERS[name](groups_of(model))
        engine = Engine(model, inner, zero=stage, group=group)
        engine.load_state_dict(states[1][0])
        engine.load_optimizer_state(states[1][1])
        start = engine.optimizer_state()
        for batch in batches()[2:]:
            engine.backward(loss_of(model, batch, group))
            engine.step()
        return start, engine.state_dict(), engine.optimizer_state()

    for start, values, state in zf.simulate(RANKS, main):
        torch.testing.assert_close(filled(start), filled(states[1][1]))
        torch.testing.assert_close(values, states[3][0])
        torch.testing.assert_close(filled(state), filled(states[3][1]))


def filled(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what torch keeps empty, and schedulers' marks."""
    entries = {
        index: {name: x for name, x in entry.items() if x is not None}
        for index, entry in state["state"].items()
    }
    return {
        "state": {index: entry for index, entry in entries.items() if entry},
        "numbers": [(group["lr"], group.get("k")) for group in state["param_groups"]],
        "params": [group["params"] for group in state["param_groups"]],
    }


def test_leaves_of_one_group_keep_their_own_counts() -> None:
    def trained(model: Any, optimizer: Any, step: Callable[[Tensor], Any]) -> None:
        model[0].requires_grad_(False)
        for index, batch in enumerate(batches()):
            if index == 2:
                model[0].requires_grad_(True)
            step(batch)

    plain = net()
    adam = torch.optim.Adam(plain.parameters(), 0.1)

    def plain_step(batch: Tensor) -> None:
        adam.zero_grad()
        loss_of(plain, batch).backward()
        adam.step()

    trained(plain, adam, plain_step)

    def main(group: Any) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        engine = Engine(model, optimizer, zero=2, group=group)

        def step(batch: Tensor) -> None:
            engine.backward(loss_of(model, batch, group))
            engine.step()

        trained(model, optimizer, step)
        state = engine.optimizer_state()
        engine.load_optimizer_state(state)
        return state, engine.optimizer_state(), engine.state_dict()

    for state, again, values in zf.simulate(RANKS, main):
        torch.testing.assert_close(state, adam.state_dict())
        torch.testing.assert_close(again, state)
        torch.testing.assert_close(values, dict(plain.state_dict()))
        assert [float(x["step"]) for x in state["state"].values()] == [2.0, 2.0, 4.0, 4.0]


def test_a_state_of_another_optimizer_is_refused_by_name() -> None:
    model = net()
    engine = Engine(model, torch.optim.NAdam(model.parameters()), zero=1, group=zf.process_group())
    engine.backward(loss_of(model, batches()[0]))
    engine.step()
    state = engine.optimizer_state()
    other = {**state, "state": {**state["state"], 1: {**state["state"][1]}}}
    other["state"][1]["mu_product"] = torch.tensor(0.5)
    with pytest.raises(SpecMismatch, match=r"'mu_product'.*leaf '0.weight' has 0.45.*got 0.5"):
        engine.load_optimizer_state(other)
    other["state"][1]["exp_avg"] = torch.zeros(2)
    with pytest.raises(SpecMismatch, match=r"leaf '0.bias' has \(4,\); got exp_avg of \(2,\)"):
        engine.load_optimizer_state(other)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        engine.load_optimizer_state({"state": {}, "param_groups": []})


def test_a_rule_has_no_state_of_torch() -> None:
    engine = Engine(net(), zf.optim.sgd(0.1), zero=1, group=zf.process_group())
    with pytest.raises(OptionError, match=r"a rule of zf.optim; read engine.state.opt_state"):
        engine.optimizer_state()
