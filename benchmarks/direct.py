"""Plain direct transfers: the most that Python threads get out of a disk, with nothing else to do.

Loops of ``os.pwrite`` and ``os.preadv`` over one reused buffer for each thread. A buffer of one
block stays in the cache of the processor; a buffer of 64 MiB does not, as tensors do not.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 2**20

__all__ = ["MIB", "both_ways", "mixed", "rates"]


def rates(
    path: Path,
    num_bytes: int,
    *,
    block: int = MIB,
    threads: int = 4,
    span: int = 64 * MIB,
    fresh: bool = False,
) -> tuple[float, float]:
    """Write and read a file in the blocks of each thread; GB/s.

    Args:
        path: a directory on the disk.
        num_bytes: of the file.
        block: bytes of one call of the system.
        threads: that transfer.
        span: bytes of the buffer of each thread.
        fresh: time the write of a new file and an ``fsync``, as of a checkpoint; otherwise a second
            write, because the first gives the file its blocks on the disk.
    """
    buffers = _buffers(threads, span)
    places = [range(thread * block, num_bytes, threads * block) for thread in range(threads)]

    def move(fd: int, is_write: bool) -> Callable[[int], None]:
        return lambda thread: _move(fd, buffers[thread], block, places[thread], is_write)

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        with _file(path, num_bytes) as fd:
            list(pool.map(move(fd, True), range(threads)))
            if fresh:
                os.fsync(fd)
            else:
                begin = time.perf_counter()
                list(pool.map(move(fd, True), range(threads)))
            written = time.perf_counter()
            list(pool.map(move(fd, False), range(threads)))
            end = time.perf_counter()
    return num_bytes / (written - begin) / 1e9, num_bytes / (end - written) / 1e9


def mixed(path: Path, num_bytes: int) -> float:
    """Write one half of a file and read the other at once, from 64 MiB of memory a thread; GB/s."""
    with both_ways(path, num_bytes) as start:
        begin = time.perf_counter()
        start()()
        return num_bytes / (time.perf_counter() - begin) / 1e9


@contextlib.contextmanager
def both_ways(path: Path, num_bytes: int) -> Iterator[Callable[[], Callable[[], None]]]:
    """Yield a function that starts what :func:`mixed` times, and returns a function that waits."""
    buffers, quarter = _buffers(4, 64 * MIB), num_bytes // 4 // MIB * MIB
    places = [range(thread * quarter, (thread + 1) * quarter, MIB) for thread in range(4)]

    def start(*, writes: int = 2) -> Callable[[], None]:
        moves = [
            pool.submit(_move, fd, buffers[thread], MIB, places[thread], thread < writes)
            for thread in range(4)
        ]

        def wait() -> None:
            for move in moves:
                move.result()

        return wait

    with ThreadPoolExecutor(4) as pool, _file(path, num_bytes) as fd:
        start(writes=4)()  # the first write gives the file its blocks on the disk
        yield start


def _move(fd: int, buffer: memoryview, block: int, places: range, is_write: bool) -> None:
    for index, at in enumerate(places):
        view = buffer[index * block % len(buffer) :][:block]
        done = os.pwrite(fd, view, at) if is_write else os.preadv(fd, [view], at)
        assert done == block


def _buffers(threads: int, span: int) -> list[memoryview]:
    found = []
    for _ in range(threads):
        # A huge page has 2 MiB.
        buffer = mmap.mmap(-1, max(span, 2 * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer[:] = os.urandom(MIB) * (len(buffer) // MIB)
        found.append(memoryview(buffer)[:span])
    return found


@contextlib.contextmanager
def _file(path: Path, num_bytes: int) -> Iterator[int]:
    with tempfile.NamedTemporaryFile(dir=path, prefix="direct-", delete=False) as made:
        file = Path(made.name)
    fd = os.open(file, os.O_RDWR | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        yield fd
    finally:
        os.close(fd)
        file.unlink()
