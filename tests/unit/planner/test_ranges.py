"""Ranges of torch.profiler carry the names of buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zfun as zf

BUCKETS = ("bucket 0: h.0.w", "bucket 1: h.1.w")


def names_of_a_step(stage: int, group: zf.Group, *, profiled: bool) -> list[str]:
    """Take two steps, the second under a profiler; return the ranges that zfun has made."""
    params = {"h": [{"w": torch.ones(4, 4)}, {"w": torch.ones(4, 4)}]}

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in params["h"]:
            x = torch.tanh(x @ layer["w"])
        return x.sum()

    zero = zf.zero(stage, loss_fn, zf.optim.sgd(0.1), group, bucket_bytes=64)
    state, _ = zero.step(zero.init(params), torch.ones(2, 4))
    if not profiled:
        zero.step(state, torch.ones(2, 4))
        return []
    with profile(activities=[ProfilerActivity.CPU]) as found:
        zero.step(state, torch.ones(2, 4))
    return [event.name for event in found.events() or () if event.name.startswith("zfun ")]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_profile_of_a_step_names_each_collective_with_its_bucket(stage: int) -> None:
    found = zf.simulate(2, lambda group: names_of_a_step(stage, group, profiled=group.rank == 0))[0]
    gathers = [f"zfun all_gather params ({label})" for label in BUCKETS]
    sums = [f"zfun reduce_scatter grads ({label})" for label in BUCKETS]
    for name in (*gathers, *sums):
        assert found.count(name) >= 1, (name, found)
        assert found.count(f"{name}: wait") == found.count(name), name
    assert found.count(gathers[0]) == (1 if stage == 1 else 2)
