"""Copies between a device and the host, with queues on the CPU that are as strict as a device.

No test here runs on a GPU: a ``StrictQueue`` takes the place of a queue of copies.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zfun as zf
from tests import models
from tests.property.collectives.strict import StrictQueue
from zfun.stores import _streams
from zfun.stores._streams import MAX_UNDER_WAY, QueuedCopies, QueuedCopy, Ring, hosted
from zfun.testing import assert_same_bits

CPU = torch.device("cpu")


class Events(TorchDispatchMode):
    """The starts and waits of copies, and the matmuls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.log.append("matmul")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(_streams, "queue_of", lambda device: StrictQueue(made.log.append))
    return made


def _vectors(count: int, numel: int = 8) -> list[Tensor]:
    return [torch.arange(float(numel)) + 100 * number for number in range(count)]


# Stores.


def test_a_store_waits_for_a_copy_where_its_value_is_needed(events: Events) -> None:
    store = zf.stores.host()
    handle = store.put(torch.arange(3.0), "params")
    assert events.log == ["start"]
    pending = handle.get(CPU)
    assert events.log == ["start", "start"]
    assert pending.wait().tolist() == [0.0, 1.0, 2.0]
    assert events.log == ["start", "start", "device"]


def test_the_host_waits_for_a_copy_before_it_reads(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = zf.stores.host().put(torch.arange(3.0), "state")
    # From here on the CPU is the host, whose reads copy nothing.
    monkeypatch.setattr(QueuedCopies, "queue", lambda self, device, kind: None)
    pending = handle.get(CPU)
    assert events.log == ["start"]
    assert pending.wait().tolist() == [0.0, 1.0, 2.0]
    assert events.log == ["start", "host"]
    assert handle.get(CPU).wait().data_ptr() == pending.wait().data_ptr()
    assert events.log == ["start", "host"]


def test_a_few_copies_to_the_host_hold_memory_of_the_device(events: Events) -> None:
    store = zf.stores.host()
    handles = [store.put(x, "grads") for x in _vectors(MAX_UNDER_WAY)]
    assert events.log == ["start"] * MAX_UNDER_WAY
    handles += [store.put(x + 1, "grads") for x in _vectors(3)]
    assert events.log[MAX_UNDER_WAY:] == ["device", "start"] * 3
    expected = [*_vectors(MAX_UNDER_WAY), *(x + 1 for x in _vectors(3))]
    assert_same_bits([handle.get(CPU).wait() for handle in handles], expected)


def test_a_flush_gives_the_memory_of_the_device_back(events: Events) -> None:
    x = torch.arange(3.0)
    handle = zf.stores.host().put(x, "params")
    handle.flush()
    assert events.log == ["start", "device"]
    x.zero_()
    handle.flush()
    assert handle.get(CPU).wait().tolist() == [0.0, 1.0, 2.0]
    assert events.log == ["start", "device", "start", "device"]


def test_a_copy_that_nobody_waits_for_holds_its_target(events: Events) -> None:
    """Backward drops the handles of a graph that is dropped."""
    store = zf.stores.host()
    handle = store.put(torch.arange(3.0), "activations")
    handle.get(CPU)
    gc.collect()
    assert handle.get(CPU).wait().tolist() == [0.0, 1.0, 2.0]
    handle.get(CPU)
    del handle, store
    gc.collect()
    assert events.log[-1] == "device"


def test_a_source_that_is_overwritten_is_found(events: Events) -> None:
    x = torch.arange(3.0)
    handle = zf.stores.host().put(x, "params")
    x.zero_()
    with pytest.raises(AssertionError, match="somebody wrote to the source of a copy"):
        handle.get(CPU).wait()


def test_a_source_that_is_freed_is_found() -> None:
    queue = StrictQueue()
    out = torch.empty(3)
    copy = QueuedCopy(queue, out, torch.arange(3.0))  # type: ignore[arg-type]
    copy._held = None
    with pytest.raises(AssertionError, match="the source of a copy was freed"):
        copy.wait()


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "read", "drop"]), st.integers(0, 5)), max_size=30
    )
)
def test_any_order_of_transfers_keeps_all_values(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_streams, "queue_of", lambda device: StrictQueue())
        store = zf.stores.host()
        kept: dict[int, tuple[Any, Tensor]] = {}
        reads: list[tuple[Any, Tensor]] = []
        for number, (step, place) in enumerate(steps):
            if step == "put":
                x = torch.full((4,), float(number))
                kept[place] = store.put(x, "state"), x.clone()
            elif step == "get" and place in kept:
                handle, value = kept[place]
                reads.append((handle.get(CPU), value))
            elif step == "read" and reads:
                pending, value = reads.pop(place % len(reads))
                assert torch.equal(pending.wait(), value)
            elif step == "drop":
                kept.pop(place, None)
                del reads[place:]
        for pending, value in reads:
            assert torch.equal(pending.wait(), value)


def test_a_disk_is_written_after_the_copy_from_the_device(events: Events, tmp_path: Path) -> None:
    store = zf.stores.nvme(tmp_path)
    handles = [store.put(x, "state") for x in _vectors(3, 5000)]
    zf.stores.flush(handles)
    assert events.log.count("start") == events.log.count("host") == 3
    assert_same_bits([handle.get(CPU).wait() for handle in handles], _vectors(3, 5000))
    store.close()


