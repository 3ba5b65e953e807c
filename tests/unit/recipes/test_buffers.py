"""Buffers: leaves that a loss writes, merged over the ranks once in a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun import optim, tree
from zfun.collectives import record, sum_group
from zfun.testing import assert_same_bits

STAGES = [0, 1, 2, 3]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)
RULES = ["mean", "rank 0", "by rank"]


class Net(nn.Module):
    """Two layers with running statistics; ``block`` computes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.first(x)))


def module() -> Any:
    """Return the same module each time; ranks must not share one."""
    return copy.deepcopy(NET)


NET = Net().double()


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in net.state_dict().items()}


def is_buffer(path: str) -> bool:
    return "running" in path or path.endswith("tracked")


def by(rule: str) -> Any:
    return lambda path, leaf: rule if is_buffer(path) else None


def loss_of(net: nn.Module) -> Any:
    return lambda params, x: functional_call(net, params, (x,)).pow(2).mean()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64) * (1 + rank) + rank


def train(
    group: zf.Group,
    stage: int,
    rule: str,
    num_micro_batches: int = 1,
    steps: int = 3,
    **options: Any,
) -> dict[str, Tensor]:
    net = module()
    z = zf.zero(
        stage,
        loss_of(net),
        optim.adam(0.05),
        group,
        buffers=by(rule),
        num_micro_batches=num_micro_batches,
        bucket_bytes=256,
        **options,
    )
    state = z.init(values(net))
    for step in range(steps):
        state, _ = z.step(state, batch(step, sum_group(group).rank))
    return z.params(state)


def in_torch(size: int, rule: str, num_micro_batches: int, steps: int = 3) -> list[Any]:
    """The same training by hand: one module for each rank, gradients and buffers averaged."""
    nets = [module() for _ in range(size)]
    optimizers = [torch.optim.Adam(net.parameters(), 0.05) for net in nets]
    for step in range(steps):
        for rank, net in enumerate(nets):
            net.zero_grad()
            for micro in batch(step, rank).chunk(num_micro_batches):
                (net(micro).pow(2).mean() / num_micro_batches / size).backward()
        for same in zip(*(net.parameters() for net in nets), strict=True):
            total = torch.stack([x.grad for x in same]).sum(0)
            for x in same:
                x.grad = total.clone()
        for same in zip(*(net.buffers() for net in nets), strict=True):
            mean = torch.stack(same).double().mean(0).to(same[0].dtype)
            new = {"mean": mean, "rank 0": same[0].clone()}.get(rule)
            for x in same:
                x.copy_(x if new is None else new)
        for optimizer in optimizers:
            optimizer.step()
    return [values(net) for net in nets]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "num_micro_batches"), [(1, 2), (2, 1), (3, 2)])
def test_batch_norm_trains_as_torch_does(size: int, num_micro_batches: int, rule: str) -> None:
    expected = in_torch(size, rule, num_micro_batches)
    runs = [zf.simulate(size, train, stage, rule, num_micro_batches) for stage in STAGES]
    for run in runs:
        # With micro-batches, stages add and sum over the ranks in different orders.
        if num_micro_batches == 1:
            assert_same_bits(run, runs[0])
        for mine, theirs in zip(run, expected, strict=True):
            assert list(mine) == list(theirs)
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@EACH_STAGE
def test_one_collective_merges_all_buffers(stage: int) -> None:
    def merges(group: zf.Group, rule: str) -> int:
        recorder = record(group)
        train(recorder, stage, rule, steps=2)
        return sum(found.name == "buffers" for found in recorder.log)

    assert [zf.simulate(2, merges, rule)[0] for rule in RULES] == [2, 2, 0]


def test_all_kinds_of_values_are_merged() -> None:
    big = torch.tensor([2**62 + 1, -(2**40), 5])
    special = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])

    def main(group: zf.Group) -> Any:
        sign = 1 - 2 * group.rank
        found = {
            "count": big * sign,
            "flags": torch.tensor([group.rank == 0, False, True]),
            "special": special * sign,
            "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16) * sign,
            "complex": torch.tensor([1 + 2j]) * (1 + group.rank),
            "own": torch.tensor(float(group.rank)),
            "mean": torch.tensor(3.0) * (1 + group.rank),
        }
        rules = {"special": "rank 0", "own": "by rank"}
        return zf.reductions.merge_buffers(found, group, lambda path, leaf: rules.get(path, "mean"))

    for rank, merged in enumerate(zf.simulate(2, main)):
        expected = {
            "count": big,
            "flags": torch.tensor([True, False, True]),
            "special": special,
            "half": torch.zeros(2, dtype=torch.bfloat16),
            "complex": torch.tensor([1.5 + 3j]),
            "own": torch.tensor(float(rank)),
            "mean": torch.tensor(4.5),
        }
        assert_same_bits(merged, expected)


