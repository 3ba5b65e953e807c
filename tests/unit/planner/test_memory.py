"""The bytes that are alive at once, measured on storages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zfun as zf
from tests import models
from zfun.collectives import Collective, Group, Work

SIZE, WIDTH, LAYERS = 4, 64, 16
BUCKET = (WIDTH * WIDTH + WIDTH) * 8
PSI = BUCKET * LAYERS
# Buckets of parameters: the current one, the previous one, and one in flight. Buckets of gradients:
# one being filled (first as leaves, then as one buffer), and two in flight.
PARAMS, GRADS = 3, 5


class Live(TorchDispatchMode):
    """Tracks the storages that operations of this thread make, and the peak of the sum of their
    bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        mine = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in mine:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._seen.values())


class Echo(Group):
    """Rank 0 of several ranks with equal data: the measured thread makes all results."""

    rank, size = 0, SIZE

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        if call.op.kind == "all_gather":
            return Work.done(x.repeat(SIZE))
        if call.op.kind == "reduce_scatter":
            return Work.done(x[: x.numel() // SIZE] * SIZE)
        return Work.done(x * SIZE if call.op.kind == "all_reduce" else x.clone())


def params() -> dict[str, Any]:
    return {"h": models.mlp(width=WIDTH, num_layers=LAYERS)["h"]}


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x.pow(2).mean()


X = torch.ones(1, WIDTH, dtype=torch.float64)
SLACK = LAYERS * WIDTH * 8 * 8 + 2**15  # activations, norms and other small things


def peak_of(call: Callable[[], Any]) -> int:
    gc.collect()
    with Live() as live:
        call()
    return live.peak


def gradient(
    group: zf.Group, *, sharded: bool, shard_grads: bool, loss_fn: Any = loss_fn
) -> tuple[Any, Any]:
    value: Any = (zf.shard if sharded else zf.replicate)(params(), group, bucket_bytes=BUCKET)
    assert len(value.buffers) == LAYERS
    vg = zf.data_parallel(
        zf.value_and_grad(zf.shard_params(loss_fn, group) if sharded else loss_fn), group
    )
    return (zf.shard_grads(vg, group) if shard_grads else vg), value


def test_peak_of_counts_new_memory_and_no_views() -> None:
    assert peak_of(lambda: torch.ones(1000, dtype=torch.float64) + 1) == 16_000
    assert peak_of(lambda: torch.ones(1000, dtype=torch.float64).view(10, 100).t()) == 8_000


def test_whole_gradients_exist_at_once_only_without_shard_grads() -> None:
    group = Echo()
    vg, value = gradient(group, sharded=False, shard_grads=False)
    assert peak_of(lambda: vg(value, X)) >= PSI
    vg, value = gradient(group, sharded=False, shard_grads=True)
    peak = peak_of(lambda: vg(value, X))
    assert peak < PSI
    assert peak <= PSI // SIZE + GRADS * BUCKET + SLACK


class Late(Echo):
    """Keeps the input alive until ``wait()``, as a collective in flight does."""

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        return Work(lambda: Echo.start(self, call, x, out).wait())


def test_one_bucket_is_filled_while_another_is_in_flight() -> None:
    vg, value = gradient(Late(), sharded=False, shard_grads=True)
    # The results, one bucket as leaves and as one buffer, and one bucket in flight.
    assert peak_of(lambda: vg(value, X)) < PSI // SIZE + 4 * BUCKET


def test_leaves_of_gradients_are_gone_when_the_call_returns() -> None:
    """The address tables, which live from call to call, keep no gradient alive."""
    seen: list[StorageWeakRef] = []

    def noted(params: Any, x: Tensor) -> Tensor:
        for layer in params["h"]:
            layer["w"].register_hook(
                lambda grad: seen.append(StorageWeakRef(grad.untyped_storage()))
            )
        return loss_fn(params, x)

    vg, value = gradient(Echo(), sharded=False, shard_grads=True, loss_fn=noted)
    for _ in range(2):
        vg(value, X)
    assert [grad.expired() for grad in seen] == [True] * 2 * LAYERS


def test_whole_parameters_never_exist_with_shard_params() -> None:
    group = Echo()
    vg, value = gradient(group, sharded=True, shard_grads=True)
    for _ in range(3):  # the first call does not know the order of use
        peak = peak_of(lambda: vg(value, X))
        assert peak < PSI
        assert peak <= PSI // SIZE + (PARAMS + GRADS) * BUCKET + SLACK


def test_backward_off_the_schedule_frees_complete_buckets() -> None:
    """After a rank has diverged from the schedule, a bucket with complete gradients is freed too,
    unless a view of the bucket is alive.
    """

    def swaps(params: Any, x: Tensor) -> Tensor:
        *others, last, end = params["h"]
        return loss_fn({"h": [*others, end, last] if x.sum() < 0 else params["h"]}, x)

    vg, value = gradient(Echo(), sharded=True, shard_grads=True, loss_fn=swaps)
    for _ in range(2):
        vg(value, X)
    assert peak_of(lambda: vg(value, -X)) <= PSI // SIZE + (PARAMS + GRADS) * BUCKET + SLACK < PSI


def test_forward_alone_holds_a_few_buckets() -> None:
    group = Echo()
    value = zf.shard(params(), group, bucket_bytes=BUCKET)
    loss = zf.shard_params(loss_fn, group)
    for _ in range(3):
        with torch.no_grad():
            assert peak_of(lambda: loss(value, X)) <= (PARAMS + 1) * BUCKET + SLACK


@pytest.mark.parametrize(
    "stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))]
)
def test_ten_steps_leave_no_more_objects_alive_than_three(stage: int) -> None:
    """With the cycle collector off, ten steps leave the same objects alive as three."""

    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, zf.optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(models.mlp())
        batch = models.mlp_batches(1, group.size)[0][group.rank]
        with Live() as live:
            alive = []
            for _ in range(10):
                state, info = z.step(state, batch)
                alive.append(live.now())
            del info
        assert alive[3:] == [alive[3]] * 7

    gc.collect()
    gc.disable()
    try:
        zf.simulate(1, main)
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_donated_step_makes_no_second_state() -> None:
    group = Echo()

    def peak(donate: bool) -> int:
        z = zf.zero(3, loss_fn, zf.optim.adamw(0.1), group, bucket_bytes=BUCKET, donate=donate)
        state = z.init(params())
        for _ in range(2):
            state, _ = z.step(state, X)
        return peak_of(lambda: z.step(state, X))

    shard = PSI // SIZE
    # Without donation the new parameters and two new moments stand beside the old ones.
    assert peak(True) <= peak(False) - shard
    assert peak(True) <= shard + (PARAMS + GRADS) * BUCKET + SLACK


@pytest.mark.slow
def test_stage_1_reduces_in_place_of_keeping_whole_gradients() -> None:
    """Stage 1 frees partial gradients bucket by bucket during the reduction."""
    group = Echo()

    def peak(stage: int) -> int:
        z = zf.zero(stage, loss_fn, zf.optim.adamw(0.1), group, bucket_bytes=BUCKET)
        state = z.init(params())
        state, _ = z.step(state, X)
        return peak_of(lambda: z.step(state, X))

    assert PSI <= peak(1) <= PSI + PSI // SIZE * 2 + GRADS * BUCKET + SLACK
    assert peak(2) < peak(1) + BUCKET
