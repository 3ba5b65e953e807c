"""One file of a run on a disk, which threads read and write in blocks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import os
import socket
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from zfun.errors import OffloadError, check_process
from zfun.files import ALIGNMENT, Files, aligned, open_direct, pages
from zfun.stores._regions import Lease, Regions

PREFIX = "zfun-nvme-"
DATA = "data"


def failure(name: str, problem: str, path: str, number: int | None) -> OffloadError:
    """Return the error of a tensor that the disk does not keep or return."""
    remedy = {
        errno.ENOSPC: "free room on the disk, or choose another path",
        errno.EDQUOT: "free room in your quota, or choose another path",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another path",
        errno.ENOMEM: "lower bucket_bytes or buffer_count, or raise the limit on the memory",
    }.get(number or 0, "look at the disk and the log of the system, or choose another path")
    return OffloadError(
        f"a store must keep {name} on the disk; {problem} ({path}); {remedy}",
        path=path,
        errno=number,
    )


class Place(NamedTuple):
    """The bytes of one tensor in the file.

    Attributes:
        region: where they are.
        sums: the checksum of each chunk, if checksums are kept.
        name: the part of the state, for messages.
    """

    region: Lease
    sums: list[int]
    name: str


class Disk:
    """A file in a directory of this run, and the threads that transfer blocks of the file.

    A transfer is cut into chunks of ``chunk_bytes``, one for each call of the system. Addresses,
    offsets and lengths are those of whole pages, as direct transfers need. All lengths are checked.
    The other options are those of :func:`zfun.stores.nvme`.
    """

    def __init__(
        self,
        path: str,
        files: Files,
        *,
        chunk_bytes: int,
        num_threads: int,
        checksum: bool,
        timeout_s: float,
    ) -> None:
        self.files = files
        self.chunk_bytes = chunk_bytes
        self.checksum = checksum
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self.path, self._fd, self.is_direct = _create(files, path)
        self._unsynced = False
        self._syncing = threading.Lock()
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(num_threads, "zfun-nvme")
        self.regions = Regions(functools.partial(_grow, files, self._fd, self.path))
        # Transfers hold this object, so no thread uses the descriptor when this runs.
        self._remove = weakref.finalize(
            self, _remove, files, self._fd, self.path, self._threads, self.pid
        )

    def write(self, place: Place, data: Tensor, ready: Callable[[], Any]) -> list[Future[None]]:
        """Start to write bytes, when ``ready`` returns; the checksums go into ``place.sums``."""
        starts = range(0, data.numel(), self.chunk_bytes)
        place.sums.extend(0 for _ in starts if self.checksum)
        return [self._start(self._write, place, data, at, ready) for at in starts]

    def read(
        self, place: Place, buffer: Tensor, num_bytes: int, writes: Sequence[Future[None]]
    ) -> list[Future[None]]:
        """Start to read bytes into a buffer of whole pages, when the writes are complete."""
        return [
            self._start(self._read, place, buffer, at, num_bytes, writes)
            for at in range(0, num_bytes, self.chunk_bytes)
        ]

    def wait(self, transfers: Sequence[Future[None]], name: str) -> None:
        """Wait for all transfers, and raise the first error."""
        self.settle(transfers, name)
        for transfer in transfers:
            transfer.result()

    def settle(self, transfers: Sequence[Future[None]], name: str) -> None:
        """Wait for the end of all transfers, by success or failure."""
        if concurrent.futures.wait(transfers, self.timeout_s).not_done:
            raise failure(
                name, f"the disk did not answer in {self.timeout_s:g} s", self.path, errno.ETIMEDOUT
            )

    def sync(self, name: str) -> None:
        """Wait for the system's own buffers; direct transfers have none."""
        with self._syncing:
            if not self._unsynced:
                return
            self._check_open()
            self._unsynced = False
            try:
                self.files.sync(self._fd)
            except OSError as error:
                raise failure(
                    name, f"a sync failed with {error}", self.path, error.errno
                ) from error

    def close(self) -> None:
        """Wait for all transfers, and remove the file."""
        self._threads.shutdown()
        self._remove()

    def _start(self, fn: Callable[..., None], *args: Any) -> Future[None]:
        check_process(self.pid, "a store on a disk")
        self._check_open()
        return self._threads.submit(fn, *args)

    def _check_open(self) -> None:
        if not self._remove.alive:
            raise OffloadError(
                "a store keeps tensors until close(); got a use of a closed store; make a new one",
                path=self.path,
            )

    def _write(self, place: Place, data: Tensor, at: int, ready: Callable[[], Any]) -> None:
        ready()
        chunk = data.numpy()[at : at + self.chunk_bytes]
        if self.checksum:
            place.sums[at // self.chunk_bytes] = zlib.crc32(chunk.data)
        # Memory that begins at a page needs no copy, except after the last whole page.
        is_aligned = (data.data_ptr() + at) % ALIGNMENT == 0
        whole = len(chunk) // ALIGNMENT * ALIGNMENT if is_aligned else 0
        if whole:
            self._transfer("write", place, chunk[:whole], at)
        if whole < len(chunk):
            rest = len(chunk) - whole
            staged = self._staging(place.name)[: aligned(rest)]
            staged[:rest] = chunk[whole:]
            staged[rest:] = 0
            self._transfer("write", place, staged, at + whole)
        if not self.is_direct:
            self._unsynced = True

    def _read(
        self, place: Place, buffer: Tensor, at: int, num_bytes: int, writes: Sequence[Future[None]]
    ) -> None:
        # Threads take transfers in order, so other threads are at these writes or past them.
        for write in writes:
            write.result()
        num_bytes = min(self.chunk_bytes, num_bytes - at)
        chunk = buffer.numpy()[at : at + aligned(num_bytes)]
        self._transfer("read", place, chunk, at)
        if self.checksum and (
            zlib.crc32(chunk[:num_bytes].data) != place.sums[at // self.chunk_bytes]
        ):
            where = f"{num_bytes} bytes at {place.region.start + at} of the file"
            raise failure(place.name, f"{where} are not those written", self.path, errno.EIO)

    def _transfer(self, kind: str, place: Place, chunk: np.ndarray, at: int) -> None:
        operation = self.files.write if kind == "write" else self.files.read
        offset = place.region.start + at
        problem = f"a {kind} of {len(chunk)} bytes at {offset}"
        try:
            done = operation(self._fd, chunk, offset)
        except OSError as error:
            problem += f" failed with {error}"
            raise failure(place.name, problem, self.path, error.errno) from error
        if done != len(chunk):
            raise failure(place.name, f"{problem} transferred {done}", self.path, errno.EIO)

    def _staging(self, name: str) -> np.ndarray:
        """Return memory of this thread for one chunk."""
        if not hasattr(self._local, "staging"):
            num_bytes = aligned(self.chunk_bytes)
            with _explaining(
                f"there is no memory for a chunk of {num_bytes} bytes", self.path, name
            ):
                self._local.staging = np.frombuffer(pages(num_bytes), np.uint8)
        return self._local.staging


def _create(files: Files, path: str) -> tuple[str, int, bool]:
    """Make the file of a run, and return its path, the descriptor, and whether it is direct."""
    prefix = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-"
    page = np.frombuffer(pages(ALIGNMENT), np.uint8)
    with _explaining(f"the file of the store cannot be made in {path}", path):
        # `zfun clean` may remove a directory before the file in it is locked.
        for _ in range(9):
            directory = files.make_directory(path, prefix)
            data = f"{directory}/{DATA}"
            try:
                fd, is_direct = open_direct(
                    files, data, os.O_RDWR | os.O_CREAT, lambda fd: files.write(fd, page, 0)
                )
            except FileNotFoundError:
                continue
            except OSError:
                with contextlib.suppress(OSError):
                    files.remove(data)
                raise
            is_mine = True
            with contextlib.suppress(OSError):  # a file system without locks
                is_mine = files.lock(fd)
            if is_mine and Path(data).exists():
                break
            files.close(fd)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not is_direct:
        warnings.warn(
            f"the file system of {path} refuses direct transfers (O_DIRECT); the store transfers "
            "through the memory of the system, which is slower and takes that memory",
            stacklevel=6,
        )
    return data, fd, is_direct


@contextlib.contextmanager
def _explaining(problem: str, path: str, name: str = "tensors") -> Any:
    try:
        yield
    except OSError as error:
        raise failure(name, f"{problem}: {error}", path, error.errno) from error


def _grow(files: Files, fd: int, path: str, offset: int, num_bytes: int) -> None:
    with _explaining("the free room is not known", path):
        free = files.free_bytes(path)
    if free < num_bytes:
        problem = f"{num_bytes} more bytes are needed, and {free} are free"
        raise failure("tensors", problem, path, errno.ENOSPC)
    with _explaining(f"{num_bytes} more bytes cannot be reserved", path):
        files.reserve(fd, offset, num_bytes)


def _remove(files: Files, fd: int, path: str, threads: ThreadPoolExecutor, pid: int) -> None:
    # A fork of the process has a copy of the store, but not the file.
    if os.getpid() != pid:
        return
    threads.shutdown(wait=False)
    with contextlib.suppress(OSError):
        files.remove(path)
    with contextlib.suppress(OSError):
        files.close(fd)
