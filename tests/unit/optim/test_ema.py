"""Averages of parameters: of the exact values, at every stage, in every store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from zfun.errors import OptionError, SpecMismatch
from zfun.evaluation import averaged, evaluate
from zfun.optim import EmaState, adamw, by_label, chain, clip_by_global_norm, ema, sgd

DECAY = 0.75
RULES: dict[str, Callable[[], zf.optim.Optimizer]] = {
    "adamw": lambda: adamw(0.05),
    "clipped": lambda: chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.8)),
    "by label": lambda: by_label(
        {"a": sgd(0.1), "b": adamw(0.05)}, lambda path, leaf: "b" if path.endswith("b1") else "a"
    ),
    "user": lambda: zf.optim.optimizer(
        lambda params: (),
        lambda grads, state, params: (zf.tree.map(lambda g: -0.1 * g, grads), state),
    ),
}


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    x = batch.to(params["w1"].dtype)
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return (hidden @ params["w2"]).float().square().mean()


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (5, 7), "b1": (7,), "w2": (7, 3), "unused": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(97 * step + rank))


def exact(state: Any) -> dict[str, Tensor]:
    """Return the whole float32 values that the optimizer steps."""
    master = getattr(state.opt_state, "master", None)
    whole = zf.unshard(zf.stores.resident(state.params if master is None else master))
    return {name: leaf.detach().float().clone() for name, leaf in whole.items()}


@settings(max_examples=examples(60))
@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    precision=st.sampled_from([None, torch.bfloat16]),
    rule=st.sampled_from(sorted(RULES)),
    store=st.sampled_from(["none", "host", "part", "disk"]),
    ranks=st.sampled_from([1, 2, 3, 5]),
    bucket_bytes=st.sampled_from([64, 200, 10**6]),
    micro_batches=st.sampled_from([1, 2]),
)
def test_the_average_is_that_of_the_exact_parameters(
    stage: int,
    precision: Any,
    rule: str,
    store: str,
    ranks: int,
    bucket_bytes: int,
    micro_batches: int,
) -> None:
    """After each step, bit by bit, as one process computes it from the master weights."""

    def main(group: zf.Group, folder: str) -> None:
        kept = zf.stores.nvme(folder) if store == "disk" else zf.stores.host()
        offload = None
        if store != "none":
            fraction = 0.5 if store == "part" else 1.0
            offload = zf.stores.Offload(optimizer=kept, fraction=fraction)
        zero = zf.zero(
            stage,
            loss_fn,
            ema(DECAY, RULES[rule]()),
            group,
            precision=precision,
            offload=offload,
            bucket_bytes=bucket_bytes,
            num_micro_batches=micro_batches,
        )
        state = zero.init(initial())
        average = exact(state)
        for step in range(4):
            state, _ = zero.step(state, batch_of(step, group.rank))
            for name, value in exact(state).items():
                average[name] = average[name] + (1 - DECAY) * (value - average[name])
            found = zero.params(averaged(state))
            dtype = precision or torch.float32
            for name, value in average.items():
                assert found[name].dtype is dtype
                assert torch.equal(found[name], value.to(dtype)), name

    with tempfile.TemporaryDirectory() as folder:
        zf.simulate(ranks, main, folder)


def test_the_average_goes_on_after_a_load_on_other_ranks_and_stages() -> None:
    def run(group: zf.Group, path: Path, stage: int, steps: range, load: bool) -> Any:
        zero = zf.zero(stage, loss_fn, ema(DECAY, sgd(0.1)), group, precision=torch.bfloat16)
        state = zero.init(initial())
        state = zf.load(path, state).state if load else state
        for step in steps:
            state, _ = zero.step(state, batch_of(step, 0))
        zf.save(path, state, step=steps.stop)
        return zero.params(averaged(state))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        zf.simulate(2, run, path / "a", 3, range(2), False)
        resumed = zf.simulate(3, run, path / "a", 1, range(2, 4), True)[0]
        straight = zf.simulate(1, run, path / "b", 0, range(4), False)[0]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_schedule_of_the_decay_counts_the_steps_taken() -> None:
    seen: list[int] = []

    def decay(step: int) -> float:
        seen.append(step)
        return min(0.9, (1 + step) / (10 + step))

    params = {"w": torch.zeros(2, dtype=torch.float64)}
    rule = ema(decay, sgd(1.0))
    state, average = rule.init(params), 0.0
    for step in range(3):
        params, state = rule.apply({"w": -torch.ones(2, dtype=torch.float64)}, state, params)
        average += (1 - (1 + step) / (10 + step)) * (step + 1 - average)
        torch.testing.assert_close(state.average["w"], torch.full((2,), average).double())
    assert seen == [0, 1, 2]


def test_a_skipped_step_leaves_the_average() -> None:
    def main(group: zf.Group) -> None:
        loss = lambda params, batch: (params["w"] * batch).sum()
        zero = zf.zero(2, loss, ema(0.5, sgd(1.0)), group, max_skipped=3)
        state = zero.init({"w": torch.ones(3)})
        state, info = zero.step(state, torch.tensor(float("nan")))
        assert info.skipped
        assert torch.equal(zero.params(averaged(state))["w"], torch.ones(3))

    zf.simulate(2, main)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluate_and_export_see_the_average(
    stage: int, precision: torch.dtype | None, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> dict[str, Tensor]:
        zero = zf.zero(stage, loss_fn, ema(DECAY, sgd(0.5)), group, precision=precision)
        state = zero.init(initial())
        average = exact(state)
        for step in range(3):
            state, _ = zero.step(state, batch_of(step, group.rank))
            for name, value in exact(state).items():
                average[name] = average[name] + (1 - DECAY) * (value - average[name])
        x = batch_of(9, 0)
        dtype = precision or torch.float32
        whole = {name: value.to(dtype) for name, value in average.items()}
        assert evaluate(loss_fn, group)(averaged(state), x) == loss_fn(whole, x)
        zf.save(tmp_path / "run", averaged(state))
        # Training goes on from the state itself.
        zero.step(state, x)
        return average

    average = zf.simulate(2, main)[0]
    zf.checkpoint.export(str(tmp_path / "run"), str(tmp_path / "model"), dtype=torch.float32)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == average.keys()
    assert all(torch.equal(exported[name], value) for name, value in average.items())


def test_narrow_parameters_without_masters_have_a_wide_average() -> None:
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    rule = ema(0.999, sgd(1e-2))
    state = rule.init(params)
    for _ in range(4):
        params, state = rule.apply({"w": torch.ones(2)}, state, params)
    assert state.average["w"].dtype is torch.float32
    assert 0.9995 < state.average["w"][0] < 1


def test_update_and_apply_agree() -> None:
    rule = ema(0.5, adamw(0.1))
    params = initial()
    grads = zf.tree.map(torch.sin, params)
    updates, by_update = rule.update(grads, rule.init(params), params)
    new, by_apply = rule.apply(grads, rule.init(params), params)
    for name, value in zf.optim.apply_updates(params, updates).items():
        torch.testing.assert_close(value, new[name])
        torch.testing.assert_close(by_update.average[name], by_apply.average[name])


def test_names_and_rates_are_those_of_the_optimizer_inside() -> None:
    rule = ema(0.5, adamw(0.25))
    assert rule.description()["optimizer.decay"] == "0.5"
    assert rule.description()["optimizer.parts[0].learning_rate"] == "0.25"
    assert rule.learning_rate(rule.init(initial())) == 0.25


def test_masters_inside_are_refused() -> None:
    with pytest.raises(OptionError, match=r"with_master\(ema\(decay, optimizer\)\)"):
        ema(0.5, zf.optim.with_master(sgd(0.1)))
    with pytest.raises(OptionError, match=r"with_master\(ema\(decay, optimizer\)\)"):
        ema(0.5, chain(clip_by_global_norm(1.0), zf.optim.with_master(sgd(0.1))))


@pytest.mark.parametrize(
    "rule",
    [sgd(0.1), by_label({"a": ema(0.5, sgd(0.1)), "b": sgd(0.2)}, lambda path, leaf: path[0])],
    ids=["none", "some leaves"],
)
def test_a_state_without_an_average_of_all_parameters_is_refused(rule: Any) -> None:
    def main(group: zf.Group) -> None:
        loss = lambda params, batch: (params["a"] + params["b"]).sum()
        zero = zf.zero(1, loss, rule, group)
        with pytest.raises(OptionError, match="averages all parameters"):
            averaged(zero.init({"a": torch.ones(2), "b": torch.ones(2)}))

    zf.simulate(2, main)


def test_the_state_of_another_optimizer_is_refused() -> None:
    rule = ema(0.5, sgd(0.1))
    params = initial()
    with pytest.raises(SpecMismatch, match="'average'"):
        rule.apply(params, sgd(0.1).init(params), params)
    assert isinstance(rule.init(params), EmaState)


def test_a_plan_counts_the_average() -> None:
    def zero_of(group: zf.Group) -> Any:
        return zf.zero(2, loss_fn, ema(0.5, sgd(0.1)), group)

    planned = zf.plan(zero_of, initial(), batch_of(0, 0), 2)
    state = zf.simulate(2, lambda group: zero_of(group).init(initial()))[0]
    kept = sum(buffer.nbytes for buffer in state.opt_state.average.buffers)
    assert sum(part.moments for part in planned.by_path) == kept > 0
