"""Checkpoints of real ranks: the bodies of the simulation, and a rank that dies in a save."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from tests.checkpoints import Case, directories, load_into, save_after, unbroken
from tests.conftest import on_one_core
from tests.distributed import processes
from tests.faulty_files import EVERY, FaultyFiles
from zfun.checkpoint import steps
from zfun.collectives import Workers, barrier
from zfun.errors import CheckpointError
from zfun.files import Files
from zfun.testing import assert_same_bits

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


@pytest.fixture(
    scope="module",
    params=[None, pytest.param(False, marks=pytest.mark.slow)],
    ids=["over the default transport", "over gloo"],
)
def two(request: pytest.FixtureRequest) -> Iterator[Workers]:
    options = {"timeout_s": 60.0, "collective_timeout_s": 20.0, "shared_memory": request.param}
    with processes(2, **options) as held:
        yield held


PAIRS: list[Any] = [(Case(2, 3), Case(2, 1))]
LONGER = [
    (Case(2, 1, precision="bfloat16"), Case(2, 3, precision="bfloat16", store="nvme")),
    (Case(2, 0, optimizer="muon", store="host"), Case(2, 2, optimizer="muon")),
    (Case(2, 2, optimizer="torch"), Case(2, 0, optimizer="torch")),
]


PAIRS += [pytest.param(pair, marks=pytest.mark.slow) for pair in LONGER]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("background", [False, True])
def test_ranks_load_what_they_and_simulated_ranks_saved(
    two: Workers, pair: tuple[Case, Case], background: bool
) -> None:
    first, second = pair
    with directories() as (saved, stores):
        two.run(save_after, first, saved, stores, background=background)
        with on_one_core():
            expected = zf.simulate(2, unbroken, second, stores, 4)[0]
            found = zf.simulate(2, load_into, second, saved, stores, range(2, 4))
        for _, values in (*found, *two.run(load_into, second, saved, stores, range(2, 4))):
            assert_same_bits(values, expected, f"{second} from {first}")


def dies_in_a_save(group: zf.Group, path: str, at: int) -> None:
    if group.rank == 1:

        class Deadly(FaultyFiles):
            def _die(self) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

        files = Deadly(at, "kill", EVERY)
    else:
        files = FaultyFiles()
    with pytest.raises(zf.ZfunError):
        zf.save(path, {"w": zf.shard(weights(), group)}, step=2, files=files)


def weights() -> Any:
    return torch.arange(500.0)


def saves(group: zf.Group, path: str) -> None:
    zf.save(path, {"w": zf.shard(weights(), group)}, step=1)


def differs(group: zf.Group, path: str) -> str:
    own = Path(path) / str(group.rank)
    with pytest.raises(CheckpointError, match=r"on a disk that they share") as caught:
        zf.save(own, {"w": zf.shard(torch.ones(9), group)}, step=1)
    return str(caught.value)


def test_ranks_without_a_common_disk_are_told(two: Workers) -> None:
    with directories() as (saved, _):
        for text in two.run(differs, saved):
            assert "on a disk that they share" in text


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_rank_that_is_killed_in_a_save_leaves_the_last_checkpoint(at: int) -> None:
    with directories() as (saved, _):
        zf.simulate(2, saves, saved)
        with processes(2, timeout_s=60.0, collective_timeout_s=10.0) as workers:
            workers.outcomes(dies_in_a_save, saved, at)
        assert [step for step, _ in steps(saved)] == [1]
        assert torch.equal(zf.load(saved, {"w": torch.zeros(500)}).state["w"], weights())


class DiesInPublication(Files):
    def rename(self, old: str, new: str) -> None:
        # The other rank is in wait() by now, or comes there soon.
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)


def waits_for(group: zf.Group, path: str, way: str) -> str:
    """Save in the background, of which rank 0 dies, and meet the loss in one of three ways."""
    state = {"w": zf.shard(weights(), group)}
    files = DiesInPublication() if group.rank == 0 else None
    saving = zf.save(path, state, step=2, background=True, files=files)
    meets = {
        "wait": saving.wait,
        "save": lambda: zf.save(path, state, step=3),
        "load": lambda: zf.load(path, state),
        "step": lambda: [barrier(group) for _ in itertools.count()],
    }
    start = time.monotonic()
    with pytest.raises(zf.ZfunError, match="lost rank 0") as caught:
        meets[way]()
    while not saving.done:
        time.sleep(0.01)
    assert time.monotonic() - start < 15.0
    return str(caught.value)


@pytest.mark.parametrize(
    "way",
    [
        "wait",
        pytest.param("save", marks=pytest.mark.slow),
        pytest.param("load", marks=pytest.mark.slow),
        "step",
    ],
)
def test_a_rank_that_dies_while_it_publishes_is_missed_by_those_that_wait(way: str) -> None:
    """Not after the 1,800 s of the save, and the thread of the save ends too."""
    with directories() as (saved, _):
        zf.simulate(2, saves, saved)
        with processes(2, timeout_s=60.0, collective_timeout_s=10.0) as workers:
            lost, survivor = workers.outcomes(waits_for, saved, way)
        assert isinstance(lost, Exception)
        assert "rank 0" in str(survivor)
        assert [step for step, _ in steps(saved)] == [1]
        assert torch.equal(zf.load(saved, {"w": torch.zeros(500)}).state["w"], weights())
