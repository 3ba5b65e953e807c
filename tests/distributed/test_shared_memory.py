"""Collectives through shared memory: the bits of the simulation, no deadlock in any order of waits,
and no shared memory left behind.

Errors between ranks are tested for both transports in ``test_processes``.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import hashlib
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from tests.distributed import needs_shared_memory, processes
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    Workers,
    allocate,
    await_readers,
    barrier,
    is_symmetric,
    process_group,
    simulate,
)
from zfun.collectives.shm import _pages as pages
from zfun.collectives.shm import _rendezvous as rendezvous
from zfun.collectives.shm import _segment as segments
from zfun.collectives.shm._rendezvous import exchange_texts
from zfun.errors import CollectiveMismatch, OptionError, PeerLost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90), needs_shared_memory]

SLOW = pytest.mark.slow
RUN_S = 60.0
DTYPES = [
    *[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    *[torch.int64, torch.uint8, torch.bool, torch.complex64],
]
# No element, an input that fits in a record, and an input just too large for a record.
LENGTHS = [0, 1, 7, 895, 897]
LARGE = {torch.float32: 70_001, torch.bfloat16: 140_001}
# Elements of a piece that lies in whole pages.
PIECE = 3 * 4096


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)]
)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(request.param, timeout_s=RUN_S, shared_memory=True) as held:
        yield held


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with processes(2, timeout_s=RUN_S, collective_timeout_s=20.0, shared_memory=True) as held:
        yield held


def _values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + 10 * seed + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 100
    if dtype == torch.bool:
        return values > 0
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def _symmetric(group: Group, x: Tensor) -> Tensor:
    """Copy a tensor to a symmetric buffer, which other ranks read in place."""
    return allocate(group, x.numel(), x.dtype).copy_(x)


def _filled(group: Group, numel: int, value: float) -> Tensor:
    return allocate(group, numel, torch.float32).fill_(value)


def _gather(group: Group, x: Tensor, *, zero_copy: bool = True) -> Tensor:
    call = Collective(AllGather(), "params", stream=Stream.PARAMS, zero_copy=zero_copy)
    return group.start(call, x).wait()


def _fingerprint(x: Tensor) -> bytes:
    # Ranks return hashes, because sending the tensors would take longer than the steps.
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {x.numel()} ".encode() + hashlib.sha1(data).digest()


def _shared_bytes() -> int:
    """Return the shared memory that counts as this process's own, once for each mapped page."""
    found, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_shared = "memfd:zfun" in line
        elif is_shared and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def _reserved_bytes() -> int:
    """Return the memory of all segments that this process has open, mapped or not."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        # The descriptor of the folder itself is closed again.
        with contextlib.suppress(FileNotFoundError):
            if "memfd:zfun" in str(fd.readlink()):
                found += 512 * fd.stat().st_blocks
    return found


# Bits and order.


def _ops(size: int) -> list[Any]:
    turned = Permute(tuple((rank + 1) % size for rank in range(size)))
    swapped = Permute((1, 0, *range(2, size)))
    reduces = [Reduce(0), Reduce(size - 1)]
    sums = [ReduceScatter(), AllReduce()]
    return [AllGather(), *sums, Broadcast(size - 1), *reduces, AllToAll(), turned, swapped]


def _every_collective(group: Group) -> list[bytes]:
    size, rank = group.size, group.rank
    results = []
    for dtype in DTYPES:
        for numel in (*LENGTHS, LARGE.get(dtype, 2_001)):
            for op in _ops(size):
                x = _values(rank, numel * size if op.splits_input else numel, dtype)
                found = group.start(Collective(op, "x"), x).wait()
                out = torch.empty_like(found)
                assert group.start(Collective(op, "x"), _symmetric(group, x), out).wait() is out
                results += [found, out]
            x = _values(rank, numel, dtype)
            for op in (AllReduce(), Broadcast(0)):
                for held in (x.clone(), _symmetric(group, x)):
                    results.append(group.start(Collective(op, "x"), held, held).wait())
            for whole in (
                torch.empty(numel * size, dtype=dtype),
                allocate(group, numel * size, dtype),
            ):
                shard = whole.view(size, numel)[rank].copy_(x)
                results.append(group.start(Collective(AllGather(), "x"), shard, whole).wait())
    return [_fingerprint(result) for result in results]


def test_every_collective_has_the_bits_of_the_simulation(workers: Workers) -> None:
    real = workers.run(_every_collective)
    assert real == simulate(len(real), _every_collective)


def _random_program(group: Group, seed: int, num_calls: int, largest: int) -> list[bytes]:
    """Start the same collectives on all ranks, and wait in another order on each rank."""
    common, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    pending: list[tuple[int, Any]] = []
    kept: list[Tensor] = []
    digests: dict[int, bytes] = {}

    def wait_for_one() -> None:
        number, handle = pending.pop(own.randrange(len(pending)))
        result = handle.wait()
        digests[number] = _fingerprint(result)
        if own.random() < 0.1:
            kept.append(result[:1])
            del kept[:-20]

    limit = 1
    for number in range(num_calls):
        op = common.choice(_ops(group.size))
        dtype = common.choice(DTYPES)
        numel = int(largest ** common.random()) - 1
        stream = common.choice([Stream.PARAMS, Stream.GRADS, Stream.CONTROL])
        if common.random() < 0.3:
            numel = -(-numel // 4096) * 4096
        x = _values(
            group.rank, numel * group.size if op.splits_input else numel, dtype, seed=number
        )
        if own.random() < 0.3:
            x = _symmetric(group, x)
        out = x if isinstance(op, AllReduce) and own.random() < 0.3 else None
        call = Collective(op, "x", str(number), stream, zero_copy=own.random() < 0.5)
        pending.append((number, group.start(call, x, out)))
        if number % 40 == 0:
            limit = common.choice([1, 4, 30, 200])
        while len(pending) > limit:
            wait_for_one()
    while pending:
        wait_for_one()
    return [digests[number] for number in range(num_calls)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_program_with_any_order_of_waits_has_the_bits_of_the_simulation(
    workers: Workers, seed: int
) -> None:
    size = len(workers.run(_size))
    largest = 10_000 if size == 4 else 1_000_000 if seed else 400_000
    program = (seed, 300 if seed and size < 4 else 150, largest)
    found = workers.run(_random_program, *program)
    assert found == simulate(size, _random_program, *program)


def _size(group: Group) -> int:
    return group.size


def _finishes_late(group: Group) -> list[float]:
    """Rank 0 finishes a sum after the other ranks have gone on."""
    first = group.start(
        Collective(AllReduce(), "x", "first"), torch.full((5000,), 1.0 + group.rank)
    )
    if group.rank:
        first.wait()
    group.start(Collective(AllReduce(), "y", stream=Stream.PARAMS), torch.ones(1)).wait()
    time.sleep(0.0 if group.rank else 0.1)
    calls = [Collective(AllGather(), "z", str(i), Stream.GRADS) for i in range(5)]
    later = [group.start(call, torch.zeros(5000)) for call in calls]
    values = [float(first.wait().min()), float(first.wait().max())]
    for pending in later:
        pending.wait()
    return values


def test_a_late_rank_receives_every_result(workers: Workers) -> None:
    results = workers.run(_finishes_late)
    total = sum(range(1, len(results) + 1))
    assert results == [[total, total]] * len(results)


# Reuse of memory.


def _many_pending(group: Group) -> tuple[list[float], int]:
    """Start 500 collectives; one rank waits backwards and the other forwards."""
    taken = []
    for _ in range(4):
        calls = [Collective(AllReduce(), "x", str(i), Stream.GRADS) for i in range(500)]
        pending = [group.start(call, torch.full((2000,), float(i))) for i, call in enumerate(calls)]
        for handle in pending if group.rank else reversed(pending):
            handle.wait()
        values = [float(handle.wait()[-1]) for handle in pending]
        del pending, handle
        barrier(group)
        taken.append(_shared_bytes())
    return values, taken[3] - taken[1]


def test_a_stream_takes_any_number_of_collectives(two: Workers) -> None:
    for values, growth in two.run(_many_pending):
        assert values == [2.0 * i for i in range(500)]
        # Each round takes 6 MiB, in pages of 2 MiB.
        assert growth < 6 << 20


def _steps(group: Group) -> int:
    """Run the collectives of 50 steps, while a zero-copy result stays alive."""
    kept = _gather(group, _filled(group, PIECE, 1.0))
    taken = []
    for step in range(50):
        for numel in (1 << 18, 1 << 16):
            x = torch.full((numel,), float(step))
            gathered = _gather(group, x if step % 2 else _symmetric(group, x))
            assert gathered[:: numel // 2].tolist() == [float(step)] * 2 * group.size
            group.start(Collective(ReduceScatter(), "grads", stream=Stream.GRADS), gathered).wait()
        taken.append(_shared_bytes())
    assert kept.sum() == PIECE * group.size
    return max(taken[10:]) - max(taken[:10])


def test_shared_memory_is_reused(two: Workers) -> None:
    for growth in two.run(_steps):
        # In pages of 2 MiB; without reuse the growth would be 100 MiB.
        assert growth < 6 << 20


def _drops_before_wait(group: Group) -> int:
    """Drop each zero-copy result between the start of the next gather and the wait for it."""
    taken = []
    gathered: Tensor | None = None
    for step in range(60):
        x = _symmetric(group, torch.full((1 << 16,), float(step)))
        call = Collective(AllGather(), "params", stream=Stream.PARAMS, zero_copy=True)
        pending = group.start(call, x)
        gathered = None
        gathered = pending.wait()
        assert gathered[:: 1 << 15].tolist() == [float(step)] * 2 * group.size
        taken.append(_reserved_bytes())
    return max(taken[20:]) - max(taken[:20])


def test_shared_memory_is_reused_if_a_result_dies_before_the_next_wait(two: Workers) -> None:
    for growth in two.run(_drops_before_wait):
        # Both segments grow by 2 MiB at a time; without reuse the growth would be 20 MiB.
        assert growth < 6 << 20


def _frees_while_read(group: Group) -> list[float]:
    """Rank 0 frees a buffer before rank 1 has read the buffer."""
    x = _filled(group, 10_000, 7.0)
    pending = group.start(Collective(Broadcast(0), "x", stream=Stream.PARAMS), x)
    del x
    if group.rank == 0:
        pending.wait()
        del pending
        others = [_filled(group, 10_000, 0.0) for _ in range(5)]
        barrier(group)
        return [float(sum(other.sum() for other in others))]
    barrier(group)
    return pending.wait().unique().tolist()


def test_a_freed_buffer_waits_for_readers(two: Workers) -> None:
    assert two.run(_frees_while_read) == [[0.0], [7.0]]


# Zero-copy results.


def _gathers_zero_copy(group: Group) -> None:
    """Zero-copy results have the bits of copies, and are the very memory of a symmetric buffer."""
    for step in range(3):
        x = _symmetric(group, _values(group.rank, PIECE, torch.float32, step))
        gathered = _gather(group, x)
        assert torch.equal(gathered, _gather(group, x, zero_copy=False))
        assert torch.equal(gathered, _gather(group, x.clone()))
        barrier(group)
        own = gathered.view(group.size, PIECE)[group.rank]
        x[0] = own[1] = 99.0 + step
        assert own[0] == x[1] == 99.0 + step
        # Pieces that are no whole pages are copied.
        assert torch.equal(_gather(group, x[1:]), _gather(group, x[1:], zero_copy=False))
        barrier(group)


def test_a_zero_copy_gather_shows_the_memory_of_the_ranks(workers: Workers) -> None:
    workers.run(_gathers_zero_copy)


def _keeps_a_view(group: Group) -> list[float]:
    x = _filled(group, PIECE, 1.0 + group.rank)
    gathered = _gather(group, x)
    kept = gathered[PIECE - 1 : PIECE + 1]
    time.sleep(0.0 if group.rank else 0.1)
    assert gathered.sum() == PIECE * sum(range(1, group.size + 1))
    await_readers(group, [x])
    x += 10
    barrier(group)
    expected = [11.0 + rank for rank in range(group.size)]
    assert _gather(group, x)[::PIECE].tolist() == expected
    return kept.tolist()


def test_the_values_of_a_kept_view_do_not_change(workers: Workers) -> None:
    results = workers.run(_keeps_a_view)
    assert results == [[1.0, 2.0]] * len(results)


def _updates(group: Group, update: str) -> None:
    """A donated update of symmetric shards waits for the ranks that still read the shards."""
    params = zf.shard({"w": torch.ones(group.size * PIECE)}, group)
    optimizer = zf.shard_optimizer(zf.optim.sgd(1.0), group)
    state = optimizer.init(params)
    grads = params.with_buffers(torch.ones_like(shard) for shard in params.buffers)
    gathered = _gather(group, params.buffers[0])
    time.sleep(0.1 if group.rank else 0.0)
    assert gathered.sum() == group.size * PIECE
    if update == "apply":
        new, _ = zf.apply(optimizer, grads, state, params, donate=True)
    else:
        new, _ = optimizer.apply(grads, state, params, donate=True)
    barrier(group)
    assert new.buffers[0].sum() == 0


@pytest.mark.parametrize("update", ["apply", "shard_optimizer"])
def test_a_donated_update_waits_for_readers(workers: Workers, update: str) -> None:
    workers.run(_updates, update)


def _writes_through(group: Group) -> None:
    """An update writes to this rank's piece of a zero-copy result, step after step."""
    gathered = _gather(group, torch.full((PIECE,), float(group.rank)))
    for step in range(3):
        own = gathered.view(group.size, PIECE)[group.rank]
        await_readers(group, [own])
        own += 1
        time.sleep(0.02 * group.rank)
        gathered = _gather(group, own)
        assert gathered[::PIECE].tolist() == [step + 1.0 + rank for rank in range(group.size)]


