"""How CPU kernels are compiled, kept on disk and cut over threads."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

# Below this a second thread costs more than it saves.
_MIN_PER_THREAD = 1 << 18

# Compilation that takes longer is logged.
_LONG_S = 1.0
# A lock that takes longer is that of another process.
_SHORT_S = 0.1

# A process that waited this long for another's compilation compiles by itself: the other may be
# stopped, in a debugger say, and the lock saves work only.
_PATIENCE_S = 5.0

_LOG = logging.getLogger("zfun")

# For the whole process, because ranks may be threads.
_lock = threading.Lock()
_first_call_s: dict[str, float] = {}
_compile_s: dict[str, float] = {}


@functools.cache
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    # A pool belongs to one process, because the child of a fork has none of the threads.
    return ThreadPoolExecutor(num_threads, thread_name_prefix="zfun kernel")


def in_parts(length: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(begin, end)`` for all of a length, cut over as many threads as torch may use.

    The threads are not Numba's own: two threads of a process must not enter a parallel region of
    those at once, and ranks may be threads.
    """
    num_threads = min(torch.get_num_threads(), length // _MIN_PER_THREAD)
    # After the end of the main thread, Python starts no work on other threads.
    if num_threads < 2 or not threading.main_thread().is_alive():
        if length:
            work(0, length)
        return
    step = -(-length // num_threads // 1024) * 1024
    spans = [(begin, min(begin + step, length)) for begin in range(step, length, step)]
    pool = _pool(num_threads, os.getpid())
    waiting = [pool.submit(work, *span) for span in spans]
    work(0, step)
    for future in waiting:
        future.result()


def seconds_compiled() -> dict[str, float]:
    """Return how many seconds each kernel of this process was compiled, loaded or waited for."""
    with _lock:
        return dict(_first_call_s)


@functools.cache
def entry(kernel: Any) -> Callable[..., None]:
    """Make a kernel callable from Python, compiled by one process of a host, and logged once.

    The first process that calls a kernel holds a lock on a file beside the machine code; the other
    processes of the host wait for some seconds, and then load the code. Only the process of local
    rank 0 logs, and only one line for all kernels.
    """

    def call(*args: Any) -> None:
        if kernel.overloads:
            kernel(*args)
            return
        start = time.perf_counter()
        with _lock_file(kernel):
            has_waited = time.perf_counter() - start > _SHORT_S
            is_new = not kernel.overloads  # another thread may have compiled the kernel meanwhile
            kernel(*args)
        if is_new:
            # A slow load is no compilation; a wait is, by another process.
            is_compiled = bool(kernel.stats.cache_misses) or has_waited
            _note(kernel.py_func.__name__, time.perf_counter() - start, is_compiled)

    return call


def _note(name: str, seconds: float, is_compiled: bool) -> None:
    with _lock:
        _first_call_s[name] = seconds
        before = sum(_compile_s.values())
        if is_compiled:
            _compile_s[name] = seconds
        is_first = before <= _LONG_S < sum(_compile_s.values())
    if is_first and os.environ.get("LOCAL_RANK", "0") == "0":
        _LOG.warning("compiling CPU kernels, for some seconds in all; the machine code is kept")


def _lock_file(kernel: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a locked file beside a kernel's machine code, or nothing where no code is kept."""
    folder = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if folder is None:
        return contextlib.nullcontext()
    try:
        import fcntl  # noqa: F401 (Windows has none)

        Path(folder).mkdir(parents=True, exist_ok=True)
        file = (Path(folder) / f"{kernel.py_func.__name__}.lock").open("w")
    except (ImportError, OSError):
        return contextlib.nullcontext()
    deadline = time.monotonic() + _PATIENCE_S
    while not _locked(file) and time.monotonic() < deadline:
        time.sleep(0.01)
    return file


def _locked(file: IO[str]) -> bool:
    """Lock a file; return False where another process holds the lock."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@functools.cache
def _digest() -> str:
    """Return a digest of the modules of all kernels."""
    paths = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _renewed(kernel: Any) -> Any:
    """Keep machine code until a module of this package changes, not only the kernel's own.

    Numba compares the kernel's own file alone, so a kernel would keep helpers of before; and
    loading fails where a type that was kept has moved. Numba also compares its own version, first.
    """
    kept: Any = getattr(kernel._cache, "_cache_file", None)
    if hasattr(kept, "_version"):
        kept._version = f"{kept._version}, {_digest()}"
    return kernel


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, and keep the machine code where that is possible.

    The interpreter's lock is released, division by zero gives infinity as in torch, and every
    operation rounds by itself: without fast-math a vector instruction computes what the scalar one
    does, so neither tails nor cuts change bits.
    """
    import numba
    from numba.core.errors import NumbaPerformanceWarning

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        try:
            return _renewed(numba.njit(cache=True, **options)(function))
        except RuntimeError:  # neither the package's folder nor one of the user can be written
            return numba.njit(**options)(function)
