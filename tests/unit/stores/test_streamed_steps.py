"""Steps over stores go bucket by bucket: memory, order of transfers, bytes, and faults."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.faulty_files import FaultyFiles
from zfun import optim, tree
from zfun.errors import OffloadError, OptionError
from zfun.files import Files
from zfun.stores import READ_AHEAD, Crossing, Stored, nvme
from zfun.testing import assert_same_bits

CPU = torch.device("cpu")
SMALL = {"block_size": 4096, "queue_depth": 2, "num_threads": 2}
NUM_BUCKETS = 8
PARAMS = [torch.linspace(-1, 1, 30 * 40).reshape(30, 40) for _ in range(NUM_BUCKETS)]
BATCH = torch.linspace(0, 1, 60).reshape(2, 30)


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    x = batch.to(params[0].dtype)
    return torch.stack([(x @ w).square().mean() for w in params]).sum()


def crossings(
    optimizer: Any, params: Any = PARAMS, *, stage: int = 3, size: int = 1, **options: Any
) -> list[Crossing]:
    """Return the transfers of one step, after the state was made."""
    stores: list[Any] = [zf.stores.host(log=True) for _ in range(size)]

    def main(group: zf.Group) -> list[Crossing]:
        store = stores[group.rank]
        offload = options.pop("offload", None) or {"optimizer"}
        z = zf.zero(
            stage,
            loss_fn,
            optimizer,
            group,
            bucket_bytes=1,
            offload=zf.stores.Offload(**dict.fromkeys(offload, store)),
            **options,
        )
        state = z.init(params)
        assert store.log is not None
        before = len(store.log)
        z.step(state, BATCH)
        return store.log[before:]

    return zf.simulate(size, main)[0]


def norm_of_all(grads: Any, state: Any, params: Any) -> Any:
    return tree.map(lambda g: -0.1 * g / float(zf.reductions.global_norm(grads)), grads), state


def norm_by_bucket() -> optim.Optimizer:
    def at(norm: Tensor) -> optim.Optimizer:
        def update(grads: Any, state: Any, params: Any) -> Any:
            return tree.map(lambda g: -0.1 * g / float(norm), grads), state

        return optim.optimizer(zeros, update)

    return optim.optimizer(zeros, norm_of_all)._replace(
        prepare=lambda grads, state, params: at(zf.reductions.global_norm(grads))
    )


def doubled(grads: Any, state: Any, params: Any) -> Any:
    return tree.map(lambda g: -0.1 * g, grads), tree.map(lambda m: m * 2, state)


def zeros(params: Any) -> Any:
    return tree.map(torch.zeros_like, params)


BY_BUCKET = {
    "adamw": optim.adamw(0.1),
    "clip": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "lamb": optim.lamb(0.1),
    "muon": optim.muon(0.1, optim.adamw(0.1)),
    "torch": optim.from_torch(torch.optim.NAdam, lr=0.1),
    "pair": (zeros, doubled),
    "norm of all, prepared": norm_by_bucket(),
}
AT_ONCE = {
    "norm of all": (zeros, norm_of_all),
    "clip in the middle": optim.chain(
        optim.scale_by_adam(), optim.clip_by_global_norm(0.1), optim.scale(-0.1)
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", [*BY_BUCKET, *AT_ONCE])
def test_an_optimizer_that_mixes_no_buckets_steps_one_after_the_other(
    name: str, stage: int
) -> None:
    optimizer = BY_BUCKET.get(name) or AT_ONCE[name]
    kinds = [x.kind for x in crossings(optimizer, stage=stage) if x.name == "state"]
    each = kinds.count("get") // NUM_BUCKETS
    assert each
    assert kinds.count("put") == kinds.count("get") == each * NUM_BUCKETS
    at_first = NUM_BUCKETS if name in AT_ONCE else 1 + READ_AHEAD
    assert kinds.index("put") == each * at_first


def test_counts_advance_once_for_a_step() -> None:
    def main(group: zf.Group) -> list[int]:
        optimizer = zf.offload(optim.muon(0.1, optim.adamw(0.1)), zf.stores.host())
        params = zf.shard([*PARAMS, torch.ones(3)], group, labels=optimizer.labels)
        state = optimizer.init(params)
        grads = zf.shard([*PARAMS, torch.ones(3)], group, labels=optimizer.labels)
        for _ in range(3):
            params, state = zf.apply(optimizer, grads, state, params)
        return [int(state[label].count) for label in ("matrices", "rest")]

    assert zf.simulate(2, main) == [[3, 3]] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_four_bytes_cross_for_a_parameter_with_half_precision(stage: int) -> None:
    bf16 = torch.bfloat16
    half = zf.Precision(param=bf16, compute=bf16, reduce=bf16, master=torch.float32)
    found = crossings(
        optim.adamw(0.1), stage=stage, size=2, precision=half, offload={"optimizer", "grads"}
    )
    numel = sum(
        bucket.padded_numel for bucket in zf.layout.layout_of(PARAMS, 2, bucket_bytes=1).buckets
    )
    crossed = {
        (x.kind, x.name): sum(y.num_bytes for y in found if (y.kind, y.name) == (x.kind, x.name))
        for x in found
        if (x.kind, x.name) not in {("get", "grads"), ("get", "state"), ("put", "state")}
    }
    # Each rank sends the gradients of its half and receives the parameters of that half.
    assert crossed == {("put", "grads"): numel // 2 * 2, ("get", "params"): numel // 2 * 2}


# The plan: data, which the step follows and the timeline draws.


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_a_step_does_what_the_plan_says(kind: str, fraction: float, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        store: Any = nvme(tmp_path, **SMALL) if kind == "nvme" else zf.stores.host()
        offload = zf.stores.Offload(optimizer=store, fraction=fraction)
        z = zf.zero(2, loss_fn, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state, _ = z.step(z.init(PARAMS), BATCH)
        with zf.planner.profile() as profile:
            z.step(state, BATCH)
        stored = range(NUM_BUCKETS if fraction == 1 else 4, NUM_BUCKETS)
        plan = zf.planner.plan_update(
            state_layout(PARAMS),
            stored=[*range(NUM_BUCKETS)] if fraction == 1 else [*stored],
            in_backward=kind == "nvme",
        )
        labels = [*plan.labels]
        first = profile.labels.index(labels[0])
        kinds = ("read", "wait", "compute", "write", "gathered", "commit")
        found = [
            (
                "gather" if e.kind == "gathered" else e.kind,
                e.bucket - first if e.bucket >= 0 else -1,
            )
            for e in profile.events
            if e.phase == "update" and e.kind in kinds
        ]
        assert found == [tuple(step) for step in plan.steps]
        assert profile.labels[first : first + NUM_BUCKETS] == labels
        lanes = {span.lane for span in profile.timeline().spans if span.name.startswith("update")}
        assert {"read", "write", "gather", "compute"} <= lanes

    zf.simulate(2, main)


def state_layout(params: Any) -> zf.layout.Layout:
    return zf.layout.layout_of(params, 2, bucket_bytes=1)


def chain_loss(params: Any, batch: Tensor) -> Tensor:
    x = batch
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().sum()


CHAIN = [torch.eye(30) + 0.01 * i for i in range(NUM_BUCKETS)]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_transfers_run_beside_forward_and_backward(clip: bool, stage: int, tmp_path: Path) -> None:
    """Reads begin before forward; without a norm of all gradients, writes begin in backward."""
    seen: dict[str, int] = {}

    def main(group: zf.Group) -> int:
        store = nvme(tmp_path, **SMALL)

        def loss(params: Any, batch: Tensor) -> Tensor:
            seen["read in forward"] = store.bytes_moved("get", "state")
            x = torch.tanh(batch @ params[0])
            # The first layer has its gradient last.
            if x.requires_grad:
                x.register_hook(lambda _: seen.update(put=store.bytes_moved("put", "state")))
            return chain_loss(params[1:], x)

        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
        offload = zf.stores.Offload(optimizer=store)
        rule = rule if clip else optim.adamw(0.1)
        z = zf.zero(stage, loss, rule, group, bucket_bytes=1, offload=offload)
        state, _ = z.step(z.init(CHAIN), BATCH)
        before = {kind: store.bytes_moved(kind, "state") for kind in ("get", "put")}
        z.step(state, BATCH)
        seen["read in forward"] -= before["get"]
        seen["put"] -= before["put"]
        return store.bytes_moved("put", "state") - before["put"]

    (num_bytes,) = zf.simulate(1, main)
    assert seen["read in forward"] == num_bytes * (READ_AHEAD + 1) // NUM_BUCKETS
    if clip:
        assert seen["put"] == 0
    else:
        # One rank waits for nobody, so all layers but the first are stepped.
        assert seen["put"] == num_bytes * (NUM_BUCKETS - 1) // NUM_BUCKETS


CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))


@pytest.mark.parametrize("rule", [optim.adamw(0.1), CLIPPED], ids=["adamw", "clip"])
@pytest.mark.parametrize("size", [1, 2])
def test_new_parameters_take_the_memory_of_gradients(
    size: int, rule: optim.Optimizer, tmp_path: Path
) -> None:
    """Memory grows by old and new parameters with each bucket, and not by gradients too."""

    def peak(num_buckets: int) -> int:
        params = [torch.empty(64, 64) for _ in range(num_buckets)]
        offload = zf.stores.Offload(optimizer=nvme(tmp_path, **SMALL))

        def make(group: zf.Group) -> Any:
            return zf.zero(3, chain_loss, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)

        live = zf.planner.live_bytes(make, params, torch.empty(1, 64), size, steps=2)
        return live.peak.device.total

    shard, activations = 64 * 64 * 4 // size, 4 * 64 * 4
    assert 2 * shard <= (peak(16) - peak(8)) / 8 <= 2 * shard + activations


class SlowFiles(Files):
    """Writes that are under way when the next bucket is computed."""

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        time.sleep(0.003)
        return super().write(fd, buffer, offset)


def train_chain(rule: Any, path: Path | None, is_bad: Callable[[int], bool], **options: Any) -> Any:
    """Train, and let one layer in the middle have bad gradients in some steps."""

    def main(group: zf.Group) -> Any:
        store = None if path is None else nvme(path, files=SlowFiles(), **SMALL)
        offload = None if store is None else zf.stores.Offload(optimizer=store)
        steps: list[int] = []

        def loss(params: Any, batch: Tensor) -> Tensor:
            middle = params[4] * 1.0
            if middle.requires_grad and is_bad(len(steps)):
                middle.register_hook(lambda grad: grad * float("inf"))
            steps.append(0)
            return chain_loss([*params[:4], middle, *params[5:]], batch)

        z = zf.zero(3, loss, rule, group, bucket_bytes=1, offload=offload, **options)
        state, found = z.init(CHAIN), []
        for _ in range(4):
            state, info = z.step(state, BATCH)
            found.append((repr(info.grad_norm.item()), info.skipped, info.bad_leaf))
        return z.params(state), found

    return zf.simulate(1, main)[0]


def test_the_bad_leaf_is_named_after_gradients_were_spent(tmp_path: Path) -> None:
    values, infos = train_chain(optim.adamw(0.1), tmp_path, lambda step: step == 2)
    expected = train_chain(optim.adamw(0.1), None, lambda step: step == 2)
    assert_same_bits(values, expected[0])
    assert infos == expected[1]
    assert [leaf for _, _, leaf in infos] == [None, None, "4", None]


def test_the_gradients_of_a_caller_are_not_spent(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        offload = zf.stores.Offload(optimizer=nvme(tmp_path, **SMALL))
        z = zf.zero(3, chain_loss, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state = z.init(CHAIN)
        value, pullback, _ = z.vjp(chain_loss, state, BATCH)
        grads = pullback(torch.ones(()))
        before = [buffer.clone() for buffer in grads.buffers]
        z.update(state, grads, value)
        assert_same_bits(list(grads.buffers), before)

    zf.simulate(1, main)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_state_may_keep_the_gradients(num_micro_batches: int, tmp_path: Path) -> None:
    """The memory of gradients is not spent where the optimizer returns gradients as the state."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g, last: -0.1 * (g + last), grads, state), grads

    # With micro-batches, the update begins after backward.
    options = {"num_micro_batches": num_micro_batches}
    values, infos = train_chain((zeros, update), tmp_path, lambda step: False, **options)
    expected = train_chain((zeros, update), None, lambda step: False, **options)
    assert_same_bits(values, expected[0])
    assert infos == expected[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_skipped_or_raises_drops_the_new_state(stage: int, tmp_path: Path) -> None:
    def train(group: zf.Group, store: Any) -> Any:
        offload = None if store is None else zf.stores.Offload(optimizer=store)
        is_faulty: list[bool] = []

        def fail(grad: Tensor) -> None:
            if is_faulty:
                raise ArithmeticError("the last layer of backward")

        def loss(params: Any, batch: Tensor) -> Tensor:
            x = torch.tanh(batch @ params[0])
            if x.requires_grad:
                x.register_hook(fail)
            return chain_loss(params[1:], x)

        z = zf.zero(stage, loss, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state, infos = z.init(CHAIN), []
        for number in range(4):
            if number == 2:
                is_faulty.append(True)
                with pytest.raises(ArithmeticError):
                    z.step(state, BATCH)
                is_faulty.clear()
            state, info = z.step(state, BATCH * float("nan") if number == 1 else BATCH)
            infos.append((info.loss.isnan().item(), info.skipped))
        return z.params(state), state.opt_state.count, infos

    store = nvme(tmp_path, **SMALL)
    found = zf.simulate(1, train, store)
    assert_same_bits(found, zf.simulate(1, train, None))
    assert [skipped for _, skipped in found[0][2]] == [False, True, False, False]
    # Two moments: old, new, and those of a dropped step, whose writes may be under way.
    assert store.file_bytes <= 3 * 2 * NUM_BUCKETS * 4096


@pytest.mark.parametrize(("size", "num_reads"), [(1, 2), (2, 3)])
def test_one_rank_computes_with_host_memory_in_place(size: int, num_reads: int) -> None:
    """On a CPU, one rank has nothing to gather: the loss and the update read a bucket once each."""
    stores: list[Any] = [zf.stores.host() for _ in range(size)]

    def main(group: zf.Group) -> list[float]:
        store = stores[group.rank]
        offload = zf.stores.Offload(params=store)
        z = zf.zero(3, loss_fn, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state, found = z.init(PARAMS), []
        num_bytes = sum(buffer.shape.numel() * 4 for buffer in state.params.buffers)
        for _ in range(3):
            before = store.bytes_moved("get", "params")
            state, _ = z.step(state, BATCH)
            found.append((store.bytes_moved("get", "params") - before) / num_bytes)
        return found

    # The first step learns the order of use.
    assert zf.simulate(size, main) == [[3, num_reads, num_reads]] * size


def test_reads_and_writes_run_beside_the_computation() -> None:
    plan = zf.planner.plan_update(state_layout(PARAMS))
    numel = plan.numels[0]

    def duration(**costs: float) -> float:
        return zf.planner.timeline(plan, gather_cost=0.0, **costs).duration / numel

    # The first read and the last write have nothing to run beside.
    assert duration(read_cost=1.0, write_cost=1.0) == NUM_BUCKETS + 2
    assert duration(read_cost=0.5, write_cost=0.25) == NUM_BUCKETS + 0.75
    assert duration(read_cost=2.0, write_cost=1.0) == 2 * NUM_BUCKETS + 2
    assert duration(read_cost=1.0, write_cost=3.0) == 3 * NUM_BUCKETS + 2
    at_once = zf.planner.plan_update(state_layout(PARAMS), ahead=0)
    assert zf.planner.timeline(at_once, gather_cost=0.0).duration / numel == 2 * NUM_BUCKETS + 1


def test_no_more_buckets_are_in_memory_than_the_plan_says() -> None:
    layout = state_layout(PARAMS)
    for late in (False, True):
        for ahead in (0, 1, 3):
            plan = zf.planner.plan_update(layout, late=late, ahead=ahead)
            assert max(plan.live()) == ahead + 1
            assert f"at most {ahead + 1} in memory" in repr(plan)
            assert [b for kind, b in plan.steps if kind == "compute"] == [*range(NUM_BUCKETS)]
    assert "bucket 0: 0" in plan._repr_html_()
    # Where a store may fail, buckets in memory come after all that can fail.
    mixed = zf.planner.plan_update(layout, stored=[6, 7], late=True, reads_first=True)
    commit = mixed.steps.index(("commit", -1))
    assert {b for kind, b in mixed.steps[:commit] if kind == "compute"} == {6, 7}
    assert {b for kind, b in mixed.steps[:commit] if kind == "read"} == {*range(NUM_BUCKETS)}
    assert not [b for kind, b in mixed.steps[:commit] if kind == "gather"]


def test_master_weights_stay_where_the_state_is() -> None:
    """On a device of its own, no parameter goes down: the master weights are there."""
    store = zf.stores.host(log=True, pin=False)
    bf16 = torch.bfloat16
    half = zf.Precision(param=bf16, compute=bf16, reduce=bf16, master=torch.float32)

    def make(group: zf.Group) -> Any:
        offload = zf.stores.Offload(optimizer=store)
        return zf.zero(
            2, loss_fn, optim.adamw(0.1), group, bucket_bytes=1, precision=half, offload=offload
        )

    num_steps = 2
    zf.planner.live_bytes(make, PARAMS, BATCH, 2, steps=num_steps, device="meta")
    shard = sum(bucket.padded_numel for bucket in state_layout(PARAMS).buckets) // 2
    crossed = {
        name: store.bytes_moved(*name)
        for name in [("put", "grads"), ("put", "params"), ("get", "params")]
    }
    assert crossed == {
        ("put", "grads"): 2 * shard * num_steps,
        ("put", "params"): 0,
        ("get", "params"): 2 * shard * num_steps,
    }


class Update:
    """An update alone: parameters, gradients and state on a disk that takes no memory."""

    def __init__(self, group: zf.Group, path: Path) -> None:
        self.group = group
        self.store = nvme(path, **SMALL)
        self.optimizer = zf.offload(
            optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), self.store
        )

    def init(self, params: Any) -> Any:
        kept = zf.shard(params, self.group, bucket_bytes=1)
        state = self.optimizer.init(kept)
        return zf.offload(kept, self.store), zf.offload(kept, self.store), state

    def step(self, state: Any, batch: Any) -> Any:
        params, grads, kept = state
        params, kept = zf.apply(self.optimizer, grads, kept, params, donate=True)
        return (params, grads, kept), None


def test_memory_does_not_grow_with_the_number_of_buckets(tmp_path: Path) -> None:
    def peak(num_buckets: int) -> int:
        params = [torch.empty(64, 64, device="meta") for _ in range(num_buckets)]
        live = zf.planner.live_bytes(
            lambda group: Update(group, tmp_path), params, torch.empty(1), 2
        )
        assert live.steady.device.total == 0
        return live.peak.device.total

    shard = 64 * 64 * 4 // 2
    # Gradients, parameters and two moments, of buckets that are read, computed and written, and
    # the clipped gradients of one.
    assert peak(8) == peak(32) <= (4 * (READ_AHEAD + 2) + 1) * shard


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.3, 3), (0.5, 4), (1.0, 8)])
def test_a_fraction_of_the_state_lies_in_the_store(
    fraction: float, count: int, stage: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> list[list[bool]]:
        store = nvme(tmp_path, **SMALL)
        offload = zf.stores.Offload(optimizer=store, fraction=fraction)
        z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state, found = z.init(PARAMS), []
        for _ in range(2):
            state, _ = z.step(state, BATCH)
            found.append([isinstance(buffer, Stored) for buffer in state.opt_state.mu.buffers])
        return found

    expected = [False] * (NUM_BUCKETS - count) + [True] * count
    assert zf.simulate(2, main) == [[expected] * 2] * 2


def mixing() -> optim.Optimizer:
    """An optimizer that needs all buckets at once."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        norm = float(zf.reductions.global_norm(grads))
        return tree.map(lambda g: -g / norm, grads), tree.map(torch.add, state, grads)

    return optim.optimizer(lambda params: tree.map(torch.zeros_like, params), update)


KINDS = {
    "streamed": optim.adamw(0.1),
    "clipped last": optim.chain(optim.adamw(0.1), optim.clip_by_global_norm(1.0)),
    "one bit": optim.onebit_adam(0.1),
    "a pair": mixing(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.01, 1), (0.25, 2), (1.0, 8)])
def test_the_rest_of_the_state_stays_on_the_device(kind: str, fraction: float, count: int) -> None:
    """Also after a step that all buckets take at once on the device of the store."""
    params = {f"w{i}": torch.empty(64, 64, device="meta") for i in range(8)}

    def make(group: zf.Group) -> Any:
        offload = zf.stores.Offload(optimizer=zf.stores.host(pin=False), fraction=fraction)
        loss = lambda p, x: sum((x @ w).sum() for w in p.values())
        return zf.zero(2, loss, KINDS[kind], group, bucket_bytes=1, offload=offload)

    held = zf.plan(make, params, torch.empty(4, 64), 1, device="meta").steady
    moments = (1 if kind == "a pair" else 2) * 64 * 64 * 4
    assert (held.host.total, held.device.moments) == (count * moments, (8 - count) * moments)


def test_a_fraction_of_trees_lies_in_the_store() -> None:
    store = zf.stores.host()
    optimizer, plain = zf.offload(optim.adamw(0.1), store, fraction=0.25), optim.adamw(0.1)
    state = optimizer.init(PARAMS)
    stored = [isinstance(leaf, Stored) for leaf in tree.leaves(state)]
    assert sum(stored) == 2 * NUM_BUCKETS // 4
    expected, found = PARAMS, PARAMS
    other = plain.init(PARAMS)
    for _ in range(2):
        found, state = zf.apply(optimizer, PARAMS, state, found)
        expected, other = zf.apply(plain, PARAMS, other, expected)
    assert [isinstance(leaf, Stored) for leaf in tree.leaves(state)] == stored
    assert_same_bits(found, expected)


def test_a_fraction_is_for_optimizers() -> None:
    with pytest.raises(OptionError, match=r"got fraction=0\.5 for Flat; leave fraction out"):
        zf.simulate(1, lambda g: zf.offload(zf.shard(PARAMS, g), zf.stores.host(), fraction=0.5))
    with pytest.raises(OptionError, match=r"got fraction=0\.5 without a store"):
        zf.stores.Offload(fraction=0.5)
    with pytest.raises(OptionError, match=r"fraction.* must be a number from 0 to 1"):
        zf.stores.Offload(optimizer=zf.stores.host(), fraction=1.5)


@pytest.mark.parametrize("name", BY_BUCKET)
def test_a_state_is_made_bucket_by_bucket(name: str) -> None:
    def main(group: zf.Group) -> None:
        store = zf.stores.host(log=True)
        rule = optim.as_optimizer(BY_BUCKET[name])
        inner = zf.shard_optimizer(optim.with_master(rule), group)
        half = [w.to(torch.bfloat16) if i % 2 else w for i, w in enumerate(PARAMS)]
        params = zf.shard([*half, torch.ones(3)], group, bucket_bytes=1, labels=inner.labels)
        kept = zf.offload(params, store)
        assert store.log is not None
        before = len(store.log)
        state = zf.transforms.offload_optimizer(inner, store).init(kept)
        kinds = [x.kind for x in store.log[before:]]
        # The third read is under way when the first state is put.
        assert kinds.index("put") == 1 + READ_AHEAD
        assert kinds.count("get") == NUM_BUCKETS + 1
        expected = inner.init(params)
        assert tree.structure(state) == tree.structure(expected)
        assert_same_bits(
            [
                leaf.get(CPU).wait() if isinstance(leaf, Stored) else leaf
                for leaf in tree.leaves(state)
            ],
            tree.leaves(expected),
        )

    zf.simulate(2, main)


# Faults: a step is applied wholly or not at all, whatever lies where.


def failure_of(fn: Callable[[], Any]) -> OffloadError | None:
    try:
        fn()
    except OffloadError as error:
        return error
    return None


def tensors(state: Any) -> list[Tensor]:
    return [
        leaf.get(CPU).wait().clone() if isinstance(leaf, Stored) else leaf.clone()
        for leaf in tree.leaves((state.params, state.opt_state))
        if isinstance(leaf, (Stored, Tensor))
    ]


PLACES = {
    "state on the disk": {"optimizer": "nvme"},
    "gradients on the disk": {"grads": "nvme"},
    "gradients on the disk, state in host memory": {"grads": "nvme", "optimizer": "host"},
    "gradients and state on the disk": {"grads": "nvme", "optimizer": "nvme"},
    "parameters on the disk": {"params": "nvme"},
    "parameters on the disk, state in host memory": {"params": "nvme", "optimizer": "host"},
    "all on the disk": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}
FRACTIONS = dict.fromkeys(
    ("state on the disk", "gradients and state on the disk", "all on the disk"), (1.0, 0.3)
)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(None, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("places", "fraction"),
    [(places, fraction) for places in PLACES for fraction in FRACTIONS.get(places, (1.0,))],
)
def test_a_step_is_applied_wholly_or_not_at_all(
    places: str, fraction: float, precision: torch.dtype | None, tmp_path: Path
) -> None:
    params = PARAMS[:3]

    def make(group: zf.Group, files: FaultyFiles | None) -> Any:
        kinds: dict[str, Any] = {
            "host": zf.stores.host(),
            "nvme": nvme(tmp_path, **SMALL, files=files),
        }
        parts = {part: kinds[kind] for part, kind in PLACES[places].items()}
        return zf.zero(
            3,
            loss_fn,
            optim.adamw(0.1),
            group,
            bucket_bytes=1,
            precision=precision,
            offload=None if files is None else zf.stores.Offload(**parts, fraction=fraction),
        )

    def main(group: zf.Group) -> None:
        files = FaultyFiles(kinds=("read", "write"))
        z, plain = make(group, files), make(group, None)
        state, expected = z.init(params), plain.init(params)
        for _ in range(2):
            expected, _ = plain.step(expected, BATCH)
        state, _ = z.step(state, BATCH)
        before = tensors(state)
        for n in range(1000):
            files.at, files.failed = files.count + n, None
            after: list[Any] = []
            error = failure_of(lambda: after.append(z.step(state, BATCH)[0]))
            files.at = None
            if error is None:
                break
            assert error.errno == errno.EIO
            assert_same_bits(tensors(state), before)
        assert n >= 4
        assert_same_bits(z.params(after[0]), plain.params(expected))

    zf.simulate(1, main)
