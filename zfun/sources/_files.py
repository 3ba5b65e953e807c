"""Files of other libraries: opened by plain names, read by ranges, bounded by their size."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun.errors import CheckpointError, CorruptCheckpoint, UntrustedCheckpoint
from zfun.objects import Address
from zfun.sources.scratch import scratch

# The most that a JSON file or a header may take: 100 million names would not be read by anyone.
MAX_TEXT_BYTES = 256 * 2**20
MAX_NAME = 255
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file, of which any range can be read.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        fetch: a function from ``start`` and ``stop`` to a 1-D tensor on the CPU with these
            elements, in the order of the contiguous tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[int, int], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        return self.fetch(0, self.numel).view(self.shape)


class FilePart(NamedTuple):
    """The elements from ``start`` to ``stop`` of a tensor."""

    tensor: StoredTensor
    start: int
    stop: int


def entry(directory: Path, name: Any, where: str) -> Path:
    """Return the path of a file of a directory, by a name that a file of the directory gives.

    Raises:
        UntrustedCheckpoint: the name is no plain name, or is a link, so the path might lie
            elsewhere.
    """
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_NAME
        or name in (".", "..")
        or any(mark in name for mark in "/\\\0")
    ):
        shown = repr(name)
        raise UntrustedCheckpoint(
            f"{where} names files of its own directory; got {shown[:80]}; load checkpoints of "
            "trusted origin only, with names as the library wrote them"
        )
    check_no_link(directory / name)
    return directory / name


def check_no_link(path: Path) -> None:
    """Refuse a link that leads out of its folder; the cache of Hugging Face has links to blobs.

    Raises:
        UntrustedCheckpoint: the link leads elsewhere.
    """
    if isinstance(path, Address):
        return
    # Path.is_symlink() raises for a name that is too long, which the reader of the file reports.
    if not os.path.islink(path):  # noqa: PTH114
        return
    # Path.resolve() raises for links in a circle, which the reader of the file reports.
    folder, end = Path(os.path.realpath(path.parent)), os.path.realpath(path)
    if Path(end).parent not in (folder, folder.parent.parent / "blobs"):
        raise UntrustedCheckpoint(
            f"the files of a checkpoint lie in its folder; got {path}, a link to "
            f"{end}; copy the file in place of the link, or name the folder where it is",
            path=str(path),
        )


class _Opened:
    """A file that is open, on a disk or in a store."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = stream.seek(0, os.SEEK_END)

    def read(self, buffer: Any, offset: int) -> int:
        """Read into a buffer, and return the number of bytes read."""
        self._stream.seek(offset)
        return self._stream.readinto(buffer) or 0

    def close(self) -> None:
        self._stream.close()


def _open(path: Path) -> _Opened:
    # A device may act when opened, and a pipe waits for a writer, so the kind is checked first.
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(
            f"a checkpoint has the files that its metadata names; got {error}; copy the directory "
            "again",
            path=str(path),
        ) from None
    if not is_regular:
        raise UntrustedCheckpoint(
            f"a checkpoint consists of regular files; got {path}, which is something else; load "
            "checkpoints of trusted origin only"
        )
    try:
        if isinstance(path, Address):
            return _Opened(path.open())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return _Opened(os.fdopen(fd, "rb", buffering=0))
    except OSError as error:
        raise CheckpointError(
            f"the files of a checkpoint must be readable; got {error}; change the permissions of "
            f"{path.name}",
            path=str(path),
        ) from None


def read_into(path: Path, offset: int, into: Tensor) -> None:
    """Fill a contiguous tensor with the bytes of a file from an offset on.

    Raises:
        CorruptCheckpoint: the file ends before.
    """
    rest: Any = into.view(-1).view(torch.uint8).numpy()
    opened = _open(path)
    try:
        while rest.size:
            count = opened.read(rest, offset)
            if count == 0:
                raise CorruptCheckpoint(
                    f"{path} holds the bytes that its header promises; got an end of file at byte "
                    f"{offset}, {len(rest)} bytes early; copy the file again"
                )
            rest, offset = rest[count:], offset + count
    finally:
        opened.close()


def read_text(path: Path) -> str:
    """Return the content of a text file of bounded size."""
    with View(path) as view:
        if view.num_bytes > MAX_TEXT_BYTES:
            raise UntrustedCheckpoint(
                f"a text file of a checkpoint has at most {MAX_TEXT_BYTES} bytes; got {path} with "
                f"{view.num_bytes}; load checkpoints of trusted origin only"
            )
        try:
            return view.read().decode()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(
                f"{path} is text; got {error}; copy the file again", path=str(path)
            ) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of bounded size, without repeated keys."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    try:
        return json.loads(read_text(path), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path} is JSON with different keys; got {error}; copy the file again",
            path=str(path),
        ) from None


def in_file(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    """Return the contiguous tensor whose bytes begin at an offset of a file."""

    def fetch(start: int, stop: int) -> Tensor:
        found = scratch((stop - start,), dtype, CPU)
        read_into(path, offset + start * dtype.itemsize, found)
        return found

    return StoredTensor(shape, dtype, fetch)


def in_memory(tensor: Tensor) -> StoredTensor:
    """Return a tensor in memory."""
    flat = tensor.detach().reshape(-1)
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda start, stop: flat[start:stop])


def joined_parts(shape: tuple[int, ...], parts: Sequence[FilePart]) -> StoredTensor:
    """Return the tensor whose elements are those of some parts, one after the other.

    Elements behind those of the shape are padding, which is not read.
    """
    dtype = parts[0].tensor.dtype if parts else torch.float32

    def fetch(start: int, stop: int) -> Tensor:
        if len(parts) == 1:
            return parts[0].tensor.fetch(parts[0].start + start, parts[0].start + stop)
        found = scratch((stop - start,), dtype, CPU)
        at = 0
        for tensor, begin, end in parts:
            first, last = max(start, at), min(stop, at + end - begin)
            if first < last:
                piece = tensor.fetch(begin + first - at, begin + last - at)
                found[first - start : last - start] = piece
            at += end - begin
        return found

    return StoredTensor(shape, dtype, fetch)


_LINE_BYTES = 1 << 8


class View:
    """A range of a file as a binary file, for readers that take file objects.

    Args:
        path: the file.
        offset: of the first byte of the range.
        num_bytes: the length of the range; by default up to the end of the file.
    """

    def __init__(self, path: Path, offset: int = 0, num_bytes: int | None = None) -> None:
        self._opened = _open(path)
        size = self._opened.size
        self.num_bytes = size - offset if num_bytes is None else num_bytes
        self.path, self.offset, self._at = path, offset, 0
        if offset < 0 or self.num_bytes < 0 or offset + self.num_bytes > size:
            self.close()
            raise CorruptCheckpoint(
                f"{path} has the bytes that the checkpoint's metadata names; got {size} bytes in "
                f"place of {offset + (num_bytes or 0)}; copy the file again"
            )

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self.num_bytes - self._at)
        count = left if count is None or count < 0 else min(count, left)
        found = bytearray(count)
        done = self._opened.read(found, self.offset + self._at)
        self._at += done
        return bytes(found[:done])

    def readline(self, limit: int = -1) -> bytes:
        line = bytearray()
        while limit < 0 or len(line) < limit:
            # In pieces, because behind a short line lie the bytes of all tensors.
            count = _LINE_BYTES if limit < 0 else min(_LINE_BYTES, limit - len(line))
            piece = self.read(count)
            end = piece.find(b"\n") + 1
            line += piece[:end] if end else piece
            if end:
                self._at -= len(piece) - end
            if end or not piece:
                break
        return bytes(line)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
