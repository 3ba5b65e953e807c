"""The directory of checkpoints: one sub-directory for each step, made visible at one moment.

[Note: commit objects]
On a disk the moment is the rename of a temporary directory. A store has no rename: there the files
of a save have their last names from the beginning, and the manifest is the commit. It is written
last, on the condition that there is none.

- A step is a directory with a manifest. The layout is that of a disk, so copies in both directions
  load.
- ``.saving`` in a directory claims the directory for one save, on the same condition.
- A save that finds a directory without a manifest cannot know whether its writer is dead. So it
  first writes a manifest that says that the save was given up. A writer that is alive then cannot
  commit, and raises; one that is dead leaves nothing but this object.
- A step is removed manifest first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zfun.checkpoint.format._manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from zfun.checkpoint.format._parse import parse_manifest
from zfun.checkpoint.format._write import explaining
from zfun.errors import CheckpointError, CorruptCheckpoint
from zfun.files import Files
from zfun.objects import files_of
from zfun.options import PATH, instance, integer, takes

TEMPORARY = ".saving-"
LOCK = ".lock"
# In a store: the object that claims a directory, and the manifest of a save that was given up.
CLAIM = ".saving"
GIVEN_UP = b'{"zfun": "this save did not end, and a later save removed its files"}\n'
# A step that is saved again is another attempt, because no rename replaces a full directory.
STEP = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,6}))?", re.ASCII)

FILES = instance(Files, "an object of zf.files.Files", "zf.files.Files()") | None


class SavedStep(NamedTuple):
    """A checkpoint in a directory of checkpoints.

    Attributes:
        step: the step.
        path: the directory of the checkpoint.
    """

    step: int
    path: str


@takes(path=PATH, files=FILES)
def steps(path: str | Path, *, files: Files | None = None) -> list[SavedStep]:
    """Return the checkpoints in a directory, oldest step first.

    A checkpoint is published at one moment, so each one is whole. Saves that are under way, or that
    were killed, are not among them.

    Args:
        path: the directory of checkpoints. No such directory means no checkpoints.
        files: the operations on files, for tests that let some of them fail.

    Returns:
        The steps; where a step was saved twice, the newer save.

    Raises:
        CheckpointError: the directory cannot be read.

    Example:
        >>> steps("no such directory")
        []
    """
    saves = all_saves(str(path).rstrip("/") or "/", files_of(path, files))
    return [*{one.step: one for one in saves}.values()]


def named(path: str, files: Files) -> Iterator[tuple[int, int, str]]:
    """Yield step, attempt and name of every directory that is named like a step."""
    with explaining(path, "listing the checkpoints"):
        matches: dict[str, re.Match[str]] = {}
        before: list[str] | None = None
        whole: list[bool] = []
        # A writer may publish a newer one, and remove all of these, before they are looked at.
        while not any(whole) and [*matches] != before:
            before = [*matches]
            try:
                names = files.names(path)
            except FileNotFoundError:
                return
            matches = {name: match for name in names if (match := STEP.fullmatch(name))}
            whole = are_whole([f"{path}/{name}" for name in matches], files)
        for (name, match), is_there in zip(matches.items(), whole, strict=True):
            if is_there:
                yield int(match[1]), int(match[2] or 0), name


def are_whole(paths: Sequence[str], files: Files) -> list[bool]:
    """Return for each directory whether it is there and was published."""
    if files.is_disk:
        return [files.is_directory(path) for path in paths]
    sizes = files.sizes([f"{path}/{MANIFEST}" for path in paths])
    return [size not in (None, len(GIVEN_UP)) for size in sizes]


def all_saves(path: str, files: Files) -> list[SavedStep]:
    """Return every checkpoint of a directory, older saves of a step included, oldest first."""
    return [SavedStep(step, f"{path}/{name}") for step, _, name in sorted(named(path, files))]


def is_whole(path: str, files: Files) -> bool:
    """Whether a path leads to the directory of a checkpoint that was published."""
    with explaining(path, "looking for a directory"):
        return are_whole([path], files)[0]


@takes(path=PATH, files=FILES)
def latest(path: str | Path, *, files: Files | None = None) -> SavedStep | None:
    """Return the newest checkpoint whose manifest is good; ``None`` if there is none.

    Args:
        path: the directory of checkpoints.
        files: the operations on files.

    Returns:
        The newest one. A newer one with a damaged manifest is skipped with a warning.

    Example:
        >>> latest("no such directory") is None
        True
    """
    files = files_of(path, files)
    for step in reversed(steps(path, files=files)):
        try:
            read_manifest(step.path, files=files)
        except CheckpointError as error:
            if not is_whole(step.path, files):
                # A writer has removed it, and published a newer one before.
                return latest(path, files=files)
            if not isinstance(error, CorruptCheckpoint):
                raise
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
            continue
        return step
    return None


@takes(path=PATH, files=FILES)
def read_manifest(path: str | Path, *, files: Files | None = None) -> Manifest:
    """Read and check the manifest of one checkpoint.

    Args:
        path: the directory of the checkpoint, such as ``"runs/step-00000010"``.
        files: the operations on files.

    Returns:
        The manifest, of which every name, number and range was checked.

    Raises:
        CorruptCheckpoint: the manifest is damaged, hostile, or missing.
        CheckpointError: the disk refused.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     [leaf.key for leaf in read_manifest(saved.path).leaves]
        ['w']
    """
    files = files_of(path, files)
    name = f"{path}/{MANIFEST}"
    if files.is_disk and not is_whole(str(path), files):
        raise CorruptCheckpoint(
            f"a checkpoint is a directory, and no link; got {path}; pass the path of one",
            path=str(path),
        )
    with explaining(name, "reading the manifest"):
        try:
            fd = files.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise CorruptCheckpoint(
                f"{path} must have a manifest; got none: it is no checkpoint; pass the directory "
                "of a step, or of checkpoints",
                path=name,
            ) from None
        try:
            num_bytes = files.size(fd)
            if num_bytes > MAX_MANIFEST_BYTES:
                raise CorruptCheckpoint(
                    f"{name} must have at most {MAX_MANIFEST_BYTES >> 20} MiB; got "
                    f"{num_bytes >> 20} MiB; load another checkpoint",
                    path=name,
                )
            buffer = np.empty(num_bytes, np.uint8)
            done = 0
            while done < num_bytes:
                count = files.read(fd, buffer[done:], done)
                if not count:
                    break
                done += count
        finally:
            files.close(fd)
    if buffer[:done].tobytes() == GIVEN_UP:
        raise CorruptCheckpoint(
            f"{path} must have a manifest; got that of a save that did not end; load another "
            "checkpoint",
            path=name,
        )
    return parse_manifest(buffer[:done].tobytes(), name)


@takes(path=PATH, step=integer(0) | None, files=FILES)
def step_path(path: str | Path, step: int | None = None, *, files: Files | None = None) -> str:
    """Return the directory of one checkpoint.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint under any name.
        step: the step; by default the newest.
        files: the operations on files.

    Returns:
        The directory.

    Raises:
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     step_path(path).removeprefix(path)
        '/step-00000007'
    """
    files = files_of(path, files)
    if step is None and is_whole(str(path), files):
        with explaining(str(path), "looking for a manifest"):
            has_manifest = files.sizes([f"{path}/{MANIFEST}"])[0] is not None
        # A copy of a checkpoint has any name; a directory of checkpoints may have that of a step.
        if has_manifest or (STEP.fullmatch(Path(path).name) and not steps(path, files=files)):
            return str(path)
    newest = latest(path, files=files) if step is None else None
    known = steps(path, files=files)
    found = newest or next((one for one in known if one.step == step), None)
    if found is None and step is None and known:
        # The newest one is damaged, published since, or removed since.
        found = known[-1]
        try:
            read_manifest(found.path, files=files)
        except CheckpointError:
            if is_whole(found.path, files):
                raise
            return step_path(path, files=files)
    if found is None:
        have = ", ".join(str(one.step) for one in known[-8:]) or "none"
        raise CheckpointError(
            f"{path} must have a checkpoint{'' if step is None else f' of step {step}'}; it has "
            f"the steps {have}; pass another path or step",
            path=str(path),
        )
    return found.path


def manifest_at(
    path: str | Path, step: int | None = None, files: Files | None = None
) -> tuple[str, Manifest]:
    """Return the directory of one checkpoint, as :func:`step_path` does, and the manifest.

    Look again where a writer has removed the newest one meanwhile.
    """
    files = files_of(path, files)
    while True:
        chosen = step_path(path, step, files=files)
        try:
            return chosen, read_manifest(chosen, files=files)
        except CheckpointError:
            if step is not None or chosen == str(path) or is_whole(chosen, files):
                raise


def name_for(path: str, step: int, files: Files) -> str:
    """Return the name of a new checkpoint of a step, which no other directory has."""
    try:
        matches = map(STEP.fullmatch, files.names(path))
    except FileNotFoundError:
        matches = map(STEP.fullmatch, ())
    attempts = [int(match[2] or 0) for match in matches if match and int(match[1]) == step]
    return f"step-{step:08d}" + (f".{max(attempts) + 1}" if attempts else "")


@contextlib.contextmanager
def locked(path: str, files: Files) -> Iterator[None]:
    """Hold the lock of a directory of checkpoints, so that two jobs do not save to one path."""
    if not files.is_disk:
        yield
        return
    name = f"{path}/{LOCK}"
    with explaining(name, "the lock"):
        fd = files.open(name, os.O_RDWR | os.O_CREAT)
        try:
            is_mine = True
            try:
                is_mine = files.lock(fd)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                    raise
            if not is_mine:
                holder = np.zeros(256, np.uint8)
                count = files.read(fd, holder, 0)
                raise CheckpointError(
                    f"one job saves to {path} at a time; got another one, "
                    f"{holder[:count].tobytes().decode(errors='replace')!r}; save to another "
                    "path, or end that job",
                    path=path,
                )
            files.truncate(fd, 0)
            files.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BaseException:
            files.close(fd)
            raise
    pid = os.getpid()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # A fork, such as a worker of a DataLoader, keeps a copy of the descriptor, and with the
            # copy the lock.
            if os.getpid() == pid:
                files.unlock(fd)
        with contextlib.suppress(OSError):
            files.close(fd)
