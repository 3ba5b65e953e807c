from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import NotElementwiseError, OptionError, PlacementError, SpecMismatch
from zfun.testing import same_bits

RULES = {"matrix": optim.adamw(0.05, weight_decay=0.3), "rest": optim.sgd(0.05, momentum=0.9)}


def kind(path: str, leaf: Any) -> str:
    return "matrix" if leaf.ndim == 2 else "rest"


def train(optimizer: optim.Optimizer, params: Any, num_steps: int = 3) -> Any:
    state = optimizer.init(params)
    for step in models.mlp_batches(num_steps, 1):
        _, grads = zf.value_and_grad(models.mlp_loss)(params, step[0])
        params, state = zf.apply(optimizer, grads, state, params)
    return params, state


def test_each_leaf_has_the_changes_of_torch() -> None:
    params, (ours, _) = models.mlp(), train(optim.by_label(RULES, kind), models.mlp())
    parameters = tree.map(lambda x: torch.nn.Parameter(x.clone()), params)
    leaves = tree.leaves(parameters)
    oracles = [
        torch.optim.AdamW([x for x in leaves if x.ndim == 2], lr=0.05, weight_decay=0.3),
        torch.optim.SGD([x for x in leaves if x.ndim != 2], lr=0.05, momentum=0.9),
    ]
    for step in models.mlp_batches(3, 1):
        for oracle in oracles:
            oracle.zero_grad()
        models.mlp_loss(parameters, step[0]).backward()
        for oracle in oracles:
            oracle.step()
    for mine, theirs, before in zip(tree.leaves(ours), leaves, tree.leaves(params), strict=True):
        assert (theirs.detach() - before).abs().max() > 1e-3
        torch.testing.assert_close(mine - before, theirs.detach() - before, rtol=1e-12, atol=1e-14)


def test_each_optimizer_has_state_for_the_leaves_of_one_label() -> None:
    _, state = train(optim.by_label(RULES, kind), models.mlp(num_layers=2))
    assert tree.paths(state["matrix"].mu) == ["h.0.w", "h.1.w"]
    assert tree.paths(state["rest"].velocity) == ["h.0.b", "h.1.b", "out"]

    def main(group: zf.Group) -> None:
        z = zf.zero(3, models.mlp_loss, optim.by_label(RULES, kind), group)
        state = z.init(models.mlp(num_layers=2)).opt_state
        assert state["matrix"].mu.layout.paths == ("h.0.w", "h.1.w")
        assert sum(b.numel for b in state["rest"].velocity.layout.buckets) == 15
        assert state["rest"].velocity.placement is zf.S

    zf.simulate(2, main)


def test_an_optimizer_whose_label_no_leaf_has_stays_unused() -> None:
    optimizer = optim.by_label({**RULES, "none": optim.adamw(1.0)}, kind)
    whole, state = train(optimizer, models.mlp())
    assert state["none"] is None
    assert same_bits(whole, train(optim.by_label(RULES, kind), models.mlp())[0])


def test_the_learning_rate_is_that_of_a_label_with_leaves() -> None:
    params = {"b": torch.ones(2)}
    for rule in (
        optim.muon(optim.linear(1.0, 0.0, 4), optim.adamw(0.05)),
        optim.by_label({"none": optim.sgd(0.5), "all": optim.sgd(0.05)}, lambda path, leaf: "all"),
    ):
        zero = zf.zero(0, lambda p, batch: (p["b"] * batch).sum(), rule, zf.process_group())
        _, info = zero.step(zero.init(params), torch.ones(2))
        assert info.learning_rate == 0.05


