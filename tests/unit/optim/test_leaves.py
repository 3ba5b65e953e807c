from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models, reference
from zfun import optim, tree
from zfun.errors import LeafError, OptionError
from zfun.optim._leaves import is_matrix
from zfun.reductions._leaves import _shared_out
from zfun.testing import same_bits

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (5, 9),
    "tall": (12, 3),
    "square": (4, 4),
    "one": (1, 1),
}


def draw(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def changes(
    optimizer: optim.Optimizer, oracle: Any, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> Any:
    start = draw(0, shapes)
    params, expected, state, memory = start, start, optimizer.init(start), {}
    for step in range(1, 5):
        grads = draw(step, shapes)
        params, state = optimizer.apply(grads, state, params)
        expected = oracle(expected, grads, memory)
    for name in start:
        assert (expected[name] - start[name]).abs().max() > 1e-3
        torch.testing.assert_close(
            params[name] - start[name], expected[name] - start[name], rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.4, 0.5), (3.0, 5.0)])
def test_lamb_equals_a_plain_loop(low: float, high: float) -> None:
    optimizer = optim.lamb(0.05, weight_decay=0.2, min_ratio=low, max_ratio=high)
    changes(
        optimizer,
        lambda p, g, s: reference.lamb(p, g, s, 0.05, 0.2, low, high),
        {**SHAPES, "b": (7,), "scalar": ()},
    )


def test_lamb_steps_from_zero() -> None:
    params = {"w": torch.zeros(3)}
    optimizer = optim.lamb(0.5, b1=0.0, b2=0.0)
    assert optimizer.apply({"w": torch.ones(3)}, optimizer.init(params), params)[0][
        "w"
    ].tolist() == pytest.approx([-0.5] * 3)


def test_lamb_takes_a_buffer_without_elements() -> None:
    params = {"w": torch.ones(3), "empty": torch.zeros(0, 4, dtype=torch.float64)}
    optimizer = optim.lamb(0.5)
    stepped, _ = optimizer.apply(
        {"w": torch.ones(3), "empty": params["empty"]}, optimizer.init(params), params
    )
    assert same_bits(stepped["empty"], params["empty"])
    assert not same_bits(stepped["w"], params["w"])


def test_muon_equals_the_polynomial_of_the_singular_values() -> None:
    changes(
        optim.muon(0.05, optim.sgd(1.0), weight_decay=0.2),
        lambda p, g, s: reference.muon(p, g, s, 0.05, 0.2, 0.95),
    )


class Beside(NamedTuple):
    """Parameters and the state after steps, and those of torch's Muon."""

    start: dict[str, Tensor]
    params: Any
    state: Any
    twins: dict[str, torch.nn.Parameter]
    oracle: torch.optim.Optimizer


def beside_torch(optimizer: optim.Optimizer, rates: list[float], **options: Any) -> Beside:
    start = {name: x.float() for name, x in draw(0).items()}
    twins = {name: torch.nn.Parameter(x.clone()) for name, x in start.items()}
    oracle = torch.optim.Muon(list(twins.values()), **options)
    params, state = start, optimizer.init(start)
    for step, rate in enumerate(rates, 1):
        oracle.param_groups[0]["lr"] = rate
        if "lr" in optim.hyperparams(state):
            state = optim.set_hyperparams(state, lr=rate)
        grads = {name: x.float() for name, x in draw(step).items()}
        params, state = optimizer.apply(grads, state, params)
        for name, twin in twins.items():
            twin.grad = grads[name].clone()
        oracle.step()
    return Beside(start, params, state, twins, oracle)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_that_of_torch_in_the_same_dtype(nesterov: bool) -> None:
    options = {"weight_decay": 0.1, "nesterov": nesterov}
    optimizer = optim.muon(0.05, optim.sgd(1.0), dtype=torch.bfloat16, **options)
    found = beside_torch(optimizer, [0.05] * 3, **options)
    for name, twin in found.twins.items():
        before = found.start[name]
        change, expected = found.params[name] - before, twin.detach() - before
        assert expected.abs().max() > 0.01
        # Products in bfloat16 are accurate to two digits.
        assert (change - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 0.1},
    ],
)
def test_torch_muon_has_the_numbers_of_torch(options: dict[str, Any]) -> None:
    optimizer = optim.inject_hyperparams(optim.from_torch)(torch.optim.Muon, lr=0.5, **options)
    found = beside_torch(optimizer, [0.05 / step for step in range(1, 5)], **options)
    for name, twin in found.twins.items():
        assert (twin - found.start[name]).abs().max() > 1e-4
        torch.testing.assert_close(found.params[name], twin.detach(), rtol=0, atol=2.4e-7)
        buffer = found.oracle.state[twin]["momentum_buffer"]
        torch.testing.assert_close(found.state.inner.trees["momentum_buffer"][name], buffer)


