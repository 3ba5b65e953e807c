"""Addresses with the methods of paths that readers of other libraries' files use."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from zfun.objects._store import Objects, files_of


def located(path: str | Path) -> Path:
    """Return the path, or the address with the methods of a path.

    Example:
        >>> located("memory://bucket/run") / "model.pt"
        Address('memory://bucket/run/model.pt')
    """
    files = files_of(path)
    if isinstance(files, Objects):
        return cast("Path", Address(str(path), files))
    return Path(path)


class _Stat(NamedTuple):
    st_size: int
    st_mode: int


class Address:
    """A file or a folder of a store, with some methods of ``pathlib.Path``.

    Args:
        url: the address.
        files: the operations of the store.

    Example:
        >>> Address("memory://bucket/run/model.pt", Objects("memory://bucket")).suffix
        '.pt'
    """

    def __init__(self, url: str, files: Objects) -> None:
        self._url, self.files = url.rstrip("/"), files
        self._size: int | None = None

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Address({self._url!r})"

    def __lt__(self, other: Address) -> bool:
        return self._url < other._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self._url}/{name}", self.files)

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def is_file(self) -> bool:
        return self.files.sizes([self._url])[0] is not None

    def is_dir(self) -> bool:
        return self.files.is_directory(self._url)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[Address]:
        return (self / name for name in self.files.names(self._url))

    def glob(self, pattern: str) -> Iterator[Address]:
        return (one for one in self.iterdir() if fnmatch.fnmatchcase(one.name, pattern))

    def stat(self) -> _Stat:
        if self._size is None:
            self._size = self.files.sizes([self._url])[0]
        if self._size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self._url)
        return _Stat(self._size, stat.S_IFREG)

    def unlink(self, missing_ok: bool = False) -> None:
        self.files.remove(self._url)

    @contextlib.contextmanager
    def created(self, num_bytes: int) -> Iterator[_Sink]:
        """Open a new object of a given length, which appears at the end."""
        fd = self.files.open(self._url, os.O_WRONLY | os.O_CREAT)
        try:
            self.files.reserve(fd, 0, num_bytes)
            yield _Sink(self.files, fd)
            self.files.sync(fd)
        finally:
            self.files.close(fd)


class _Sink:
    """A new object as a file that is written from the beginning to the end."""

    def __init__(self, files: Objects, fd: int) -> None:
        self._files, self._fd, self._at = files, fd, 0

    def write(self, data: Any) -> int:
        count = self._files.write(self._fd, data, self._at)
        self._at += count
        return count
