"""How kernels are chosen, compiled, kept on disk and cut over threads."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_array", "compiled", "in_parts", "is_abstract", "is_large", "is_plain", "jit", "number", "telling", "use", "wide"]

# Below this a second thread costs more than it saves.
_MIN_PER_THREAD = 1 << 18

# More than a core keeps in its own caches until somebody reads it.
_LARGE_BYTES = 1 << 21

# A compilation that takes longer is worth a word.
_LONG_S = 3.0

_LOG = logging.getLogger("zfun")

# How arrays of each dtype travel to a kernel; see [Note: half types].
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
}
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}

_PLAIN_TYPES = {Tensor, torch.nn.Parameter}

# What `use` chose, for the whole process: ranks may be threads, and autograd has threads of its own.
_chosen = {"kernels": "compiled"}


@contextlib.contextmanager
def use(kernels: str) -> Iterator[None]:
    """Choose the kernels of this process, for debugging: the plain torch ones compute what the compiled ones do.

    Args:
        kernels: ``"reference"`` for plain torch everywhere, ``"compiled"`` for compiled kernels where there are any, as without this.

    Example:
        >>> from zfun import ops
        >>> with use("reference"):
        ...     ops.ravel([torch.ones(2)], [0], 3, dtype=torch.float32, device=torch.device("cpu"))
        tensor([1., 1., 0.])
    """
    if kernels not in ("reference", "compiled"):
        raise ValueError(f'kernels are "reference" or "compiled"; got {kernels!r}; pass one of the two')
    before = _chosen["kernels"]
    _chosen["kernels"] = kernels
    try:
        yield
    finally:
        _chosen["kernels"] = before


def is_abstract(x: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers: ``meta`` or fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    return x.is_meta or isinstance(x, FakeTensor)


def compiled() -> bool:
    """Whether compiled kernels may run now: they were not switched off, and nobody watches or transforms torch's operations."""
    return (
        not torch.compiler.is_compiling()
        and _chosen["kernels"] == "compiled"
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def is_plain(*tensors: Tensor) -> bool:
    """Whether the numbers of all tensors lie in the memory of the CPU as their dtypes, shapes and addresses say."""
    return all(
        type(x) in _PLAIN_TYPES and x.is_cpu and x.dtype in _CARRIERS and x.layout is torch.strided and x.is_contiguous() and not x.is_neg()
        for x in tensors
    )


def as_array(x: Tensor) -> Any:
    """View a plain tensor as the array that kernels take."""
    return x.detach().view(_CARRIERS[x.dtype]).numpy()


def number(dtype: torch.dtype) -> Any:
    """Return the type of an element in the arrays of :func:`as_array`."""
    return _DTYPES[dtype]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are added: float32 for floating types of fewer than 32 bits, else the same.

    Example:
        >>> wide(torch.bfloat16), wide(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def is_large(x: Tensor) -> bool:
    """Whether a kernel that writes all of a buffer should do so past the caches, since it would not stay there anyway."""
    return x.numel() * x.dtype.itemsize >= _LARGE_BYTES


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zfun kernel")


def in_parts(length: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(begin, end)`` for all of a length, cut over as many threads as torch may use.

    The threads are not Numba's own: a parallel region of those must not be entered from two threads of a process at once, and ranks may be
    threads.
    """
    num_threads = min(torch.get_num_threads(), length // _MIN_PER_THREAD)
    if num_threads < 2:
        if length:
            work(0, length)
        return
    step = -(-length // num_threads // 1024) * 1024
    waiting = [_pool(num_threads).submit(work, begin, min(begin + step, length)) for begin in range(step, length, step)]
    work(0, step)
    for future in waiting:
        future.result()


def telling(kernel: Any) -> Callable[..., None]:
    """Make a kernel say so when compiling it took long: the first step of a program then stands still, and nobody knows why."""

    def call(*args: Any) -> None:
        known, start = len(kernel.overloads), time.perf_counter()
        kernel(*args)
        taken = time.perf_counter() - start
        if taken > _LONG_S and len(kernel.overloads) > known:
            _LOG.warning("compiled the kernel %r in %.1f s; where its machine code can be kept, only once", kernel.py_func.__name__, taken)

    return call


@functools.cache
def _digest() -> str:
    """What this folder's modules say, in short."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _renewed(kernel: Any) -> Any:
    """Keep machine code for as long as no module of this folder changes, and not only the one where the kernel stands.

    Numba asks for no more, so a kernel would keep helpers of before; and it fails where a type that it kept has gone to another module.
    It does ask for its own version, before anything else.
    """
    kept: Any = getattr(kernel._cache, "_cache_file", None)
    if hasattr(kept, "_version"):
        kept._version = f"{kept._version}, {_digest()}"
    return kernel


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, and keep the machine code on disk where there is a place for it.

    The interpreter's lock is released, division by zero gives infinity as in torch, and every operation rounds by itself: without fast-math
    a vector instruction computes what the scalar one does, so that neither tails nor cuts change bits.
    """
    import numba
    from numba.core.errors import NumbaPerformanceWarning

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        try:
            return _renewed(numba.njit(cache=True, **options)(function))
        except RuntimeError:  # neither the package's folder nor a cache folder of the user can be written
            return numba.njit(**options)(function)
