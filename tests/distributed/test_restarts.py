"""Ranks that start again with the store of ranks that have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import FORM
from tests.distributed import fork_server
from zfun.collectives import AllReduce, Collective, process_group
from zfun.errors import PeerLost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

RESTARTS = {"everyday": 4, "all": 4, "search": 20}[FORM]


@pytest.mark.slow
def test_every_restart_by_torchrun_succeeds(tmp_path: Path) -> None:
    restarts = 2 * RESTARTS - 1
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--max-restarts", str(restarts)]
    command += ["-m", "tests.distributed.programs.restarting", str(tmp_path), "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=290, check=False
    )
    attempts = range(1, restarts + 1, 2)
    expected = {f"{attempt}.{rank}" for attempt in attempts for rank in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == expected, done.stderr[-4000:]
    assert done.returncode == 0


def _first(rank: int, port: int) -> None:
    _launched(rank, port)
    process_group(timeout_s=5.0)
    if rank == 0:
        with pytest.raises(PeerLost, match="rank 0 lost rank 1, which did not come within 1 s"):
            process_group(timeout_s=1.0)
    os._exit(0)


def _second(rank: int, port: int) -> None:
    _launched(rank, port)
    # Rank 1 finds the keys of the earlier rank 0 first.
    time.sleep(0.3 * (1 - rank))
    for group in (process_group(timeout_s=5.0), process_group(timeout_s=5.0)):
        total = group.start(Collective(AllReduce()), torch.tensor([1.0 + group.rank])).wait()
        assert total.item() == 3.0


def _launched(rank: int, port: int) -> None:
    names = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in names.items()})


def test_keys_of_ranks_that_have_ended_are_not_read() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_server()
    for program in (_first, _second):
        started = [context.Process(target=program, args=(rank, store.port)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join(30.0)
            process.kill()
        assert [process.exitcode for process in started] == [0, 0]
