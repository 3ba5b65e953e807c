"""Read payload files: any ranges, of which every byte is verified."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from zfun.checkpoint.format._manifest import MANIFEST, FileEntry, Manifest, digest_of
from zfun.checkpoint.format._write import chunk_of, explaining
from zfun.errors import CheckpointError, CorruptCheckpoint
from zfun.files import Files, aligned, open_direct
from zfun.objects import files_of

_NUM_THREADS = 4


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
        self._files = files_of(directory, files)
        self._opened: dict[int, int] = {}
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "zfun-load")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
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
        self._read_chunks(chunks)

    def verify(self) -> None:
        """Read and verify all bytes of all files.

        Raises:
            CorruptCheckpoint: as in :meth:`read`.
        """
        for index, file in enumerate(self.manifest.files):
            self._open(index)
            self._read_chunks({(index, at): () for at in range(len(file.chunks))})

    def _read_chunks(self, chunks: Mapping[tuple[int, int], Sequence[Want]]) -> None:
        """Read and verify chunks by file and number, and copy what is wanted of each."""
        reads = [
            self._threads.submit(self._read, file, ats, [chunks[file, at] for at in ats])
            for file, ats in self._runs(sorted(chunks))
        ]
        try:
            for read in reads:
                read.result()
        finally:
            # No thread writes to the targets after this call.
            for read in reads:
                read.cancel()
            concurrent.futures.wait(reads)

    def _runs(self, chunks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, range]]:
        """Yield file and chunks of each read: one chunk, or a row of about ``read_bytes``."""
        most = max(1, self._files.read_bytes // self.manifest.chunk_bytes)
        # In a row, the number of a chunk grows as its place does.
        rows = itertools.groupby(enumerate(chunks), lambda each: (each[1][0], each[1][1] - each[0]))
        for (file, _), row in rows:
            ats = [at for _, (_, at) in row]
            num_reads = max(1, round(len(ats) / most))
            ends = [ats[0] + len(ats) * read // num_reads for read in range(num_reads + 1)]
            yield from ((file, range(*pair)) for pair in itertools.pairwise(ends))

    def path(self, file: int) -> str:
        """Return the path of a file."""
        return f"{self.directory}/{self.manifest.files[file].name}"

    def _open(self, index: int) -> None:
        if index in self._opened:
            return
        path, entry = self.path(index), self.manifest.files[index]
        with explaining(path, "opening the file"):
            try:
                # A pipe in place of a file would block without O_NONBLOCK.
                flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
                fd, _ = open_direct(self._files, path, flags)
            except FileNotFoundError:
                raise self._missing(path) from None
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

    def _missing(self, path: str) -> CheckpointError:
        if self._files.sizes([f"{self.directory}/{MANIFEST}"]) == [None]:
            return CheckpointError(
                f"a checkpoint stays while it is read; got {self.directory}, which another process "
                "has removed; load another one, or save with a larger keep=",
                path=path,
            )
        return CorruptCheckpoint(
            f"{path} must be there, because the manifest names it; got no such file; load another "
            "checkpoint",
            path=path,
        )

    def _read(self, index: int, ats: range, wants: Sequence[Sequence[Want]]) -> None:
        """Read chunks in a row, and verify each."""
        entry, length = self.manifest.files[index], self.manifest.chunk_bytes
        start = ats.start * length
        num_bytes = min(len(ats) * length, entry.num_bytes - start)
        path = self.path(index)
        with explaining(path, f"a read of {num_bytes} bytes at {start}"):
            try:
                found = self._files.fetch(self._opened[index], self._memory, num_bytes, start)
            except FileNotFoundError:
                # In a store each read is a request.
                raise self._missing(path) from None
        if len(found) < num_bytes:
            self._refuse(entry, path, start, f"only {len(found)} of {num_bytes} bytes")
        for at, wanted in zip(ats, wants, strict=True):
            first = (at - ats.start) * length
            self._take(index, at, found[first : min(first + length, num_bytes)], wanted)

    def _memory(self, num_bytes: int) -> np.ndarray:
        """Return the thread's memory for a read, in whole blocks of the disk."""
        if len(getattr(self._local, "memory", ())) < aligned(num_bytes):
            self._local.memory = chunk_of(max(aligned(num_bytes), self.manifest.chunk_bytes))
        return self._local.memory[: aligned(num_bytes)]

    def _take(self, index: int, at: int, chunk: np.ndarray, wants: Sequence[Want]) -> None:
        """Verify a chunk, and copy what is wanted."""
        entry, path = self.manifest.files[index], self.path(index)
        start, num_bytes = at * self.manifest.chunk_bytes, len(chunk)
        if digest_of(self.manifest.hash, chunk) != entry.chunks[at]:
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
