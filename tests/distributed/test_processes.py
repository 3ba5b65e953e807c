"""Real processes, over gloo and through shared memory: the bits of the simulation, and errors that
name the cause.

The programs of the ranks are functions of this module, which the processes import.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests.distributed import needs_shared_memory, processes, run_program
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    LeafRecord,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    Workers,
    all_gather,
    barrier,
    check_same,
    checked,
    process_group,
    record,
    simulate,
    spawn,
)
from zfun.collectives.backends._nccl import NativeGroup
from zfun.errors import CollectiveMismatch, OptionError, PeerLost, SpecMismatch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

RUN_S = 40.0


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), marks=pytest.mark.slow),
        (3, False),
        pytest.param((3, True), marks=needs_shared_memory),
    ],
    ids=["2", "3", "3 shared"],
)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    size, shared_memory = request.param
    with processes(size, timeout_s=RUN_S, shared_memory=shared_memory) as held:
        yield held


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=needs_shared_memory)],
    ids=["gloo", "shared"],
)
def two(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(
        2, timeout_s=RUN_S, collective_timeout_s=20.0, shared_memory=request.param
    ) as held:
        yield held


def _size(workers: Workers) -> int:
    return len(workers.run(_nothing))


def _nothing(group: Group) -> None:
    return None


def _values(group: Group, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + group.rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 100).to(dtype)


def _every_collective(group: Group) -> list[Tensor]:
    size = group.size
    ops = [
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(size - 1),
        Reduce(0),
        Reduce(size - 1),
        AllToAll(),
    ]
    same: Any = [*range(size)]  # a list, which callers without types pass
    ops += [Permute(tuple((rank + 1) % size for rank in range(size))), Permute(same)]
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.complex64):
        for numel in (0, 1, 1025) if dtype == torch.float32 else (7,):
            for op in ops:
                x = _values(group, numel * size if op.splits_input else numel, dtype)
                results.append(group.start(Collective(op, "x"), x).wait())
                out = torch.empty_like(results[-1])
                assert group.start(Collective(op, "x"), x, out).wait() is out
                results.append(out)
        # The input lies in the buffer that receives the gather.
        whole = torch.zeros(5 * size, dtype=dtype)
        shard = whole.view(size, 5)[group.rank]
        shard.copy_(_values(group, 5, dtype))
        results.append(group.start(Collective(AllGather(), "x"), shard, whole).wait())
        x = _values(group, 9, dtype)
        results.append(group.start(Collective(AllReduce(), "x"), x, x).wait())
    for op in ops:
        numel = 7 * size if op.splits_input else 7
        lazy = _values(group, numel, torch.complex64).conj()
        inputs = lazy, torch._neg_view(_values(group, numel, torch.float32))
        found = [group.start(Collective(op, "x"), x).wait() for x in inputs]
        results += [x.resolve_conj().resolve_neg() for x in found]
    return results


def test_every_collective_has_the_bits_of_the_simulation(workers: Workers) -> None:
    real = workers.run(_every_collective)
    simulated = simulate(len(real), _every_collective)
    for rank, (mine, theirs) in enumerate(zip(real, simulated, strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (rank, index)


def _skips_leaves(group: Group, stage: int) -> tuple[list[float], list[Tensor]]:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for i, w in enumerate(params["w"]):
            # Each rank skips a leaf.
            x = x if i == group.rank else torch.tanh(x @ w + params["b"])
        return (x @ params["w"][-1]).square().mean()

    generator = torch.Generator().manual_seed(0)
    params = {
        "w": [torch.randn(640, 640, generator=generator) / 20 for _ in range(4)],
        "b": torch.zeros(640),
    }
    # A bucket has room for two of the large leaves, so there are several buckets.
    z = zf.zero(stage, loss_fn, zf.optim.adamw(1e-2), group, bucket_bytes=2 * 4 * 640 * 640 + 640)
    state, losses = z.init(params), []
    for number in range(3):
        x = torch.randn(4, 640, generator=torch.Generator().manual_seed(10 * number + group.rank))
        state, info = z.step(state, x)
        losses.append(info.loss.item())
    return losses, zf.tree.leaves(zf.unshard(state.params))


@pytest.mark.parametrize("how", ["plainly", "remat", "checkpoint", "frozen", "persistent"])
@pytest.mark.parametrize("diverges", [False, True])
def test_ranks_that_take_other_branches_have_the_bits_of_the_simulation(
    two: Workers, how: str, diverges: bool
) -> None:
    for (losses, params), (expected, theirs) in zip(
        two.run(_branches, how, diverges), simulate(2, _branches, how, diverges), strict=True
    ):
        assert len(set(losses)) == len(losses)
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


def _branches(group: Group, how: str, diverges: bool) -> tuple[list[float], list[Tensor]]:
    def block(w: Tensor, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ w)

    def loss_fn(params: Any, batch: tuple[int, Tensor]) -> Tensor:
        number, x = batch
        order = [0, 1, 2, 3]
        if diverges and number % 2:
            order = [[0, 2, 3], [2, 1, 0, 2, 3]][group.rank]
        for i in order:
            if how == "remat":
                x = zf.remat(block)(params["w"][i], x)
            elif how == "checkpoint":
                x = checkpoint(block, params["w"][i], x, use_reentrant=False)
            else:
                x = block(params["w"][i], x)
        return (x * params["b"]).square().mean()

    generator = torch.Generator().manual_seed(0)
    params = {
        "w": [torch.randn(128, 128, generator=generator) / 10 for _ in range(4)],
        "b": torch.ones(128),
    }
    z = zf.zero(
        3,
        loss_fn,
        zf.optim.adamw(1e-2),
        group,
        bucket_bytes=1 << 16,
        schedule=zf.ScheduleOptions(persistence=128 if how == "persistent" else 0),
        trainable=(lambda path, leaf: path != "w.1") if how == "frozen" else None,
    )
    state, losses = z.init(params), []
    for number in range(6):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * number + group.rank))
        state, info = z.step(state, (number, x))
        losses.append(info.loss.item())
    return losses, zf.tree.leaves(z.params(state))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_that_skip_leaves_have_the_bits_of_the_simulation(
    workers: Workers, stage: int
) -> None:
    real = workers.run(_skips_leaves, stage)
    expected, theirs = simulate(len(real), _skips_leaves, stage)[0]
    for losses, params in real:
        assert losses == expected
        assert len(set(losses)) == 3
        assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


def _overlapped(group: Group) -> list[Tensor]:
    """Start collectives in both streams at once, and wait in an order that depends on the rank."""
    streams = [Stream.PARAMS, Stream.GRADS] if group.rank % 2 else [Stream.GRADS, Stream.PARAMS]
    pending = {}
    for stream in streams:
        for index in range(3):
            for op in (AllReduce(), AllGather(), ReduceScatter()):
                x = torch.arange(60.0) * (group.rank + 1) + 100 * index + 1000 * stream
                pending[stream, index, op.kind] = group.start(
                    Collective(op, "x", str(index), stream), x
                )
    order = sorted(pending, key=lambda key: (key[0] != streams[1], -key[1], key[2]))
    results = {key: pending[key].wait() for key in order}
    return [results[key] for key in sorted(results)]


def test_streams_do_not_wait_for_each_other(workers: Workers) -> None:
    real = workers.run(_overlapped)
    for mine, theirs in zip(real, simulate(len(real), _overlapped), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _recorded(group: Group) -> tuple[int, int, int]:
    recorder = record(group)
    params = torch.zeros(1000, requires_grad=True)
    all_gather(params, recorder, name="params").square().sum().backward()
    recorder.start(Collective(AllReduce(), "loss"), torch.ones(1)).wait()
    return recorder.bytes_sent("params"), recorder.bytes_sent("loss"), recorder.bytes_sent()


def test_recorded_bytes_are_those_of_the_simulation(workers: Workers) -> None:
    recorded = workers.run(_recorded)
    assert recorded == simulate(len(recorded), _recorded)
    assert recorded[0][0] == 2 * 4000 * (len(recorded) - 1)


def _checked_collectives(group: Group) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(_overlapped(checked(group)), _overlapped(group), strict=True)
    )


def test_debug_changes_nothing(workers: Workers) -> None:
    assert all(workers.run(_checked_collectives))


def _torch_groups(group: Group) -> list[tuple[int, int, float]]:
    """Groups from torch groups and meshes. Each group has separate connections, so the collectives
    of two groups do not mix.
    """
    mesh = init_device_mesh("cpu", (1, group.size), mesh_dim_names=("replica", "shard"))
    subgroup: Any = dist.new_group([0, 1])
    seen = []
    for made in (
        process_group(mesh, axis="shard"),
        process_group(mesh, axis="replica"),
        process_group(mesh["shard"]),
    ):
        with made:
            total = (
                made.start(Collective(AllReduce()), torch.tensor([1.0 + group.rank])).wait().item()
            )
            seen.append((made.rank, made.size, total))
    if group.rank < 2:
        with process_group(subgroup) as made:
            barrier(made)
    else:
        with pytest.raises(OptionError, match="not a rank of the given group"):
            process_group(subgroup)
    with pytest.raises(OptionError, match="needs axis=; it has replica, shard"):
        process_group(mesh)
    with pytest.raises(OptionError, match="no axis 'model'; it has replica, shard"):
        process_group(mesh, axis="model")
    with pytest.raises(OptionError, match=r"axis='shard' .* got a torch process group, which has"):
        process_group(dist.group.WORLD, axis="shard")
    return seen


def test_groups_come_from_torch_groups_and_meshes(workers: Workers) -> None:
    results = workers.run(_torch_groups)
    size = len(results)
    total = float(size * (size + 1) // 2)
    assert results == [
        [(rank, size, total), (0, 1, 1.0 + rank), (rank, size, total)] for rank in range(size)
    ]


def _native(group: Group) -> list[Tensor]:
    """The group of nccl, over gloo's native collectives. Inputs are small integers, because gloo
    adds in another order.
    """
    world = dist.group.WORLD
    assert world is not None
    with NativeGroup(
        world,
        dist.PrefixStore("native", world.get_group_store()),
        group.rank,
        group.size,
        RUN_S,
        None,
    ) as native:
        ops = [AllGather(), ReduceScatter(), AllReduce(), Broadcast(1), Reduce(0), AllToAll()]
        ops += [
            Permute(tuple((rank + 1) % group.size for rank in range(group.size))),
            Permute(tuple(range(group.size))),
            Permute((1, 0, *range(2, group.size))),
        ]
        results = []
        for op in ops:
            x = torch.arange(4.0 * group.size) + group.rank
            results.append(native.start(Collective(op), x).wait())
            expected = group.start(Collective(op), x).wait()
            assert torch.equal(results[-1], expected), op
            out = torch.empty_like(expected)
            assert native.start(Collective(op), x, out).wait() is out
            assert torch.equal(out, expected), op
        return results


def test_native_collectives_have_the_same_values(workers: Workers) -> None:
    workers.run(_native)


def _disagree(group: Group) -> str:
    with pytest.raises(SpecMismatch) as caught:
        check_same([LeafRecord("h.0.w", f"({3 + group.rank},) float32")], group, "params")
    return str(caught.value)


def test_a_disagreement_is_the_same_error_on_all_ranks(two: Workers) -> None:
    text = (
        "all ranks must hold the same params; leaf h.0.w is (3,) float32 on rank 0 and (4,) "
        "float32 on rank 1"
    )
    assert two.run(_disagree) == [text, text]


# Errors.


def _loss(group: Group, x: Tensor | None = None) -> Tensor:
    return group.start(
        Collective(AllReduce(), "loss", "step 3"), torch.ones(4) if x is None else x
    ).wait()


def _other_shape(group: Group) -> None:
    _loss(group, torch.ones(4 + group.rank))


def _other_dtype(group: Group) -> None:
    _loss(group, torch.ones(4, dtype=torch.int32 if group.rank else torch.float32))


def _swapped(group: Group) -> None:
    for name in ("a", "b") if group.rank == 0 else ("b", "a"):
        group.start(Collective(AllReduce(), name), torch.ones(4)).wait()


def _swapped_in_debug(group: Group) -> None:
    _swapped(checked(group))


def _skipped(group: Group) -> None:
    if group.rank == 0:
        group.start(
            Collective(AllGather(), "params", "bucket 2", Stream.PARAMS), torch.ones(4)
        ).wait()
    group.start(
        Collective(ReduceScatter(), "grads", "bucket 2", Stream.GRADS), torch.ones(4)
    ).wait()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            _other_shape,
            (
                "rank 0 started all_reduce 'loss' .step 3. of 4 float32.*rank 1 started all_reduce "
                "'loss' .step 3. of 5 float32"
            ),
        ),
        (_other_dtype, "rank 0 started .* of 4 float32.*rank 1 started .* of 4 int32"),
        (_swapped, "rank 0 started all_reduce 'a'.*rank 1 started all_reduce 'b'"),
        (
            _swapped_in_debug,
            (
                "rank 0 started collective 0: all_reduce 'a'.*rank 1 started collective 0: "
                "all_reduce 'b'"
            ),
        ),
        (
            _skipped,
            (
                "rank 0 in collective 0 .all_gather 'params' .bucket 2.*rank 1 in collective 0 "
                ".reduce_scatter 'grads' .bucket 2"
            ),
        ),
    ],
)
def test_different_collectives_are_named_on_both_ranks(
    two: Workers, program: Callable[[Group], None], message: str
) -> None:
    for outcome in two.outcomes(program):
        assert isinstance(outcome, BaseException)
        with pytest.raises(CollectiveMismatch, match=message):
            raise outcome


def _raises(group: Group) -> None:
    if group.rank == 1:
        raise ValueError("bad batch in shard 7")
    _loss(group)


def test_a_rank_that_raises_is_quoted_by_the_others(two: Workers) -> None:
    started = time.monotonic()
    waiting, raised = two.outcomes(_raises)
    assert isinstance(raised, ValueError)
    assert "in _raises" in raised.__notes__[0]
    message = (
        r"rank 0 lost rank 1 in collective \d+ of its stream .all_reduce 'loss' .step 3.*: "
        r"rank 1 raised ValueError: bad batch"
    )
    assert isinstance(waiting, BaseException)
    with pytest.raises(PeerLost, match=message):
        raise waiting
    assert time.monotonic() - started < 20


def test_run_raises_the_original_error(two: Workers) -> None:
    with pytest.raises(ValueError, match="bad batch") as caught:
        two.run(_raises)
    assert "raised on rank 1 of 2 processes" in caught.value.__notes__[0]
    assert any(note.startswith("rank 0 ended with PeerLost") for note in caught.value.__notes__)


def _dies(group: Group) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _loss(group)


def test_a_dead_rank_is_named(two: Workers) -> None:
    waiting, dead = two.outcomes(_dies)
    assert isinstance(dead, PeerLost)
    assert "rank 1 of 2 was killed by signal 9" in str(dead)
    assert isinstance(waiting, PeerLost)
    assert "rank 0 lost rank 1" in str(waiting)
    assert "'loss' (step 3)" in str(waiting)


def _dies_in_its_answer(group: Group) -> None:
    if group.rank == 1:
        for thing in gc.get_objects():
            if type(thing) is Connection and not thing.closed:
                # The length of an answer, and the first of its bytes.
                os.write(thing.fileno(), struct.pack("!ix", 100))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_while_it_sends_its_answer_is_named(two: Workers) -> None:
    with pytest.raises(PeerLost, match="rank 1 of 2 was killed by signal 9 in the middle of a run"):
        two.run(_dies_in_its_answer)


def _broadcast_for_ever(group: Group, started: list[float]) -> None:
    x = torch.ones(1 << 24)
    while True:
        started[:] = [time.monotonic()]
        group.start(Collective(Broadcast(1), "large"), x).wait()


def _dies_in_a_message(group: Group, delay_s: float) -> float:
    if group.rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started: list[float] = []
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        _broadcast_for_ever(group, started)
    return time.monotonic() - started[0]


@pytest.mark.parametrize(
    "delay_s",
    [0.05, *(pytest.param(delay_s, marks=pytest.mark.slow) for delay_s in (0.03, 0.07))],
)
def test_a_rank_that_dies_in_the_middle_of_a_message_is_noticed(delay_s: float) -> None:
    with processes(2, timeout_s=RUN_S, collective_timeout_s=15.0, shared_memory=False) as workers:
        waited_s, _ = workers.outcomes(_dies_in_a_message, delay_s)
    assert isinstance(waited_s, float), waited_s
    assert waited_s < 8.0


def _leaves(group: Group) -> None:
    if group.rank == 1:
        group.close()
        return
    _loss(group)


def test_a_rank_that_leaves_is_named(two: Workers) -> None:
    waiting, _ = two.outcomes(_leaves)
    assert isinstance(waiting, PeerLost)
    assert "left the group" in str(waiting)


def _fails_twice(group: Group) -> str:
    if group.rank == 1:
        raise ValueError("once")
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 raised ValueError: once"):
            _loss(group)
    group.close()
    with pytest.raises(OptionError, match="closed group"):
        _loss(group)
    return "done"


def test_a_broken_group_raises_the_same_error_again(two: Workers) -> None:
    assert two.outcomes(_fails_twice)[0] == "done"


def _differs_in_a_part(group: Group) -> int | None:
    size = group.size
    part = checked(group).subgroup([[0], list(range(1, size))])
    if group.rank:
        expected = r"rank 1 started .* of 1 float32.*; rank 2 started .* of 2 float32"
        with pytest.raises(CollectiveMismatch, match=expected) as caught:
            part.start(Collective(AllReduce()), torch.ones(group.rank)).wait()
        return caught.value.rank
    return None


def test_a_checked_part_names_the_ranks_of_the_whole_group() -> None:
    with processes(3, timeout_s=RUN_S) as workers:
        assert workers.run(_differs_in_a_part) == [None, 1, 2]


def _fails_in_debug(group: Group) -> str:
    with process_group(dist.group.WORLD, debug=True) as own:
        if group.rank == 1:
            raise ValueError("inside the context")
        with pytest.raises(PeerLost, match="rank 1 raised ValueError: inside the context"):
            _loss(own)
    return "reported"


def test_an_error_inside_a_wrapped_group_reaches_the_other_ranks(two: Workers) -> None:
    assert two.outcomes(_fails_in_debug)[0] == "reported"


def _stops(group: Group) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _loss(group)


@pytest.mark.parametrize(
    "shared_memory",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=needs_shared_memory)],
)
def test_a_stopped_rank_is_an_error_after_the_timeout(shared_memory: bool) -> None:
    # The watchdog looks every half second. Just when gloo gives up, the watchdog might find the
    # connection that gloo has closed, and report that.
    with processes(
        2, timeout_s=RUN_S, collective_timeout_s=1.75, grace_s=0.5, shared_memory=shared_memory
    ) as workers:
        waiting, stopped = workers.outcomes(_stops)
    assert isinstance(waiting, PeerLost)
    assert "rank 0 lost rank 1" in str(waiting)
    assert "no answer within 1.75 s" in str(waiting)
    assert isinstance(stopped, PeerLost)
    assert "was killed" in str(stopped)


def _add(group: Group, value: int) -> int:
    return int(group.start(Collective(AllReduce()), torch.tensor([value + group.rank])).wait())


def test_spawn_returns_results_in_rank_order() -> None:
    assert spawn(2, _add, 10, timeout_s=RUN_S) == [21, 21]


def test_no_process_is_left_after_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    process, started = multiprocessing.process.BaseProcess, []
    start = process.start

    def start_one(self: Any) -> None:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        start(self)
        started.append(self)

    with processes(2, timeout_s=60.0) as workers:
        monkeypatch.setattr(process, "start", start_one)
        with pytest.raises(OSError, match="temporarily unavailable"):
            workers.run(_add, 1)
        assert not set(started) & set(multiprocessing.active_children())
        monkeypatch.undo()
        assert workers.run(_add, 1) == [3, 3]


def test_functions_must_be_importable() -> None:
    with pytest.raises(OptionError, match="import the function by its name"):
        spawn(2, lambda group: None)


LAUNCHED = """
import torch, zfun.collectives as c
group = c.process_group(timeout_s=20)
total = group.start(c.Collective(c.AllReduce(), "loss"), torch.ones(2)).wait()
assert total.tolist() == [2.0, 2.0]
"""
FAILS = """
if group.rank == 1:
    raise ValueError("out of data")
group.start(c.Collective(c.AllReduce(), "loss"), torch.ones(2)).wait()
"""


@pytest.mark.slow
def test_a_program_under_a_launcher_ends_with_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """No resource is left to warn about."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert run_program(LAUNCHED, timeout_s=RUN_S) == [(0, "", "")] * 2


def test_a_program_under_a_launcher_ends_with_the_error_and_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception hook publishes uncaught errors; exit codes are not zero."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    waiting, raised = run_program(LAUNCHED + FAILS, timeout_s=RUN_S)
    assert waiting[0] == raised[0] == 1
    assert "PeerLost: rank 0 lost rank 1" in waiting[2]
    assert "rank 1 raised ValueError: out of data" in waiting[2]
    assert "Warning" not in waiting[2] + raised[2]
