"""The operations on files, on the objects of a store such as S3, through ``fsspec``."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zfun.errors import OptionError
from zfun.files import Files
from zfun.objects._upload import Upload

_NUM_THREADS = 16
# fsspec's errors often have no number.
_NUMBERS: tuple[tuple[type[OSError], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
)


def is_url(path: str | Path) -> bool:
    """Return whether a path is the address of a store, such as ``"s3://bucket/run"``."""
    return "://" in str(path)


def files_of(path: str | Path, files: Files | None = None, timeout_s: float | None = None) -> Files:
    """Return the operations for a path: those of a disk, or those of the path's store.

    Args:
        path: a path of a disk, or an address that fsspec knows, such as ``"s3://bucket/run"``.
        files: the operations that the caller has chosen.
        timeout_s: as for :class:`Objects`.

    Raises:
        OptionError: an address that lost a slash, as in ``Path("s3://bucket")``; a store that
            fsspec does not know; a package that is not installed.

    Example:
        >>> type(files_of("runs")).__name__
        'Files'
    """
    text = str(path)
    if not is_url(text):
        if re.match(r"[a-z][a-z0-9+.-]+:/", text):
            raise OptionError(
                f"the address of a store has two slashes and is a str; got {path!r}, because "
                f"Path joins the two; write {text.replace(':/', '://', 1)!r}"
            )
        return files or Files()
    if files is None:
        return Objects(text, timeout_s)
    if files.is_disk:
        raise OptionError(
            f"files= has the operations of the store of the path; got {type(files).__name__}, "
            f"those of a disk, for {text}; write files=zf.objects.Objects({text!r}), or leave "
            "files= out"
        )
    return files


class Objects(Files):
    """The operations of :class:`zfun.files.Files` on the objects of a store.

    Endpoint and credentials are those of fsspec's configuration, and of the client of the store,
    such as ``AWS_ENDPOINT_URL`` and ``AWS_ACCESS_KEY_ID``. An object appears whole, so nothing has
    to be renamed. Objects of more than 96 MiB are sent to S3 in parts, several at a time.

    Args:
        url: an address in the store.
        timeout_s: seconds for one request, with all attempts that the client makes; at most 120 by
            default.

    Example:
        >>> files = Objects("memory://bucket")
        >>> files.create("memory://bucket/example/a", b"bytes")
        >>> files.names("memory://bucket/example"), files.get("memory://bucket/example/a")
        (['a'], b'bytes')
        >>> files.remove_all("memory://bucket/example")
    """

    is_disk = False
    read_bytes = 64 * 2**20
    _LONGEST_S = 120.0

    def __init__(self, url: str, timeout_s: float | None = None) -> None:
        self.timeout_s = min(timeout_s or self._LONGEST_S, self._LONGEST_S)
        self._fs = _file_system(url)
        self._opened: dict[int, tuple[str, int] | Upload] = {}
        self._numbers = itertools.count()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the client of the store; end with ``OSError`` on any failure, and in time."""
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((function(*args, **kwargs), None))
            except BaseException as error:  # noqa: BLE001, raised by the caller
                answers.put((None, error))

        # A daemon, because a client that never answers must not keep the process.
        threading.Thread(target=run, name="zfun-object", daemon=True).start()
        try:
            value, error = answers.get(timeout=self.timeout_s)
        except queue.Empty:
            raise TimeoutError(
                errno.ETIMEDOUT, f"the store gave no answer in {self.timeout_s:g} s"
            ) from None
        if error is not None:
            raise _as_os_error(error) from error
        return value

    def open(self, path: str, flags: int) -> int:
        """Open an object to read, or start a new one, which appears at ``sync``."""
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "a store has no direct transfers")
        number = next(self._numbers)
        if flags & os.O_CREAT:
            self._opened[number] = Upload(self.call, self._fs, path)
            return number
        size = self.sizes([path])[0]
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        self._opened[number] = (path, size)
        return number

    def close(self, fd: int) -> None:
        """Forget an object; one that was not synced does not appear."""
        opened = self._opened.pop(fd)
        if isinstance(opened, Upload):
            opened.abort()

    def lock(self, fd: int) -> bool:
        """Lock nothing: a store has no locks, and ``create`` refuses the second job."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """A store has no locks and no directories, and an object has the length of its bytes."""

    unlock = make = make_all = truncate = sync_directory = _nothing

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        """Tell the length of an object before its bytes, so that its parts can be chosen."""
        self._upload(fd).reserve(offset + num_bytes)

    def free_bytes(self, path: str) -> int:
        """Return the largest number, because a store has no end."""
        return 2**63 - 1

    def read(self, fd: int, buffer: Any, offset: int) -> int:
        """Read a range of an object, with one request."""
        data = self._range(fd, len(buffer), offset)
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def fetch(self, fd: int, memory: Callable[[int], Any], num_bytes: int, offset: int) -> Any:
        """Return a range of an object in the memory in which the client received it."""
        return np.frombuffer(self._range(fd, num_bytes, offset), np.uint8)

    def _range(self, fd: int, num_bytes: int, offset: int) -> memoryview:
        opened = self._opened[fd]
        assert not isinstance(opened, Upload)
        path, size = opened
        stop = min(offset + num_bytes, size)
        if stop <= offset:
            return memoryview(b"")
        data = self.call(self._fs.cat_file, path, start=offset, end=stop)
        return memoryview(data)[: stop - offset]

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        """Add bytes to an object. The thread that fills a part sends the part."""
        self._upload(fd).write(memoryview(buffer), offset)
        return len(buffer)

    def _upload(self, fd: int) -> Upload:
        opened = self._opened[fd]
        assert isinstance(opened, Upload)
        return opened

    def sync(self, fd: int) -> None:
        """Let an object appear, whole."""
        self._upload(fd).complete()

    def size(self, fd: int) -> int:
        """Return the length of an object that was opened to read."""
        opened = self._opened[fd]
        assert not isinstance(opened, Upload)
        return opened[1]

    def names(self, path: str) -> list[str]:
        """Return the names below a path, sorted."""
        with contextlib.suppress(AttributeError):
            self._fs.invalidate_cache(path)
        found = self.call(self._fs.ls, path, detail=False)
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def rename(self, old: str, new: str) -> None:
        """Refuse: a store has no rename."""
        raise OSError(errno.ENOSYS, "a store has no rename", old)

    def remove(self, path: str) -> None:
        """Remove an object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self.call(self._fs.rm_file, path)

    unlink = remove

    def remove_all(self, path: str) -> None:
        """Remove all objects below a path, as far as the store lets us."""
        with contextlib.suppress(OSError):
            self.call(self._fs.rm, path, recursive=True)

    def create(self, path: str, data: bytes) -> None:
        """Write a new small object; raise ``FileExistsError`` if there is another one.

        The request is conditional (S3's ``If-None-Match: *``) where the store has conditions.
        Elsewhere zfun looks before, so the two requests leave a gap.
        """
        try:
            try:
                self.call(self._fs.pipe_file, path, data, mode="create")
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                if self.get(path) is not None:
                    raise FileExistsError(errno.EEXIST, "the object exists", path) from None
                self.call(self._fs.pipe_file, path, data)
        except OSError:
            # The answer to an earlier attempt of the client may have been lost.
            held = self.get(path)
            if held == data:
                return
            if held is not None:
                raise FileExistsError(errno.EEXIST, "the object exists", path) from None
            raise

    def put(self, path: str, data: bytes) -> None:
        """Write a small object, in place of another one."""
        self.call(self._fs.pipe_file, path, data)

    def get(self, path: str) -> bytes | None:
        """Return a small object; ``None`` if there is none."""
        try:
            return bytes(self.call(self._fs.cat_file, path))
        except FileNotFoundError:
            return None

    def is_directory(self, path: str) -> bool:
        """Return whether there are objects below a path."""
        return bool(self.call(self._fs.isdir, path))

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Return the lengths of objects, asked for side by side; ``None`` for no object."""
        if len(paths) < 2:
            return [self._size(path) for path in paths]
        with ThreadPoolExecutor(min(len(paths), _NUM_THREADS), "zfun-sizes") as threads:
            return list(threads.map(self._size, paths))

    def _size(self, path: str) -> int | None:
        try:
            found = self.call(self._fs.info, path)
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else int(found["size"])


def _as_os_error(error: BaseException) -> BaseException:
    """Return an error of a client as the ``OSError`` that a disk would raise."""
    if not isinstance(error, Exception):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, OSError):
        return OSError(errno.EIO, f"{type(error).__name__}: {text}")
    for kind, number in _NUMBERS:
        if isinstance(error, kind):
            return kind(number, text)
    return OSError(error.errno or errno.EIO, text)


def _file_system(url: str) -> Any:
    """Return fsspec's file system of an address."""
    if importlib.util.find_spec("fsspec") is None:
        raise OptionError(f"{url} needs the package fsspec; got none; pip install 'zfun[object]'")
    import fsspec

    protocol = url.partition("://")[0]
    # A listing must show the objects of other processes.
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("file", "local"):
        options["auto_mkdir"] = True
    try:
        return fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise OptionError(
            f"{url} needs a package that is not installed; got {error}; pip install "
            "'zfun[object]' for S3, or the package that the error names"
        ) from error
    except Exception as error:
        # Some file systems, such as that of zip://, cannot be made without options.
        raise OptionError(
            f"an address begins with a protocol of fsspec, such as s3:// or gs://; got {url}: "
            f"{error}; correct the address"
        ) from error
