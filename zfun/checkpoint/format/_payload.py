"""Read payload files: any ranges, of which every byte is verified."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import numpy as np

from zfun.checkpoint.format._hash import digest_of
from zfun.checkpoint.format._manifest import FileEntry, Manifest
from zfun.checkpoint.format._write import chunk_of, explaining
from zfun.errors import CorruptCheckpoint
from zfun.files import Files

__all__ = ["Payload", "Want"]

_NUM_THREADS = 4
_PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class Want(NamedTuple):
    """A range of a file, and the memory that receives the range.

    Attributes:
        file: index of the file in the manifest.
        offset: the first byte, in the file.
        target: the memory, as bytes.
    """

    file: int
    offset: int
    target: np.ndarray


class Payload:
    """Reads ranges of the payload files of a checkpoint, and verifies every byte.

    Use as a context, which closes the files.

    Args:
        directory: the directory of the checkpoint.
        manifest: the manifest in that directory.
        files: the operations on files.
    """

    def __init__(self, directory: str, manifest: Manifest, files: Files | None = None) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files = files or Files()
        self._opened: dict[int, int] = {}
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "zfun-load")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for fd in self._opened.values():
            with contextlib.suppress(OSError):
                self._files.close(fd)
        self._opened.clear()

    def read(self, wants: Iterable[Want]) -> None:
        """Read ranges. Whole chunks are read and verified, each chunk once in a call.

        The first call for a file also verifies the header, though zfun needs no header, because a
        damaged file should not pass for a good one.

        Raises:
            CorruptCheckpoint: a file is truncated, or has other bytes than were written.
            CheckpointError: the disk refused.
        """
        chunks: dict[tuple[int, int], list[Want]] = {}
        length = self.manifest.chunk_bytes
        for want in wants:
            end = want.offset + len(want.target)
            for at in range(want.offset // length, -(-end // length)):
                chunks.setdefault((want.file, at), []).append(want)
        for file in sorted({file for file, _ in chunks} - set(self._opened)):
            self._open(file)
            for at in range(-(-self.manifest.files[file].data_start // length)):
                chunks.setdefault((file, at), [])
        reads = [
            self._threads.submit(self._read, file, at, chunks[file, at])
            for file, at in sorted(chunks)
        ]
        try:
            for read in reads:
                read.result()
        finally:
            # No thread writes to the targets after this call.
            for read in reads:
                read.cancel()
            concurrent.futures.wait(reads)

    def verify(self) -> None:
        """Read and verify all bytes of all files.

        Raises:
            CorruptCheckpoint: as in :meth:`read`.
        """
        for index, file in enumerate(self.manifest.files):
            self._open(index)
            reads = (
                self._threads.submit(self._read, index, at, []) for at in range(len(file.chunks))
            )
            for read in list(reads):
                read.result()

    def path(self, file: int) -> str:
        """Return the path of a file."""
        return f"{self.directory}/{self.manifest.files[file].name}"

    def _open(self, index: int) -> None:
        if index in self._opened:
            return
        path, entry = self.path(index), self.manifest.files[index]
        # A pipe in place of a file would block without O_NONBLOCK.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        with explaining(path, "opening the file"):
            try:
                fd = self._files.open(path, flags | _DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = self._files.open(path, flags)
            try:
                num_bytes = self._files.size(fd)
            except OSError:
                self._files.close(fd)
                raise
        if num_bytes != entry.num_bytes:
            self._files.close(fd)
            raise CorruptCheckpoint(
                f"{path} must have {entry.num_bytes} bytes; got {num_bytes}: the file is truncated "
                "or another one; load another checkpoint",
                path=path,
            )
        self._opened[index] = fd

    def _read(self, index: int, at: int, wants: Sequence[Want]) -> None:
        entry, length = self.manifest.files[index], self.manifest.chunk_bytes
        if not hasattr(self._local, "chunk"):
            self._local.chunk = chunk_of(length)
        start = at * length
        num_bytes = min(length, entry.num_bytes - start)
        chunk = self._local.chunk[: -(-num_bytes // _PAGE) * _PAGE]
        path = self.path(index)
        with explaining(path, f"a read of {num_bytes} bytes at {start}"):
            done = self._files.read(self._opened[index], chunk, start)
        if done < num_bytes:
            self._refuse(entry, path, start, f"only {done} of {num_bytes} bytes")
        if digest_of(self.manifest.hash, chunk[:num_bytes]) != entry.chunks[at]:
            self._refuse(entry, path, start, f"other bytes in {num_bytes}")
        for want in wants:
            first = max(want.offset, start)
            stop = min(want.offset + len(want.target), start + num_bytes)
            want.target[first - want.offset : stop - want.offset] = chunk[
                first - start : stop - start
            ]

    def _refuse(self, entry: FileEntry, path: str, start: int, got: str) -> NoReturn:
        raise CorruptCheckpoint(
            f"{path} must have the bytes that were written; got {got} at {start} than were "
            f"written (file of {entry.num_bytes} bytes); load another checkpoint",
            path=path,
        )
