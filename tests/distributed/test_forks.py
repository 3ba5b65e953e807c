"""Forks: a group belongs to the process that made the group, and that process goes on."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import zfun as zf
from tests.distributed import needs_shared_memory, processes, run_program
from zfun.collectives import (
    AllGather,
    AllReduce,
    Collective,
    Group,
    Stream,
    Work,
    Workers,
    all_gather,
    allocate,
    await_readers,
    barrier,
    is_symmetric,
    process_group,
    simulate,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

RUN_S = 40.0
CHILD_S = 10.0
TRANSPORTS = [False, pytest.param(True, marks=needs_shared_memory)]


@pytest.fixture(scope="module", params=TRANSPORTS, ids=["gloo", "shared"])
def two(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(
        2, timeout_s=RUN_S, collective_timeout_s=20.0, shared_memory=request.param
    ) as held:
        yield held


def _in_fork(fn: Callable[[], object]) -> str:
    """Call a function in a fork; return the result or the error as text, or the signal."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(fn())
        except BaseException as error:  # noqa: BLE001, the parent checks the error
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    answered, _, _ = select.select([reader], [], [], CHILD_S)
    text = os.read(reader, 1 << 16).decode() if answered else "no answer"
    os.close(reader)
    if not answered:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return text if text else f"killed by signal {-os.waitstatus_to_exitcode(status)}"


def _loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return (batch @ params["w"] + params["b"]).square().mean()


def _params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(128, 256, generator=generator), "b": torch.zeros(256)}


def _batch(group: Group, step: int) -> Tensor:
    return torch.full((4, 128), 0.1 * (step + group.rank))


def _steps(group: Group, stage: int, forks: bool = False) -> tuple[list[Any], list[str]]:
    """Take steps; after the second step forks of rank 0 use the group and the state."""
    z = zf.zero(stage, _loss, zf.optim.adamw(0.1), group)
    state, results, answers = z.init(_params()), [], []
    for step in range(4):
        state, info = z.step(state, torch.full((4, 128), 0.1 * (step + group.rank)))
        results.append(info.loss)
        if forks and step == 1:
            pending = group.start(Collective(AllReduce(), "x"), torch.ones(5))
            if group.rank == 0:
                answers = [_in_fork(fn) for fn in _uses(group, z, state, pending)]
            results.append(pending.wait())
    return [*results, *z.params(state).values()], answers


def _uses(group: Group, z: Any, state: Any, pending: Work) -> list[Callable[[], object]]:
    buffers = [*state.params.buffers, *state.opt_state.mu.buffers]
    return [
        lambda: z.step(state, torch.ones(4, 128)),
        lambda: zf.unshard(state.opt_state.nu),
        lambda: barrier(group),
        lambda: allocate(group, 10_000, torch.float32),
        lambda: group.subgroup([[0], [1]]),
        pending.wait,
        lambda: [buffer.fill_(99.0) for buffer in buffers] and "written",
        group.close,
    ]


def _steps_beside_forks(group: Group, stage: int) -> Any:
    # A broken group must not break the group of other tests.
    with process_group(dist.group.WORLD, shared_memory=is_symmetric(group)) as own:
        return _steps(own, stage, forks=True)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_fork_that_steps_or_writes_changes_nothing(two: Workers, stage: int) -> None:
    found = two.run(_steps_beside_forks, stage)
    expected, _ = simulate(2, _steps, stage)[0]
    for results, _ in found:
        del results[2]
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    step, unshard, *errors, written, closed = found[0][1]
    for error in (step, *errors, *([unshard] if stage else [])):
        assert error.startswith("ForkError: a"), error
        assert "belongs to the process that made it; got a use in process" in error
        assert "or start the process with the method 'spawn'" in error
    # Shared memory is not there, and other memory is the fork's own.
    assert written in ("written", f"killed by signal {signal.SIGSEGV.value}")
    assert closed == "None"


