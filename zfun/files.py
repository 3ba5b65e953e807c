"""The operations on files as an object: on a disk, or on the objects of a store.

A test overrides an operation to let the operation fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The largest sector of a disk today, and the size of a page: direct transfers (O_DIRECT) have
# addresses, offsets and lengths that are multiples.
ALIGNMENT = 4096
# Direct transfers from and to large pages move twice to three times the bytes per second, because
# the system pins fewer pages.
_LARGE_PAGE = 1 << 21
_DIRECT = getattr(os, "O_DIRECT", 0)

# The errors of a file system, or of a file open for direct transfers, that cannot reserve room.
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Files:
    """The operations of zfun on files, each one call of the system.

    Every operation raises ``OSError`` as the system does. A subclass that overrides an operation
    lets the operation fail, or transfer fewer bytes than asked.

    Example:
        >>> with tempfile.TemporaryDirectory() as path:
        ...     files = Files()
        ...     made = files.make_directory(path, "run-")
        ...     fd = files.open(f"{made}/data", os.O_RDWR | os.O_CREAT)
        ...     files.write(fd, b"bytes", 0)
        ...     files.close(fd)
        5

    Attributes:
        is_disk: whether a directory gets its name by one rename. An object store has no rename.
        read_bytes: how many bytes one read should have where many follow each other; 0 for any.
    """

    is_disk = True
    read_bytes = 0

    def make_directory(self, path: str, prefix: str) -> str:
        """Make a directory with a new name, for this user only, and return its path."""
        return tempfile.mkdtemp(prefix=prefix, dir=path)

    def open(self, path: str, flags: int) -> int:
        """Open a file, for this user only, and return the descriptor."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Lock a file until ``unlock``, or the last copy is closed; return False if locked."""
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Unlock a file, also where another process has a copy of the descriptor."""
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        """Grow a file, with room on the disk where the file system can reserve room."""
        try:
            os.posix_fallocate(fd, offset, num_bytes)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _CANNOT_RESERVE:
                raise
            os.ftruncate(fd, offset + num_bytes)

    def free_bytes(self, path: str) -> int:
        """Return the room that the file system of a path has left for this user."""
        return shutil.disk_usage(path).free

    def read(self, fd: int, buffer: Any, offset: int) -> int:
        """Read into a buffer, and return the number of bytes read."""
        return os.preadv(fd, [buffer], offset)

    def fetch(self, fd: int, memory: Callable[[int], Any], num_bytes: int, offset: int) -> Any:
        """Return bytes, fewer at the end: in ``memory(num_bytes)``, or where a client has them."""
        buffer = memory(num_bytes)
        return buffer[: min(num_bytes, self.read(fd, buffer, offset))]

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        """Write a buffer, and return the number of bytes written."""
        return os.pwrite(fd, buffer, offset)

    def sync(self, fd: int) -> None:
        """Wait until the system has written a file to the disk."""
        os.fsync(fd)

    def size(self, fd: int) -> int:
        """Return the length of a regular file; refuse pipes, devices and directories."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return found.st_size

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, num_bytes)

    def make(self, path: str) -> None:
        """Make a directory, for this user only; raise ``FileExistsError`` if there is one."""
        Path(path).mkdir(mode=0o700)

    def make_all(self, path: str) -> None:
        """Make a directory and those above it where there are none, and keep their names."""
        missing = []
        while not Path(path).is_dir():
            missing.append(path)
            path = str(Path(path).parent)
        for new in reversed(missing):
            self.add(new)
            self.sync_directory(str(Path(new).parent))

    def add(self, path: str) -> None:
        """Make a directory if there is none."""
        Path(path).mkdir(exist_ok=True)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))  # noqa: PTH208, names and not paths are asked for

    def rename(self, old: str, new: str) -> None:
        """Give a file or a directory another name, which no other directory may have."""
        Path(old).rename(new)

    def sync_directory(self, path: str) -> None:
        """Wait until the system has written the names in a directory to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        """Remove a file, and the directory of the file when empty."""
        Path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            Path(path).parent.rmdir()

    def remove_all(self, path: str) -> None:
        """Remove a directory of plain files, as far as the system lets us."""
        with contextlib.suppress(OSError):
            for name in self.names(path):
                with contextlib.suppress(OSError):
                    self.remove(f"{path}/{name}")
        with contextlib.suppress(OSError):
            Path(path).rmdir()

    def create(self, path: str, data: bytes) -> None:
        """Write a small new file, and wait until the disk has it.

        Raise ``FileExistsError`` if there is one.
        """
        fd = self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            done = self.write(fd, data, 0)
            if done != len(data):
                raise OSError(errno.ENOSPC, f"{done} of {len(data)} bytes were written")
            self.sync(fd)
        finally:
            self.close(fd)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file that appears whole."""
        part = Path(f"{path}.part")
        part.write_bytes(data)
        part.rename(path)

    def get(self, path: str) -> bytes | None:
        """Return the content of a small file; ``None`` if there is none."""
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None

    def unlink(self, path: str) -> None:
        """Remove a file, and leave its directory."""
        Path(path).unlink()

    def is_directory(self, path: str) -> bool:
        """Return whether a path is a directory itself, and no link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Return the lengths of files; ``None`` for a path that is no regular file."""
        return [_size(path) for path in paths]


def _size(path: str) -> int | None:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def aligned(num_bytes: int) -> int:
    """Return the length of a direct transfer of ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pages(num_bytes: int) -> mmap.mmap:
    """Return fresh memory of at least ``num_bytes``, from 1 MiB on in whole large pages."""
    if num_bytes >= _LARGE_PAGE // 2:
        num_bytes = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def open_direct(
    files: Files, path: str, flags: int, probe: Callable[[int], object] = lambda fd: None
) -> tuple[int, bool]:
    """Open a file for direct transfers, or for others where the file system refuses direct ones.

    ``probe(fd)`` makes a first transfer, because some file systems refuse that and not the flag.
    Return the descriptor, and whether transfers are direct.
    """
    for direct in (_DIRECT, 0) if _DIRECT else (0,):
        fd = None
        try:
            fd = files.open(path, flags | direct)
            probe(fd)
            return fd, bool(direct)
        except OSError as error:
            if fd is not None:
                files.close(fd)
            if not direct or error.errno != errno.EINVAL:
                raise
            # The file may have been made before the flag was refused.
            flags &= ~os.O_EXCL
    raise AssertionError("the last attempt returns or raises")


def parse_json(text: bytes | str) -> Any:
    """Parse JSON from a stranger: no key twice, and no NaN.

    Raises:
        ValueError: the text is not such JSON.
        RecursionError: deep nests.

    Example:
        >>> parse_json('{"w": 1, "w": 2}')
        Traceback (most recent call last):
        ...
        ValueError: a key twice, 'w'
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"a key twice, {key!r}")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    text = text.decode("utf-8", "strict") if isinstance(text, bytes) else text
    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
