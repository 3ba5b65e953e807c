"""nccl: marks that a device leaves, and two ranks where there are two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zfun.collectives import Stream
from zfun.collectives.backends._nccl import DeviceMarks, NativeGroup


@pytest.mark.cuda
def test_a_mark_is_passed_when_the_queue_has_reached_it() -> None:
    marks = DeviceMarks(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    before = marks.add()
    torch.cuda._sleep(1_000_000_000)
    after = marks.add()
    assert not after()
    torch.cuda.synchronize()
    assert before()
    assert after()


@pytest.mark.cuda
def test_hops_run_beside_the_queue_that_computes() -> None:
    """Over torch's fake backend, which moves nothing."""
    device, event = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Event
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with NativeGroup(dist.group.WORLD, dist.HashStore(), 0, 2, 60.0, None) as group:
            torch.cuda.synchronize()
            hops, main = event(), event()
            before = torch.cuda.current_stream()
            aside = group.aside(Stream.GRADS, device)
            assert aside is not None
            with aside:
                torch.cuda._sleep(1_000_000_000)
                hops.record()
            assert torch.cuda.current_stream() == before
            main.record()
            main.synchronize()
            assert not hops.query()
            torch.cuda.synchronize()
            # And behind the work that is queued already.
            torch.cuda._sleep(1_000_000_000)
            main.record()
            aside = group.aside(Stream.GRADS, device)
            assert aside is not None
            with aside:
                hops.record()
            hops.synchronize()
            assert main.query()
            assert group.aside(Stream.GRADS, torch.device("cpu")) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.timeout(110)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_two_ranks_have_the_results_of_the_simulation(device: str) -> None:
    """Over gloo, which shows the program, and over nccl."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.gpu.two_ranks", device),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("equal") == 2


@pytest.mark.cuda
@pytest.mark.processes
@pytest.mark.timeout(110)
def test_a_rank_that_stops_is_lost_and_the_other_goes_on() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "tests.gpu.two_ranks", "cuda", "lost"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "rank 0 lost rank 1" in done.stdout, done.stderr[-5000:]
    assert "goes on" in done.stdout
    assert time.monotonic() - began < 90.0