def test_an_update_writes_this_ranks_piece_in_place(workers: Workers) -> None:
    workers.run(_writes_through)


def _writes_all(group: Group) -> list[float]:
    """Writing to a whole zero-copy result makes the result private to this rank."""
    x = _filled(group, PIECE, 1.0 + group.rank)
    gathered = _gather(group, x)
    await_readers(group, [gathered])
    gathered += 10.0 * (1 + group.rank)
    barrier(group)
    return [*gathered[::PIECE].tolist(), *x[:1].tolist()]


def test_a_zero_copy_result_that_is_written_becomes_private(two: Workers) -> None:
    assert two.run(_writes_all) == [[11.0, 12.0, 1.0], [21.0, 22.0, 2.0]]


def _in_place(group: Group) -> list[float]:
    """A loss that writes to a zero-copy result by mistake changes no other rank's memory."""
    x = _filled(group, PIECE, 1.0 + group.rank)
    gathered = _gather(group, x)
    barrier(group)
    gathered.view(group.size, PIECE)[1 - group.rank] = 50.0
    barrier(group)
    return x[:1].tolist()


def test_writing_to_a_peers_piece_changes_no_memory_of_the_peer(two: Workers) -> None:
    assert two.run(_in_place) == [[1.0], [2.0]]


def _drops_results(group: Group) -> dict[str, int]:
    """Return the shared memory that a rank has mapped, beyond the rank's own buffers."""
    numel, found = 1 << 21, {}
    x = _filled(group, numel, 1.0 + group.rank)
    barrier(group)
    before = _shared_bytes()
    gathered = _gather(group, x)
    assert gathered.sum() == 3 * numel
    kept = gathered.view(2, -1)[:, 0]
    found["held"] = _shared_bytes() - before
    del gathered
    assert kept.tolist() == [1.0, 2.0]
    found["held by a view"] = _shared_bytes() - before
    del kept
    found["dropped"] = _shared_bytes() - before
    barrier(group)
    out = torch.empty(numel // 2)
    assert group.start(Collective(ReduceScatter(), "grads"), x, out).wait().sum() == 3 * numel // 2
    found["summed"] = _shared_bytes() - before
    return found


def test_a_dropped_zero_copy_result_is_unmapped(two: Workers) -> None:
    slack = 1 << 19
    for found in two.run(_drops_results):
        # The peer's piece, and a second mapping of this rank's piece.
        assert abs(found["held"] - (16 << 20)) < slack
        assert abs(found["held by a view"] - (16 << 20)) < slack
        assert found["dropped"] < slack
        assert found["summed"] < slack


def _cannot_map(group: Group) -> list[float]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    x = _filled(group, PIECE, float(group.rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages.Pages, "show", refuse)
        whole = _gather(group, x)
    await_readers(group, [x])
    x += 1
    barrier(group)
    return whole[::PIECE].tolist()


def test_pieces_that_cannot_be_mapped_are_copied(two: Workers) -> None:
    assert two.run(_cannot_map) == [[0.0, 1.0]] * 2


# The end of a group.


def _outlive(group: Group) -> list[float]:
    own = process_group(dist.group.WORLD, shared_memory=True)
    x = _filled(own, PIECE, 2.0 + group.rank)
    gathered = _gather(own, x)
    kept = gathered[PIECE - 1 : PIECE + 1]
    barrier(own)
    pending = own.start(Collective(AllGather()), torch.ones(5000))
    barrier(own)
    own.close()
    assert len(allocate(own, 5, torch.float32)) == 5
    with pytest.raises(OptionError, match="closed group"):
        barrier(own)
    with pytest.raises(OptionError, match="closed group"):
        await_readers(own, [x])
    with pytest.raises(OptionError, match="closed group"):
        pending.wait()
    del own, gathered
    return [*kept.tolist(), *x[:1].tolist()]


def _num_mapped(group: Group) -> int:
    # A caught error keeps the variables of the test alive.
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:zfun" in line for line in lines)


def test_only_tensors_outlive_the_group(two: Workers) -> None:
    before = two.run(_num_mapped)
    assert two.run(_outlive) == [[2.0, 3.0, 2.0], [2.0, 3.0, 3.0]]
    assert two.run(_num_mapped) == before


def _names() -> set[str]:
    """Return zfun's names of shared memory and sockets that no process of another run has open."""
    sockets = {
        line.split()[6]: line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "zfun-" in line
    }
    running = (process for process in Path("/proc").iterdir() if process.name.isdigit())
    others = set().union(*(_sockets_of(int(process.name)) for process in running))
    names = {name for inode, name in sockets.items() if inode not in others}
    return names | {str(path) for path in Path("/dev/shm").iterdir()}


def _sockets_of(process: int) -> set[str]:
    """The sockets of a process of another run."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        if os.getpgid(process) != os.getpgrp():
            for fd in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _all_die(group: Group) -> None:
    gathered = _gather(group, _filled(group, PIECE, 1.0))
    assert gathered.sum() == gathered.numel()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("program", [_size, _all_die])
def test_no_shared_memory_names_remain_after_the_processes(program: Callable[[Group], Any]) -> None:
    before = _names()
    with processes(2, timeout_s=RUN_S, shared_memory=True) as workers:
        workers.outcomes(program)
        assert not {name for name in _names() - before if name.startswith("/dev/shm")}
    assert _names() <= before


# Steps.


def _loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return (batch @ params["w"] + params["b"]).square().mean()


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(400, 700, generator=generator),
        "b": torch.randn(700, generator=generator),
    }


def _aux_steps(group: Group, stage: int) -> list[bytes]:
    """Take steps and keep the results; at stage 3 aux is a view of gathered parameters."""

    def loss(params: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
        part = params["w"][:200]
        return _loss(params, batch), part if stage == 3 else part * 1.0

    z = zf.zero(stage, loss, zf.optim.adamw(0.1), group, bucket_bytes=4096)
    state, kept = z.init(_params()), []
    for step in range(4):
        state, info = z.step(state, torch.full((400,), 1.0 + group.rank + step))
        kept += [info.aux, *z.params(state).values()]
        time.sleep(0.02 * group.rank)
    # The loss of a step sees the parameters that the previous step left.
    assert torch.equal(kept[3], kept[1][:200])
    return [_fingerprint(x) for x in kept]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_have_the_bits_of_the_simulation(two: Workers, stage: int) -> None:
    found = two.run(_aux_steps, stage)
    assert found == simulate(2, _aux_steps, stage)
    # The other 3 of the 12 share memory with kept parameters.
    assert len(set(found[0])) == 12


def _mixed_steps(group: Group, stage: int) -> list[bytes]:
    """Train with zero-copy buckets between buckets that are copied."""
    lengths = (4096, 768, 16384, 3072, 65536) * 2
    params = {f"w{i}": torch.arange(n, dtype=torch.float32) + i for i, n in enumerate(lengths)}
    loss = lambda params, batch: sum(((x - batch * x[1]) ** 2).mean() for x in params.values())
    z = zf.zero(stage, loss, zf.optim.adamw(0.1), group, bucket_bytes=4096)
    state, kept = z.init(params), []
    for step in range(3):
        state, info = z.step(state, torch.tensor(1.0 + group.rank + step))
        kept += [info.loss.reshape(1), *z.params(state).values()]
    return [_fingerprint(x) for x in kept]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_copy_gathers_and_copies_may_alternate(two: Workers, stage: int) -> None:
    assert two.run(_mixed_steps, stage) == simulate(2, _mixed_steps, stage)


def _pure_steps(group: Group, stage: int) -> list[bytes]:
    """Without donation no old value ever changes."""
    z = zf.zero(stage, _loss, zf.optim.adamw(0.1), group, donate=False)
    states = [z.init(_params())]
    for step in range(3):
        batch = torch.full((400,), 1.0 + group.rank + step)
        states.append(z.step(states[-1], batch)[0])
    prints = lambda state: [_fingerprint(leaf) for leaf in z.params(state).values()]
    found = [prints(state) for state in states]
    assert found == [prints(state) for state in reversed(states)][::-1]
    assert len({text for texts in found for text in texts}) == 8
    return [text for texts in found for text in texts]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_old_values_never_change(two: Workers, stage: int) -> None:
    assert two.run(_pure_steps, stage) == simulate(2, _pure_steps, stage)


def _copied_steps(group: Group, stage: int) -> list[bytes]:
    """A copy of a state keeps the values, and trains on."""
    z = zf.zero(stage, _loss, zf.optim.adamw(0.1), group)
    step = lambda state, number: z.step(state, torch.full((400,), 1.0 + group.rank + number))[0]
    prints = lambda state: [_fingerprint(leaf) for leaf in z.params(state).values()]
    state = step(z.init(_params()), 0)
    copied, before = copy.deepcopy(state), prints(state)
    state = step(step(state, 1), 2)
    assert prints(copied) == before
    found = prints(step(step(copied, 1), 2))
    assert found == prints(state) != before
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_copy_of_a_state_trains_on(two: Workers, stage: int) -> None:
    assert two.run(_copied_steps, stage) == simulate(2, _copied_steps, stage)


def _two_models(group: Group, stages: tuple[int, int]) -> list[bytes]:
    """Two models take turns: one is updated while gathered buckets of the other are alive."""
    models = [zf.zero(stage, _loss, zf.optim.adamw(0.1), group) for stage in stages]
    states = [z.init(_params()) for z in models]
    for step in range(6):
        turn = step % 3 % 2
        batch = torch.full((400,), 1.0 + group.rank + step)
        states[turn], _ = models[turn].step(states[turn], batch)
        time.sleep(0.01 * group.rank)
    wholes = [z.params(state) for z, state in zip(models, states, strict=True)]
    return [_fingerprint(x) for whole in wholes for x in whole.values()]


@pytest.mark.parametrize("stages", [(1, 1), (3, 1), (2, 3)])
def test_two_models_may_take_turns(two: Workers, stages: tuple[int, int]) -> None:
    assert two.run(_two_models, stages) == simulate(2, _two_models, stages)


def _changes_optimizer(group: Group, stage: int) -> list[bytes]:
    """Another optimizer takes over whole parameters that ``zero`` made; one rank is late."""
    loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
    z, rule = zf.zero(stage, loss, zf.optim.adamw(0.1), group), zf.optim.adamw(0.1)
    weights = {"w": torch.arange(1 << 20, dtype=torch.float32) % 7}
    state, _ = z.step(z.init(weights), torch.tensor(1.0 + group.rank))
    params = state.params
    opt_state = state.opt_state if stage == 0 else rule.init(params)
    vg = zf.data_parallel(zf.value_and_grad(loss), group)
    for _ in range(3):
        _, grads = vg(params, torch.tensor(2.0 + group.rank))
        grads = zf.redistribute(grads, zf.R, group)
        time.sleep(0.05 * group.rank)
        params, opt_state = zf.apply(rule, grads, opt_state, params, donate=True)
    return [_fingerprint(zf.unshard(x)["w"]) for x in (params, opt_state.mu, opt_state.nu)]


@pytest.mark.parametrize("stage", [0, 1])
def test_another_optimizer_may_take_over_whole_parameters(two: Workers, stage: int) -> None:
    assert two.run(_changes_optimizer, stage) == simulate(2, _changes_optimizer, stage)


def _resident_steps(group: Group, reuse_distance: int | None) -> tuple[list[int], list[int]]:
    """Return the shared memory that is mapped in the last step, by layer, and after each step."""
    layers: list[int] = []
    steps: list[int] = []

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        layers.clear()
        for w in params:
            x = torch.tanh(x @ w)
            layers.append(_shared_bytes())
        return x.square().mean()

    schedule = zf.ScheduleOptions(reuse_distance=reuse_distance)
    z = zf.zero(3, loss, zf.optim.adamw(0.1), group, bucket_bytes=3 << 20, schedule=schedule)
    state = z.init([torch.eye(512) for _ in range(16)])
    for _ in range(8):
        state, _ = z.step(state, torch.ones(4, 512))
        steps.append(_shared_bytes())
    return layers, steps


@pytest.mark.slow
@pytest.mark.parametrize(("reuse_distance", "staying"), [(0, 0), (None, 1)])
def test_a_loss_maps_only_the_buckets_in_use(
    two: Workers, reuse_distance: int | None, staying: int
) -> None:
    for layers, steps in two.run(_resident_steps, reuse_distance):
        # At the end of the loss the last bucket is mapped, and the one before it where that stays.
        assert layers[-1] - layers[2] < (1 + staying) * (3 << 20)
        assert max(steps[4:]) - max(steps[:4]) < 6 << 20


def _uses_an_autograd_function(group: Group) -> None:
    """Give an ``autograd.Function`` a lazy leaf in a step whose order of use is known."""

    def loss(params: dict[str, Tensor], step: int) -> Tensor:
        w = params["w"] * 2 if step < 2 else _Twice.apply(params["w"])
        return (w * params["x"]).sum()

    z = zf.zero(3, loss, zf.optim.adamw(0.1), group, bucket_bytes=4096)
    state = z.init({"w": torch.ones(1 << 15), "x": torch.ones(1 << 15)})
    for step in range(3):
        state, _ = z.step(state, step)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_a_lazy_leaf_in_an_autograd_function_is_an_error_in_later_steps(two: Workers) -> None:
    with pytest.raises(
        zf.errors.PlacementError, match=r"takes whole tensors; got the lazy leaf .*w.*"
    ):
        two.run(_uses_an_autograd_function)


# Faults.


def _dies_and_leaves_a_child(group: Group) -> str:
    """A child of the dead rank keeps the rank's connections open."""
    barrier(group)
    if group.rank == 1:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1 .*its process has ended"):
        barrier(group)
    assert time.monotonic() - started < 4.5
    return "noticed"


@pytest.mark.slow
def test_a_dead_rank_is_noticed_at_once(two: Workers) -> None:
    assert two.outcomes(_dies_and_leaves_a_child)[0] == "noticed"


def _reader_stops(group: Group) -> str:
    x = _filled(group, 1 << 16, 0.0)
    pending = group.start(Collective(AllReduce(), "grads", "bucket 1"), x)
    group.start(Collective(AllReduce(), "loss", stream=Stream.GRADS), torch.ones(1)).wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pending.wait()
    expected = r"rank 0 lost rank 1 in collective .*'grads' .bucket 1.*no answer within 1 s"
    with pytest.raises(PeerLost, match=expected):
        await_readers(group, [x])
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        barrier(group)
    return "noticed"


@pytest.mark.slow
def test_a_reader_that_stops_is_noticed() -> None:
    # The stopped rank is killed at the end of the run.
    options = {"timeout_s": 12.0, "collective_timeout_s": 1.0, "shared_memory": True}
    with processes(2, **options) as workers:
        assert workers.outcomes(_reader_stops)[0] == "noticed"


def _two_roots(group: Group) -> None:
    for i in range(200):
        group.start(Collective(Broadcast(group.rank), "x", str(i)), torch.ones(1)).wait()


def test_broadcasts_from_two_roots_are_a_mismatch(two: Workers) -> None:
    for outcome in two.outcomes(_two_roots):
        assert isinstance(outcome, CollectiveMismatch), outcome
        assert "rank 0 started broadcast from rank 0 'x' (0)" in str(outcome)
        assert "rank 1 started broadcast from rank 1 'x' (0)" in str(outcome)


def _mismatch_with_others_pending(held: Group) -> str:
    group = process_group(dist.group.WORLD, shared_memory=True)
    calls = [Collective(AllReduce(), "x", str(i), Stream.PARAMS) for i in range(2 - group.rank)]
    others = [group.start(call, torch.ones(4)) for call in calls]
    started = time.monotonic()
    expected = r"rank 0 started .* of 4 float32 .*rank 1 started .* of 5 float32"
    with pytest.raises(CollectiveMismatch, match=expected):
        group.start(Collective(AllReduce(), "y"), torch.ones(4 + group.rank)).wait()
    others[0].wait()
    for pending in others[1:]:
        with pytest.raises(CollectiveMismatch):
            pending.wait()
    with pytest.raises(CollectiveMismatch):
        barrier(group)
    assert time.monotonic() - started < 5
    group.close()
    return "reported"


def test_a_broken_group_raises_without_a_wait(two: Workers) -> None:
    assert two.run(_mismatch_with_others_pending) == ["reported"] * 2


# Choice of the transport.


def _uses_shared_memory(group: Group, options: list[bool | None]) -> bool | str:
    try:
        with process_group(dist.group.WORLD, shared_memory=options[group.rank]) as own:
            barrier(own)
            return is_symmetric(own)
    except OptionError as error:
        return str(error)


def test_ranks_use_shared_memory_only_if_all_of_them_can(workers: Workers) -> None:
    size = len(workers.run(_size))
    assert workers.run(_uses_shared_memory, [None] * size) == [True] * size
    assert workers.run(_uses_shared_memory, [False] * size) == [False] * size
    assert workers.run(_uses_shared_memory, [None] * (size - 1) + [False]) == [False] * size
    assert workers.run(_uses_shared_memory, [True] * (size - 1) + [None]) == [True] * size


def _lacks(group: Group, missing: str, option: bool | None) -> bool | str:
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            match missing:
                case "memory":
                    patch.setattr(os, "posix_fallocate", _no_space)
                case "machine":
                    patch.setattr(platform, "machine", lambda: "aarch64")
                case "host":
                    patch.setattr(rendezvous, "host_name", lambda: "elsewhere")
                case "socket":
                    patch.setattr(rendezvous, "_credentials", lambda _: (0, os.getuid() + 1))
        patch.setattr(rendezvous, "_RENDEZVOUS_S", 0.25)
        return _uses_shared_memory(group, [option] * group.size)


def _no_space(*args: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("memory", "rank 1 cannot take part: memory cannot be mapped there: .*No space left"),
        ("machine", "rank 1 cannot take part: its processor .aarch64. may reorder stores"),
        ("host", "ranks 0 and 1 are on different hosts"),
        ("socket", "cannot map the memory of the others"),
    ],
)
def test_gloo_takes_over_where_ranks_cannot_share_memory(
    two: Workers, missing: str, why: str
) -> None:
    assert two.run(_lacks, missing, None) == [False] * 2
    expected = f"shared_memory=True needs ranks that can share memory; .*{why}"
    for text in two.run(_lacks, missing, True):
        with pytest.raises(OptionError, match=expected):
            raise OptionError(str(text))


def _fails_to_meet(group: Group, fault: str, timeout_s: float) -> tuple[str, int]:
    """Return the error of a rendezvous, and how many descriptors stay open."""
    before, text = _num_descriptors(), ""
    with pytest.MonkeyPatch.context() as patch:
        match fault, group.rank:
            case "unmapped", 0:
                patch.setattr(rendezvous, "Peer", _but_not_rank_2)
            case "foreign" | "in turn", 0:
                patch.setattr(segments, "_MAGIC", 1)
            case "silent", 0:
                patch.setattr(rendezvous, "exchange_texts", _but_not_mapped)
        if fault == "in turn":
            # Rank 2 has failed when rank 1 answers rank 2, and then rank 0.
            for name, late, delay_s in (("_exchange_segments", 0, 0.1), ("_credentials", 1, 0.3)):
                if group.rank == late:
                    patch.setattr(rendezvous, name, _after(delay_s, getattr(rendezvous, name)))
        try:
            process_group(dist.group.WORLD, shared_memory=True, timeout_s=timeout_s)
        except (OptionError, PeerLost) as error:
            text = str(error)
    return text, _num_descriptors() - before


def _num_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def _but_not_rank_2(fd: int, rank: int, *args: Any) -> segments.Peer:
    if rank == 2:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    return segments.Peer(fd, rank, *args)


def _after(delay_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        time.sleep(delay_s)
        return function(*args)

    return call


def _but_not_mapped(store: Any, key: str, *args: Any, **kwargs: Any) -> list[str]:
    if key == "mapped":
        raise TimeoutError("a rank did not join the group")
    return exchange_texts(store, key, *args, **kwargs)


def test_a_rendezvous_that_fails_leaves_no_descriptor() -> None:
    with processes(3, timeout_s=RUN_S, shared_memory=False) as workers:
        # The first attempt opens what stays open.
        workers.run(_fails_to_meet, "foreign", 20.0)
        for fault, timeout_s, why in (
            ("unmapped", 20.0, "rank 0 cannot map the memory of the others"),
            ("foreign", 20.0, "another program answered"),
            ("in turn", 5.0, "another program answered"),
            ("silent", 0.5, "every rank makes the group; rank . lost rank"),
        ):
            for text, left in workers.run(_fails_to_meet, fault, timeout_s):
                with pytest.raises(OptionError, match=why):
                    raise OptionError(text)
                assert left == 0


def _lacks_memory(group: Group) -> float:
    with process_group(dist.group.WORLD, shared_memory=True) as own:
        barrier(own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", _no_space)
            # allocate() then falls back to memory that is not shared.
            assert allocate(own, 10 << 20, torch.uint8).numel() == 10 << 20
            expected = r"no shared memory for 41943040 bytes .*pass shared_memory=False"
            with pytest.raises(OptionError, match=expected):
                own.start(Collective(AllReduce()), torch.ones(10 << 20))
        # No message was sent, so the group still works.
        return own.start(Collective(AllReduce()), torch.ones(10 << 20)).wait()[-1].item()


def test_missing_shared_memory_is_an_error_at_the_start(two: Workers) -> None:
    assert two.run(_lacks_memory) == [2.0, 2.0]


def _lacks_a_record(group: Group) -> float:
    with process_group(dist.group.WORLD, shared_memory=True) as own:
        barrier(own)
        x = _filled(own, PIECE, 1.0)
        call = Collective(AllReduce(), "x", stream=Stream.PARAMS)
        # These take the records to spare.
        other = Collective(AllReduce(), "other", stream=Stream.CONTROL)
        works = [own.start(other, torch.ones(1)) for _ in range(40)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", _no_space)
            # These fill the segment, so that the record of a collective has no page.
            held = [allocate(own, 4096, torch.uint8) for _ in range(1024)]
            with pytest.raises(OptionError, match="no shared memory for 49152 bytes"):
                own.start(call, x)
            del held
        assert [work.wait().item() for work in works] == [2.0] * 40
        own.start(call, x).wait()
        await_readers(own, [x])
        x += 1
        return own.start(call, x).wait()[-1].item()


def test_a_collective_that_could_not_start_leaves_no_reader(two: Workers) -> None:
    assert two.run(_lacks_a_record) == [4.0, 4.0]