def test_a_pickled_store_has_queues_of_its_own(events: Events) -> None:
    store = zf.stores.host()
    store.put(torch.ones(2), "state")
    other = pickle.loads(pickle.dumps(store))
    assert other.put(torch.ones(2), "state").get(CPU).wait().tolist() == [1.0, 1.0]


# Compute between the start of a copy and the wait.


def _matmuls_between(log: list[str]) -> list[int]:
    """Return the matmuls between each start and the wait for it; copies end in order here."""
    starts, spans, num_matmuls = [], [], 0
    for event in log:
        if event == "matmul":
            num_matmuls += 1
        elif event == "start":
            starts.append(num_matmuls)
        elif starts:
            spans.append(num_matmuls - starts.pop(0))
    return spans


def test_forward_and_backward_hide_the_copies_of_activations(events: Events) -> None:
    store = zf.stores.host()
    blocks = [torch.randn(16, 16, requires_grad=True) for _ in range(8)]
    block = zf.remat(lambda w, x: torch.tanh(x @ w), store=store)

    def loss(run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = torch.ones(4, 16)
        for w in blocks:
            x = run(w, x)
        return x.sum()

    expected = torch.autograd.grad(loss(lambda w, x: torch.tanh(x @ w)), blocks)
    with events:
        value = loss(block)
        forward = list(events.log)
        events.log.clear()
        found = torch.autograd.grad(value, blocks)
    assert_same_bits(list(found), list(expected))
    # The device waits for a copy to the host only when a few more are under way.
    num_moved = len(blocks) - 1  # the input of the first block is no result
    assert forward.count("start") == num_moved
    assert forward.count("host") == 0
    assert forward.count("device") == num_moved - MAX_UNDER_WAY
    assert all(span == MAX_UNDER_WAY for span in _matmuls_between(forward))
    # Backward starts to read two activations before it needs them; the first ones, at once.
    spans = _matmuls_between(events.log)
    assert len(spans) == num_moved
    assert spans[0] == 0
    assert all(span >= 3 for span in spans[1:]), spans


def test_matmuls_hide_the_reads_of_parameters(events: Events) -> None:
    store = zf.stores.host()

    def main(group: zf.Group, offload: zf.stores.Offload | None) -> Any:
        z = zf.zero(
            3,
            models.mlp_loss,
            zf.optim.sgd(0.1),
            group,
            offload=offload,
            schedule=zf.ScheduleOptions(prefetch=1),
            bucket_bytes=4 * 17 * 16,
        )
        state = z.init(models.mlp(16, 4, torch.float32))
        events.log.clear()
        with events:
            state, _ = z.step(state, torch.ones(4, 16))
        return z.params(state)

    expected = zf.simulate(1, main, None)
    found = zf.simulate(1, main, zf.stores.Offload(params=store))
    assert_same_bits(found, expected)
    assert "host" not in events.log
    # The first reads of forward and of backward have nothing to hide behind.
    assert sum(span > 0 for span in _matmuls_between(events.log)) >= 5


# The ring of checkpoints.


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    ),
    st.integers(1, 3),
    st.sampled_from([8, 16, 24, 64]),
    st.data(),
)
def test_a_ring_copies_what_goes_through_it(
    shapes: list[tuple[int, torch.dtype]], num_slots: int, slot_bytes: int, data: st.DataObject
) -> None:
    """``StrictQueue`` refuses a buffer that is filled again before the host has emptied it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_streams, "queue_of", lambda device: StrictQueue())
        ring = Ring(num_slots, slot_bytes)
        started: list[tuple[Any, Tensor]] = []
        for numel, dtype in shapes:
            x = torch.randint(-100, 100, (numel,)).to(dtype)
            started.append((ring.start(x.clone()), x))
            if data.draw(st.booleans()):
                finish, value = started.pop(0)
                assert_same_bits(finish(), value)
        assert_same_bits([finish() for finish, _ in started], [x for _, x in started])


def test_the_copy_of_a_range_runs_while_the_one_before_is_written(events: Events) -> None:
    seen = []
    for x in hosted(_vectors(3)):
        events.log.append("write")
        seen.append(x)
    assert_same_bits(seen, _vectors(3))
    assert events.log == [
        *("start", "start", "host", "write", "start", "host", "write", "host", "write")
    ]


def test_tensors_of_a_cpu_are_not_copied() -> None:
    given = _vectors(2)
    assert [x.data_ptr() for x in hosted(given)] == [x.data_ptr() for x in given]
    store = zf.stores.host()
    assert store.put(given[0], "state").get(CPU).wait().data_ptr() == given[0].data_ptr()


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_has_the_bits_of_the_state(
    events: Events, tmp_path: Path, background: bool
) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(3, models.mlp_loss, zf.optim.adamw(0.1), group)
        state = z.init(models.mlp(16, 2, torch.float32))
        events.log.clear()
        saved = zf.save(str(tmp_path / "run"), state, background=background)
        saved.wait()
        assert "start" in events.log
        before = z.params(state)
        loaded = zf.load(str(tmp_path / "run"), like=state).state
        assert_same_bits(z.params(loaded), before)

    zf.simulate(2, main)
