"""After ``close()`` nothing of a group is left in the process."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from tests.distributed import needs_shared_memory, processes, run_program
from zfun.collectives import (
    AllGather,
    AllReduce,
    Collective,
    Group,
    Stream,
    Workers,
    barrier,
    is_symmetric,
    process_group,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux"),
]


RUN_S = 60.0
TRANSPORTS = [
    pytest.param(False, marks=pytest.mark.slow),
    pytest.param(True, marks=needs_shared_memory),
]


@pytest.fixture(scope="module", params=TRANSPORTS, ids=["gloo", "shared"])
def two(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(2, timeout_s=RUN_S, shared_memory=request.param) as held:
        yield held


def _left() -> dict[str, Any]:
    """Return the things of a process that a group may leave behind."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "threads of the system": len(list(Path("/proc/self/task").iterdir())),
        "hook of exceptions": sys.excepthook,
        "mappings": Path("/proc/self/maps").read_text().count("memfd:zfun"),
        "descriptors": sorted(
            # The descriptor of the folder itself is closed again.
            str(path.readlink()).partition(":")[0]
            for path in Path("/proc/self/fd").iterdir()
            if path.is_symlink()
        ),
    }


def _loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return ((params["w"] - batch) ** 2).sum()


def _train(group: Group) -> None:
    z = zf.zero(3, _loss, zf.optim.adamw(0.1), group)
    state, _ = z.step(z.init({"w": torch.ones(1 << 17)}), torch.tensor(1.0 + group.rank))
    assert z.params(state)["w"].numel() == 1 << 17


def _use(group: Group) -> weakref.ref[Group]:
    with process_group(dist.group.WORLD, shared_memory=is_symmetric(group)) as own:
        part = own.subgroup([[0, 1]])
        for stream in Stream:
            large = Collective(AllReduce(), "x", stream=stream)
            own.start(large, torch.ones(1 << 17)).wait()
        call = Collective(AllGather(), "x", stream=Stream.PARAMS, zero_copy=True)
        assert part.start(call, torch.ones(1 << 17)).wait().sum() == 1 << 18
        # Rank 0 waits long enough for the watchdog, which looks every half second.
        time.sleep(0.7 * own.rank)
        barrier(own)
        _train(own)
        # A hook at exit that is left would hold the group.
        return weakref.ref(own)


def _after_close(group: Group) -> Any:
    # The first group starts what torch keeps for good.
    _use(group)
    before, made = _left(), _use(group)
    after = _left()
    assert made() is None
    return {name: (value, after[name]) for name, value in before.items() if value != after[name]}


def test_a_closed_group_leaves_nothing(two: Workers) -> None:
    assert two.run(_after_close) == [{}, {}]


PROGRAM = """
import torch, zfun as zf
from tests.distributed.test_close import _left, _train
_train(zf.collectives.single_group())
before = _left()
with zf.process_group(timeout_s=20, shared_memory=SHARED) as group:
    _train(group)
after = _left()
print({name: (value, after[name]) for name, value in before.items() if value != after[name]})
print(torch.distributed.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", TRANSPORTS, ids=["gloo", "shared"])
def test_a_closed_group_leaves_nothing_of_torch(shared_memory: bool) -> None:
    """A group that has initialised ``torch.distributed`` takes that back too."""
    program = PROGRAM.replace("SHARED", str(shared_memory))
    for code, output, errors in run_program(program, timeout_s=RUN_S):
        assert (code, output.splitlines()) == (0, ["{}", "False"]), errors
