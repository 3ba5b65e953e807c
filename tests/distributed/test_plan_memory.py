"""The resident set of a process in a real step is near the peak of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun.collectives import Workers
from zfun.demo._memory import forget_peak, peak_bytes

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WIDTH, DEPTH, ROWS = 1344, 12, 256


def params_of(width: int, device: str) -> dict[str, Tensor]:
    return {f"w{n}": torch.full((width, width), 1e-3, device=device) for n in range(DEPTH)}


def layer(weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def loss_fn(params: Any, x: Tensor, block: Callable[[Tensor, Tensor], Tensor] = layer) -> Tensor:
    for weight in params.values():
        x = block(weight, x)
    return x.sum()


def recomputed(params: Any, x: Tensor) -> Tensor:
    return loss_fn(params, x, zf.remat(layer))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"loss": recomputed},
    "accumulation": {"num_micro_batches": 2},
    "host": {"store": zf.stores.host},
    "half on the host": {"store": zf.stores.host, "fraction": 0.5},
    "disk": {"store": zf.stores.nvme},
}


def recipe(group: zf.Group, stage: int, variant: str, path: str) -> Any:
    options = dict(OPTIONS[variant])
    loss, make = options.pop("loss", loss_fn), options.pop("store", None)
    optimizer, offload = zf.optim.adamw(1e-4), None
    if make is not None:
        store = make(path) if make is zf.stores.nvme else make(pin=False)
        fraction = options.pop("fraction", 1.0)
        parts: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer")[stage != 3 :], store)
        offload = zf.stores.Offload(**parts, fraction=fraction)
    return zf.zero(stage, loss, optimizer, group, bucket_bytes=2**24, offload=offload, **options)


def growth(group: zf.Group, stage: int, variant: str, path: str) -> int:
    """Return the largest growth of the resident set in the third step."""
    torch.set_num_threads(1)
    # A small model loads libraries and compiles kernels first.
    small = recipe(group, stage, variant, path)
    state = small.init(params_of(64, "cpu"))
    small.step(state, torch.ones(4, 64))
    del state, small
    before = forget_peak()
    z = recipe(group, stage, variant, path)
    state = z.init(params_of(WIDTH, "cpu"))
    batch = torch.ones(ROWS, WIDTH)
    for _ in range(2):
        state, _ = z.step(state, batch)
    forget_peak()
    state, _ = z.step(state, batch)
    return peak_bytes() - before


@pytest.mark.parametrize(
    ("stage", "variant"),
    [*((stage, "plain") for stage in (0, 1, 2)), *((3, variant) for variant in OPTIONS)],
)
def test_the_peak_of_a_process_is_near_that_of_the_plan(
    stage: int, variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    # The allocator gives freed buffers back to the system at once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    batch = torch.empty(ROWS, WIDTH, device="meta")
    path = str(tmp_path)
    make = lambda group: recipe(group, stage, variant, path)
    planned = zf.plan(make, params_of(WIDTH, "meta"), batch, 2).peak.device.total
    with Workers(2, timeout_s=120.0, shared_memory=False) as workers:
        found = max(workers.run(growth, stage, variant, path))
    assert abs(found - planned) <= 0.1 * planned + 100e6, (planned, found)
