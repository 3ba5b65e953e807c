"""Losses without a gradient: ``no_grad``, ``inference_mode``, and training afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.slow_store import SlowStore
from zfun import tree
from zfun.evaluation import bound, evaluate
from zfun.planner import Meter
from zfun.testing import assert_same_bits

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SIZES = pytest.mark.parametrize("size", [1, 2])


def mlp() -> dict[str, Any]:
    return models.mlp(num_layers=2)


def noisy(params: Any, x: Tensor) -> Tensor:
    """A loss that writes to its own tensors, and uses parameters again after their release."""
    for layer in [*params["h"], *params["h"]]:
        x = torch.tanh((x @ layer["w"]).add_(layer["b"]))
    return (x @ params["out"]).square().mean()


def evaluated(form: str, group: zf.Group, zero: Any, state: Any) -> Tensor:
    if form == "the loss" and state.params.placement is zf.S:
        return zf.shard_params(noisy, group)(state.params, X)
    return noisy(zero.params(state), X)


@MODES
@STAGES
@SIZES
@pytest.mark.parametrize("form", ["the loss", "the whole parameters"])
def test_evaluation_between_steps_changes_no_bit(
    mode: Callable[[], Any], stage: int, size: int, form: str
) -> None:
    def main(group: zf.Group, evaluates: bool) -> Any:
        zero = zf.zero(stage, noisy, zf.optim.adamw(0.05), group, bucket_bytes=300)
        state = zero.init(mlp())
        for step in range(3):
            if evaluates:
                with mode():
                    for _ in range(2):
                        found = evaluated(form, group, zero, state)
                assert_same_bits(found.clone(), noisy(zero.params(state), X))
            state, _ = zero.step(state, X + group.rank + step)
        return zero.params(state)

    assert_same_bits(zf.simulate(size, main, True), zf.simulate(size, main, False))


@MODES
@SIZES
def test_one_sharded_loss_trains_and_evaluates(mode: Callable[[], Any], size: int) -> None:
    def main(group: zf.Group, evaluates: bool) -> Any:
        loss = zf.shard_params(noisy, group)
        vg = zf.value_and_grad(loss)
        flat = zf.shard(mlp(), group, bucket_bytes=300)
        found = []
        for step in range(3):
            if evaluates:
                with mode():
                    assert_same_bits(loss(flat, X), noisy(mlp(), X))
            found.append(vg(flat, X + step))
        return [(value, zf.unshard(zf.redistribute(g, zf.S, group))) for value, g in found]

    assert_same_bits(zf.simulate(size, main, True), zf.simulate(size, main, False))


@STAGES
@SIZES
def test_parameters_made_in_inference_mode(stage: int, size: int) -> None:
    def main(group: zf.Group, params: Any) -> Any:
        zero = zf.zero(stage, noisy, zf.optim.adamw(0.05), group, bucket_bytes=300)
        state = zero.init(params)
        for _ in range(2):
            state, info = zero.step(state, X)
        return info.loss, zero.params(state)

    with torch.inference_mode():
        params = tree.map(torch.clone, mlp())
    assert_same_bits(zf.simulate(size, main, params), zf.simulate(size, main, mlp()))
    assert_same_bits(params, mlp())


@STAGES
def test_a_step_in_inference_mode_is_refused(stage: int) -> None:
    def main(group: zf.Group) -> None:
        zero = zf.zero(stage, noisy, zf.optim.adamw(0.05), group)
        state = zero.init(mlp())
        with (
            torch.inference_mode(),
            pytest.raises(zf.ZfunError, match=r"take the step outside, or call the loss alone"),
        ):
            zero.step(state, X)

    zf.simulate(1, main)


def deep_loss(params: Any, x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.sum(1)


def deep(depth: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(5, 5, generator=made, dtype=torch.float64) for _ in range(depth)]


@MODES
@SIZES
def test_parameters_in_a_store_are_evaluated_a_few_at_a_time(
    mode: Callable[[], Any], size: int
) -> None:
    def most(group: zf.Group, depth: int) -> tuple[int, int]:
        store = SlowStore()
        zero = zf.zero(
            3,
            lambda params, x: deep_loss(params, x).mean(),
            zf.optim.sgd(0.1),
            group,
            bucket_bytes=1,
            offload=zf.stores.Offload(params=store),
        )
        state = zero.init(deep(depth))
        run = evaluate(deep_loss, group)
        with mode():
            for step in range(3):
                found = run(state, X + group.rank + step)
                assert_same_bits(found.clone(), deep_loss(deep(depth), X + group.rank + step))
        gc.collect()
        assert not store.living
        return store.most_under_way, store.most_living

    found = zf.simulate(size, most, 6), zf.simulate(size, most, 20)
    assert found[0] == found[1]
    under_way, living = found[0][0]
    # The layer in use, the prefetched one, and the one that is being read.
    assert (under_way, living <= 3) == (1, True)


@STAGES
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 4), (1, 1, 1), (0, 0, 0)])
@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "in a store"])
def test_ranks_may_call_different_numbers_of_times(
    stage: int, counts: tuple[int, ...], stored: bool
) -> None:
    if stored and stage < 3:
        return

    def main(group: zf.Group) -> None:
        store = SlowStore()
        offload = zf.stores.Offload(params=store) if stored else None
        zero = zf.zero(
            stage,
            lambda params, x: deep_loss(params, x).mean(),
            zf.optim.sgd(0.1),
            group,
            bucket_bytes=1,
            offload=offload,
        )
        state = zero.init(deep(4))
        run = evaluate(deep_loss, group)
        for _ in range(2):
            with run.uneven(state) as call:
                for step in range(counts[group.rank]):
                    assert_same_bits(call(X + step), deep_loss(deep(4), X + step))
            # All ranks are at the same place, and even calls work too.
            assert_same_bits(run(state, X), deep_loss(deep(4), X))
        assert store.under_way == 0

    zf.simulate(3, main)


def test_a_rank_without_calls_keeps_no_more_than_the_others() -> None:
    """A rank at the end gathers and frees, in the order of the schedule."""

    def main(group: zf.Group, depth: int) -> int:
        meter = Meter()
        watched = meter.watch(group)
        zero = zf.zero(
            3,
            lambda params, x: deep_loss(params, x).mean(),
            zf.optim.sgd(0.1),
            watched,
            bucket_bytes=1,
        )
        state = zero.init([torch.randn(32, 32) for _ in range(depth)])
        run = evaluate(deep_loss, watched)
        x = torch.ones(1, 32)
        run(state, x)
        with meter, run.uneven(state) as call:
            for _ in range(3 * group.rank):
                call(x)
        return meter.live().largest.gathered

    few, many = (zf.simulate(2, main, depth) for depth in (5, 12))
    assert few == many
    assert 0 < few[0] <= few[1]


def test_an_error_of_one_rank_is_not_hidden_by_the_end_of_the_context() -> None:
    def main(group: zf.Group) -> None:
        zero = zf.zero(3, lambda params, x: deep_loss(params, x).mean(), zf.optim.sgd(0.1), group)
        state = zero.init(deep(2))
        with evaluate(deep_loss, group).uneven(state) as call:
            call(X)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        zf.simulate(2, main)


def test_a_bound_module_is_of_the_same_class_and_gathers() -> None:
    def main(group: zf.Group) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
        expected = module(X.float()).detach()
        apply = zf.functional(module.to("meta"))
        torch.manual_seed(0)
        first, _, last = (torch.nn.Linear(5, 7), None, torch.nn.Linear(7, 2))
        params = {
            f"{place}.{name}": leaf.detach()
            for place, layer in ((0, first), (2, last))
            for name, leaf in layer.named_parameters()
        }
        zero = zf.zero(
            3, lambda params, x: apply(params, x).sum(), zf.optim.sgd(0.1), group, bucket_bytes=1
        )
        state = zero.init(params)
        with bound(apply, state, group) as model:
            assert type(model) is torch.nn.Sequential
            assert next(model.parameters()).device.type == "cpu"
            for _ in range(1 + group.rank):
                assert_same_bits(model(X.float()), expected)

    zf.simulate(2, main)
