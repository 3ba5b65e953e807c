"""Kernels for the CPU, compiled when they are first used.

[Note: compiled kernels]
Each is the twin of a readable kernel with the same signature. They are plain loops over slices, without fast-math: LLVM turns them into
vector instructions that round as the scalar ones do, so that the tail of a buffer computes what its body computes, and cutting a buffer
changes no bits. They release the interpreter's lock, and large buffers are cut over as many threads as torch may use: a parallel region of
Numba's own must not be entered from two threads of a process at once, and ranks may be threads. The machine code is cached on disk where
there is a place for it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["adam_step", "takes"]

# Below this a second thread costs more than it saves.
_MIN_PER_THREAD = 1 << 18

# What has to be cast first is cast in pieces that stay in the cache.
_CHUNK = 1 << 16

_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


def takes(*tensors: Tensor) -> bool:
    """Whether the compiled kernels apply: contiguous CPU tensors of one type, float32 or float64, with numbers in them."""
    dtype = tensors[0].dtype
    if dtype not in _TYPES:
        return False
    return all(type(t) is Tensor and t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() and not t.is_neg() for t in tensors)


@functools.cache
def _compiled(name: str) -> Callable[..., None]:
    """Compile a kernel, and keep the machine code on disk where that is possible."""
    import numba
    from numba.core.errors import NumbaPerformanceWarning

    source = globals()[name]
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        try:
            return numba.njit(cache=True, **options)(source)
        except RuntimeError:  # neither the package's folder nor a cache folder of the user can be written
            return numba.njit(**options)(source)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zfun kernel")


def _run(kernel: Callable[..., None], arrays: list[Any], constants: tuple[Any, ...]) -> None:
    """Run a kernel over arrays of one length, cut over torch's number of threads."""
    length = arrays[0].size
    num_threads = min(torch.get_num_threads(), length // _MIN_PER_THREAD)
    if num_threads < 2:
        kernel(*arrays, *constants)
        return
    step = -(-length // num_threads // 64) * 64
    parts = [[array[start : start + step] for array in arrays] for start in range(0, length, step)]
    waiting = [_pool(num_threads).submit(kernel, *part, *constants) for part in parts[1:]]
    kernel(*parts[0], *constants)
    for future in waiting:
        future.result()


def adam_step(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    change: Tensor | None,
    *,
    b1: float,
    b2: float,
    step_size: float,
    eps: float,
    l2: float,
    decay: float,
) -> None:
    """Take one step of Adam; the readable twin is :func:`zfun.ops.adam_step`."""
    number = _TYPES[param.dtype]
    constants = tuple(number(c) for c in (b1, 1.0 - b1, b2, 1.0 - b2, -step_size, eps, l2, -decay))
    kernel = _compiled("_adam" if change is None else "_adam_change")
    buffers = (param, grad, mu, nu) if change is None else (param, grad, mu, nu, change)
    if grad.dtype == param.dtype and grad.is_contiguous():
        _run(kernel, [x.detach().numpy() for x in buffers], constants)
        return
    for chunk in zip(*(x.detach().split(_CHUNK) for x in buffers), strict=True):
        ready = [x.to(param.dtype).contiguous() if x.dtype != param.dtype or not x.is_contiguous() else x for x in chunk]
        _run(kernel, [x.numpy() for x in ready], constants)


def _adam(p: Any, g: Any, m: Any, v: Any, b1: Any, c1: Any, b2: Any, c2: Any, step: Any, eps: Any, l2: Any, decay: Any) -> None:
    # The usual cases have loops of their own: what is tested inside a loop does not vectorise. Locals, because arrays might overlap.
    if l2 == 0 and decay == 0:
        for i in range(p.size):
            x = g[i]
            mean = m[i] * b1 + x * c1
            square = v[i] * b2 + (x * x) * c2
            m[i] = mean
            v[i] = square
            p[i] = p[i] + (mean / (np.sqrt(square) + eps)) * step
    elif l2 == 0:
        for i in range(p.size):
            x = g[i]
            mean = m[i] * b1 + x * c1
            square = v[i] * b2 + (x * x) * c2
            m[i] = mean
            v[i] = square
            old = p[i]
            p[i] = old + ((mean / (np.sqrt(square) + eps)) * step + old * decay)
    else:
        for i in range(p.size):
            old = p[i]
            x = old * l2 + g[i]
            mean = m[i] * b1 + x * c1
            square = v[i] * b2 + (x * x) * c2
            m[i] = mean
            v[i] = square
            u = (mean / (np.sqrt(square) + eps)) * step
            if decay != 0:
                u += old * decay
            p[i] = old + u


def _adam_change(
    p: Any, g: Any, m: Any, v: Any, change: Any, b1: Any, c1: Any, b2: Any, c2: Any, step: Any, eps: Any, l2: Any, decay: Any
) -> None:
    for i in range(p.size):
        x = g[i]
        if l2 != 0:
            x += p[i] * l2
        mean = m[i] * b1 + x * c1
        square = v[i] * b2 + (x * x) * c2
        m[i] = mean
        v[i] = square
        u = (mean / (np.sqrt(square) + eps)) * step
        if decay != 0:
            u += p[i] * decay
        change[i] = u
