"""Write payload files: safetensors, in hashed chunks, by several threads."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from zfun.checkpoint.format._manifest import digest_of
from zfun.errors import CheckpointError
from zfun.files import ALIGNMENT, Files, aligned, open_direct, pages
from zfun.objects import is_url

_NUM_THREADS = 4


def failure(path: str, problem: str, number: int | None) -> CheckpointError:
    """Return the error of a file that cannot be written or read."""
    remedy = {
        errno.ENOSPC: "free room on the disk",
        errno.EDQUOT: "free room in your quota",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
        errno.ELOOP: "replace the link by the file, because links are not followed",
    }.get(number or 0, "look at the disk and the log of the system")
    if is_url(path):
        remedy = {
            errno.EACCES: "look at the credentials and the policy of the bucket",
            errno.ENOENT: "look at the address of the store and the name of the bucket",
            errno.ETIMEDOUT: "look at the network, or pass a larger timeout_s",
        }.get(number or 0, "look at the store, the credentials and the network")
    return CheckpointError(
        f"{path}: {problem}; {remedy}; committed checkpoints are as they were",
        path=path,
        errno=number,
    )


@contextlib.contextmanager
def explaining(path: str, problem: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`CheckpointError` with path and errno."""
    try:
        yield
    except OSError as error:
        raise failure(path, f"{problem} failed with {error}", error.errno) from error


def be_gentle() -> None:
    """Let this thread run only where other threads leave time, as far as the system can.

    Two such threads get less than a tenth of a core that others want.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


class Hashing(NamedTuple):
    """The length of the chunks of a file, and the hash that each gets."""

    chunk_bytes: int
    name: str


def write_file(
    files: Files,
    path: str,
    blocks: Iterable[np.ndarray],
    num_bytes: int,
    hashing: Hashing,
    *,
    gentle: bool = False,
) -> tuple[str, ...]:
    """Write a new file, wait until the disk has it, and return the hash of each chunk.

    Each of ``blocks``, in uint8, may be overwritten when the next is asked for. With ``gentle`` one
    thread writes, where the work of the process leaves time. The error is :class:`CheckpointError`
    where the disk refuses, or writes fewer bytes than asked.
    """
    with explaining(path, "the file"):
        fd, is_direct = open_direct(files, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        writer = _Writer(files, path, fd, hashing, is_direct=is_direct, gentle=gentle)
        # A full disk is found before the first write, and the file gets its blocks at once.
        with explaining(path, f"reserving {num_bytes} bytes"):
            files.reserve(fd, 0, num_bytes)
        with writer:
            for block in blocks:
                writer.add(block)
                del block  # before the next is read from a store
            writer.finish()
        assert writer.num_bytes == num_bytes, (writer.num_bytes, num_bytes)
        with explaining(path, "the end of the file"):
            if is_direct and num_bytes % ALIGNMENT:
                files.truncate(fd, num_bytes)
            files.sync(fd)
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)
    return tuple(writer.hashes)


class _Writer:
    """Collects bytes in chunks, which threads hash and write.

    The threads are plain ones, because the end of the process waits for plain threads, and takes no
    more work for the threads of an executor.
    """

    def __init__(
        self, files: Files, path: str, fd: int, hashing: Hashing, *, is_direct: bool, gentle: bool
    ) -> None:
        self._files, self._path, self._fd, self._is_direct = files, path, fd, is_direct
        self._hashing, self._gentle = hashing, gentle
        self._num_threads = 1 if gentle else _NUM_THREADS
        self.hashes: list[str] = []
        self.num_bytes = 0
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(self._num_threads):
            self._free.put(chunk_of(hashing.chunk_bytes))
        self._chunk = chunk_of(hashing.chunk_bytes)
        self._filled = 0
        self._work: queue.SimpleQueue[tuple[np.ndarray, int, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name="zfun-save") for _ in range(self._num_threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = self._error or error
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def add(self, block: np.ndarray) -> None:
        done = 0
        while done < len(block):
            count = min(len(block) - done, len(self._chunk) - self._filled)
            self._chunk[self._filled : self._filled + count] = block[done : done + count]
            self._filled += count
            done += count
            if self._filled == len(self._chunk):
                self._hand_over()

    def finish(self) -> None:
        if self._filled:
            self._hand_over()
        for _ in range(self._num_threads):
            self._free.get()
        self._check()

    def _hand_over(self) -> None:
        self.hashes.append("")
        self._work.put((self._chunk, self._filled, self.num_bytes))
        self.num_bytes += self._filled
        self._filled = 0
        self._chunk = self._free.get()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._gentle:
            be_gentle()
        while (work := self._work.get()) is not None:
            try:
                if self._error is None:
                    self._write(*work)
            except BaseException as error:  # noqa: BLE001, the thread that saves raises it
                self._error = error
            self._free.put(work[0])

    def _write(self, chunk: np.ndarray, filled: int, at: int) -> None:
        digest = digest_of(self._hashing.name, chunk[:filled])
        self.hashes[at // self._hashing.chunk_bytes] = digest
        end = aligned(filled) if self._is_direct else filled
        chunk[filled:end] = 0
        with explaining(self._path, f"a write of {end} bytes at {at}"):
            done = self._files.write(self._fd, chunk[:end], at)
        if done != end:
            problem = f"a write of {end} bytes at {at} wrote {done}"
            raise failure(self._path, problem, errno.ENOSPC)


def chunk_of(num_bytes: int) -> np.ndarray:
    """Return memory for one chunk, which begins at a page."""
    try:
        block = pages(num_bytes)
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint takes {num_bytes} bytes of memory for each thread; got {error}; "
            "free memory, raise the limit of the process, or save with a smaller chunk_bytes=",
            errno=error.errno,
        ) from error
    return np.frombuffer(block, np.uint8, num_bytes)
