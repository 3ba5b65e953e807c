"""The resident set of a process in a real step is near the peak of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun.collectives import Workers
from zfun.demo._memory import forget_peak, peak_bytes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WIDTH, DEPTH, ROWS = 1536, 12, 256


def params_of(width: int, device: str) -> dict[str, Tensor]:
    return {f"w{n}": torch.full((width, width), 1e-3, device=device) for n in range(DEPTH)}


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.sum()


def recipe(group: zf.Group, stage: int) -> Any:
    optimizer = zf.optim.adamw(1e-4)
    return zf.zero(stage, loss_fn, optimizer, group, bucket_bytes=2**24)


def growth(group: zf.Group, stage: int) -> int:
    """Return the largest growth of the resident set in the third step."""
    torch.set_num_threads(1)
    # A small model loads libraries and compiles kernels first.
    small = recipe(group, stage)
    state = small.init(params_of(64, "cpu"))
    small.step(state, torch.ones(4, 64))
    del state, small
    before = forget_peak()
    z = recipe(group, stage)
    state = z.init(params_of(WIDTH, "cpu"))
    batch = torch.ones(ROWS, WIDTH)
    for _ in range(2):
        state, _ = z.step(state, batch)
    forget_peak()
    state, _ = z.step(state, batch)
    return peak_bytes() - before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_of_a_process_is_near_that_of_the_plan(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The allocator gives freed buffers back to the system at once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    batch = torch.empty(ROWS, WIDTH, device="meta")
    plan = zf.plan(lambda group: recipe(group, stage), params_of(WIDTH, "meta"), batch, 2)
    planned = plan.peak.device.total
    with Workers(2, timeout_s=120.0, shared_memory=False) as workers:
        found = max(workers.run(growth, stage))
    assert planned > 2e8
    assert abs(found - planned) <= 0.1 * planned + 100e6, (planned, found)