@EACH_STAGE
def test_a_step_leaves_the_old_buffers_and_a_skipped_step_keeps_them(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = module()
        z = zf.zero(stage, loss_of(net), optim.adam(0.1), group, buffers=by("mean"), donate=False)
        first = z.init(values(net))
        before = z.params(first)
        second, _ = z.step(first, batch(0, group.rank))
        assert_same_bits(z.params(first), before)
        third, info = z.step(second, batch(1, group.rank) * (float("nan") if group.rank else 1.0))
        assert info.skipped
        assert_same_bits(z.params(third), z.params(second))
        # The module of the loss has no part in the state.
        assert_same_bits(values(net), before)

    zf.simulate(2, main)


@EACH_STAGE
def test_a_module_may_assign_to_a_buffer(stage: int) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + x.mean(0)
            return (x * self.w).sum()

    def main(group: zf.Group, resize: bool) -> Any:
        net = Mean()

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            out = functional_call(net, params, (x,))
            if resize:
                params["seen"] = params["seen"][:1]
            return out

        rule = lambda path, leaf: "mean" if path == "seen" else None
        z = zf.zero(stage, loss_fn, optim.sgd(0.1), group, buffers=rule, num_micro_batches=2)
        state = z.init(values(net))
        for _ in range(2):
            state, _ = z.step(state, torch.full((4, 3), 1.0 + group.rank))
        return z.params(state)["seen"]

    assert_same_bits(zf.simulate(2, main, False)[0], torch.full((3,), 6.0))
    with pytest.raises(zf.errors.SpecMismatch, match=r"leaf 'seen' was torch.float32 \(3,\), and"):
        zf.simulate(2, main, True)


@EACH_STAGE
@pytest.mark.parametrize("counts", [True, False])
def test_a_frozen_leaf_that_the_loss_writes_is_refused(stage: int, counts: bool) -> None:
    def main(group: zf.Group) -> None:
        net = module()
        for part in net.modules():
            if isinstance(part, nn.BatchNorm1d) and not counts:
                part.num_batches_tracked = None
        z = zf.zero(
            stage,
            loss_of(net),
            optim.adam(0.1),
            group,
            trainable=lambda path, leaf: not is_buffer(path),
        )
        z.step(z.init(values(net)), batch(0, group.rank))

    leaf = "num_batches_tracked" if counts else "running_mean"
    remedy = r"or name the leaf in zf.zero\(\.\.\., buffers=\.\.\.\)"
    for size in (1, 2):
        with pytest.raises(zf.ZfunError, match=rf"'first.1.{leaf}' was changed; .*{remedy}"):
            zf.simulate(size, main)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@EACH_STAGE
def test_evaluation_writes_no_frozen_leaf(stage: int, dtype: Any) -> None:
    def main(group: zf.Group) -> None:
        net = module().float().eval()
        z = zf.zero(
            stage,
            loss_of(net),
            optim.adam(0.1),
            group,
            precision=dtype,
            trainable=lambda path, leaf: not is_buffer(path),
        )
        state = z.init(values(net))
        for step in range(2):
            state, _ = z.step(state, batch(step, group.rank).float())

    zf.simulate(2, main)


@EACH_STAGE
def test_recomputation_writes_once(stage: int) -> None:
    class Recomputed(Net):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.run = run

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.run(self.first, x)))

    runs = {
        "plain": lambda block, x: block(x),
        "remat": lambda block, x: zf.remat(block)(x),
        "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    }

    def main(group: zf.Group, run: str) -> Any:
        apply = zf.functional(Recomputed(runs[run]).double())
        z = zf.zero(
            stage,
            lambda params, x: apply(params, x).pow(2).mean(),
            optim.adam(0.1),
            group,
            buffers=by("mean"),
            num_micro_batches=2,
            bucket_bytes=256,
        )
        state = z.init(values(NET))
        for step in range(3):
            state, _ = z.step(state, batch(step, group.rank))
        return z.params(state)

    plain = zf.simulate(2, main, "plain")
    assert_same_bits(zf.simulate(2, main, "remat"), plain)
    assert_same_bits(zf.simulate(2, main, "checkpoint"), plain)


@EACH_STAGE
def test_buffers_keep_their_dtypes(stage: int) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        y = x @ params["w"]
        assert y.dtype is torch.bfloat16
        assert params["mean"].dtype is torch.float32
        params["mean"].lerp_(y.detach().float().mean(0), 0.1)
        return (y - params["mean"]).float().pow(2).mean()

    def main(group: zf.Group) -> Any:
        z = zf.zero(
            stage,
            loss_fn,
            optim.adam(0.01),
            group,
            precision=torch.bfloat16,
            buffers=lambda path, leaf: "mean" if path == "mean" else None,
        )
        state = z.init({"w": torch.eye(6), "mean": torch.zeros(6)})
        state, _ = z.step(state, batch(0, group.rank).float())
        return z.params(state)

    for params in zf.simulate(2, main):
        assert (params["w"].dtype, params["mean"].dtype) == (torch.bfloat16, torch.float32)
        assert params["mean"].abs().sum() > 0


def test_ranks_start_with_the_same_shared_buffers() -> None:
    def main(group: zf.Group, rule: str, init: str) -> Any:
        params = {**values(module()), "norm.running_mean": torch.full((8,), 1.0 + group.rank)}
        z = zf.zero(3, loss_of(module()), optim.sgd(0.1), group, buffers=by(rule))
        return z.params(z.init(params, init=init))["norm.running_mean"][0].item()

    assert zf.simulate(2, main, "by rank", "check") == [1.0, 2.0]
    assert zf.simulate(2, main, "mean", "broadcast") == [1.0, 1.0]
    with pytest.raises(zf.errors.SpecMismatch, match=r"norm\.running_mean"):
        zf.simulate(2, main, "mean", "check")


@pytest.mark.parametrize("rule", [True, "sum"])
def test_a_rule_that_does_not_exist(rule: Any) -> None:
    def main(group: zf.Group) -> None:
        zf.zero(0, loss_of(module()), optim.sgd(0.1), group, buffers=lambda path, leaf: rule).init(
            values(module())
        )

    with pytest.raises(zf.errors.OptionError, match=rf"got {rule!r} for leaf 'first.0.weight'"):
        zf.simulate(1, main)


def test_ranks_must_have_the_same_rule() -> None:
    def main(group: zf.Group) -> None:
        rule = by(RULES[group.rank])
        zf.zero(1, loss_of(module()), optim.sgd(0.1), group, buffers=rule).init(values(module()))

    with pytest.raises(zf.errors.SpecMismatch, match=r"buffers\[.*mean.*rank 0"):
        zf.simulate(2, main)


def test_no_buffers_are_no_state() -> None:
    def main(group: zf.Group) -> Any:
        rule = lambda path, leaf: None
        z = zf.zero(3, lambda p, x: (p["w"] * x).sum(), optim.sgd(0.1), group, buffers=rule)
        return z.init({"w": torch.ones(3)}).buffers

    assert zf.simulate(1, main) == [None]


@EACH_STAGE
def test_live_bytes_count_buffers_whole(stage: int) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        params["mean"].lerp_(x.mean(0), 0.1)
        return ((x - params["mean"]) * params["w"]).sum()

    def kept(buffers: Any) -> int:
        make = lambda group: zf.zero(stage, loss_fn, optim.sgd(0.1), group, buffers=buffers)
        params = {"w": torch.empty(4096), "mean": torch.empty(4096)}
        found = zf.planner.live_bytes(make, params, torch.empty(2, 4096), 4)
        return found.steady.device.params

    share = 4 if stage == 3 else 1
    assert kept(lambda path, leaf: "mean" if path == "mean" else None) == 16384 // share + 16384


def test_simulated_ranks_of_a_mesh_merge_over_the_whole_mesh() -> None:
    def main(group: zf.Group) -> Any:
        return train(zf.split(group, inner=2).inner, 3, "mean")

    mine, theirs = zf.simulate(4, main)[0], zf.simulate(4, train, 3, "mean")[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_pieces_make_the_same_step() -> None:
    """The loss returns the buffers as aux, and the loop merges them: no recipe."""
    rule = by("mean")

    def main(group: zf.Group) -> Any:
        net = module()
        buffers, params = zf.partition(values(net), lambda path, leaf: is_buffer(path))

        def loss_fn(params: Any, inputs: Any) -> Any:
            x, buffers = inputs
            new = tree.map(torch.clone, buffers)
            out = functional_call(net, zf.combine(params, new), (x,))
            return out.pow(2).mean(), new

        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss_fn), group), group)
        optimizer = zf.shard_optimizer(optim.adam(0.05), group)
        opt_state = optimizer.init(params)
        for step in range(3):
            (_, left), grads = vg(params, (batch(step, group.rank), buffers))
            buffers = zf.reductions.merge_buffers(left, group, rule)
            params, opt_state = zf.apply(optimizer, grads, opt_state, params)
        return zf.combine(params, buffers)

    for mine, theirs in zip(zf.simulate(2, main), zf.simulate(2, train, 2, "mean"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
