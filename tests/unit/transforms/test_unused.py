"""A loss that does not use its parameters trains nothing: the first such step raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun import optim
from zfun.collectives import Group
from zfun.errors import LeafError
from zfun.testing import assert_same_bits

PARAMS = {"a": torch.linspace(-1, 1, 40), "b": torch.ones(70)}
EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"num_micro_batches": 2},
    "bfloat16": {"precision": torch.bfloat16},
    "loss scale": {"precision": torch.float16},
    "offload": {"offload": zf.stores.Offload(grads=zf.stores.host(), optimizer=zf.stores.host())},
    "frozen": {"trainable": lambda path, leaf: path == "a"},
}


def steps(group: Group, stage: int, loss: Any, num: int = 1, **options: Any) -> Any:
    z = zf.zero(stage, loss, optim.sgd(0.1), group, **options)
    state = z.init(PARAMS)
    for _ in range(num):
        state, _ = z.step(state, torch.ones(2))
    return z.params(state)


@EACH_STAGE
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_loss_that_uses_the_model_and_not_the_parameters_is_refused(
    stage: int, options: dict[str, Any]
) -> None:
    def main(group: Group) -> None:
        model = nn.Linear(1, 1)
        with pytest.raises(
            LeafError,
            match=r"^a loss must use its parameters; in step 0 no trained leaf got a gradient on "
            r"any rank; .*functional_call\(model, params",
        ) as error:
            steps(group, stage, lambda params, x: model(x[:1].float()).sum(), **options)
        assert error.value.step == 0

    zf.simulate(2, main)


@EACH_STAGE
@pytest.mark.parametrize("kind", ["constant", "detached", "only frozen leaves"])
def test_other_losses_without_a_gradient_are_refused(stage: int, kind: str) -> None:
    losses = {
        "constant": lambda params, x: x.sum(),
        "detached": lambda params, x: params["a"].detach().sum() + params["b"].detach().sum(),
        "only frozen leaves": lambda params, x: params["b"].sum(),
    }
    only_a: dict[str, Any] = {"trainable": lambda path, leaf: path == "a"}
    options = only_a if kind.startswith("only") else {}

    def main(group: Group) -> None:
        with pytest.raises(LeafError, match="a loss must use its parameters"):
            steps(group, stage, losses[kind], **options)

    zf.simulate(2, main)


@EACH_STAGE
@pytest.mark.parametrize("kind", ["zero", "one rank", "one micro-batch"])
def test_gradients_of_zeros_and_of_one_rank_are_no_error(stage: int, kind: str) -> None:
    def main(group: Group) -> Any:
        calls = []

        def loss(params: Any, x: Tensor) -> Tensor:
            calls.append(x)
            if kind == "zero":
                return params["a"].sum() * 0
            used = group.rank == 1 if kind == "one rank" else len(calls) % 2 == 0
            # The gradient of the one that uses the parameters is zero too.
            return params["b"].sum() * 0 if used else x.sum()

        num = 2 if kind == "one micro-batch" else 1
        return steps(group, stage, loss, 2, num_micro_batches=num)

    assert_same_bits(zf.simulate(2, main)[0], PARAMS)


@EACH_STAGE
def test_the_first_step_without_a_gradient_raises_and_leaves_the_state(stage: int) -> None:
    def main(group: Group) -> Any:
        uses = [True, False, True]
        z = zf.zero(
            stage,
            lambda params, x: params["a"].sum() if uses.pop(0) else x.sum(),
            optim.sgd(0.5),
            group,
        )
        state, _ = z.step(z.init(PARAMS), torch.ones(2))
        with pytest.raises(LeafError, match="in step 1 no trained leaf"):
            z.step(state, torch.ones(2))
        state, _ = z.step(state, torch.ones(2))
        return z.params(state)["a"]

    assert_same_bits(zf.simulate(2, main)[0], PARAMS["a"] - 0.5 - 0.5)


@EACH_STAGE
def test_steps_with_gradients_send_nothing_more(stage: int) -> None:
    def main(group: Group) -> set[str]:
        recorded = zf.record(group)
        steps(recorded, stage, lambda params, x: (params["a"] * x.sum()).sum(), 2)
        return {entry.name for entry in recorded.log}

    assert "ranks with gradients" not in zf.simulate(2, main)[0]


@EACH_STAGE
def test_without_trained_leaves_there_is_nothing_to_use(stage: int) -> None:
    zf.simulate(
        2, steps, stage, lambda params, x: params["a"].sum(), trainable=lambda path, leaf: False
    )
