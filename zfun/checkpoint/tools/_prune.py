"""Remove old checkpoints, never the last good one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from zfun.checkpoint._directory import (
    FILES,
    SavedStep,
    all_saves,
    is_whole,
    locked,
    read_manifest,
    steps,
)
from zfun.checkpoint._remove import remove_step
from zfun.checkpoint.format._write import explaining
from zfun.errors import CheckpointError, CorruptCheckpoint, OptionError
from zfun.files import Files
from zfun.objects import files_of
from zfun.options import PATH, integer, takes


class Pruned(NamedTuple):
    """The result of :func:`prune`.

    Attributes:
        removed: the checkpoints that were removed, or would be in a dry run.
        kept: the checkpoints that stay.
        num_bytes: the bytes of the removed checkpoints.
    """

    removed: tuple[SavedStep, ...]
    kept: tuple[SavedStep, ...]
    num_bytes: int


@takes(path=PATH, keep=integer(1) | None, every=integer(1) | None, files=FILES)
def prune(
    path: str | Path,
    *,
    keep: int | None = None,
    every: int | None = None,
    dry_run: bool = True,
    files: Files | None = None,
) -> Pruned:
    """Remove old checkpoints of a directory, never the last good one.

    Args:
        path: the directory of checkpoints.
        keep: keep the newest ``keep`` good ones. A checkpoint is good if its manifest is, and all
            of its files have their lengths.
        every: keep those whose step ``every`` divides, too.
        dry_run: return what would be removed, and remove nothing.
        files: the operations on files.

    Returns:
        The checkpoints that were removed, and those that stay. Damaged ones, and older saves of a
        step that was saved twice, are removed too; if no checkpoint is good, none is removed.

    Raises:
        OptionError: neither ``keep`` nor ``every``.
        CheckpointError: a job saves to the directory, or the disk refused.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     for step in (10, 20, 30, 40):
        ...         saved = zf.save(path, {"w": torch.ones(3)}, step=step)
        ...     pruned = zf.checkpoint.prune(path, keep=1, every=20, dry_run=False)
        ...     [one.step for one in pruned.removed], [one.step for one in pruned.kept]
        ([10, 30], [20, 40])
    """
    if keep is None and every is None:
        raise OptionError(
            "prune() keeps some checkpoints; got neither keep= nor every=; write keep=3 for the "
            "newest three"
        )
    files, path = files_of(path, files), str(path).rstrip("/") or "/"
    if not steps(path, files=files):
        return Pruned((), (), 0)
    if dry_run:
        return _choose(path, keep, every, files)
    with locked(path, files):
        found = _choose(path, keep, every, files)
        for one in found.removed:
            with explaining(one.path, "removing the checkpoint"):
                remove_step(path, Path(one.path).name, files)
    return found


def _choose(path: str, keep: int | None, every: int | None, files: Files) -> Pruned:
    # One list, because a job may publish to a store meanwhile.
    everything = all_saves(path, files)
    good = [one for one in everything if _is_good(one, files)]
    # Of two good saves of a step, the newer one counts.
    newest = {one.step: one for one in good}
    by_step = [newest[step] for step in sorted(newest)]
    kept = {*by_step[-(keep or 1) :], *(one for one in by_step if every and one.step % every == 0)}
    if not kept:
        return Pruned((), tuple(everything), 0)
    removed = tuple(one for one in everything if one not in kept)
    num_bytes = sum(_num_bytes(one, files) for one in removed)
    return Pruned(removed, tuple(one for one in everything if one in kept), num_bytes)


def _is_good(one: SavedStep, files: Files) -> bool:
    try:
        manifest = read_manifest(one.path, files=files)
    except CheckpointError as error:
        # A disk that fails says nothing of the checkpoint.
        if isinstance(error, CorruptCheckpoint) or not is_whole(one.path, files):
            return False
        raise
    sizes = {file.name: file.num_bytes for file in manifest.files}
    with explaining(one.path, "looking for the files"):
        return files.sizes([f"{one.path}/{name}" for name in sizes]) == list(sizes.values())


def _num_bytes(one: SavedStep, files: Files) -> int:
    with contextlib.suppress(OSError):
        return sum(
            size or 0
            for size in files.sizes([f"{one.path}/{name}" for name in files.names(one.path)])
        )
    return 0
