"""Evaluation of a state, metrics over ranks, and the numbers of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim
from zfun.errors import OptionError, SpecMismatch, ZfunError
from zfun.evaluation import evaluate
from zfun.planner import Meter
from zfun.reductions import any_rank, mean_metrics
from zfun.testing import assert_same_bits

EACH_STAGE = pytest.mark.parametrize("stage", range(4))


def predict(params: Any, x: Tensor) -> dict[str, Tensor]:
    return {"y": torch.tanh(x @ params["w"]) @ params["v"], "norm": params["w"].norm()}


def square(params: Any, x: Tensor) -> Tensor:
    return predict(params, x)["y"].square().mean()


def small() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(6, 40, generator=generator), "v": torch.randn(40, generator=generator)}


@EACH_STAGE
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_is_evaluated_with_the_bits_of_whole_parameters(stage: int, frozen: bool) -> None:
    def main(group: zf.Group) -> None:
        trainable = (lambda path, leaf: path == "w") if frozen else None
        z = zf.zero(stage, square, optim.adam(0.1), group, bucket_bytes=64, trainable=trainable)
        forward = evaluate(predict, group)
        state = z.init(small())
        for seed in range(3):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
            for _ in range(2):
                found = forward(state, x)
                assert not found["y"].requires_grad
                assert_same_bits(found, predict(z.params(state), x))
            state, _ = z.step(state, x)

    zf.simulate(2, main)


def test_sharded_parameters_are_gathered_bucket_by_bucket() -> None:
    params = {f"w{i}": torch.eye(64) for i in range(24)}

    def chain(params: Any, x: Tensor) -> Tensor:
        for w in params.values():
            x = x @ w
        return x

    def main(group: zf.Group) -> tuple[int, int]:
        z = zf.zero(3, lambda p, x: chain(p, x).sum(), optim.sgd(0.1), group, bucket_bytes=1)
        forward = evaluate(chain, group)
        state = z.init(params)
        forward(state, torch.ones(64))
        with Meter() as meter:
            forward(state, torch.ones(64))
        return meter.live().peak.device.total, 24 * 64 * 64 * 4

    held, whole = zf.simulate(2, main)[0]
    assert held < whole / 2


def test_offloaded_parameters_are_evaluated_too() -> None:
    def main(group: zf.Group) -> None:
        for stage in (2, 3):
            offload = zf.stores.Offload(optimizer=zf.stores.host())
            if stage == 3:
                offload = zf.stores.Offload(params=zf.stores.host())
            z = zf.zero(stage, square, optim.sgd(0.1), group, offload=offload)
            state, x = z.init(small()), torch.ones(2, 6)
            assert_same_bits(evaluate(predict, group)(state, x), predict(small(), x))

    zf.simulate(2, main)


@EACH_STAGE
def test_buffers_are_given_as_copies(stage: int) -> None:
    def fn(params: Any, x: Tensor) -> Tensor:
        params["mean"].add_(1.0)
        return params["w"].sum() * x + params["mean"]

    def main(group: zf.Group) -> None:
        rule = lambda path, leaf: "mean" if path == "mean" else None
        z = zf.zero(stage, fn, optim.sgd(0.1), group, buffers=rule)
        state = z.init({"w": torch.ones(3), "mean": torch.zeros(())})
        forward = evaluate(fn, group)
        assert [forward(state, torch.tensor(2.0)).item() for _ in range(2)] == [7.0, 7.0]
        assert z.params(state)["mean"] == 0

    zf.simulate(2, main)


def test_metrics_are_weighted_over_batches_and_ranks() -> None:
    values = [[1.0, 2.0], [3.0], [float("nan")]]
    weights = [[1, 3], [4], [0]]

    def main(group: zf.Group) -> Any:
        rows = [
            ({"a": torch.tensor([v, -v]), "b": (v,)}, w)
            for v, w in zip(values[group.rank], weights[group.rank], strict=True)
        ]
        return mean_metrics(rows, group)

    found = zf.simulate(3, main)
    assert_same_bits(found, [found[0]] * 3)
    expected = (1.0 + 6.0 + 12.0) / 8
    assert found[0]["a"].tolist() == [expected, -expected]
    assert found[0]["b"][0].item() == expected
    assert found[0]["a"].dtype == torch.float64


def test_metrics_that_cannot_be_averaged_are_refused() -> None:
    group = zf.process_group()
    with pytest.raises(OptionError, match=r"at least one pair of metrics .* got none"):
        mean_metrics([], group)
    with pytest.raises(OptionError, match="a weight above 0 on some rank; got 0 on all"):
        mean_metrics([({"a": 1.0}, 0)], group)
    with pytest.raises(SpecMismatch, match="metrics of all batches have one structure"):
        mean_metrics([({"a": 1.0}, 1), ({"b": 1.0}, 1)], group)
    with pytest.raises(SpecMismatch, match="one structure"):
        mean_metrics([({"a": 1.0}, 1), ({"a": torch.ones(2)}, 1)], group)
    with pytest.raises(OptionError, match="takes pairs of metrics and a weight; got dict"):
        mean_metrics([{"a": 1.0}], group)  # type: ignore[list-item]
    with pytest.raises(ZfunError, match="group"):
        mean_metrics([({"a": 1.0}, 1)], 3)  # type: ignore[arg-type]


def test_all_ranks_decide_alike() -> None:
    assert zf.simulate(3, lambda group: any_rank(group.rank == 2, group)) == [True] * 3
    assert zf.simulate(3, lambda group: any_rank(False, group)) == [False] * 3


RATE = optim.linear(0.5, 0.0, 4)
OPTIMIZERS = {
    "adamw": optim.adamw(RATE),
    "chain": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(RATE)),
    "parts": optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(RATE)),
    "master": optim.with_master(optim.lion(RATE), torch.float64),
    "labels": optim.by_label(
        {"a": optim.lamb(RATE), "b": optim.sgd(RATE)}, lambda path, leaf: "ab"[leaf.ndim == 1]
    ),
    "torch": optim.from_torch(torch.optim.RMSprop, lr=RATE),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_tells_the_learning_rate_and_the_steps_applied(name: str, stage: int) -> None:
    def main(group: zf.Group) -> list[tuple[float | None, int, int]]:
        offload = zf.stores.Offload(optimizer=zf.stores.host())
        loss = lambda p, x: (p["w"] * x).sum() + p["v"].sum()
        z = zf.zero(stage, loss, OPTIMIZERS[name], group, offload=offload)
        state, found = z.init(small()), []
        for x in (1.0, float("inf"), 1.0):
            state, info = z.step(state, torch.tensor(x))
            assert state.num_applied == info.num_applied
            found.append((info.learning_rate, info.num_applied, state.step))
        return found

    # A skipped step uses no rate, so the next step has the same.
    expected = [(0.5, 1, 1), (0.375, 1, 2), (0.375, 2, 3)]
    assert zf.simulate(2, main) == [expected] * 2


def test_a_rate_that_is_a_number_and_an_optimizer_without_one() -> None:
    params, group = {"w": torch.ones(2)}, zf.process_group()
    pair = (lambda params: (), lambda grads, state, params: (zf.tree.map(torch.neg, grads), state))
    for optimizer, rate in ((optim.sgd(0.25), 0.25), (pair, None)):
        z = zf.zero(1, lambda p, x: (p["w"] * x).sum(), optimizer, group)
        _, info = z.step(z.init(params), torch.ones(2))
        assert info.learning_rate == rate


def test_the_loop_sets_the_rate() -> None:
    def main(group: zf.Group) -> list[float]:
        rate = [1.0]
        z = zf.zero(2, lambda p, x: (p["w"] * x).sum(), optim.sgd(lambda count: rate[0]), group)
        state, found = z.init({"w": torch.zeros(1)}), []
        for now in (1.0, 10.0, 100.0):
            rate[0] = now
            state, _ = z.step(state, torch.ones(1))
            found.append(z.params(state)["w"].item())
        return found

    assert zf.simulate(2, main)[0] == [-1.0, -11.0, -111.0]


@EACH_STAGE
def test_an_average_of_the_parameters_is_a_tree_map(stage: int) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, optim.adam(0.1), group, bucket_bytes=300)
        state = z.init(models.mlp())
        average = zf.tree.map(torch.clone, state.params)
        whole = models.mlp()
        for batches in models.mlp_batches(3, 2):
            state, _ = z.step(state, batches[group.rank])
            lerp = lambda old, new: old.lerp(new, 0.25)
            average = zf.tree.map(lerp, average, state.params)
            whole = zf.tree.map(lerp, whole, z.params(state))
        assert_same_bits(zf.unshard(average), whole)
        found = evaluate(models.mlp_loss, group)(state._replace(params=average), batches[0])
        assert_same_bits(found, models.mlp_loss(whole, batches[0]))

    zf.simulate(2, main)


def test_a_constant_rate_needs_no_count_in_the_state() -> None:
    rule = optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.25))
    assert rule.learning_rate(rule.init({"w": torch.ones(2)})) == 0.25
