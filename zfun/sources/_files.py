"""Files of other libraries: opened by plain names, read by ranges, bounded by their size."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun.errors import CheckpointError, CorruptCheckpoint, UntrustedCheckpoint
from zfun.files import Files, parse_json
from zfun.objects import Address
from zfun.sources.scratch import scratch

# The most that a JSON file or a header may take: 100 million names would not be read by anyone.
MAX_TEXT_BYTES = 256 * 2**20
MAX_NAME = 255
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file, of which any range can be read.

    ``fetch(start, stop)`` returns these elements of the contiguous tensor, 1-D and on the CPU.
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


class OpenFile:
    """A regular file that is open, on a disk or in a store, with the errors of the system."""

    def __init__(self, path: Path) -> None:
        # A device may act when opened, and a pipe waits for a writer, so the kind is checked first.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UntrustedCheckpoint(
                f"a checkpoint consists of regular files; got {path}, which is something else; "
                "load checkpoints of trusted origin only",
                path=str(path),
            )
        is_disk = not isinstance(path, Address)
        self._files = Files() if is_disk else path.files
        # Files follows no links; check_no_link() has looked where this one leads.
        name = os.path.realpath(path) if is_disk else str(path)
        self._fd = self._files.open(name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self.size = self._files.size(self._fd)
        except OSError:
            self.close()
            raise

    def read(self, buffer: Any, offset: int) -> int:
        """Fill a buffer of bytes; return the number of bytes, fewer at the end of the file."""
        rest = memoryview(buffer)
        # One call of the system may read less.
        while rest and (count := self._files.read(self._fd, rest, offset)):
            rest, offset = rest[count:], offset + count
        return len(buffer) - len(rest)

    def close(self) -> None:
        self._files.close(self._fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> OpenFile:
    try:
        return OpenFile(path)
    except (OSError, ValueError) as error:
        if os.path.isfile(str(path)):  # noqa: PTH113, Path.is_file() raises for some names
            raise CheckpointError(
                f"the files of a checkpoint must be readable; got {error}; change the permissions "
                f"of {path.name}",
                path=str(path),
            ) from None
        raise CorruptCheckpoint(
            f"a checkpoint has the files that its metadata names; got {error}; copy the directory "
            "again",
            path=str(path),
        ) from None


def read_into(path: Path, offset: int, into: Tensor) -> None:
    """Fill a contiguous tensor with the bytes of a file from an offset on.

    Raises:
        CorruptCheckpoint: the file ends before.
    """
    with _open(path) as opened:
        done = opened.read(into.view(-1).view(torch.uint8).numpy(), offset)
    if done < into.nbytes:
        raise CorruptCheckpoint(
            f"{path} holds the bytes that its header promises; got an end of file at byte "
            f"{offset + done}, {into.nbytes - done} bytes early; copy the file again"
        )


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
    return as_json(path, read_text(path))


def as_json(path: Path, text: str | bytes) -> Any:
    """Return the value of a text of a file, without repeated keys."""
    try:
        return parse_json(text)
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


def of_index(
    folder: Path, name: str, open_file: Callable[[Path], Mapping[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Return the tensors of the files that an index of a folder names."""
    index = folder / name
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise CorruptCheckpoint(f"an index has a weight_map; got {index} without; copy it again")
    found: dict[str, StoredTensor] = {}
    file_of: dict[str, Path] = {}
    for file in dict.fromkeys(entry(folder, file, str(index)) for file in places.values()):
        for name, tensor in open_file(file).items():
            if name in found:
                raise CorruptCheckpoint(
                    f"one file has each tensor; {name!r} is in {file_of[name]} and in {file}; "
                    "remove one of them, and the index that names both",
                    leaf=name,
                )
            found[name], file_of[name] = tensor, file
    lost = [name for name in places if name not in found]
    if lost:
        raise CorruptCheckpoint(
            f"the files of {folder} have every tensor of the index; {lost[0]!r} is missing "
            f"from {places[lost[0]]}; copy the folder again",
            leaf=lost[0],
        )
    return found


def in_memory(tensor: Tensor) -> StoredTensor:
    """Return a tensor in memory."""
    flat = tensor.detach().reshape(-1)
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda start, stop: flat[start:stop])


def cut(parts: Sequence[FilePart], start: int, stop: int) -> list[FilePart]:
    """Return the parts of the elements from ``start`` to ``stop`` of parts put together."""
    found: list[FilePart] = []
    at = 0
    for tensor, begin, end in parts:
        first, last = max(start, at), min(stop, at + end - begin)
        if first < last:
            found.append(FilePart(tensor, begin + first - at, begin + last - at))
        at += end - begin
    return found


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
        for tensor, begin, end in cut(parts, start, stop):
            found[at : at + end - begin] = tensor.fetch(begin, end)
            at += end - begin
        return found

    return StoredTensor(shape, dtype, fetch)


_LINE_BYTES = 1 << 8


class View:
    """A range of a file, by default up to its end, as a binary file for other readers."""

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
