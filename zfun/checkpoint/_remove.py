"""Remove old checkpoints, and what saves left that did not end; see [Note: commit objects]."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from zfun.checkpoint._directory import GIVEN_UP, STEP, TEMPORARY, are_whole, named, steps
from zfun.checkpoint.format._manifest import MANIFEST
from zfun.checkpoint.format._write import explaining
from zfun.files import Files
from zfun.objects import files_of


def prune(path: str, keep: int | None, published: str, files: Files) -> None:
    """Remove older saves of the published step, and keep ``keep`` steps: that and the newest."""
    published_step = STEP.fullmatch(published)
    assert published_step is not None
    if keep is None and published_step[2] is None:
        return
    own = int(published_step[1])
    # One list, because another job may publish between two.
    found = sorted(named(path, files))
    others = {step: name for step, _, name in found if step != own}
    count = len(others) if keep is None else keep - 1
    kept = {published, *[*others.values()][len(others) - min(count, len(others)) :]}
    for _, _, name in found:
        if name not in kept:
            with contextlib.suppress(OSError):
                remove_step(path, name, files)
    if keep is not None and not files.is_disk:
        with contextlib.suppress(OSError):
            # None is left where another job has removed all.
            for oldest in steps(path, files=files)[-keep:][:1]:
                _remove_given_up(path, oldest.step, files)


def remove_step(path: str, name: str, files: Files) -> None:
    """Remove a checkpoint, so that no reader finds one with missing files."""
    if not files.is_disk:
        files.remove(f"{path}/{name}/{MANIFEST}")
        files.remove_all(f"{path}/{name}")
        return
    gone = f"{path}/{TEMPORARY}old-{name}"
    files.rename(f"{path}/{name}", gone)
    files.remove_all(gone)


def _remove_given_up(path: str, before: int, files: Files) -> None:
    """Remove what unfinished saves of earlier steps left, of which no writer can be alive."""
    matches = [match for name in files.names(path) if (match := STEP.fullmatch(name))]
    names = [match[0] for match in matches if int(match[1]) < before]
    sizes = files.sizes([f"{path}/{name}/{MANIFEST}" for name in names])
    for name, size in zip(names, sizes, strict=True):
        if size == len(GIVEN_UP):
            files.remove_all(f"{path}/{name}")


def remove_stale(path: str, files: Files) -> None:
    """Remove the files of saves that did not end; on a disk the caller holds the lock."""
    if files.is_disk:
        for name in files.names(path):
            if name.startswith(TEMPORARY) and files.is_directory(f"{path}/{name}"):
                files.remove_all(f"{path}/{name}")
        return
    for name in _unfinished(path, files):
        give_up(f"{path}/{name}", files)


def give_up(directory: str, files: Files) -> bool:
    """End a save to a store, whose writer then cannot publish, and remove its files.

    Returns:
        Whether the save was ended; it was not if it has published.
    """
    with contextlib.suppress(FileExistsError):
        files.create(f"{directory}/{MANIFEST}", GIVEN_UP)
    if files.sizes([f"{directory}/{MANIFEST}"]) != [len(GIVEN_UP)]:
        return False
    for name in files.names(directory):
        if name != MANIFEST:
            files.remove(f"{directory}/{name}")
    return True


def _unfinished(path: str, files: Files) -> list[str]:
    """Return the directories of a store without the manifest of a checkpoint."""
    try:
        names = [name for name in files.names(path) if STEP.fullmatch(name)]
    except FileNotFoundError:
        return []
    found = zip(names, are_whole([f"{path}/{name}" for name in names], files), strict=True)
    return [name for name, is_whole in found if not is_whole]


def stale(path: str | Path, files: Files | None = None) -> Sequence[str]:
    """Return the directories of saves that are under way or did not end."""
    files = files_of(path, files)
    with explaining(str(path), "listing the directory"), contextlib.suppress(FileNotFoundError):
        names = files.names(str(path))
        if files.is_disk:
            return [f"{path}/{name}" for name in names if name.startswith(TEMPORARY)]
        unfinished = _unfinished(str(path), files)
        return [
            f"{path}/{name}"
            for name in unfinished
            if set(files.names(f"{path}/{name}")) - {MANIFEST}
        ]
    return []
