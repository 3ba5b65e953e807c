"""Ranks that are killed at a request to an S3 server, while they save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
from fsspec.config import conf

import zfun as zf
from tests import object_store
from tests.distributed import processes
from tests.object_store import BUCKET, Proxy
from zfun.checkpoint import steps
from zfun.checkpoint._directory import stale
from zfun.objects import Objects

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PATH = f"s3://{BUCKET}/run"
TIMEOUT_S = 10.0


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
        zf.save(PATH, state_of(step), step=step)
    yield proxies
    for proxy in proxies:
        proxy.fail(None)
    Objects(PATH).remove_all(PATH)


def state_of(step: float, group: zf.Group | None = None) -> dict[str, Any]:
    params = {"w": torch.arange(500.0) + step}
    return {"params": params if group is None else zf.shard(params, group)}


def pid_of(group: zf.Group, urls: list[str]) -> int:
    """Let this rank use its proxy, and return its process."""
    conf["s3"] = object_store.options(urls[group.rank])
    fsspec.get_filesystem_class("s3").retries = 2
    return os.getpid()


def saves(group: zf.Group, background: bool) -> float:
    """Save, and return the seconds until the end, good or bad."""
    begin = time.monotonic()
    state = state_of(2, group)
    try:
        zf.save(PATH, state, step=2, keep=2, background=background, timeout_s=TIMEOUT_S).wait()
    except zf.ZfunError:
        return time.monotonic() - begin
    return 0.0


def killing(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def outcomes(proxies: list[Proxy], rank: int, at: int | None, background: bool) -> list[Any]:
    """Save on two ranks, of which one is killed at a request."""
    with processes(2, timeout_s=60.0, collective_timeout_s=TIMEOUT_S) as workers:
        pids = workers.outcomes(pid_of, [proxy.url for proxy in proxies])
        for number, proxy in enumerate(proxies):
            proxy.fail(at if number == rank else None, killing(pids[number]))
        return workers.outcomes(saves, background)


def cases(quick: list[tuple[int, int]]) -> list[Any]:
    """Rank and number of the request: a few of them, or all, with some to spare."""
    everything = [(0, at) for at in range(30)] + [(1, at) for at in range(8)]
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in everything
    ]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("rank", "at"), cases([(0, 5)]))
def test_a_rank_killed_at_any_request_leaves_the_last_checkpoint(
    saved: list[Proxy], rank: int, at: int, background: bool
) -> None:
    found = outcomes(saved, rank, at, background)
    is_hit = saved[rank].count > at
    for proxy in saved:
        proxy.fail(None)
    if is_hit:
        assert isinstance(found[rank], Exception)
        survivor = found[1 - rank]
        assert isinstance(survivor, float), survivor
        assert survivor < TIMEOUT_S + 5
    else:
        assert found == [0.0, 0.0]
    loaded = zf.load(PATH, state_of(-1))
    assert loaded.step in ((1, 2) if is_hit else (2,))
    assert torch.equal(loaded.state["params"]["w"], state_of(loaded.step)["params"]["w"])
    # The next job goes on, and removes what the dead one left.
    zf.save(PATH, state_of(3), step=3, keep=1)
    assert [step for step, _ in steps(PATH)] == [3]
    assert not stale(PATH)
