"""Tests on real processes of this machine: loopback only, each with a hard timeout."""

from __future__ import annotations

import functools
import multiprocessing
import platform
import sys
from typing import Any

import pytest

from zfun.collectives import Workers

# The modules of torch and of the tests that ranks use. One process imports the
# modules, and every rank inherits the imports.
_IMPORTED = [
    "numba",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "tests.distributed.bodies",
    "tests.distributed.test_shared_memory",
]


@functools.cache
def _server() -> Any:
    if sys.platform == "win32":
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def processes(size: int, **options: Any) -> Workers:
    """Processes that start fast, because torch is imported before they fork; the tests of ``spawn``
    cover processes that import torch themselves.
    """
    return Workers(size, context=_server(), **options)


needs_shared_memory = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"),
    reason="shared memory is for Linux on x86-64",
)
