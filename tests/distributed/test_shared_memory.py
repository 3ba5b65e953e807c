"""Collectives through shared memory: the bits of the simulation, no order of waits that blocks, and nothing left over.

What goes wrong between ranks is tested for both transports in ``test_processes``.
"""

from __future__ import annotations

import contextlib
import errno
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
    Call,
    Group,
    Lane,
    Permute,
    Reduce,
    ReduceScatter,
    Workers,
    checked,
    process_group,
    record,
    simulate,
    single_group,
)
from zfun.collectives import _leases as leases
from zfun.collectives import _meeting as meeting
from zfun.collectives import _reading as reading
from zfun.collectives import _region as region
from zfun.collectives import _room as room
from zfun.collectives import _segment as segment
from zfun.collectives._process import _SharedGroup
from zfun.collectives._shared import SharedMemory
from zfun.errors import CollectiveMismatch, OptionError, PeerLost
from zfun.flat import Flat

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90), needs_shared_memory]

RUN_S = 60.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
# Nothing, in the slot of the record, just about in it, and (for some) in several chunks of a sum.
LENGTHS = [0, 1, 7, 895, 897]
LARGE = {torch.float32: 70_001, torch.bfloat16: 140_001}


@pytest.fixture(scope="module", params=[2, 3, 4])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(request.param, timeout_s=RUN_S, shared_memory=True) as held:
        yield held


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    with processes(2, timeout_s=RUN_S, collective_timeout_s=20.0, shared_memory=True) as held:
        yield held


def _memory(group: Group) -> SharedMemory:
    assert isinstance(group, _SharedGroup)
    return group._memory


def _values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + 10 * seed + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 100
    return values > 0 if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def _ops(size: int) -> list[AllGather | ReduceScatter | AllReduce | Broadcast | Reduce | AllToAll | Permute]:
    turned = Permute(tuple((rank + 1) % size for rank in range(size)))
    swapped = Permute((1, 0, *range(2, size)))
    return [AllGather(), ReduceScatter(), AllReduce(), Broadcast(size - 1), Reduce(0), Reduce(size - 1), AllToAll(), turned, swapped]


def _every_collective(group: Group) -> list[Tensor]:
    size, rank = group.size, group.rank
    results = []
    for dtype in DTYPES:
        for numel in (*LENGTHS, LARGE.get(dtype, 2_001)):
            for op in _ops(size):
                x = _values(rank, numel * size if op.splits_input else numel, dtype)
                results.append(group.start(Call(op, "x"), x).wait())
                held = group.buffer(x.numel(), dtype).copy_(x)
                out = torch.empty_like(results[-1])
                assert group.start(Call(op, "x"), held, out).wait() is out
                results.append(out)
            for op in (AllReduce(), Broadcast(0)):
                inputs = (_values(rank, numel, dtype), group.buffer(numel, dtype).copy_(_values(rank, numel, dtype)))
                results.extend(group.start(Call(op, "x"), x, x).wait() for x in inputs)
            for whole in (torch.empty(numel * size, dtype=dtype), group.buffer(numel * size, dtype)):
                shard = whole.view(size, numel)[rank].copy_(_values(rank, numel, dtype))
                results.append(group.start(Call(AllGather(), "x"), shard, whole).wait().clone())
    return [result.clone() for result in results]


def test_every_collective_has_the_bits_of_the_simulation(workers: Workers) -> None:
    real = workers.run(_digests)
    assert real == simulate(len(real), _digests)


def _digests(group: Group) -> list[bytes]:
    # The tensors themselves would take longer to travel than to compute.
    return [_fingerprint(result) for result in _every_collective(group)]


def _fingerprint(x: Tensor) -> bytes:
    return f"{x.dtype} {x.numel()} ".encode() + hashlib.sha1(x.view(torch.uint8).numpy().tobytes()).digest()


def _let_go_of_all(patch: pytest.MonkeyPatch) -> None:
    """Let nothing stay mapped that is not looked at, however small."""
    for module, name in ((leases, "_IDLE_BYTES"), (leases, "_SMALL_BYTES"), (reading, "_UNMAPPED_BYTES"), (room, "_FREE_BYTES")):
        patch.setattr(module, name, 0)


def _random_program(group: Group, seed: int, num_calls: int, largest: int) -> list[bytes]:
    """Start what the seed says, the same on all ranks; keep, wait, free and lend as each rank likes."""
    if seed % 2:
        with pytest.MonkeyPatch.context() as patch:
            _let_go_of_all(patch)
            if isinstance(group, _SharedGroup):
                # As if small pieces were made of huge pages, or none were.
                patch.setattr(segment, "_LARGE_BYTES", 0)
                patch.setattr(region, "_LARGE_BYTES", 0)
                patch.setattr(_memory(group)._segment, "is_huge", seed % 4 == 1)
            return _random_program_of(group, seed, num_calls, largest)
    return _random_program_of(group, seed, num_calls, largest)