RULES: dict[str, Any] = {
    "of zfun": optim.muon(0.05, optim.adamw(0.05)),
    "of torch": optim.by_label(
        {"matrices": optim.from_torch(torch.optim.Muon, lr=0.05), "rest": optim.adamw(0.05)},
        lambda path, leaf: "matrices" if is_matrix(path, leaf) else "rest",
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_sends_each_matrix_to_one_rank_and_back(stage: int, rule: str) -> None:
    def main(group: zf.Group) -> Any:
        recorded = zf.record(group)
        z = zf.zero(stage, models.mlp_loss, RULES[rule], recorded, bucket_bytes=300)
        # Matrices of 121 elements: pieces of 64 cut some, and others lie whole on a rank.
        state = z.init(models.mlp(width=11))
        for step in models.mlp_batches(2, group.size, width=11):
            recorded.clear()
            state, _ = z.step(state, step[group.rank])
        return z.params(state), recorded.bytes_sent("leaves")

    runs = zf.simulate(3, main)
    plain = zf.simulate(3, main_of_stage_0, RULES[rule])
    for params, sent in runs:
        assert same_bits(params, plain[0])
        assert (sent > 0) is (stage > 0)


def main_of_stage_0(group: zf.Group, rule: optim.Optimizer) -> Any:
    z = zf.zero(0, models.mlp_loss, rule, group)
    state = z.init(models.mlp(width=11))
    for step in models.mlp_batches(2, group.size, width=11):
        state, _ = z.step(state, step[group.rank])
    return z.params(state)


def test_muon_assigns_matrices_to_ranks_by_cost() -> None:
    costs = [8.0, 1.0, 1.0, 5.0, 3.0, 4.0, 2.0]
    owners = _shared_out(costs, [0.0] * 3)
    loads = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(3)
    ]
    assert sorted(loads) == [8.0, 8.0, 8.0]
    # A rank that has whole matrices already gets fewer of those that are cut.
    assert _shared_out([2.0, 2.0, 2.0], [5.0, 0.0, 1.0]) == [1, 2, 1]


def test_embeddings_may_be_left_out() -> None:
    params = {"embedding": torch.ones(3, 2), "w": torch.eye(2)}
    optimizer = optim.muon(
        0.1, optim.sgd(0.1), matrices=lambda path, leaf: leaf.ndim == 2 and path != "embedding"
    )
    state = optimizer.init(params)
    assert tree.paths(state["matrices"].mu) == ["w"]
    assert (
        optimizer.apply(params, state, params)[0]["embedding"].tolist()
        == [[pytest.approx(0.9)] * 2] * 3
    )


def test_torch_muon_takes_matrices_alone() -> None:
    optimizer = optim.from_torch(torch.optim.Muon, lr=0.1)
    with pytest.raises(LeafError, match=r"torch\.optim\.Muon steps real matrices; leaf 'b' is"):
        optimizer.init({"w": torch.ones(2, 2), "b": torch.ones(2)})
    empty = {"w": torch.ones(0, 3)}
    assert optimizer.apply(empty, optimizer.init(empty), empty)[0]["w"].shape == (0, 3)


def test_options_are_checked() -> None:
    with pytest.raises(
        LeafError, match=r"real matrices; leaf 'b' is torch\.float32 of shape \(2,\); let matrices"
    ):
        optim.muon(0.1, optim.sgd(0.1), matrices=lambda path, leaf: True).init(
            {"w": torch.ones(2, 2), "b": torch.ones(2)}
        )
    for make, message in (
        (lambda: optim.lamb(0.1, b2=1.0), "a number of at least 0, below 1"),
        (lambda: optim.lamb(0.1, eps=-1.0), "at least 0; got -1.0"),
        (lambda: optim.lamb(0.1, min_ratio=2.0, max_ratio=1.0), r"min_ratio lies in \[0"),
        (
            lambda: optim.muon(0.1, optim.sgd(0.1), momentum=1.0),
            "at least 0, below 1; got 1.0",
        ),
        (
            lambda: optim.muon(0.1, optim.sgd(0.1), weight_decay=-1.0),
            "at least 0; got -1.0",
        ),
        (
            lambda: optim.muon(0.1, optim.sgd(0.1), num_iterations=0),
            "an integer of at least 1",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            make()


def test_options_of_muon_may_be_numbers_of_any_class() -> None:
    params = {"w": torch.eye(2)}

    def changed(half: Any) -> Tensor:
        optimizer = optim.muon(0.1, optim.sgd(0.1), momentum=half, weight_decay=half)
        return optimizer.apply(params, optimizer.init(params), params)[0]["w"]

    assert torch.equal(changed(Fraction(1, 2)), changed(0.5))
