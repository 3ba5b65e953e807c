"""Programs with ``zf.vjp``, run on simulated ranks and on processes."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests import models, vjps
from tests.interop.deepspeed_runs import ranks
from zfun import tree
from zfun.errors import CollectiveMismatch
from zfun.interop import Engine
from zfun.testing import assert_same_bits

STAGES = (0, 2, 3)


def _gradient(stage: int, group: zf.Group, fn: Any) -> Any:
    fn = zf.shard_params(fn, group) if stage == 3 else fn
    vg = zf.data_parallel(zf.value_and_grad(fn), group)
    return zf.shard_grads(vg, group) if stage >= 2 else vg


def _placed(stage: int, group: zf.Group) -> Any:
    place = zf.shard if stage == 3 else zf.replicate
    return place(models.mlp(), group, bucket_bytes=300)


def losses_outside(group: zf.Group) -> Any:
    """Pull calls at once, late, in another order and never; the bits are those of one function."""
    first: Any = None
    for stage in STAGES:
        inside = _gradient(stage, group, vjps.whole)
        outside = _gradient(stage, group, vjps.forward)
        params, found = _placed(stage, group), []
        for step in models.tree_batches(3, 3 * group.size, 6):
            mine = step[group.rank :: group.size]
            expected = [zf.unshard(inside(params, x)[1]) for x in mine]
            calls = [zf.vjp(outside, params, x) for x in mine]
            calls[1][1].close()
            for i in (2, 0):
                out, pullback = calls[i]
                grads = zf.unshard(pullback(vjps.cotangents(out, mine[i])[1]))
                assert_same_bits(grads, expected[i])
                assert all(leaf.any() for leaf in tree.leaves(grads))
                found.append(grads)
        first = found if first is None else first
        assert_same_bits(found, first, f"stage {stage} and stage 0")
    return first


def ranks_that_differ(group: zf.Group) -> Any:
    """One rank drops a call that the others pull: all ranks raise, and name the rank."""
    told = []
    for stage in STAGES:
        vg, params = _gradient(stage, group, vjps.forward), _placed(stage, group)
        batch = models.tree_batches(1, group.size, 6)[0][group.rank]
        vjps.pulled(vg, params, batch)
        out, pullback = zf.vjp(vg, params, batch)
        try:
            if group.rank == group.size - 1:
                pullback.close()
                zf.vjp(vg, params, batch)
            else:
                pullback(vjps.cotangents(out, batch)[1])
        except CollectiveMismatch as error:
            told.append(str(error))
        pullback.close()
    assert len(told) == len(STAGES)
    assert all(f"rank {group.size - 1} began call" in text for text in told)
    return len(told)


NET = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def engines(group: zf.Group) -> Any:
    """Train a module with running statistics at every stage; the bits are those of stage 0."""
    first: Any = None
    for stage in range(4):
        start = {
            name: torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float64).view(x.shape).sin()
            for name, x in NET.named_parameters()
        }
        engine = Engine(
            copy.deepcopy(NET),
            zf.optim.adamw(0.02, eps=1e-3),
            zero=stage,
            group=group,
            clip_norm=0.5,
            init="broadcast",
        )
        engine.load_state_dict({**engine.state_dict(), **start})
        for step in models.tree_batches(3, group.size, 20):
            engine(step[group.rank].view(4, 5))
            engine.backward(engine(step[group.rank].view(4, 5)).pow(2).mean())
            info = engine.step()
            assert info is not None
        found = engine.state_dict(), engine.grad_norm
        first = found if first is None else first
        assert_same_bits(found, first, f"stage {stage} and stage 0")
    assert int(first[0]["1.num_batches_tracked"]) == 6
    return first


class Reader(nn.Module):
    """A module whose last rank is slow to read the parameters."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**14))
        self.delay_s = delay_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay_s)
        return (self.weight * x).sum()


def values_for_a_rank_that_reads(group: zf.Group) -> Any:
    """Load weights while another rank computes with the old ones, in memory that ranks share."""
    found = []
    for stage in (1, 3):
        engine, *_ = deepspeed.initialize(
            model=Reader(0.3 if group.rank == group.size - 1 else 0.0),
            mpu=ranks(group),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
                "zero_optimization": {"stage": stage},
            },
        )
        engine.backward(engine(torch.ones(1)))
        engine.step()
        engine.eval()
        before = engine(torch.ones(1))
        engine.load_module_state_dict({"weight": torch.full((2**14,), 7.0)})
        found += [before, engine(torch.ones(1))]
    return found


BODIES = [losses_outside, ranks_that_differ, engines, values_for_a_rank_that_reads]
