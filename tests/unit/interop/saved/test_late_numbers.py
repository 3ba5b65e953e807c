"""Numbers that torch keeps for each tensor, of leaves that have missed steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.test_torch_form import batches, loss_of, net
from zfun.errors import CheckpointError, LeafError
from zfun.interop import Engine

EACH_STAGE = pytest.mark.parametrize("stage", [1, 3])


class Rising(torch.optim.Optimizer):
    """A rule with a count of its own, beside which there is no other."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["k"] = state.get("k", torch.tensor(0.0)) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                    param.sub_(state["sum"], alpha=group["lr"] * float(state["k"]))


CLASSES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "NAdam": (lambda params: torch.optim.NAdam(params, 0.05), {"mu_product"}),
    "ASGD": (lambda params: torch.optim.ASGD(params, 0.05, t0=1), {"eta", "mu"}),
    "count": (Rising, {"k"}),
}


def trained(model: Any, step: Callable[[Tensor], Any], frozen: dict[int, list[int]]) -> None:
    """Take a step for each batch; ``frozen`` are the layers that are frozen from a step on."""
    for index, batch in enumerate(batches()):
        for layer in (0, 2) if index in frozen else ():
            model[layer].requires_grad_(layer not in frozen[index])
        step(batch)


def plain_run(make: Any, frozen: dict[int, list[int]]) -> tuple[nn.Module, Any, Any]:
    model = net()
    optimizer = make(model.parameters())

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    trained(model, step, frozen)
    return model, optimizer, step


def engine_run(make: Any, stage: int, frozen: dict[int, list[int]]) -> tuple[Any, Any, Any]:
    model = net()
    engine = Engine(model, make(model.parameters()), zero=stage, group=zf.process_group())

    def step(batch: Tensor) -> None:
        engine.backward(loss_of(model, batch))
        engine.step()

    trained(model, step, frozen)
    return model, engine, step


FROZEN = {2: [2]}
WARNS = r"has missed steps, and one '{}' for all leaves.*has none for this leaf.*AdamW"


@EACH_STAGE
@pytest.mark.parametrize("name", CLASSES)
def test_numbers_of_the_newest_step_are_not_those_of_leaves_that_missed_it(
    name: str, stage: int
) -> None:
    make, numbers = CLASSES[name]
    _, optimizer, _ = plain_run(make, FROZEN)
    _, engine, _ = engine_run(make, stage, FROZEN)
    with pytest.warns(UserWarning, match=WARNS.format(min(numbers))) as told:
        state = engine.optimizer_state()
    assert len(told) == 1
    assert "'2.weight'" in str(told[0].message)
    expected = optimizer.state_dict()["state"]
    for place in (2, 3):
        # Else the numbers would be those of the newest step by chance.
        assert any(expected[place][x] != expected[0][x] for x in numbers)
        expected[place] = {x: y for x, y in expected[place].items() if x not in numbers}
    torch.testing.assert_close(state["state"], expected, check_dtype=False)
    if name != "count":
        with pytest.raises(KeyError, match=min(numbers)):
            make(net().parameters()).load_state_dict(state)


@EACH_STAGE
@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_an_engine_takes_back_a_state_with_late_leaves(name: str, stage: int) -> None:
    make, _ = CLASSES[name]
    model, engine, step = engine_run(make, stage, FROZEN)
    with pytest.warns(UserWarning, match="has missed steps"):
        state = engine.optimizer_state()
    engine.load_optimizer_state(state)
    plain, _, plain_step = plain_run(make, FROZEN)
    more = batches(5)[4]
    plain_step(more)
    step(more)
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))
    model[2].requires_grad_(True)
    with pytest.raises(LeafError, match=r"'2\.weight' is used again after 3 .*such as torch.*Adam"):
        step(more)


@EACH_STAGE
@pytest.mark.parametrize("frozen", [FROZEN, {0: [2], 2: [0]}])
def test_a_class_that_counts_by_itself_refuses_a_state_with_late_leaves(
    frozen: dict[int, list[int]], stage: int
) -> None:
    """Such a state does not say which leaves are late, and in the second case all of them are."""
    plain, *_ = plain_run(Rising, frozen)
    _, engine, _ = engine_run(Rising, stage, frozen)
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))
    with pytest.warns(UserWarning, match="has missed steps"):
        state = engine.optimizer_state()
    with pytest.raises(CheckpointError, match=r"no 'k' for leaf '.*'; resume from a directory"):
        engine.load_optimizer_state(state)


@EACH_STAGE
def test_a_state_without_the_numbers_of_a_leaf_that_took_all_steps_is_refused(stage: int) -> None:
    _, engine, _ = engine_run(CLASSES["NAdam"][0], stage, {})
    state = engine.optimizer_state()
    del state["state"][1]["mu_product"]
    with pytest.raises(CheckpointError, match=r"most steps; got no 'mu_product' for leaf '0.bias'"):
        engine.load_optimizer_state(state)
