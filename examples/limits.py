"""A limit on the memory of a process, which the system enforces."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence

import torch


def limit_memory(num_bytes: int) -> None:
    """Let the system refuse private memory beyond ``num_bytes``, and try that once."""
    # The allocator of C keeps freed memory in pieces that fit no other tensor: return large ones
    # (M_MMAP_THRESHOLD) to the system at once, and keep one heap for all threads (M_ARENA_MAX).
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**17)
    mallopt(-8, 1)
    threading.stack_size(2**20)  # the limit counts whole stacks, of 8 MiB each by default
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return
    raise OSError("this system does not enforce RLIMIT_DATA; use Linux 4.7 or later")


def run_alone(command: Sequence[str]) -> None:
    """Run a Python program as one rank, without a progress bar."""
    alone = {name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE")}
    alone["TQDM_DISABLE"] = "1"
    subprocess.run([sys.executable, *command], env=alone, check=True)
