"""The engine whose backward() runs, for the hooks of autograd, also on autograd's own threads."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

_RUNNING = "zfun.interop.engine"


def run_by(engine: Any) -> None:
    """Set the engine whose backward() runs in this thread, or ``None``.

    Example:
        >>> engine = object()
        >>> count = sys.getrefcount(engine)
        >>> for _ in range(3):
        ...     run_by(engine)
        ...     run_by(None)
        >>> sys.getrefcount(engine) == count
        True
    """
    if _is_uncounted():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    torch._C._stash_obj_in_tls(_RUNNING, engine)


@functools.cache
def _is_uncounted() -> bool:
    """Whether torch releases an object that it has not taken a reference to, as torch 2.11 does."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_RUNNING}.probe", probe)
    uncounted = sys.getrefcount(probe) == before
    if uncounted:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return uncounted


def running_engine() -> Any:
    """Return the engine whose backward() runs, in this thread or the one that began the pass."""
    return torch._C._get_obj_in_tls(_RUNNING) if torch._C._is_key_in_tls(_RUNNING) else None
