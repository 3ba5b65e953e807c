"""Sharded parameters in a store: reads are steps of the schedule, few at a time, and ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from tests.slow_store import SlowStore
from zfun.errors import OffloadError
from zfun.planner import Meter
from zfun.testing import assert_same_bits

WIDTH = 32


def layers(depth: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for _ in range(depth)]


def chain(note: Callable[[int], None] = lambda place: None) -> Callable[[Any, Tensor], Tensor]:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for place, w in enumerate(params):
            x = x @ w
            note(place)
            x = torch.tanh(x)
        return x.square().mean()

    return loss_fn


def sharded(
    group: zf.Group, depth: int, store: Any, **options: Any
) -> tuple[Callable[[Tensor], tuple[Tensor, Any]], Any]:
    """Return a gradient function of a chain whose parameters are in a store."""
    schedule = zf.ScheduleOptions(**options)
    note = lambda place: store.events.append(("use", place))
    loss = zf.shard_params(chain(note), group, schedule=schedule)
    params = zf.offload(zf.shard(layers(depth), group, bucket_bytes=1), store)
    vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), group), group)
    return lambda x: vg(params, x), loss


X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


def between_uses(events: list[tuple[str, Any]], place: int) -> list[tuple[str, Any]]:
    return events[events.index(("use", place - 1)) + 1 : events.index(("use", place))]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("read_ahead", [0, 1, 2])
def test_reads_run_beside_the_uses_before(prefetch: int, read_ahead: int) -> None:
    depth = 8

    def main(group: zf.Group) -> None:
        store = SlowStore()
        step, _ = sharded(group, depth, store, prefetch=prefetch, read_ahead=read_ahead)
        step(X)
        step(X)
        store.events.clear()
        step(X)
        events = store.events
        for kind in ("start", "wait"):
            # A read for forward, and one for backward, for which the last buckets stay.
            again = range(depth - 1 - prefetch)
            assert sorted(b for k, b in events if k == kind) == sorted([*range(depth), *again])
        # Between two uses one read is waited for, and a later one begins.
        ahead = prefetch + read_ahead
        for place in range(1, depth - ahead):
            found = between_uses(events, place)
            gathered, read = place + prefetch, place + ahead
            steps = [("wait", gathered), ("start", read)]
            assert found == (steps if read_ahead else steps[::-1])
        assert store.most_under_way == max(1, read_ahead)
        assert store.under_way == 0

    zf.simulate(2, main)


@pytest.mark.parametrize("prefetch", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_few_shards_are_in_memory_however_many_layers_there_are(prefetch: int) -> None:
    def most(group: zf.Group, depth: int) -> tuple[int, int]:
        store = SlowStore()
        step, _ = sharded(group, depth, store, prefetch=prefetch, read_ahead=1)
        for _ in range(3):
            step(X)
        gc.collect()
        assert not store.living
        return store.most_under_way, store.most_living

    for size in (1, 2):
        found = zf.simulate(size, most, 6), zf.simulate(size, most, 24)
        assert found[0] == found[1]
        under_way, living = found[0][0]
        assert under_way == 1
        # The shards of the gathers under way, and the one that a gather is about to send.
        assert living <= prefetch + 2


def test_the_peak_does_not_grow_with_the_layers() -> None:
    """The meter counts activations too, so the batch is one small row."""

    def peak(group: zf.Group, depth: int) -> int:
        store = zf.stores.host()
        meter = Meter()
        schedule = zf.ScheduleOptions(read_ahead=2)
        loss = zf.shard_params(chain(), meter.watch(group), schedule=schedule)
        watched = loss.group  # type: ignore[missing-attribute]
        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), watched), watched)
        # The store hands out copies, as a disk does.
        store = SlowStore()
        params = zf.offload(zf.shard(layers(depth), watched, bucket_bytes=1), store)
        vg = zf.offload(vg, zf.stores.host())
        for _ in range(2):
            vg(params, X[:1])
        with meter:
            _, grads = vg(params, X[:1])
        most = meter.live().largest
        whole = sum(buffer.shape.numel() for buffer in grads.buffers) * 4
        # The gradients that have left are in host memory, which is this memory here.
        rest = most.gathered + most.params + most.communication + most.work
        return rest + max(0, most.grads - whole)

    few, many = (zf.simulate(2, peak, depth)[0] for depth in (6, 24))
    bucket = WIDTH * WIDTH * 4
    assert few == many
    assert few < 8 * bucket


@settings(max_examples=examples(12))
@given(
    size=st.sampled_from([1, 2, 3]),
    prefetch=st.integers(0, 3),
    read_ahead=st.integers(0, 3),
    reuse_distance=st.sampled_from([None, 0, 10**9]),
    persistence=st.sampled_from([0, 40]),
    max_live=st.sampled_from([None, 2]),
    frozen=st.booleans(),
    precision=st.sampled_from([None, torch.bfloat16]),
)
def test_reads_change_no_bit(
    size: int, frozen: bool, precision: Any, max_live: int | None, **options: Any
) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for layer in (params[0], params[1], params[0], params[2]):
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return x.square().mean()

    params = [{"w": w, "b": w[0].clone()} for w in layers(3)]
    if max_live is not None:
        options["max_live"] = max_live * (WIDTH * WIDTH + 32 * size) + 4096
    trainable = (lambda path, leaf: not path.startswith("1")) if frozen else None

    def train(group: zf.Group, store: Any) -> Any:
        z = zf.zero(
            3,
            loss_fn,
            zf.optim.adamw(0.05),
            group,
            schedule=zf.ScheduleOptions(**options),
            bucket_bytes=1,
            trainable=trainable,
            precision=precision,
            offload=None if store is None else zf.stores.Offload(params=store),
        )
        state = z.init(params)
        losses = []
        for step in range(3):
            state, info = z.step(state, X + group.rank + step)
            losses.append(info.loss)
        if store is not None:
            assert store.under_way == 0
        return losses, z.params(state)

    run = lambda is_stored: zf.simulate(
        size, lambda group: train(group, SlowStore() if is_stored else None)
    )
    assert_same_bits(run(True), run(False))


def test_ranks_that_take_different_branches_leave_no_read_behind() -> None:
    def loss_fn(params: Any, batch: tuple[Tensor, int]) -> Tensor:
        x, skipped = batch
        for place, w in enumerate(params):
            if place != skipped:
                x = torch.tanh(x @ w)
        return x.square().mean()

    def main(group: zf.Group, is_stored: bool) -> Any:
        store = SlowStore()
        loss = zf.shard_params(loss_fn, group, schedule=zf.ScheduleOptions(read_ahead=2))
        params = zf.shard(layers(6), group, bucket_bytes=1)
        params = zf.offload(params, store) if is_stored else params
        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), group), group)
        found = []
        for step in range(4):
            skipped = 3 if step in (1, 3) and group.rank == 0 else -1
            loss_value, grads = vg(params, (X, skipped))
            found.append((loss_value, zf.unshard(grads)))
            assert store.under_way == 0
        return found

    assert_same_bits(zf.simulate(2, main, True), zf.simulate(2, main, False))


def test_an_error_of_a_read_names_the_leaf_and_the_rank_and_the_next_step_works() -> None:
    def main(group: zf.Group) -> None:
        store = SlowStore()
        z = zf.zero(
            3,
            chain(),
            zf.optim.sgd(0.1),
            group,
            bucket_bytes=1,
            offload=zf.stores.Offload(params=store),
        )
        state = z.init(layers(4))
        state, _ = z.step(state, X)
        store.fails_at = store.num_reads + 3
        with pytest.raises(OffloadError, match="got a broken one") as caught:
            z.step(state, X)
        assert caught.value.rank == 0
        assert str(caught.value.leaf).startswith("bucket")
        assert store.under_way == 0
        store.fails_at = None
        state, info = z.step(state, X)
        assert not info.skipped

    zf.simulate(1, main)


def test_a_plan_with_reads_is_data_and_equals_the_real_step() -> None:
    depth = 5

    def main(group: zf.Group) -> Any:
        store = zf.stores.host()
        z = zf.zero(
            3,
            chain(),
            zf.optim.sgd(0.1),
            group,
            bucket_bytes=1,
            offload=zf.stores.Offload(params=store),
        )
        state = z.init(layers(depth))
        for _ in range(2):
            state, _ = z.step(state, X)
        before = store.bytes_moved("get", "params")
        with zf.planner.profile() as found:
            z.step(state, X)
        return found, store.bytes_moved("get", "params") - before

    offload = zf.stores.Offload(params=zf.stores.host())
    trace = zf.planner.trace(chain(), layers(depth), X, 2, bucket_bytes=1, offload=offload)
    made = zf.planner.schedule(trace)
    found, _ = zf.simulate(2, main)[0]
    assert found.steps() == made.steps
    # The last two buckets stay from forward to backward.
    assert [step.kind for step in made.steps].count("read") == 2 * depth - 2
    price = zf.planner.explain(made)
    assert price.bytes_read == (2 * depth - 2) * WIDTH * WIDTH * 4 // 2
    assert price.reads[2].overlaps == (0,)
    assert "forward   read" in str(price)
    assert {"read", "gather", "compute"} <= {span.lane for span in found.timeline().spans}
    durations = [
        zf.planner.timeline(
            zf.planner.schedule(trace, zf.ScheduleOptions(read_ahead=ahead)), read_cost=1.0
        ).duration
        for ahead in (0, 1)
    ]
    assert durations[1] < durations[0]