def test_labels_may_be_nested() -> None:
    inner = optim.by_label(
        {"first": optim.sgd(0.01), "later": optim.sgd(0.1)},
        lambda path, leaf: "first" if "h.0" in path else "later",
    )
    nested = optim.by_label({"matrix": inner, "rest": optim.adamw(0.05)}, kind)
    flat = optim.by_label(
        {"a": optim.sgd(0.01), "b": optim.sgd(0.1), "c": optim.adamw(0.05)},
        lambda path, leaf: "c" if leaf.ndim != 2 else "a" if "h.0" in path else "b",
    )
    expected = train(flat, models.mlp())[0]
    assert same_bits(train(nested, models.mlp())[0], expected)

    def main(group: zf.Group) -> Any:
        z = zf.zero(3, models.mlp_loss, nested, group)
        state = z.init(models.mlp())
        for step in models.mlp_batches(3, 1):
            state, _ = z.step(state, step[0])
        return z.params(state)

    for found, value in zip(
        tree.leaves(zf.simulate(2, main)[0]), tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


def test_tied_leaves_have_the_label_of_the_first() -> None:
    w = torch.ones(2)
    optimizer = optim.by_label(
        {"in": optim.sgd(0.5), "out": optim.sgd(5.0)}, lambda path, leaf: path
    )
    params = {"in": w, "out": w}
    for flat in (False, True):

        def main(group: zf.Group, flat: bool = flat) -> Any:
            value: Any = zf.replicate(params, group) if flat else params
            _, grads = zf.data_parallel(
                zf.value_and_grad(lambda p, b: (p["in"] + p["out"]).sum()), group
            )(value, None)
            new, _ = zf.apply(optimizer, grads, optimizer.init(value), value)
            return zf.unshard(new) if flat else new

        found = zf.simulate(2, main)[0]
        assert found["in"].tolist() == found["out"].tolist() == [0.0, 0.0]


def test_replicated_buckets_that_mix_labels_are_copied() -> None:
    optimizer = optim.by_label(RULES, kind)

    def main(group: zf.Group, labels: Any, shards: bool, donate: bool) -> Any:
        params = zf.replicate(models.mlp(), group, labels=labels)
        assert (len(params.layout.buckets) == 1) is (labels is None)
        rule = zf.shard_optimizer(optimizer, group) if shards else optimizer
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        state = rule.init(params)
        for step in models.mlp_batches(3, group.size):
            _, grads = vg(params, step[group.rank])
            params, state = zf.apply(rule, grads, state, params, donate=donate)
        return zf.unshard(params)

    expected = zf.simulate(3, main, kind, False, False)[0]
    assert not same_bits(expected, models.mlp())
    for labels, shards, donate in (
        (None, False, False),
        (None, True, True),
        (kind, True, False),
        (None, False, True),
    ):
        assert same_bits(zf.simulate(3, main, labels, shards, donate)[0], expected)


def test_sharded_buckets_that_mix_labels_are_refused() -> None:
    optimizer = optim.by_label(RULES, kind)

    def main(group: zf.Group) -> None:
        params = zf.shard(models.mlp(), group)
        with pytest.raises(
            PlacementError,
            match=r"buckets have one label each; .* shard\(params, group, "
            r"labels=optimizer\.labels\)",
        ):
            optimizer.init(params)
        with pytest.raises(PlacementError, match="buckets have one label each"):
            zf.shard_optimizer(optimizer, group).init(params)
        zf.shard_optimizer(optimizer, group).init(
            zf.shard(models.mlp(), group, labels=optimizer.labels)
        )

    zf.simulate(2, main)


def test_labels_states_and_gradients_that_do_not_fit_are_refused() -> None:
    optimizer, params = optim.by_label(RULES, kind), {"w": torch.ones(2, 2), "b": torch.ones(2)}
    with pytest.raises(
        OptionError,
        match=r"one of the labels 'matrix', 'rest'; leaf 'b' got 'bias'; add an optimizer",
    ) as caught:
        optim.by_label(RULES, lambda path, leaf: "bias" if path == "b" else "matrix").init(params)
    assert caught.value.leaf == "b"
    with pytest.raises(OptionError, match="at least one optimizer"):
        optim.by_label({}, kind)
    with pytest.raises(
        OptionError, match=r"labels of by_label.* are strings; got True; write 'True"
    ):
        optim.by_label({True: optim.sgd(0.1)}, lambda path, leaf: leaf.ndim > 1)  # type: ignore[dict-item]
    with pytest.raises(OptionError, match=r"leaf 'w' got \['rest'\]; add an optimizer"):
        optim.by_label(RULES, lambda path, leaf: ["rest"]).init(params)  # type: ignore[arg-type,return-value]
    with pytest.raises(
        SpecMismatch, match=r"a dict with the labels 'matrix', 'rest'; got AdamState"
    ):
        optimizer.update(params, optim.adamw(0.1).init(params), params)
    with pytest.raises(
        SpecMismatch, match=r"gradients must have the tree of the parameters; missing \['b'\]"
    ):
        optimizer.update({"w": torch.ones(2, 2)}, optimizer.init(params), params)

    def per_leaf(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: g / g.norm(), grads), state

    def main(group: zf.Group) -> None:
        with pytest.raises(NotElementwiseError):
            zf.shard_optimizer(optim.by_label({"all": (lambda params: (), per_leaf)}, kind), group)
        with pytest.raises(
            PlacementError, match=r"for 'rest' that computes in S; write shard_optimizer\(by_label"
        ):
            optim.by_label({**RULES, "rest": zf.shard_optimizer(optim.sgd(0.1), group)}, kind)

    zf.simulate(2, main)


def test_label_functions_receive_leaves_without_numbers() -> None:
    seen: list[Tensor] = []

    def label(path: str, leaf: Tensor) -> str:
        seen.append(leaf)
        return "rest"

    optim.by_label(RULES, label).init({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert [(x.shape, x.dtype, x.is_meta) for x in seen] == [((2, 3), torch.bfloat16, True)]
