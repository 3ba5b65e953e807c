"""Files of which one operation fails: with an errno, by few bytes, or by the end of the process.

A simulated end of the process is an exception that no handler of errors catches. From then on every
operation raises it, because a dead process does nothing more.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

from zfun.files import Files

SHORT = "short"
KILL = "kill"

EVERY = (
    *("open", "lock", "reserve", "read", "write", "sync", "size", "truncate", "make"),
    *("names", "rename", "sync_directory", "remove"),
)


class Killed(BaseException):
    """The process is dead."""


class FaultyFiles(Files):
    """Lets one operation fail, counted from 0 over all threads.

    Args:
        at: the index of the operation; ``None`` lets none fail.
        fault: the number of an error, ``SHORT`` for half a transfer, or ``KILL`` for the end of the
            process. A write that is killed writes a half, and of files that were not synced a half
            is lost.
        kinds: the operations that count.

    Attributes:
        count: the operations so far.
        failed: the operation that failed, by name.
        opened: the paths that were opened.
    """

    def __init__(
        self,
        at: int | None = None,
        fault: int | str = errno.EIO,
        kinds: tuple[str, ...] = ("open", "lock", "reserve", "read", "write", "sync"),
    ) -> None:
        self.at = at
        self.fault = fault
        self.kinds = kinds
        self.count = 0
        self.failed: str | None = None
        self.opened: list[str] = []
        self._lock = threading.Lock()
        self._is_dead = False
        self._paths: dict[int, str] = {}
        self._unsynced: set[str] = set()

    def _fails(self, kind: str) -> bool:
        with self._lock:
            if self._is_dead:
                raise Killed
            if kind not in self.kinds:
                return False
            index, self.count = self.count, self.count + 1
        if index != self.at:
            return False
        self.failed = kind
        if self.fault == KILL and kind != "write":
            self._die()
        if self.fault not in (SHORT, KILL):
            number = int(self.fault)
            raise OSError(number, os.strerror(number))
        return True

    def _die(self) -> None:
        with self._lock:  # another simulated rank may be in write or sync
            self._is_dead = True
            unsynced = set(self._unsynced)
        for path in unsynced:
            if Path(path).exists():
                os.truncate(path, Path(path).stat().st_size // 2)
        raise Killed

    def open(self, path: str, flags: int) -> int:
        self._fails("open")
        self.opened.append(path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        # The system closes the files of a dead process.
        super().close(fd)

    def lock(self, fd: int) -> bool:
        self._fails("lock")
        return super().lock(fd)

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        self._fails("reserve")
        super().reserve(fd, offset, num_bytes)

    def read(self, fd: int, buffer: Any, offset: int) -> int:
        fails = self._fails("read")
        return super().read(fd, buffer[: len(buffer) // 2] if fails else buffer, offset)

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        fails = self._fails("write")
        if fd in self._paths:
            with self._lock:
                self._unsynced.add(self._paths[fd])
        if not fails:
            return super().write(fd, buffer, offset)
        try:
            return super().write(fd, buffer[: len(buffer) // 2], offset)
        finally:
            if self.fault == KILL:
                self._die()

    def sync(self, fd: int) -> None:
        self._fails("sync")
        super().sync(fd)
        with self._lock:
            self._unsynced.discard(self._paths.get(fd, ""))

    def size(self, fd: int) -> int:
        self._fails("size")
        return super().size(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._fails("truncate")
        super().truncate(fd, num_bytes)

    def make(self, path: str) -> None:
        self._fails("make")
        super().make(path)

    def names(self, path: str) -> list[str]:
        self._fails("names")
        return super().names(path)

    def rename(self, old: str, new: str) -> None:
        self._fails("rename")
        super().rename(old, new)
        # Bytes lost after the rename would be found under the new name.
        for path in [path for path in self._unsynced if path.startswith(f"{old}/")]:
            self._unsynced.remove(path)
            self._unsynced.add(path.replace(old, new, 1))

    def sync_directory(self, path: str) -> None:
        self._fails("sync_directory")
        super().sync_directory(path)

    def remove(self, path: str) -> None:
        self._fails("remove")
        super().remove(path)
