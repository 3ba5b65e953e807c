"""Laws 4, 5, 6 and 10: all compositions give the same bits and agree with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models, reference
from tests.conftest import FORM, examples
from zfun import optim, tree
from zfun.testing import (
    Composition,
    all_compositions,
    assert_same_runs,
    bucket_sizes,
    compositions,
    same_bits,
    tensors,
    trees,
)
from zfun.testing import train as train_once

SIZES = (1, 2, 3, 4, 7, 16)
LR = 0.05


# Optimizers: name, zfun's rule, and one step of the oracle, ``(params, grads, state) -> params``,
# which changes the state in place.

Oracle = Callable[[reference.Params, reference.Params, dict[Any, Any]], reference.Params]


class Rule(NamedTuple):
    name: str
    optimizer: Any
    oracle: Oracle


def nesterov(
    params: reference.Params, grads: reference.Params, state: dict[Any, Any]
) -> reference.Params:
    out = {}
    for name, p in params.items():
        state[name] = grads[name] if name not in state else 0.8 * state[name] + grads[name]
        out[name] = p - LR * (grads[name] + 0.8 * state[name])
    return out


class LionState(NamedTuple):
    average: Any
    count: Tensor


def user_init(params: Any) -> LionState:
    return LionState(tree.map(torch.zeros_like, params), torch.zeros((), dtype=torch.int64))


def user_update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
    """A rule of a user: element-wise, with a state tree, a counter and the parameters."""
    average = tree.map(lambda a, g: 0.7 * a + 0.3 * g, state.average, grads)
    rate = LR / (1.0 + float(state.count))
    updates = tree.map(lambda a, p: -rate * (torch.tanh(3.0 * a) + 0.1 * p), average, params)
    return updates, LionState(average, state.count + 1)


def user_oracle(
    params: reference.Params, grads: reference.Params, state: dict[Any, Any]
) -> reference.Params:
    count = state["t"] = state.get("t", -1) + 1
    out = {}
    for name, p in params.items():
        state[name] = 0.7 * state.get(name, torch.zeros_like(p)) + 0.3 * grads[name]
        out[name] = p - LR / (1.0 + count) * (torch.tanh(3.0 * state[name]) + 0.1 * p)
    return out


RULES = [
    Rule("sgd", optim.sgd(LR), lambda p, g, s: reference.sgd(p, g, s, LR, 0.0)),
    Rule("momentum", optim.sgd(LR, momentum=0.8), lambda p, g, s: reference.sgd(p, g, s, LR, 0.8)),
    Rule("nesterov", optim.sgd(LR, momentum=0.8, nesterov=True), nesterov),
    Rule(
        "adam",
        optim.adam(LR, eps=1e-3),
        lambda p, g, s: reference.adamw(p, g, s, LR, 0.0, eps=1e-3),
    ),
    Rule(
        "adamw",
        optim.adamw(LR, eps=1e-3, weight_decay=0.1),
        lambda p, g, s: reference.adamw(p, g, s, LR, 0.1, eps=1e-3),
    ),
    Rule(
        "clipped",
        # SGD, because Adam would hide a norm that is wrong by a factor.
        optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(LR, momentum=0.8)),
        lambda p, g, s: reference.sgd(p, reference.clip(g, 0.1), s, LR, 0.8),
    ),
    Rule("user", (user_init, user_update), user_oracle),
    Rule(
        "adagrad",
        optim.adagrad(LR, rate_decay=0.1, eps=1e-3),
        lambda p, g, s: reference.adagrad(p, g, s, LR, 0.1, 1e-3),
    ),
    # No Lion: the sign of a gradient near zero depends on the last bit; see test_optim.
]
RULES_BY_NAME = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])


def oracle_run(
    rule: Rule, loss_fn: Any, params: Any, batches: list[list[Any]], num_micro_batches: int = 1
) -> tuple[list[float], reference.Params]:
    values, state, losses = models.flat_dict(params), {}, []
    for step in batches:
        loss, grads = reference.gradients(
            lambda p, batch: loss_fn(models.unflat_dict(p, params), batch),
            values,
            models.micro_batches(step, num_micro_batches),
        )
        values = rule.oracle(values, grads, state)
        losses.append(loss)
    return losses, values


def assert_close_to_oracle(
    run: Any, params: Any, losses: list[float], values: reference.Params
) -> None:
    """Compare changes within 1e-12, so that training without effect cannot pass."""
    for mine, theirs in zip(run.losses, losses, strict=True):
        assert abs(mine - theirs) <= 1e-12 * max(1.0, abs(theirs))
    start, end = (
        models.flat_dict(params),
        dict(zip(tree.paths(params), tree.leaves(run.params), strict=True)),
    )
    for name, value in values.items():
        torch.testing.assert_close(
            end[name] - start[name], value - start[name], rtol=1e-12, atol=1e-12
        )
        if value.numel():
            assert bool((value != start[name]).any())


# Every composition at once, on one model.


# Every day a sample on three sizes; in `make test-all` on each size, and all compositions on two
# ranks; in a search all compositions on all sizes.
EVERY = {1: 4, 2: 1, 3: 4, 4: 12, 7: 24, 16: 32}
EVERY_WITH_MICRO_BATCHES = 6
if FORM == "everyday":  # primes, so that no choice of a composition has the same period
    EVERY |= {1: 13, 3: 13}
    EVERY_WITH_MICRO_BATCHES = 17
WIDE = pytest.param(16, marks=pytest.mark.slow)
# Every size is drawn by other laws of this file.
RANKS = [pytest.param(n, marks=() if n in (1, 3, 7) else pytest.mark.slow) for n in SIZES]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", RANKS)
def test_every_subset_and_order_is_the_same_function(size: int) -> None:
    params, batches = models.mlp(num_layers=2), models.mlp_batches(3, size)
    rule = RULES[5]
    # Clipping reveals the order of all sums.
    stride = 1 if FORM == "search" else EVERY[size]
    every = [Composition(), *all_compositions()[size % stride :: stride]]
    run = assert_same_runs(
        models.mlp_loss, rule.optimizer, params, batches, every, bucket_bytes=[1, 400, 2**20]
    )
    assert_close_to_oracle(run, params, *oracle_run(rule, models.mlp_loss, params, batches))


def test_every_subset_and_order_with_micro_batches() -> None:
    params, batches = models.mlp(num_layers=2), models.mlp_batches(2, 2, rows=6)
    every = all_compositions(num_micro_batches=3)
    rule = RULES[4]
    for reduces_first in (False, True):
        chosen = [
            composition for composition in every if composition.reduces_first is reduces_first
        ]
        assert len(chosen) > 200
        run = assert_same_runs(
            models.mlp_loss,
            rule.optimizer,
            params,
            batches,
            chosen[::EVERY_WITH_MICRO_BATCHES],
            num_micro_batches=3,
            bucket_bytes=[300, 2**20],
        )
        assert_close_to_oracle(run, params, *oracle_run(rule, models.mlp_loss, params, batches, 3))


@pytest.mark.parametrize("size", [4, pytest.param(7, marks=pytest.mark.slow), WIDE])
@RULES_BY_NAME
def test_compositions_agree_for_all_sizes_and_optimizers(rule: Rule, size: int) -> None:
    params, batches = models.mlp(num_layers=2), models.mlp_batches(3, size)
    chosen = [
        Composition(),
        Composition(loss=("shard_params",), donate=True),
        Composition(grads=("shard_grads",)),
        Composition(grads=("offload", "replicate_grads"), optimizer=("shard_optimizer",)),
        Composition(optimizer=("shard_optimizer", "offload"), flat=True, donate=True),
        Composition(
            ("shard_params", "offload"), ("offload", "shard_grads"), ("offload", "shard_optimizer")
        ),
        Composition(
            ("offload", "shard_params"),
            ("shard_grads", "offload"),
            ("shard_optimizer", "offload"),
            donate=True,
        ),
    ]
    run = assert_same_runs(
        models.mlp_loss, rule.optimizer, params, batches, chosen, bucket_bytes=[300]
    )
    assert_close_to_oracle(run, params, *oracle_run(rule, models.mlp_loss, params, batches))


# Any tree, bucket size, optimizer and composition.


@settings(max_examples=examples(16))
@given(
    params=trees(nodes=models.NODES),
    size=st.sampled_from(SIZES),
    rule=st.sampled_from(RULES),
    buckets=st.lists(bucket_sizes(), min_size=1, max_size=3),
    num_micro_batches=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_tree_trains(
    params: Any,
    size: int,
    rule: Rule,
    buckets: list[int],
    num_micro_batches: int,
    seed: int,
    data: st.DataObject,
) -> None:
    batches = models.tree_batches(3, size, 6, seed)
    drawn = data.draw(
        st.lists(compositions(num_micro_batches=num_micro_batches), min_size=3, max_size=4)
    )
    run = assert_same_runs(
        models.tree_loss,
        rule.optimizer,
        params,
        batches,
        [Composition(), *drawn],
        num_micro_batches=num_micro_batches,
        bucket_bytes=buckets,
    )
    losses, values = oracle_run(rule, models.tree_loss, params, batches, num_micro_batches)
    for mine, theirs in zip(run.losses, losses, strict=True):
        assert abs(mine - theirs) <= 1e-12 * max(1.0, abs(theirs))
    end = dict(zip(tree.paths(params), tree.leaves(run.params), strict=True))
    for name, value in values.items():
        torch.testing.assert_close(end[name], value, rtol=1e-12, atol=1e-12)


MIXED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


@settings(max_examples=examples(12))
@given(
    params=trees(tensors(MIXED), nodes=models.NODES),
    size=st.sampled_from(SIZES[:5]),
    rule=st.sampled_from(RULES[:6]),
    buckets=st.lists(bucket_sizes(), min_size=1, max_size=3),
    drawn=st.lists(compositions(), min_size=3, max_size=4),
    seed=st.integers(0, 99),
)
def test_mixed_dtypes_train(
    params: Any, size: int, rule: Rule, buckets: list[int], drawn: list[Composition], seed: int
) -> None:
    batches = models.tree_batches(2, size, 3, seed)
    run = assert_same_runs(
        models.tree_loss,
        rule.optimizer,
        params,
        batches,
        [Composition(), *drawn],
        bucket_bytes=buckets,
    )
    for before, after in zip(tree.leaves(params), tree.leaves(run.params), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        # A clipped step may be too small for a half type.
        if before.numel() and before.dtype not in (torch.bfloat16, torch.float16):
            assert not same_bits(before, after)


# Recipes are compositions.

STAGES = {
    0: Composition(grads=("replicate_grads",), flat=True),
    1: Composition(optimizer=("shard_optimizer",), flat=True),
    2: Composition(grads=("shard_grads",), optimizer=("shard_optimizer",), flat=True),
    3: Composition(("shard_params",), ("shard_grads",), ("shard_optimizer",)),
}


def run_zero(
    group: zf.Group,
    stage: int,
    loss_fn: Any,
    optimizer: Any,
    params: Any,
    batches: Any,
    **options: Any,
) -> tuple[Any, tuple[float, ...]]:
    z = zf.zero(stage, loss_fn, optimizer, group, **options)
    state, losses = z.init(params), []
    for step in batches:
        state, info = z.step(state, step[group.rank])
        losses.append(float(info.loss))
    return z.params(state), tuple(losses)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_equals_the_composition_by_hand(stage: int, size: int) -> None:
    params, batches, rule = models.mlp(), models.mlp_batches(3, size), RULES[5]
    expected = zf.simulate(
        size,
        lambda g: train_once(Composition(), g, models.mlp_loss, rule.optimizer, params, batches)[
            :2
        ],
    )
    stores = [
        None,
        zf.stores.Offload(optimizer=zf.stores.host()),
        zf.stores.Offload(grads=zf.stores.host(), optimizer=zf.stores.host()),
    ]
    if stage == 3:
        stores.append(zf.stores.Offload(params=zf.stores.host()))
    # Donation does not depend on the number of ranks.
    for donate in (True, False) if size <= 4 else (True,):
        for offload in stores:
            found = zf.simulate(
                size,
                run_zero,
                stage,
                models.mlp_loss,
                rule.optimizer,
                params,
                batches,
                donate=donate,
                bucket_bytes=300,
                offload=offload,
            )
            assert same_bits(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_with_micro_batches_equals_the_composition_by_hand(stage: int) -> None:
    params, batches, rule = models.mlp(), models.mlp_batches(3, 2, rows=6), RULES[4]
    composition = (
        STAGES[stage] if stage else Composition(grads=("accumulate", "replicate_grads"), flat=True)
    )

    def main(group: zf.Group) -> Any:
        return train_once(
            composition,
            group,
            models.mlp_loss,
            rule.optimizer,
            params,
            batches,
            num_micro_batches=3,
        )[:2]

    found = zf.simulate(
        2,
        run_zero,
        stage,
        models.mlp_loss,
        rule.optimizer,
        params,
        batches,
        num_micro_batches=3,
        bucket_bytes=300,
    )
    assert same_bits(found, zf.simulate(2, main))
    losses, values = oracle_run(rule, models.mlp_loss, params, batches, 3)
    for name, value in models.flat_dict(found[0][0]).items():
        torch.testing.assert_close(value, values[name], rtol=1e-12, atol=1e-12)
    assert math.isclose(found[0][1][-1], losses[-1], rel_tol=1e-12)


# Law 4: on one rank the transforms are the identity.


@settings(max_examples=examples(25))
@given(
    params=trees(nodes=models.NODES),
    rule=st.sampled_from(RULES),
    drawn=compositions(),
    bucket_bytes=bucket_sizes(),
)
def test_one_rank_is_plain_training(
    params: Any, rule: Rule, drawn: Composition, bucket_bytes: int
) -> None:
    batches = models.tree_batches(3, 1, 4)

    def plain() -> Any:
        value, state, losses = params, optim.as_optimizer(rule.optimizer).init(params), []
        for step in batches:
            loss, grads = zf.value_and_grad(models.tree_loss)(value, step[0])
            value, state = zf.apply(rule.optimizer, grads, state, value)
            losses.append(float(loss))
        return value, tuple(losses)

    run = zf.simulate(
        1,
        lambda g: train_once(
            drawn, g, models.tree_loss, rule.optimizer, params, batches, bucket_bytes=bucket_bytes
        ),
    )[0]
    expected = plain()
    assert same_bits(run[:2], expected)


def test_one_rank_sends_nothing() -> None:
    def main(group: zf.Group) -> int:
        recorded = zf.record(group)
        run_zero(
            recorded, 3, models.mlp_loss, optim.adamw(LR), models.mlp(), models.mlp_batches(2, 1)
        )
        return recorded.bytes_sent()

    assert zf.simulate(1, main) == [0]


# Law 6: a store changes no bit, and the tensors are really moved.


def test_offload_moves_the_documented_bytes() -> None:
    size, num_steps = 3, 2
    params, batches = models.mlp(), models.mlp_batches(num_steps, size)
    composition = Composition(
        ("shard_params", "offload"), ("shard_grads", "offload"), ("shard_optimizer", "offload")
    )

    def main(group: zf.Group) -> Any:
        run = train_once(
            composition, group, models.mlp_loss, optim.adamw(LR), params, batches, bucket_bytes=400
        )
        each = [b.padded_numel * b.dtype.itemsize // size for b in run.final[0].layout.buckets]
        moved = {
            (part, kind): store.bytes_moved(kind, part)
            for part, store in run.stores.items()
            for kind in ("put", "get")
        }
        state = run.stores["state"]
        return (
            each,
            moved,
            {
                (kind, name): state.bytes_moved(kind, name)
                for kind in ("put", "get")
                for name in ("params", "grads")
            },
        )

    for each, moved, crossed in zf.simulate(size, main):
        shard_bytes = sum(each)
        assert shard_bytes > 0
        # Adam keeps two numbers per parameter: put at init and at each step, get at each step.
        assert moved["state", "put"] == 2 * (1 + num_steps) * shard_bytes
        assert moved["state", "get"] == 2 * num_steps * shard_bytes
        assert moved["grads", "put"] == num_steps * shard_bytes
        assert moved["grads", "get"] == num_steps * shard_bytes
        assert moved["params", "put"] == (1 + num_steps) * shard_bytes
        # Per step: forward, backward, optimizer; and once at the end to read the parameters. From
        # the second step on, the last two buckets stay gathered for backward.
        again = shard_bytes + (num_steps - 1) * sum(each[:-2])
        assert moved["params", "get"] == (2 * num_steps + 1) * shard_bytes + again
        # The step reads gradients and parameters from their stores, not from the device.
        assert set(crossed.values()) == {0}


@pytest.mark.parametrize(
    "composition",
    [
        Composition(loss=("shard_params", "offload")),
        Composition(loss=("offload", "shard_params")),
        Composition(loss=("offload",)),
        Composition(grads=("offload",)),
        Composition(grads=("shard_grads", "offload")),
        Composition(grads=("offload", "shard_grads")),
        Composition(optimizer=("offload",)),
        Composition(optimizer=("offload", "shard_optimizer")),
        Composition(optimizer=("shard_optimizer", "offload")),
    ],
    ids=str,
)
def test_each_kind_of_offload_uses_the_store(composition: Composition) -> None:
    params, batches = models.mlp(), models.mlp_batches(2, 2)
    expected = {
        name
        for name, names in (
            ("params", composition.loss),
            ("grads", composition.grads),
            ("state", composition.optimizer),
        )
        if "offload" in names
    }

    def main(group: zf.Group) -> set[str]:
        run = train_once(composition, group, models.mlp_loss, optim.adamw(LR), params, batches)
        return {
            name
            for name, store in run.stores.items()
            if store.bytes_moved("put", name) and store.bytes_moved("get", name)
        }

    assert zf.simulate(2, main) == [expected] * 2


# Law 10: a skipped step leaves the state unchanged on every rank.


@settings(max_examples=examples(25))
@given(
    size=st.sampled_from([1, 2, 3, 7]),
    stage=st.sampled_from([0, 1, 2, 3]),
    poison=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    donate=st.booleans(),
    offload=st.booleans(),
    data=st.data(),
)
def test_gradients_that_are_not_finite_skip_the_step(
    size: int, stage: int, poison: float, donate: bool, offload: bool, data: st.DataObject
) -> None:
    params = models.mlp()
    bad_rank = data.draw(st.integers(0, size - 1))
    bad_layer = data.draw(st.integers(0, 3))
    good = models.mlp_batches(2, size)

    def bad_loss(p: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, factor = batch
        return models.mlp_loss(p, x) + (p["h"][bad_layer]["b"] * factor).sum()

    def main(group: zf.Group) -> Any:
        stores = zf.stores.Offload(optimizer=zf.stores.host()) if offload else None
        z = zf.zero(
            stage,
            bad_loss,
            optim.adamw(LR),
            group,
            donate=donate,
            bucket_bytes=300,
            max_skipped=3,
            offload=stores,
        )
        one, zero = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        hit = torch.where(torch.arange(5) == 2, poison, one) if group.rank == bad_rank else zero
        state = z.init(params)
        state, info = z.step(state, (good[0][group.rank], zero))
        assert not info.skipped
        assert info.bad_leaf is None
        before = snapshot(state)
        for count in (1, 2):
            state, info = z.step(state, (good[1][group.rank], hit))
            assert info.skipped
            assert info.bad_leaf == f"h.{bad_layer}.b"
            assert not math.isfinite(float(info.grad_norm))
            assert state.num_skipped == count
            assert state.step == 1 + count
            assert same_bits(snapshot(state), before)
        with pytest.raises(
            zf.errors.NonFiniteError, match=rf"3 steps in a row.*leaf 'h\.{bad_layer}\.b'"
        ) as caught:
            z.step(state, (good[1][group.rank], hit))
        assert (caught.value.leaf, caught.value.rank, caught.value.step) == (
            f"h.{bad_layer}.b",
            group.rank,
            3,
        )
        # The error leaves the state unchanged, and one good step resets the count.
        assert same_bits(snapshot(state), before)
        state, info = z.step(state, (good[1][group.rank], zero))
        assert not info.skipped
        assert state.num_skipped == 0
        assert not same_bits(snapshot(state), before)
        return z.params(state)

    runs = zf.simulate(size, main)
    assert all(same_bits(run, runs[0]) for run in runs)


def snapshot(state: zf.recipes.ZeroState) -> Any:
    """Copy every tensor of a state, including tensors in stores."""
    cpu = torch.device("cpu")
    is_flat = lambda x: isinstance(x, zf.Flat)

    def copy(x: Any) -> Any:
        if isinstance(x, zf.Flat):
            return [zf.stores.fetch(buffer, cpu).clone() for buffer in x.buffers]
        return zf.stores.fetch(x, cpu).clone()

    return [copy(x) for x in tree.leaves((state.params, state.opt_state), is_leaf=is_flat)]