def _keeps_a_window(group: Group) -> list[float]:
    x = allocate(group, 3 * 4096, torch.float32).fill_(1.0 + group.rank)
    call = Collective(AllGather(), "params", stream=Stream.PARAMS, zero_copy=True)
    held = [group.start(call, x).wait()]
    if group.rank == 0:
        assert _in_fork(held.clear) == "None"
        time.sleep(0.2)
        return held.pop()[::4096].tolist()
    held.clear()
    await_readers(group, [x])
    x.fill_(50.0)
    return []


@needs_shared_memory
def test_a_fork_that_drops_a_window_leaves_the_window_to_its_parent() -> None:
    with processes(2, timeout_s=RUN_S, shared_memory=True) as workers:
        assert workers.run(_keeps_a_window)[0] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_fork_leaves_workers_to_its_parent() -> None:
    with processes(2, timeout_s=RUN_S) as workers:
        before = workers.run(_process)
        assert "a Workers belongs to the process" in _in_fork(lambda: workers.run(_process))
        assert _in_fork(workers.close) == "None"
        assert _in_fork(lambda: workers.__exit__(ValueError, ValueError(), None)) == "None"
        assert workers.run(_process) == before


def _process(group: Group) -> int:
    return os.getpid()


def test_a_fork_of_a_simulated_rank_has_no_group() -> None:
    found = simulate(2, lambda group: "" if group.rank else _in_fork(lambda: barrier(group)))
    assert found[0].startswith("ForkError: a simulated group belongs to the process")


class _Gathered(Dataset[Tensor]):
    """A dataset in the memory that a group has gathered."""

    def __init__(self, group: Group, whole: dict[str, Tensor]) -> None:
        rows = torch.arange(8192.0).view(64, 128) / 8192 + group.rank
        self.rows = all_gather(rows, group)
        self.whole = whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + self.whole["b"].sum()


def _loads(group: Group, num_workers: int) -> list[Tensor]:
    z = zf.zero(3, _loss, zf.optim.adamw(0.1), group)
    state, results = z.init(_params()), []
    dataset = _Gathered(group, z.params(state))
    for _ in range(2):
        loader = DataLoader(
            dataset,
            batch_size=8,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )
        for batch in loader:
            state, info = z.step(state, batch)
            results.append(info.loss)
    return [*results, *z.params(state).values()]


def test_workers_of_a_data_loader_go_with_every_transport(two: Workers) -> None:
    expected = simulate(2, _loads, 0)[0]
    for results in two.run(_loads_in_forks):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def _loads_in_forks(group: Group) -> list[Tensor]:
    # A daemonic process starts no others.
    multiprocessing.current_process().daemon = False
    return _loads(group, 2)


PROGRAM = """
import os, sys, torch, zfun as zf
group = zf.process_group(timeout_s=15, shared_memory=SHARED)
loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
z = zf.zero(3, loss, zf.optim.sgd(0.1), group)
state = z.init({"w": torch.ones(10_000)})
state, _ = z.step(state, torch.ones(()))
for end in ("return", "exit", "raise"):
    child = os.fork() if group.rank == 0 else None
    if child == 0:
        if end == "return":
            del state, z, group
            break
        with group:
            sys.exit(3) if end == "exit" else 1 / 0
    if child is not None:
        # The next fork would write what is left in the buffer once more.
        print(end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    for _ in range(2):
        state, info = z.step(state, torch.tensor(1.0 + group.rank))
    torch.distributed.barrier()
    print("loss", info.loss.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", TRANSPORTS, ids=["gloo", "shared"])
def test_forks_end_alone(shared_memory: bool) -> None:
    """A fork that runs exit hooks, or the exception hook, says nothing to the peers."""
    (code, first, errors), (other, second, _) = run_program(
        PROGRAM.replace("SHARED", str(shared_memory)), timeout_s=RUN_S
    )
    assert (code, other) == (0, 0), errors
    *ends, loss = first.splitlines()
    assert ends == ["return 0", "exit 3", "raise 1"]
    assert loss == second.splitlines()[-1]
    assert "ZeroDivisionError" in errors