def _random_program_of(group: Group, seed: int, num_calls: int, largest: int) -> list[bytes]:
    common, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    pending: list[tuple[int, object]] = []
    digests: dict[int, bytes] = {}

    def wait_for_one() -> None:
        number, handle = pending.pop(own.randrange(len(pending)))
        digests[number] = _fingerprint(handle.wait())  # type: ignore[attr-defined]

    limit = 1
    for number in range(num_calls):
        op = common.choice(_ops(group.size))
        dtype = common.choice(DTYPES)
        numel = int(largest ** common.random()) - 1
        lane = common.choice([Lane.PARAMS, Lane.GRADS, Lane.CONTROL])
        borrow = common.random() < 0.3
        if borrow:  # shards of whole pages
            numel = -(-numel // (4096 * group.size)) * 4096 * group.size
        x = _values(group.rank, numel * group.size if op.splits_input else numel, dtype, seed=number)
        if own.random() < 0.3:
            x = group.buffer(x.numel(), dtype).copy_(x)
        out = None
        if isinstance(op, AllReduce) and not borrow and own.random() < 0.3:
            out = x
        pending.append((number, group.start(Call(op, "x", str(number), lane, borrow), x, out)))
        if number % 40 == 0:
            limit = common.choice([1, 4, 30, 200])
        while len(pending) > limit:
            wait_for_one()
    while pending:
        wait_for_one()
    return [digests[number] for number in range(num_calls)]


@pytest.mark.parametrize("seed", range(2))
def test_any_program_with_any_order_of_waits_has_the_bits_of_the_simulation(workers: Workers, seed: int) -> None:
    size = len(workers.run(_size))
    num_calls, largest = (300, 1_000_000) if size < 4 else (150, 10_000)
    assert workers.run(_random_program, seed, num_calls, largest) == simulate(size, _random_program, seed, num_calls, largest)


def _size(group: Group) -> int:
    return group.size


def _many_pending(group: Group) -> tuple[list[float], int, int]:
    """More calls under way than there are slots, waited for backwards by one rank and forwards by the other."""
    reserved = []
    for _ in range(3):
        pending = [group.start(Call(AllReduce(), "x", str(i), Lane.GRADS), torch.full((2000,), float(i))) for i in range(500)]
        results = {i: pending[i].wait() for i in (range(500) if group.rank else reversed(range(500)))}
        values = [float(results[i][-1]) for i in range(500)]
        group.barrier()
        reserved.append(_memory(group).reserved)
    return values, reserved[1], reserved[2]


def test_lanes_grow_and_are_used_again(two: Workers) -> None:
    for values, second, third in two.run(_many_pending):
        assert values == [2.0 * i for i in range(500)]
        assert second == third < 20 << 20


def _steps(group: Group) -> list[int]:
    taken = []
    group.barrier()
    before = _memory(group).in_use
    for step in range(50):
        for numel in (1 << 18, 1 << 16):
            gathered = group.start(Call(AllGather(), "params", lane=Lane.PARAMS), torch.full((numel,), float(step))).wait()
            assert gathered.tolist()[:: numel // 2] == [float(step)] * 2 * group.size
            group.start(Call(ReduceScatter(), "grads", lane=Lane.GRADS), gathered).wait()
        taken.append(_memory(group).reserved)
    group.barrier()
    return [taken[5], taken[-1], _memory(group).in_use - before]


def test_memory_is_used_again(two: Workers) -> None:
    for early, late, in_use in two.run(_steps):
        assert early == late < 20 << 20
        # What may remain are the slots of three lanes.
        assert in_use < 1 << 20


def _ahead(group: Group) -> list[float]:
    """A rank that finishes later than the others does not lose its own term, nor they theirs."""
    first = group.start(Call(AllReduce(), "x", "first"), torch.full((5000,), 1.0 + group.rank))
    if group.rank == 0:
        group.start(Call(AllReduce(), "y", lane=Lane.PARAMS), torch.ones(1)).wait()
        time.sleep(0.1)
    else:
        first.wait()
        group.start(Call(AllReduce(), "y", lane=Lane.PARAMS), torch.ones(1)).wait()
    later = [group.start(Call(AllGather(), "z", str(i), Lane.GRADS), torch.zeros(5000)) for i in range(5)]
    values = [float(first.wait().min()), float(first.wait().max())]
    for pending in later:
        pending.wait()
    return values


def test_a_late_rank_finds_everything(workers: Workers) -> None:
    results = workers.run(_ahead)
    total = sum(range(1, len(results) + 1))
    assert results == [[total, total]] * len(results)


def _lends(group: Group) -> tuple[int, int, int]:
    memory = _memory(group)
    group.barrier()
    before = memory.in_use
    x = group.buffer(1 << 20, torch.float32)
    held = memory.in_use - before
    x.fill_(1.0 + group.rank)
    results = []
    for step in range(3):
        pending = group.start(Call(AllReduce(), "x", str(step), Lane.GRADS), x)
        copied = memory.in_use - before - held
        results.append(pending.wait())
        group.await_readers(x)
        x += 1
    part = group.start(Call(AllGather(), "part", lane=Lane.GRADS), x[100:200]).wait()
    assert part.unique().tolist() == [4.0 + rank for rank in range(group.size)]
    total = sum(range(1, group.size + 1))
    assert [result.unique().tolist() for result in results] == [[float(total + group.size * step)] for step in range(3)]
    # A view keeps the storage; then everything goes.
    x = x[:1]
    assert memory.in_use - before >= held
    del x
    group.barrier()
    group.barrier()
    # Slots of the lane remain.
    return held, copied, memory.in_use - before


def test_a_buffer_is_sent_where_it_lies(two: Workers) -> None:
    for held, copied, left in two.run(_lends):
        assert held == 4 << 20
        assert copied <= 64 * 4096
        assert left <= 64 * 4096


def _frees_while_read(group: Group) -> list[float]:
    """A buffer that its owner lets go of is not used again while others have still to read it."""
    x = group.buffer(10_000, torch.float32).fill_(7.0)
    pending = group.start(Call(Broadcast(0), "x", lane=Lane.PARAMS), x)
    del x
    if group.rank == 0:
        pending.wait()
        del pending
        others = [group.buffer(10_000, torch.float32).fill_(0.0) for _ in range(5)]
        group.barrier()
        return [float(sum(other.sum() for other in others))]
    group.barrier()
    return pending.wait().unique().tolist()


def test_a_freed_buffer_waits_for_its_readers(two: Workers) -> None:
    assert two.run(_frees_while_read) == [[0.0], [7.0]]


def _buffers_outlive(group: Group) -> list[float]:
    own = process_group(dist.group.WORLD, shared_memory=True)
    x = own.buffer(1000, torch.float32).fill_(3.0)
    own.barrier()
    own.close()
    assert len(own.buffer(5, torch.float32)) == 5
    with pytest.raises(OptionError, match="closed group"):
        own.barrier()
    with pytest.raises(OptionError, match="closed group"):
        own.await_readers(x)
    x += 1
    del own
    return x.unique().tolist()


def test_buffers_outlive_the_group(two: Workers) -> None:
    assert two.run(_buffers_outlive) == [[4.0], [4.0]]


def _mappings(group: Group) -> tuple[int, int, int]:
    def count() -> int:
        return sum("memfd:zfun" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = count()
    with process_group(dist.group.WORLD, shared_memory=True) as own:
        own.barrier()
        during = count()
        pending = own.start(Call(AllGather()), torch.ones(5000))
        own.barrier()
    with pytest.raises(OptionError, match="closed group"):
        pending.wait()
    return before, during, count()


def test_a_closed_group_lets_go_of_the_memory(two: Workers) -> None:
    assert two.run(_mappings) == [(2, 4, 2)] * 2


def test_every_group_has_buffers() -> None:
    for group in (single_group(), record(single_group()), checked(single_group())):
        assert group.buffer(3, torch.float64).shape == (3,)
        group.await_readers(torch.ones(1))


# Borrowed results.


PIECE = 3 * 4096


def _gather(group: Group, x: Tensor, *, borrow: bool) -> Tensor:
    return group.start(Call(AllGather(), "params", lane=Lane.PARAMS, borrow=borrow), x).wait()


def _borrows(group: Group) -> list[bytes]:
    """What is borrowed has the bits of what is copied; what lies in a buffer is looked at where it lies, and nothing is copied."""
    memory, found = _memory(group), []
    for step in range(3):
        x = group.buffer(PIECE, torch.float32).copy_(_values(group.rank, PIECE, torch.float32, step))
        before = memory.in_use
        borrowed = _gather(group, x, borrow=True)
        assert memory.in_use - before <= 64 * 4096  # slots of the lane
        assert torch.equal(borrowed, _gather(group, x, borrow=False))
        found.append(_fingerprint(borrowed))
        from_elsewhere = _gather(group, x.clone(), borrow=True)
        assert torch.equal(from_elsewhere, borrowed)
        term = group.buffer(4096 * group.size, torch.float32).fill_(step + group.rank)
        expected = group.start(Call(AllReduce(), "grads", lane=Lane.GRADS), term.clone()).wait()
        assert torch.equal(group.start(Call(AllReduce(), "grads", lane=Lane.GRADS, borrow=True), term).wait(), expected)
    del x, borrowed, from_elsewhere, term
    group.barrier()
    group.barrier()
    assert memory.in_use <= 3 * 64 * 4096 + 4 * 4096
    return found


def test_what_is_borrowed_has_the_bits_of_what_is_copied(workers: Workers) -> None:
    results = workers.run(_borrows)
    assert results == [results[0]] * len(results)


def _keeps(group: Group) -> list[float]:
    """Who is about to write waits for the others, and a view that is kept in spite of that keeps its values."""
    x = group.buffer(PIECE, torch.float32).fill_(1.0 + group.rank)
    whole = _gather(group, x, borrow=True)
    kept = whole[PIECE - 1 : PIECE + 1]
    if group.rank == 0:
        time.sleep(0.1)
    assert whole.sum() == PIECE * sum(range(1, group.size + 1))
    group.await_readers(x)
    x += 10
    group.barrier()
    assert _gather(group, x, borrow=True)[::PIECE].tolist() == [11.0 + rank for rank in range(group.size)]
    return kept.tolist()


def test_a_view_that_is_kept_keeps_its_values(workers: Workers) -> None:
    results = workers.run(_keeps)
    assert results == [[1.0, 2.0]] * len(results)


def _writes_through(group: Group) -> int:
    """A rank's own part of what it has borrowed is the buffer itself, step after step."""
    regions = []
    whole = _gather(group, torch.full((PIECE,), float(group.rank)), borrow=True)
    for step in range(3):
        own = whole.view(group.size, PIECE)[group.rank]
        group.await_readers(own)
        own += 1
        whole = _gather(group, own, borrow=True)
        assert whole[::PIECE].tolist() == [step + 1.0 + rank for rank in range(group.size)]
        regions.append(whole.data_ptr())
    return len(set(regions))


def test_an_own_part_is_written_where_it_lies(workers: Workers) -> None:
    results = workers.run(_writes_through)
    assert results == [1] * len(results)


def _views_outlive(group: Group) -> list[float]:
    own = process_group(dist.group.WORLD, shared_memory=True)
    whole = _gather(own, own.buffer(PIECE, torch.float32).fill_(2.0 + group.rank), borrow=True)
    kept = whole[PIECE - 1 : PIECE + 1]
    own.barrier()
    own.close()
    del own, whole
    return kept.tolist()


def test_borrowed_views_outlive_the_group(two: Workers) -> None:
    mappings = two.run(_mapped)
    assert two.run(_views_outlive) == [[2.0, 3.0]] * 2
    assert two.run(_mapped) == mappings


def _mapped(group: Group) -> int:
    return sum("memfd:zfun" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _shared_resident() -> int:
    """Bytes of shared memory that count as this process's own, as often as it has them mapped."""
    found, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_shared = "memfd:zfun" in line
        elif is_shared and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def _lets_go(group: Group) -> dict[str, int]:
    """What each rank has mapped after it has read 8 MB of others, beyond what it had before."""
    numel, found = 1 << 21, {}
    with pytest.MonkeyPatch.context() as patch:
        _let_go_of_all(patch)
        x = group.buffer(numel, torch.float32).fill_(1.0 + group.rank)
        group.barrier()
        before = _shared_resident()
        whole = _gather(group, x, borrow=True)
        kept, expected = whole.view(group.size, -1)[:, 0], [1.0, 2.0]
        assert whole.sum() == 3 * numel
        found["looked at"] = _shared_resident() - before
        group.rest(whole[5:])
        found["at rest"] = _shared_resident() - before
        assert whole.sum() == 3 * numel
        del whole
        group.barrier()
        assert kept.tolist() == expected  # a view of it is there, and so is all of it
        del kept
        group.barrier()
        found["let go"] = _shared_resident() - before
        # Over the same pages, which are what they were.
        assert _gather(group, x, borrow=True)[::numel].tolist() == expected
        group.barrier()
        sent = group.buffer(numel, torch.float32).fill_(1.0 + group.rank)
        before = _shared_resident()
        assert group.start(Call(ReduceScatter(), "grads"), sent, torch.empty(numel // 2)).wait().sum() == 3 * numel // 2
        found["summed"] = _shared_resident() - before
        summed = group.start(Call(AllReduce(), "grads", borrow=True), sent).wait()
        assert summed.sum() == 3 * numel
        found["summed in place"] = _shared_resident() - before
        del summed, sent
        group.barrier()
        before = _shared_resident()
        own = group.buffer(numel, torch.float32).fill_(1.0)
        whole = _gather(group, own, borrow=True)
        del own
        assert whole.sum() == 2 * numel
        group.rest(whole)
        found["at rest, not a buffer"] = _shared_resident() - before
        del whole
        group.barrier()
        # Where something was let go of, something else is written.
        assert _gather(group, group.buffer(numel, torch.float32).fill_(7.0), borrow=True).sum() == 7 * 2 * numel
    return found


def test_what_is_not_looked_at_is_no_memory_of_this_rank(two: Workers) -> None:
    mebibyte, slack = 1 << 20, 1 << 19
    for found in two.run(_lets_go):
        # The other rank's piece, and one's own a second time.
        assert abs(found["looked at"] - 16 * mebibyte) < slack
        # What is one's own as a buffer is there once.
        assert found["at rest"] < slack
        assert abs(found["at rest, not a buffer"] - 8 * mebibyte) < slack
        assert found["let go"] < slack
        assert found["summed"] < slack
        # Half of the sum is one's own, half the other's; the input is gone.
        assert found["summed in place"] < slack


def _grows(group: Group) -> int:
    """What a rank has mapped where what was freed is too short for what comes, beyond what is in use."""
    short, kept = group.buffer(1 << 22, torch.float32).fill_(1.0), group.buffer(1 << 20, torch.float32).fill_(1.0)
    before = _shared_resident()
    del short
    long = group.buffer(3 << 21, torch.float32).fill_(1.0)
    assert long.sum() + kept.sum() == (3 << 21) + (1 << 20)
    return _shared_resident() - before


def test_no_more_is_mapped_than_was_ever_in_use(two: Workers) -> None:
    for growth in two.run(_grows):
        assert abs(growth - (8 << 20)) < 1 << 19


def _no_more_mappings(group: Group) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "Region", refuse)
        x = group.buffer(PIECE, torch.float32).fill_(float(group.rank))
        whole = _gather(group, x, borrow=True)
    group.await_readers(x)
    x += 1
    group.barrier()
    assert whole[::PIECE].tolist() == list(range(group.size))


def test_what_cannot_be_mapped_is_copied(two: Workers) -> None:
    two.run(_no_more_mappings)


def _lean_steps(group: zf.Group, stage: int) -> list[bytes]:
    """Steps in the state's own memory, where everything that can be let go of is; and what somebody keeps of the first one."""
    with pytest.MonkeyPatch.context() as patch:
        _let_go_of_all(patch)
        generator = torch.Generator().manual_seed(0)
        params = {"w": torch.randn(400, 700, generator=generator), "b": torch.randn(700, generator=generator)}
        z = zf.zero(stage, lambda params, batch: (_loss(params, batch), params["w"] * 1.0), zf.optim.adamw(0.1), group, bucket_bytes=4096)
        state, kept = z.init(params), []
        for step in range(4):
            state, info = z.step(state, torch.full((400,), 1.0 + group.rank + step))
            kept += [info.aux, *z.params(state).values()]
        return [_fingerprint(x) for x in kept]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_that_let_go_of_everything_have_the_bits_of_the_simulation(two: Workers, stage: int) -> None:
    found = two.run(_lean_steps, stage)
    assert found == zf.simulate(2, _lean_steps, stage)
    # What the loss sees in a step is what the one before has left.
    assert len(set(found[0])) == 9


def _mixed_steps(group: zf.Group, stage: int) -> list[bytes]:
    """Buckets whose shards are whole pages, and are looked at where they lie, between ones that are copied."""
    lengths = (4096, 768, 16384, 3072) * 3
    params = {f"w{i:02}": torch.arange(numel, dtype=torch.float32) + i for i, numel in enumerate(lengths)}
    loss = lambda params, batch: sum(((leaf - batch * leaf[1]) ** 2).mean() for leaf in params.values())
    z = zf.zero(stage, loss, zf.optim.adamw(0.1), group, bucket_bytes=4096)
    state, kept = z.init(params), []
    for step in range(3):
        state, info = z.step(state, torch.tensor(1.0 + group.rank + step))
        kept += [info.loss.reshape(1), *z.params(state).values()]
    return [_fingerprint(x) for x in kept]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_looked_at_is_kept_while_something_else_is_copied(two: Workers, stage: int) -> None:
    assert two.run(_mixed_steps, stage) == zf.simulate(2, _mixed_steps, stage)


def _pure_steps(group: zf.Group, stage: int) -> list[bytes]:
    """Without donation no old value ever changes."""
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(400, 700, generator=generator), "b": torch.randn(700, generator=generator)}
    z = zf.zero(stage, _loss, zf.optim.adamw(0.1), group, donate=False)
    states = [z.init(params)]
    for step in range(3):
        states.append(z.step(states[-1], torch.full((400,), 1.0 + group.rank + step))[0])
    found = [[_fingerprint(leaf) for leaf in z.params(state).values()] for state in states]
    again = [[_fingerprint(leaf) for leaf in z.params(state).values()] for state in reversed(states)]
    assert found == again[::-1]
    assert len({text for texts in found for text in texts}) == 8
    return [text for texts in found for text in texts]


def _loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return (batch @ params["w"] + params["b"]).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_old_values_never_change(two: Workers, stage: int) -> None:
    assert two.run(_pure_steps, stage) == zf.simulate(2, _pure_steps, stage)


def _centered(learning_rate: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A rule of a user, whose state is a tree and a number."""

    def init(params: Any) -> Any:
        return zf.tree.map(torch.zeros_like, params), 0

    def update(grads: Any, state: Any, params: Any) -> Any:
        mean = zf.tree.map(lambda m, g: 0.5 * m + 0.5 * g, state[0], grads)
        return zf.tree.map(lambda m, g: -learning_rate * (g - 0.25 * m), mean, grads), (mean, state[1] + 1)

    return init, update


_RULES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "adamw": (lambda: zf.optim.adamw(0.1), {}),
    "micro-batches": (lambda: zf.optim.adamw(0.1), {"num_micro_batches": 2}),
    "kept": (lambda: zf.optim.adamw(0.1), {"donate": False}),
    "by leaf": (lambda: zf.optim.lamb(0.1), {}),
    "masters": (lambda: zf.optim.adamw(0.1), {"precision": torch.bfloat16}),
    "loss scale": (lambda: zf.optim.adamw(0.1), {"precision": torch.float16}),
    "frozen": (lambda: zf.optim.adamw(0.1), {"trainable": lambda path, leaf: path != "b"}),
    "a pair": (lambda: _centered(0.1), {}),
}


def _whole_state(group: zf.Group, stage: int, name: str) -> list[bytes]:
    """What steps make of parameters and of the optimizer's state, as every rank sees it, and of a state that somebody keeps."""
    rule, options = _RULES[name]
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(400, 700, generator=generator), "b": torch.randn(700, generator=generator)}
    z = zf.zero(stage, lambda params, x: _loss(params, x[0]), rule(), group, bucket_bytes=1 << 19, **options)
    states, found = [z.init(params)], []
    for step in range(4):
        batch = torch.stack([torch.full((400,), 1.0 + group.rank + step), torch.full((400,), 0.5)])
        state, info = z.step(states[-1], batch if name == "micro-batches" else batch[:1])
        # Ranks come here one after the other, and the first goes on at once.
        time.sleep(0.02 * group.rank)
        states = [*states, state] if name == "kept" else [state]
        found.append(_fingerprint(info.grad_norm.reshape(1)))
    for state in states:
        parts = [part for part in zf.tree.leaves(state.opt_state, is_leaf=_is_flat) if _is_flat(part)]
        assert {part.placement for part in (*parts, state.params)} == {zf.R if stage == 0 else zf.S} | ({zf.R} if stage < 3 else set())
        found += [_fingerprint(x) for part in (*parts, state.params) for x in zf.tree.leaves(zf.unshard(part))]
    return found


def _is_flat(value: Any) -> bool:
    return isinstance(value, Flat)


@pytest.mark.parametrize("name", list(_RULES))
@pytest.mark.parametrize("stage", [0, 1])
def test_state_of_stages_0_and_1_has_the_bits_of_the_simulation(two: Workers, stage: int, name: str) -> None:
    found = two.run(_whole_state, stage, name)
    assert found == zf.simulate(2, _whole_state, stage, name)
    assert found[0] == found[1]


def _in_other_hands(group: zf.Group, stage: int) -> list[bytes]:
    """Steps of an optimizer that takes over what ``zero()`` has made, whole, and is late on one rank."""
    loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).sum()
    z, rule = zf.zero(stage, loss_fn, zf.optim.adamw(0.1), group), zf.optim.adamw(0.1)
    state, _ = z.step(z.init({"w": torch.arange(1 << 22, dtype=torch.float32) % 7}), torch.tensor(1.0 + group.rank))
    params, opt_state = state.params, state.opt_state if stage == 0 else rule.init(state.params)
    vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
    for _ in range(3):
        _, grads = vg(params, torch.tensor(2.0 + group.rank))
        grads = zf.redistribute(grads, zf.R, group)
        time.sleep(0.05 * group.rank)
        params, opt_state = zf.apply(rule, grads, opt_state, params, donate=True)
    return [_fingerprint(zf.unshard(x)["w"]) for x in (params, opt_state.mu, opt_state.nu)]


@pytest.mark.parametrize("stage", [0, 1])
def test_who_writes_to_all_of_a_borrowed_value_has_it_alone(two: Workers, stage: int) -> None:
    assert two.run(_in_other_hands, stage) == zf.simulate(2, _in_other_hands, stage)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def _takes_lazy_leaves_as_they_are(group: zf.Group) -> None:
    """From the third step on, an ``autograd.Function`` gets a leaf that is used in no other way."""

    def loss_fn(params: dict[str, Tensor], step: int) -> Tensor:
        w = params["w"] * 2 if step < 2 else _Twice.apply(params["w"])
        return (w * params["x"]).sum()

    z = zf.zero(3, loss_fn, zf.optim.adamw(0.1), group, bucket_bytes=4096)
    state = z.init({"w": torch.ones(1 << 15), "x": torch.ones(1 << 15)})
    for step in range(2):
        state, _ = z.step(state, step)
    z.step(state, 2)


def test_a_lazy_leaf_in_an_autograd_function_is_an_error_in_later_steps_too(two: Workers) -> None:
    with pytest.raises(zf.PlacementError, match=r"takes whole tensors; got the lazy leaf .*w.*; call zf.gather\(\) on it first"):
        two.run(_takes_lazy_leaves_as_they_are)


def _is_through_first(group: zf.Group, folder: Path) -> list[bytes]:
    """In each step one rank begins to compute backward when the other has come to the first layer there."""

    def loss_fn(params: list[Tensor], batch: tuple[int, Tensor]) -> Tensor:
        step, x = batch
        done = folder / str(step)

        def wait(grad: Tensor) -> None:
            while not done.exists():
                time.sleep(0.001)

        is_last = step % group.size == group.rank
        x = torch.tanh(x @ params[0])
        if not is_last:
            x.register_hook(lambda grad: done.touch())
        for w in params[1:]:
            x = torch.tanh(x @ w)
        if is_last:
            x.register_hook(wait)
        return x.square().mean()

    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(128, 128, generator=generator) / 10 for _ in range(6)]
    z = zf.zero(0, loss_fn, zf.optim.adamw(0.1), group, bucket_bytes=1 << 16)
    state = z.init(params)
    for step in range(4):
        state, _ = z.step(state, (step, torch.full((4, 128), 1.0 + group.rank)))
    return [_fingerprint(w) for w in z.params(state)]


def test_nobody_waits_in_backward_for_sums_that_take_no_room(two: Workers, tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir()
    real = two.run(_is_through_first, tmp_path)
    assert real[0] == real[1]
    for step in range(4):
        (tmp_path / "simulated" / str(step)).touch()
    assert real == zf.simulate(2, _is_through_first, tmp_path / "simulated")


def _starts_something_else(group: zf.Group) -> None:
    """Disagree on the first of two sums, and wait for neither before both are started."""
    pending = []
    for number in range(2):
        name = f"sum {number}" if group.rank or number else "another sum"
        try:
            pending.append(group.start(Call(AllReduce(), name, lane=Lane.GRADS, borrow=True), torch.ones(1 << 14)))
            # Messages of another lane go on.
            group.start(Call(AllGather(), "params", lane=Lane.PARAMS), torch.ones(4)).wait()
        except CollectiveMismatch as error:
            raise AssertionError("not where it is started") from error
    pending[0].wait()


def test_a_mismatch_of_sums_is_an_error_of_the_wait_for_it(two: Workers) -> None:
    for outcome in two.outcomes(_starts_something_else):
        assert isinstance(outcome, CollectiveMismatch), outcome
        assert "'sum 0'" in str(outcome)
        assert "'another sum'" in str(outcome)


def _names() -> set[str]:
    """Files in shared memory and sockets of zfun; not the sockets of other programs that use it at the same time."""
    sockets = {line.split()[6]: line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "zfun-" in line}
    others = set().union(*(_sockets_of(int(process.name)) for process in Path("/proc").iterdir() if process.name.isdigit()))
    return {name for inode, name in sockets.items() if inode not in others} | {str(path) for path in Path("/dev/shm").iterdir()}


def _sockets_of(process: int) -> set[str]:
    """What a process of another process group has open: what this run starts, and leaves, is in its own."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        if os.getpgid(process) != os.getpgrp():
            for fd in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _all_die(group: Group) -> None:
    group.start(Call(AllGather()), torch.ones(1 << 20)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _all_die_borrowing(group: Group) -> None:
    whole = _gather(group, group.buffer(PIECE, torch.float32).fill_(1.0), borrow=True)
    assert whole.sum() == whole.numel()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("program", [_size, _all_die, _all_die_borrowing])
def test_nothing_is_left(program: object) -> None:
    before = _names()
    with processes(2, timeout_s=RUN_S, shared_memory=True) as workers:
        workers.outcomes(program)  # type: ignore[arg-type]
        assert not {name for name in _names() - before if name.startswith("/dev/shm")}
    assert _names() <= before


# What goes wrong.


def _dies_and_leaves_a_child(group: Group) -> str:
    """A process that the dead rank has forked holds its connections open."""
    group.barrier()
    if group.rank == 1:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1 .*its process has ended"):
        group.barrier()
    assert time.monotonic() - started < 4.5
    return "noticed"


def test_a_dead_rank_is_noticed_at_once(two: Workers) -> None:
    assert two.outcomes(_dies_and_leaves_a_child)[0] == "noticed"


def _reader_stops(group: Group) -> str:
    x = group.buffer(1 << 16, torch.float32).zero_()
    pending = group.start(Call(AllReduce(), "grads", "bucket 1"), x)
    group.start(Call(AllReduce(), "loss", lane=Lane.GRADS), torch.ones(1)).wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pending.wait()
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1 in collective .*'grads' .bucket 1.*no answer within 1 s"):
        group.await_readers(x)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        group.barrier()
    return "noticed"


def test_a_reader_that_stops_is_noticed() -> None:
    # The rank that has stopped is killed at the end of this time.
    with processes(2, timeout_s=12.0, collective_timeout_s=1.0, shared_memory=True) as workers:
        assert workers.outcomes(_reader_stops)[0] == "noticed"


def _unrelated(group: Group) -> None:
    """Ranks that wait for nothing of each other's still see that they differ: one has gone far ahead."""
    for i in range(200):
        group.start(Call(Broadcast(group.rank), "x", str(i)), torch.ones(1)).wait()


def test_two_roots_are_a_mismatch(two: Workers) -> None:
    for outcome in two.outcomes(_unrelated):
        assert isinstance(outcome, CollectiveMismatch), outcome
        assert "rank 0 started broadcast from rank 0 'x' (0)" in str(outcome)
        assert "rank 1 started broadcast from rank 1 'x' (0)" in str(outcome)


def _mismatch_with_others_pending(held: Group) -> str:
    group = process_group(dist.group.WORLD, shared_memory=True)
    others = [group.start(Call(AllReduce(), "x", str(i), Lane.PARAMS), torch.ones(4)) for i in range(2 - group.rank)]
    started = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"rank 0 started .* of 4 float32 .*rank 1 started .* of 5 float32"):
        group.start(Call(AllReduce(), "y"), torch.ones(4 + group.rank)).wait()
    others[0].wait()
    for pending in others[1:]:
        with pytest.raises(CollectiveMismatch):
            pending.wait()
    with pytest.raises(CollectiveMismatch):
        group.barrier()
    assert time.monotonic() - started < 5
    group.close()
    return "told"


def test_a_broken_group_waits_for_nothing(two: Workers) -> None:
    assert two.run(_mismatch_with_others_pending) == ["told"] * 2


# Whether there is any.


def _made(group: Group, options: list[bool | None]) -> str:
    try:
        with process_group(dist.group.WORLD, shared_memory=options[group.rank]) as own:
            own.barrier()
            return type(own).__name__
    except OptionError as error:
        return str(error)


def test_ranks_agree_on_it(workers: Workers) -> None:
    size = len(workers.run(_size))
    assert workers.run(_made, [None] * size) == ["_SharedGroup"] * size
    assert workers.run(_made, [False] * size) == ["ExchangeGroup"] * size
    assert workers.run(_made, [None] * (size - 1) + [False]) == ["ExchangeGroup"] * size
    *texts, last = workers.run(_made, [True] * (size - 1) + [None])
    assert [*texts, last] == ["_SharedGroup"] * size


def _cannot(group: Group, what: str, option: bool | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            match what:
                case "memory":
                    patch.setattr(os, "posix_fallocate", _full)
                case "machine":
                    patch.setattr(platform, "machine", lambda: "aarch64")
                case "host":
                    patch.setattr(meeting, "_host", lambda: "elsewhere")
                case "socket":
                    patch.setattr(meeting, "_credentials", lambda connection: (0, os.getuid() + 1))
        patch.setattr(meeting, "_MEETING_S", 1.0)
        return _made(group, [option] * group.size)


def _full(*args: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("memory", "rank 1 cannot take part: memory cannot be mapped there: .*No space left"),
        ("machine", "rank 1 cannot take part: its processor .aarch64. may reorder stores"),
        ("host", "ranks 0 and 1 are on different hosts"),
        ("socket", "cannot map the memory of the others"),
    ],
)
def test_gloo_takes_over_where_it_cannot_be(two: Workers, what: str, why: str) -> None:
    assert two.run(_cannot, what, None) == ["ExchangeGroup"] * 2
    for text in two.run(_cannot, what, True):
        with pytest.raises(OptionError, match=f"shared_memory=True needs ranks that can share memory; .*{why}"):
            raise OptionError(text)


def _runs_out(group: Group) -> str:
    with process_group(dist.group.WORLD, shared_memory=True) as own, pytest.MonkeyPatch.context() as patch:
        own.barrier()
        patch.setattr(os, "posix_fallocate", _full)
        # A buffer then comes from elsewhere.
        assert own.buffer(10 << 20, torch.uint8).numel() == 10 << 20
        with pytest.raises(OptionError, match=r"no shared memory for 41943040 bytes .*pass shared_memory=False"):
            own.start(Call(AllReduce()), torch.ones(10 << 20))
        patch.undo()
        # Nothing was sent, so that the group still works.
        return str(own.start(Call(AllReduce()), torch.ones(10 << 20)).wait()[-1].item())


def test_no_memory_is_an_error_at_the_start(two: Workers) -> None:
    assert two.run(_runs_out) == ["2.0", "2.0"]
