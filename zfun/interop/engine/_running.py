"""Backward passes of torch, and the engine that runs one, for the hooks of autograd."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zfun.interop.engine._parameter import LiveParameter

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


def run_backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Iterable[Tensor] | None = None,
) -> None:
    """Run ``loss.backward()``; ``inputs`` may be parameters of engines, which get gradients alone.

    A call has tensors of its own in place of parameters, so ``loss.backward(inputs=)`` of torch
    would give a parameter none.
    """
    if inputs is None:
        torch.autograd.backward(loss, gradient, retain_graph, create_graph)
        return
    chosen = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    names: dict[Any, set[str]] = {}
    for x in [x for x in chosen if isinstance(x, LiveParameter)]:
        live: Any = x._live
        name = live.name_of(x)
        names.setdefault(live.owner, set()).add(name)
        # Uses outside of calls, at stage 3 of a value that was gathered there.
        chosen += [live.strays[name]] if name in live.strays else []
    for engine, only in names.items():
        engine._sum.only = frozenset(only)
        for tape in engine._open_tapes():
            chosen += tape.anchors
            tape.hooked = engine._live.hooked & only
    try:
        torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=chosen)
        for engine in names:
            engine._settle()
    finally:
        for engine in names:
            engine._sum.only = None
            for tape in engine._open_tapes():
                tape.hooked = engine._live.hooked
