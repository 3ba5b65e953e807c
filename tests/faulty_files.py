"""Files of which one operation fails: with an errno, by few bytes, or by the end of the process.

A simulated end of the process is an exception that no handler of errors catches. From then on every
operation raises it, because a dead process does nothing more.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from zfun.files import Files

SHORT = "short"
KILL = "kill"

EVERY = (
    *("open", "lock", "reserve", "read", "write", "sync", "size", "truncate", "make", "add"),
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

    def add(self, path: str) -> None:
        self._fails("add")
        super().add(path)

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


class PowerLoss(FaultyFiles):
    """A machine that loses its power, and with it all that was not synced.

    Names of files and directories come back as they were when their directory was last synced, and
    of files that were not synced all bytes are lost.

    Args:
        at: the index of the operation at which the power is lost; ``None`` for :meth:`lose`.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__(at, KILL, EVERY)
        self._changes: list[tuple[str, str, str]] = []
        # The bytes of removed files.
        self._removed: dict[str, bytes] = {}

    def lose(self) -> None:
        """Lose the power."""
        for kind, path, other in reversed(self._changes):
            if kind == "made" and Path(path).is_dir():
                shutil.rmtree(path)
            elif kind == "made":
                Path(path).unlink(missing_ok=True)
            elif kind == "renamed" and Path(other).exists():
                Path(other).rename(path)
            elif kind == "removed" and other:
                Path(path).write_bytes(self._removed[other])
            elif kind == "removed":
                Path(path).mkdir(exist_ok=True)
        self._changes.clear()
        for path in self._unsynced:
            if Path(path).exists():
                os.truncate(path, 0)

    def _die(self) -> None:
        with self._lock:
            self._is_dead = True
            self.lose()
        raise Killed

    def _changed(self, kind: str, path: str, other: str = "") -> None:
        with self._lock:
            self._changes.append((kind, path, other))

    def open(self, path: str, flags: int) -> int:
        is_new = not os.path.lexists(path)
        fd = super().open(path, flags)
        if is_new:
            self._changed("made", path)
        return fd

    def make(self, path: str) -> None:
        super().make(path)
        self._changed("made", path)

    def add(self, path: str) -> None:
        is_new = not os.path.lexists(path)
        super().add(path)
        if is_new:
            self._changed("made", path)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._changed("renamed", old, new)
        with self._lock:
            # The changes inside of a directory have the new name in their paths.
            moved = lambda path: new + path[len(old) :] if path.startswith(f"{old}/") else path
            self._changes[:-1] = [
                (kind, moved(path), moved(other)) for kind, path, other in self._changes[:-1]
            ]

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        with self._lock:
            self._changes = [
                change for change in self._changes if str(Path(change[1]).parent) != path
            ]

    def remove(self, path: str) -> None:
        kept = f"kept {len(self._removed)}"
        if Path(path).is_file():
            self._removed[kept] = Path(path).read_bytes()
        parent = Path(path).parent
        super().remove(path)
        if kept in self._removed:
            self._changed("removed", path, kept)
        if not parent.exists():
            self._changed("removed", str(parent))
