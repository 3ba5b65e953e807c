"""Tests on real processes of this machine: loopback only, each with a hard timeout."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zfun as zf
from tests.conftest import on_one_core
from zfun.collectives import Workers

# The modules of torch and of the tests that ranks use. One process imports the
# modules, and every rank inherits the imports.
_IMPORTED = [
    "numba",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "tests.distributed.programs.bodies",
    "tests.distributed.programs.dtensors",
    "tests.distributed.programs.first_kernel",
    "tests.distributed.test_restarts",
    "tests.distributed.test_shared_memory",
    "zfun.interop.deepspeed",
]


@functools.cache
def fork_server() -> Any:
    """A context whose processes start fast, because torch is imported before the fork."""
    if sys.platform == "win32":
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def processes(size: int, **options: Any) -> Workers:
    """Processes that start fast, because torch is imported before the fork. The tests of ``spawn``
    cover processes that import torch themselves.
    """
    return Workers(size, context=fork_server(), **options)


def run_forked(program: str, folder: Path, *, timeout_s: float) -> tuple[int | None, str]:
    """Run a program in a folder, in a process that has imported torch; return code and errors."""
    process = fork_server().Process(target=_execute, args=(program, folder))
    process.start()
    process.join(timeout_s)
    process.kill()
    process.join()
    return process.exitcode, (folder / "errors").read_text()


def _execute(program: str, folder: Path) -> None:
    os.chdir(folder)
    with Path("errors").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    exec(program, {"__name__": "__main__"})


@functools.cache
def simulated(size: int, body: Callable[[zf.Group], Any]) -> list[Any]:
    """Run a body on simulated ranks, once for all transports."""
    with on_one_core():
        return zf.simulate(size, body)


def run_program(program: str, *, timeout_s: float) -> list[tuple[int, str, str]]:
    """Run a program on two ranks of a launcher; return codes, outputs and errors by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        # The forks of a rank too.
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, outputs, strict=True)]


needs_shared_memory = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"),
    reason="shared memory is for Linux on x86-64",
)
