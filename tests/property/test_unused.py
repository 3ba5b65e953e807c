"""A leaf that no rank used takes no step: the numbers are those of torch's optimizers, which skip
parameters whose ``grad`` is ``None``, at every stage and to the last bit of each other.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from tests.distributed.programs import unused
from tests.distributed.programs.unused import SHAPES, Ways
from zfun import optim, tree
from zfun.testing import assert_same_bits, bucket_sizes


class Lion(torch.optim.Optimizer):
    """Lion in a plain loop, for one parameter after the other."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(
                        group["lr"] * ((0.9 * m + 0.1 * p.grad).sign() + group["weight_decay"] * p)
                    )
                    m.mul_(0.99).add_(0.01 * p.grad)


class Averaged(torch.optim.Optimizer):
    """SGD whose rate falls with a number of the group, which counts every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Rule(NamedTuple):
    """A rule of zfun, and the same training by torch."""

    rule: Callable[[], Any]
    make: Callable[[dict[str, Tensor]], list[Any]]
    max_norm: float | None = None


def scheduled_adamw(leaves: dict[str, Tensor]) -> list[Any]:
    adamw = torch.optim.AdamW(leaves.values(), lr=0.1, weight_decay=0.1)
    return [adamw, torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.2, 6)]


def by_shape(leaves: dict[str, Tensor]) -> list[Any]:
    matrices = [p for p in leaves.values() if p.ndim > 1]
    rest = [p for p in leaves.values() if p.ndim < 2]
    adam = torch.optim.Adam(matrices, lr=0.1, weight_decay=0.1)
    adam.register_step_post_hook(lambda *_: sgd.step())
    sgd = torch.optim.SGD(rest, lr=0.1, momentum=0.9)
    return [adam]


FALLING = optim.linear(0.1, 0.02, 6)
RULES: dict[str, Rule] = {
    "adamw": Rule(lambda: optim.adamw(FALLING, weight_decay=0.1), scheduled_adamw),
    "momentum": Rule(
        lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda leaves: [
            torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        ],
    ),
    "adagrad": Rule(
        lambda: optim.adagrad(0.1, rate_decay=0.3, weight_decay=0.1),
        lambda leaves: [
            torch.optim.Adagrad(leaves.values(), lr=0.1, lr_decay=0.3, weight_decay=0.1)
        ],
    ),
    "lion": Rule(
        lambda: optim.lion(0.1, weight_decay=0.1),
        lambda leaves: [Lion(leaves.values(), lr=0.1, weight_decay=0.1)],
    ),
    "parts": Rule(
        lambda: optim.chain(
            optim.clip_by_global_norm(2.0),
            optim.scale_by_adam(),
            optim.add_decayed_weights(0.1),
            optim.scale_by_learning_rate(FALLING),
        ),
        scheduled_adamw,
        2.0,
    ),
    "labels": Rule(
        lambda: optim.by_label(
            {"matrix": optim.adam(0.1, weight_decay=0.1), "rest": optim.sgd(0.1, momentum=0.9)},
            lambda path, leaf: "matrix" if leaf.ndim > 1 else "rest",
        ),
        by_shape,
    ),
    "RMSprop": Rule(
        lambda: optim.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
        lambda leaves: [torch.optim.RMSprop(leaves.values(), lr=0.1, momentum=0.9, centered=True)],
    ),
    "RAdam": Rule(
        lambda: optim.inject_hyperparams(optim.from_torch)(
            torch.optim.RAdam, lr=0.1, weight_decay=0.1
        ),
        lambda leaves: [torch.optim.RAdam(leaves.values(), lr=0.1, weight_decay=0.1)],
    ),
    "Averaged": Rule(
        lambda: optim.from_torch(Averaged, lr=0.5), lambda leaves: [Averaged(leaves.values(), 0.5)]
    ),
}


@st.composite
def programs(draw: st.DrawFn) -> Ways:
    """Draw which leaves each micro-batch of each rank uses; one leaf is used everywhere."""
    size, num_micro = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
    base = list(SHAPES).index("base")
    found = []
    for _ in range(draw(st.integers(3, 6))):
        # All ranks leave these leaves out; without a common draw this would be rare.
        idle = draw(st.sets(st.integers(0, len(SHAPES) - 1)))
        step = [
            [
                [
                    1
                    if leaf == base
                    else 0
                    if leaf in idle
                    else draw(st.sampled_from([0, 1, 1, 2]))
                    for leaf in range(len(SHAPES))
                ]
                for _ in range(num_micro)
            ]
            for _ in range(size)
        ]
        found.append(step)
    return found


CASES = st.fixed_dictionaries(
    {"ways": programs(), "name": st.sampled_from([*RULES]), "bucket_bytes": bucket_sizes()}
)


def check(ways: Ways, name: str, bucket_bytes: int) -> None:
    rule, make, max_norm = RULES[name]
    oracle = unused.plain(make, ways, max_norm)
    size, num_micro = len(ways[0]), len(ways[0][0])
    half = len(ways) // 2
    found: list[Any] = []
    for stage in range(4):
        with tempfile.TemporaryDirectory() as path:

            def main(group: zf.Group, stage: int = stage, path: str = path) -> Any:
                zero = unused.make(group, stage, rule(), ways, bucket_bytes=bucket_bytes)
                other = unused.make(group, (stage + 1) % 4, rule(), ways)
                state = zero.init(unused.params())
                for index, step in enumerate(unused.batches_of(ways)):
                    if index == half and num_micro == 1:
                        # The rest of the run goes on at another stage, from a checkpoint.
                        zf.save(path, state, step=index)
                        zero, state = other, zf.load(path, other.init(unused.params())).state
                    state, _ = zero.step(state, step[group.rank])
                return zero.params(state), dict(state.missed.counts)

            found.append(zf.simulate(size, main)[0])
        for leaf, p in found[-1][0].items():
            torch.testing.assert_close(p, oracle[leaf], rtol=1e-10, atol=1e-12)
        # With micro-batches stages 2 and 3 reduce each micro-batch, and round differently.
        assert_same_bits(found[-1], found[0 if num_micro == 1 or stage < 2 else 2])


@pytest.mark.parametrize("name", RULES)
def test_every_rule_leaves_out_what_torch_leaves_out(name: str) -> None:
    for size in (1, 2):
        check(unused.some_ways(6, size), name, 200)


@settings(max_examples=examples(40))
@given(case=CASES)
def test_programs_with_branches_have_the_numbers_of_torch(case: dict[str, Any]) -> None:
    check(**case)


def zeros(params: Any) -> Any:
    return tree.map(torch.zeros_like, params)


def heavy(grads: Any, state: Any, params: Any) -> Any:
    """A rule of a user, which moves parameters without gradients too."""
    state = tree.map(lambda m, g, p: 0.9 * m + g + 0.1 * p, state, grads, params)
    return tree.map(lambda m: -0.05 * m, state), state


def remembers(grads: Any, state: Any, params: Any) -> Any:
    """A rule of a user whose state is the gradients."""
    return tree.map(lambda g, m: -0.05 * (g + m), grads, state), grads


# These rules look at whole leaves, or zfun does not know what they do.
WHOLE: dict[str, Callable[[], Any]] = {
    "lamb": lambda: optim.lamb(0.05, weight_decay=0.1),
    "muon": lambda: optim.muon(0.05, optim.sgd(0.05, momentum=0.9), weight_decay=0.1),
    "pair": lambda: optim.optimizer(zeros, heavy),
    "memory": lambda: optim.optimizer(zeros, remembers),
    "pair in a chain": lambda: optim.chain(
        optim.optimizer(zeros, heavy), optim.add_decayed_weights(0.1), optim.scale(0.9)
    ),
}


def by_hand(rule: Any, ways: Ways) -> dict[str, Tensor]:
    """Step all leaves of a tree, and put back what the step did not use."""
    params = unused.params()
    state = rule.init(params)
    for step in ways:
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        rows = [torch.tensor([micro]) for rank in step for micro in rank]
        torch.stack([unused.loss_fn(leaves, row) for row in rows]).mean().backward()
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in leaves.items()
        }
        new, after = rule.apply(grads, state, params)
        for name, leaf in leaves.items():
            if leaf.grad is None:
                new[name] = params[name]
                after = put_back(after, state, name)
        params, state = new, after
    return params


def put_back(after: Any, before: Any, name: str) -> Any:
    if isinstance(after, dict) and set(after) <= set(SHAPES):
        return {**after, name: before[name]} if name in after else after
    if isinstance(after, dict):
        return {key: put_back(after[key], before[key], name) for key in after}
    if isinstance(after, tuple):
        parts = [put_back(x, y, name) for x, y in zip(after, before, strict=True)]
        return after._make(parts) if hasattr(after, "_make") else tuple(parts)
    return after


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [1, 2])
def test_rules_of_whole_leaves_put_unused_leaves_back(name: str, size: int) -> None:
    ways = unused.some_ways(5, size)
    expected = by_hand(WHOLE[name](), ways)
    found = [
        zf.simulate(
            size, lambda group, stage=stage: unused.train(group, stage, WHOLE[name](), ways)
        )[0]
        for stage in range(4)
    ]
    for whole, _ in found:
        for leaf, p in whole.items():
            torch.testing.assert_close(p, expected[leaf], rtol=1e-10, atol=1e-12)
        assert_same_bits(whole, found[0][0])


BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "host": lambda path: {"offload": zf.stores.Offload(optimizer=zf.stores.host())},
    "nvme": lambda path: {
        "offload": zf.stores.Offload(optimizer=zf.stores.nvme(path), fraction=0.5)
    },
    "nvme, all": lambda path: {"offload": zf.stores.Offload(optimizer=zf.stores.nvme(path))},
    "nvme, gradients": lambda path: {
        "offload": zf.stores.Offload(optimizer=zf.stores.nvme(path), grads=zf.stores.host())
    },
    "keeping": lambda path: {"donate": False},
}
PRECISIONS: dict[str, Any] = {
    "bfloat16": BF16,
    "float16": zf.Precision(
        torch.float16, torch.float16, FP32, FP32, optim.static_loss_scale(2.0**6)
    ),
    "float64": None,
}


def kept_bits(precision: str, key: str, stage: int, options: Any) -> list[Any]:
    """Train; leaves that are left out keep the bits of parameters, masters and moments."""
    ways = unused.some_ways(5, 2, seed=1)

    def main(group: zf.Group) -> Any:
        whole, state = unused.train(
            group, stage, RULES[key].rule(), ways, precision=PRECISIONS[precision], **options
        )
        return whole, dict(state.missed.counts)

    return zf.simulate(2, main)


@pytest.mark.parametrize("key", ["adamw", "labels", "memory", "pair in a chain"])
@pytest.mark.parametrize("stage", [2, 3])
def test_sums_over_micro_batches_in_a_store_leave_the_same_leaves_out(stage: int, key: str) -> None:
    rule = WHOLE[key] if key in WHOLE else RULES[key].rule
    ways = unused.some_ways(4, 2, num_micro=3)
    offload = zf.stores.Offload(optimizer=zf.stores.host(), grads=zf.stores.host())

    def main(group: zf.Group, **options: Any) -> Any:
        whole, state = unused.train(group, stage, rule(), ways, **options)
        return whole, dict(state.missed.counts)

    found, expected = zf.simulate(2, main, offload=offload), zf.simulate(2, main)
    assert any(expected[0][1].values())
    assert_same_bits(found, expected)


@functools.cache
def bits_in_memory(precision: str, key: str, stage: int) -> list[Any]:
    """Train without a store, once for all stores."""
    return kept_bits(precision, key, stage, {})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_store_changes_a_bit_where_leaves_are_left_out(
    name: str, precision: str, tmp_path: Any
) -> None:
    for key in ("adamw", "parts", "RMSprop", "momentum"):
        for stage in range(4):
            assert_same_bits(
                kept_bits(precision, key, stage, OPTIONS[name](str(tmp_path))),
                bits_in_memory(precision, key, stage),
            )
