"""Checkpoints of real ranks: the bodies of the simulation, and a rank that dies in a save."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.config import conf

import zfun as zf
from tests import object_store
from tests.checkpoints import Case, directories, load_into, save_after, unbroken
from tests.conftest import FORM, on_one_core
from tests.distributed import processes
from tests.faulty_files import EVERY, FaultyFiles
from tests.object_store import BUCKET, Proxy
from zfun.checkpoint import steps
from zfun.checkpoint._remove import stale
from zfun.collectives import Workers, barrier
from zfun.errors import CheckpointError, PeerLost
from zfun.files import Files
from zfun.objects import Objects
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


# Ranks that are killed at a request to an S3 server.

ADDRESS = f"s3://{BUCKET}/run"
STORE_TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def proxies() -> Iterator[list[Proxy]]:
    """One proxy for each rank, before one server."""
    with object_store.served() as first:
        second = Proxy(first.upstream)
        second.start()
        yield [first, second]
        second.shutdown()
        second.server_close()


@pytest.fixture
def saved(proxies: list[Proxy]) -> Iterator[list[Proxy]]:
    for step in (0, 1):
        zf.save(ADDRESS, state_at(step), step=step)
    yield proxies
    for proxy in proxies:
        proxy.fail(None)
    Objects(ADDRESS).remove_all(ADDRESS)


def state_at(step: float, group: zf.Group | None = None) -> dict[str, Any]:
    params = {"w": torch.arange(500.0) + step}
    return {"params": params if group is None else zf.shard(params, group)}


def pid_of(group: zf.Group, urls: list[str]) -> int:
    """Let this rank use its proxy, and return its process."""
    conf["s3"] = object_store.options(urls[group.rank])
    fsspec.get_filesystem_class("s3").retries = 2
    return os.getpid()


def saves_to_store(group: zf.Group, background: bool) -> float:
    """Save, and return the seconds until the end, good or bad."""
    begin = time.monotonic()
    state = state_at(2, group)
    try:
        zf.save(
            ADDRESS, state, step=2, keep=2, background=background, timeout_s=STORE_TIMEOUT_S
        ).wait()
    except (PeerLost, CheckpointError):
        return time.monotonic() - begin
    return 0.0


def killing(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def outcomes_of(proxies: list[Proxy], rank: int, at: int | None, background: bool) -> list[Any]:
    """Save on two ranks, of which one is killed at a request."""
    with processes(2, timeout_s=60.0, collective_timeout_s=STORE_TIMEOUT_S) as workers:
        pids: list[Any] = workers.outcomes(pid_of, [proxy.url for proxy in proxies])
        for number, proxy in enumerate(proxies):
            proxy.fail(at if number == rank else None, killing(pids[number]))
        return workers.outcomes(saves_to_store, background)


def requests(quick: list[tuple[int, int]]) -> list[Any]:
    """Rank and number of the request: a few of them, or all, with some to spare.

    All take ten minutes, so `make test-all` takes every sixth.
    """
    everything = [(0, at) for at in range(30)] + [(1, at) for at in range(8)]
    chosen = everything if FORM == "search" else [*everything[2::6], *quick]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in chosen]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("rank", "at"), requests([(0, 5)]))
def test_a_rank_killed_at_any_request_leaves_the_last_checkpoint(
    saved: list[Proxy], rank: int, at: int, background: bool
) -> None:
    found = outcomes_of(saved, rank, at, background)
    is_hit = saved[rank].count > at
    for proxy in saved:
        proxy.fail(None)
    if is_hit:
        assert isinstance(found[rank], Exception)
        survivor = found[1 - rank]
        assert isinstance(survivor, float), survivor
        assert survivor < STORE_TIMEOUT_S + 5
    else:
        assert found == [0.0, 0.0]
    loaded = zf.load(ADDRESS, state_at(-1))
    assert loaded.step in ((1, 2) if is_hit else (2,))
    assert torch.equal(loaded.state["params"]["w"], state_at(loaded.step)["params"]["w"])
    # The next job goes on, and removes what the dead one left.
    zf.save(ADDRESS, state_at(3), step=3, keep=1)
    assert [step for step, _ in steps(ADDRESS)] == [3]
    assert not stale(ADDRESS)
