"""Processes and files that tests have left behind."""

from __future__ import annotations

import os
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Processes inherit this variable, whoever their parent is by now.
VARIABLE = "ZFUN_TEST_RUN"
# The pool in which torch compiles lives as long as the process that compiles.
_KEPT = ("torch/_inductor", "torch._inductor")


def mark_session() -> None:
    os.environ[VARIABLE] = str(os.getpid())


def processes() -> list[str]:
    """Return the command of each process of this test run that lives, without Python's helpers."""
    mark = f"{VARIABLE}={os.getpid()}".encode()
    own = {os.getpid(), forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    own.add(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if int(folder.name) not in own and not any(name in command for name in _KEPT):
            found.append(f"process {folder.name}: {command[:200]}")
    return found


def ended(limit_s: float = 5.0) -> list[str]:
    """Wait for the processes of this test run; return those that do not end."""
    deadline = time.monotonic() + limit_s
    while (left := processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def files() -> set[str]:
    """Return the files of shared memory, and those beside the code."""
    shared = Path("/dev/shm")
    found = [*shared.glob("*zfun*")] if shared.exists() else []
    return {str(path) for path in [*found, *ROOT.iterdir()] if not path.name.startswith(".")}
