"""Remove the files that crashed runs left on a disk."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from zfun.errors import OptionError
from zfun.files import Files
from zfun.options import PATH, takes
from zfun.stores._disk import DATA, PREFIX


class Cleaned(NamedTuple):
    """The result of :func:`clean`.

    Attributes:
        removed: the directories that were removed.
        num_bytes: the bytes that the disk has back.
        in_use: the directories of runs that live, which stay.
        unknown: directories of another host, with other content, or on a file system without
            locks, which stay.
    """

    removed: tuple[str, ...]
    num_bytes: int
    in_use: tuple[str, ...]
    unknown: tuple[str, ...]


@takes(path=PATH)
def clean(path: str | Path) -> Cleaned:
    """Remove the directories of stores whose processes are gone.

    A process holds a lock on the file of a store as long as the process lives, so nothing that a
    run still uses is removed. Directories of another name or another host, links, and directories
    with other content stay.

    Args:
        path: the path that was given to :func:`nvme`.

    Returns:
        The directories that were removed, and those that stay.

    Raises:
        OptionError: ``path`` is no directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     clean(path)
        Cleaned(removed=(), num_bytes=0, in_use=(), unknown=())
    """
    if not Path(path).is_dir():
        raise OptionError(
            f"zfun clean takes the directory given to stores.nvme(); got {str(path)!r}, which is "
            "no directory; look for a spelling mistake"
        )
    found: dict[str, list[str]] = {"removed": [], "in_use": [], "unknown": []}
    num_bytes = 0
    for directory in sorted(Path(path).glob(f"{PREFIX}*")):
        verdict, freed = _clean_one(directory, Files())
        found[verdict].append(str(directory))
        num_bytes += freed
    return Cleaned(
        tuple(found["removed"]), num_bytes, tuple(found["in_use"]), tuple(found["unknown"])
    )


def _clean_one(directory: Path, files: Files) -> tuple[str, int]:
    data = directory / DATA
    try:
        if (
            # A lock on a shared file system may not reach another host.
            directory.name.rsplit("-", 2)[0] != f"{PREFIX}{socket.gethostname()}"
            or directory.is_symlink()
            or not {entry.name for entry in directory.iterdir()} <= {DATA}
        ):
            return "unknown", 0
        if not data.exists():
            directory.rmdir()
            return "removed", 0
        fd = files.open(str(data), os.O_RDWR)
        try:
            if not files.lock(fd):
                return "in_use", 0
            num_bytes = os.fstat(fd).st_blocks * 512
            files.remove(str(data))
        finally:
            files.close(fd)
    except OSError:
        return "unknown", 0
    return "removed", num_bytes
