"""Write payload files: safetensors, in hashed chunks, by several threads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from zfun.checkpoint.format._hash import digest_of
from zfun.checkpoint.format._manifest import MAX_HEADER_BYTES
from zfun.errors import CheckpointError
from zfun.files import Files
from zfun.objects import is_url
from zfun.stores import pages

_NUM_THREADS = 4
_PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


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


class PlannedFile(NamedTuple):
    """A payload file before it is written.

    Attributes:
        header: the bytes before the data.
        offsets: where each tensor begins, in bytes of the file.
        num_bytes: the length of the file.
    """

    header: bytes
    offsets: tuple[int, ...]
    num_bytes: int


def plan_file(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> PlannedFile:
    """Lay tensors out in a safetensors file, in the given order.

    Args:
        tensors: name, real dtype and shape of each. A dtype that safetensors does not know is
            shown as bytes.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    ends = [0]
    for name, dtype, shape in tensors:
        numel = 1
        for dim in shape:
            numel *= dim
        num_bytes = numel * dtype.itemsize
        kind = _SAFETENSORS.get(dtype)
        described[name] = {
            "dtype": kind or "U8",
            "shape": list(shape) if kind else [num_bytes],
            "data_offsets": [end, end + num_bytes],
        }
        end += num_bytes
        ends.append(end)
    text = json.dumps(described, separators=(",", ":")).encode()
    # Spaces fill the header up to a whole page, because direct reads begin at pages.
    length = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names of one rank's tensors take at most {MAX_HEADER_BYTES} bytes; got {length}; "
            "join small tensors, or use shorter names"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    return PlannedFile(header, tuple(len(header) + at for at in ends[:-1]), len(header) + end)


class WrittenFile(NamedTuple):
    """A file that was written: the length, and the hash of every chunk."""

    num_bytes: int
    chunks: tuple[str, ...]


def be_gentle() -> None:
    """Let this thread run only where other threads leave time, as far as the system can.

    Two such threads get less than a tenth of a core that others want.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def write_file(
    files: Files,
    path: str,
    blocks: Iterable[np.ndarray],
    num_bytes: int,
    chunk_bytes: int,
    *,
    hash_name: str = "xxh64",
    gentle: bool = False,
) -> WrittenFile:
    """Write blocks of bytes one after the other, and wait until the disk has them.

    This thread copies the blocks into chunks, and others hash and write the chunks. A block may be
    overwritten when the next one is asked for. With ``gentle``, one thread writes, where the work
    of the process leaves time.

    Raises:
        CheckpointError: the disk refused, or wrote fewer bytes than asked.
    """
    with explaining(path, "the file"):
        fd, is_direct = _open_to_write(files, path)
    try:
        writer = _Writer(
            files, path, fd, chunk_bytes, hash_name, is_direct=is_direct, gentle=gentle
        )
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
            if is_direct and num_bytes % _PAGE:
                files.truncate(fd, num_bytes)
            files.sync(fd)
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)
    return WrittenFile(num_bytes, tuple(writer.hashes))


def _open_to_write(files: Files, path: str) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    if _DIRECT:
        try:
            return files.open(path, flags | _DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file may have been made before the flag was refused.
            flags &= ~os.O_EXCL
    return files.open(path, flags), False


class _Writer:
    """Collects bytes in chunks, which threads hash and write.

    The threads are plain ones, because the end of the process waits for plain threads, and takes no
    more work for the threads of an executor.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        fd: int,
        chunk_bytes: int,
        hash_name: str,
        *,
        is_direct: bool,
        gentle: bool,
    ) -> None:
        self._hash_name = hash_name
        self._gentle = gentle
        self._num_threads = 1 if gentle else _NUM_THREADS
        self.files, self.path, self.fd, self.is_direct = files, path, fd, is_direct
        self.hashes: list[str] = []
        self.num_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(self._num_threads):
            self._free.put(chunk_of(chunk_bytes))
        self._chunk = chunk_of(chunk_bytes)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._error = self._error or error
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def add(self, block: np.ndarray) -> None:
        done = 0
        while done < len(block):
            count = min(len(block) - done, self._chunk_bytes - self._filled)
            self._chunk[self._filled : self._filled + count] = block[done : done + count]
            self._filled += count
            done += count
            if self._filled == self._chunk_bytes:
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
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                if self._error is None:
                    self._write(*work)
            except BaseException as error:  # noqa: BLE001, the thread that saves raises it
                self._error = error
            self._free.put(work[0])

    def _write(self, chunk: np.ndarray, filled: int, at: int) -> None:
        self.hashes[at // self._chunk_bytes] = digest_of(self._hash_name, chunk[:filled])
        end = filled
        if self.is_direct and filled % _PAGE:
            end = -(-filled // _PAGE) * _PAGE
            chunk[filled:end] = 0
        with explaining(self.path, f"a write of {end} bytes at {at}"):
            done = self.files.write(self.fd, chunk[:end], at)
        if done != end:
            problem = f"a write of {end} bytes at {at} wrote {done}"
            raise failure(self.path, problem, errno.ENOSPC)


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
