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
def test_ranks_send_the_unused_leaves_where_every_rank_has_some(stage: int) -> None:
    def main(group: Group, uses_all: int, unused: str = "skip") -> list[str]:
        def loss(params: Any, x: Tensor) -> Tensor:
            rest = params["b"].sum() if group.rank == uses_all else 0.0
            return (params["a"] * x.sum()).sum() + rest

        recorded = zf.record(group)
        steps(recorded, stage, loss, 2, unused=unused)
        return [entry.name for entry in recorded.log if entry.name == "unused leaves"]

    # One rank that uses all leaves is enough for the others to know.
    assert zf.simulate(2, main, 1)[0] == []
    assert len(zf.simulate(2, main, 2)[0]) == 2
    assert zf.simulate(2, main, 2, "zeros")[0] == []


@EACH_STAGE
def test_a_leaf_left_out_keeps_its_bits_and_zeros_move_the_leaf(stage: int) -> None:
    def main(group: Group, unused: str) -> Any:
        rule = optim.adamw(0.1, weight_decay=0.5)
        z = zf.zero(stage, lambda params, x: params["a"].sum(), rule, group, unused=unused)
        start = {"a": torch.ones(3), "b": torch.tensor([-0.0, 1.0, -2.5])}
        state = z.init(start)
        for _ in range(2):
            state, _ = z.step(state, torch.ones(2))
        return z.params(state)["b"], dict(state.missed.counts)

    skipped, missed = zf.simulate(2, main, "skip")[0]
    assert_same_bits(skipped, torch.tensor([-0.0, 1.0, -2.5]))
    assert missed == {"b": 2}
    decayed, missed = zf.simulate(2, main, "zeros")[0]
    torch.testing.assert_close(decayed, torch.tensor([0.0, 1.0, -2.5]) * 0.95**2)
    assert missed == {}


@EACH_STAGE
def test_a_gradient_of_zeros_is_stepped(stage: int) -> None:
    """As that of A in LoRA, while B is zero."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["up"] * params["down"]).sum() + params["up"].square().sum()

    def main(group: Group) -> Any:
        z = zf.zero(stage, loss, optim.adamw(0.1, weight_decay=0.5), group)
        state, _ = z.step(z.init({"up": torch.zeros(3), "down": torch.ones(3)}), torch.ones(1))
        return z.params(state)["down"]

    torch.testing.assert_close(zf.simulate(2, main)[0], torch.full((3,), 0.95))


@EACH_STAGE
def test_a_skipped_step_is_missed_by_no_leaf(stage: int) -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["a"] * x).sum()

    def main(group: Group) -> Any:
        z = zf.zero(stage, loss, optim.adamw(0.1), group)
        state, info = z.step(z.init(PARAMS), torch.tensor(float("nan")))
        assert info.skipped
        return dict(state.missed.counts)

    assert zf.simulate(2, main)[0] == {}


@EACH_STAGE
def test_the_halves_of_a_step_leave_out_what_no_micro_batch_uses(stage: int) -> None:
    def fn(params: Any, x: Tensor) -> Any:
        return {"a": (params["a"] * x).sum(), "b": (params["b"] * x).sum()}

    def main(group: Group, names: list[str]) -> Any:
        z = zf.zero(stage, fn, optim.adamw(0.1, weight_decay=0.5), group)
        state, grads = z.init(PARAMS), None
        for index, name in enumerate(names):
            _, pullback, _ = z.vjp(fn, state, torch.tensor(1.0 + index))
            own = {name: torch.tensor(1.0)} if group.rank == index else {}
            grads = zf.transforms.add_grads(grads, pullback(own or {"a": torch.tensor(1.0)}))
        state, _ = z.update(state, grads, torch.tensor(0.0))
        return z.params(state), dict(state.missed.counts)

    whole, missed = zf.simulate(2, main, ["a", "a"])[0]
    assert_same_bits(whole["b"], PARAMS["b"])
    assert missed == {"b": 1}
    whole, missed = zf.simulate(2, main, ["a", "b"])[0]
    assert not torch.equal(whole["b"], PARAMS["b"])
    assert missed == {}


def test_a_rank_of_a_mesh_that_uses_a_leaf_uses_the_leaf_for_all() -> None:
    def main(group: Group, rank: int) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            rest = params["b"].sum() if group.rank == rank else 0.0
            return (params["a"] * x.sum()).sum() + rest

        mesh = zf.split(group, inner=2)
        z = zf.zero(3, loss, optim.adamw(0.1), mesh.inner)
        state, _ = z.step(z.init(PARAMS), torch.ones(2))
        return dict(state.missed.counts)

    assert [zf.simulate(4, main, rank)[0] for rank in range(5)] == [{}, {}, {}, {}, {"b": 1}]


def test_plain_gradients_are_zeros_that_an_optimizer_steps() -> None:
    def main(group: Group) -> Any:
        params = zf.shard(PARAMS, group)
        rule = optim.adamw(0.1, weight_decay=0.5)
        loss = zf.shard_params(lambda params, x: params["a"].sum(), group)
        _, grads = zf.value_and_grad(loss)(params, None)
        return zf.unshard(zf.apply(rule, grads, rule.init(params), params)[0])["b"]

    torch.testing.assert_close(zf.simulate(2, main)[0], PARAMS["b"] * 0.95)


def test_a_class_with_numbers_that_are_no_counts_refuses_a_leaf_that_comes_back() -> None:
    def main(group: Group, unused: str = "skip") -> Any:
        uses = [True, False, False, True]

        def loss(params: Any, x: Tensor) -> Tensor:
            return params["a"].sum() + (params["b"].sum() if uses.pop(0) else 0.0)

        rule = optim.from_torch(torch.optim.NAdam, lr=0.1)
        z = zf.zero(1, loss, rule, group, unused=unused)
        state = z.init(PARAMS)
        for _ in range(4):
            state, _ = z.step(state, torch.ones(2))
        return z.params(state)

    with pytest.raises(
        LeafError,
        match=r"leaf 'b' is used again after 2 steps without a gradient, and torch\.optim\.NAdam "
        r"keeps 'mu_product'; use .* such as torch\.optim\.AdamW, or pass unused='zeros'",
    ) as error:
        zf.simulate(2, main)
    assert error.value.leaf == "b"
    zf.simulate(2, main, "zeros")


@EACH_STAGE
def test_without_trained_leaves_there_is_nothing_to_use(stage: int) -> None:
    zf.simulate(
        2, steps, stage, lambda params, x: params["a"].sum(), trainable=lambda path, leaf: False
    )
