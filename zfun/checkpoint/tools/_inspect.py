"""Look at checkpoints, and verify every byte of them, without a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zfun.checkpoint._directory import is_whole, manifest_at, read_manifest, step_path, steps
from zfun.checkpoint._remove import stale
from zfun.checkpoint.format._manifest import MANIFEST, LeafEntry, Manifest
from zfun.checkpoint.format._payload import Payload, Want
from zfun.checkpoint.format._write import explaining
from zfun.errors import CheckpointError
from zfun.objects import files_of
from zfun.options import PATH, integer, takes
from zfun.tables import in_bytes

# Chunks that threads read at a time.
_AT_ONCE = 4
_MOST_LEAVES = 8
_MOST_WIDE = 200


@takes(path=PATH, step=integer(0) | None)
def inspect(path: str | Path, step: int | None = None) -> str:
    """Describe a checkpoint: composition, files, and every leaf. Only the manifest is read.

    Args:
        path: the directory of one checkpoint, or of many, which are then listed.
        step: the step to describe in a directory of many.

    Returns:
        The description, to print.

    Raises:
        CorruptCheckpoint: the manifest of the checkpoint is damaged.
        CheckpointError: there is no checkpoint.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(2, 3)}, step=7)
        ...     print(inspect(saved.path).splitlines()[0])
        step 7, saved by 1 rank: 1 leaf, 24 bytes
    """
    if step is None and not _is_one(path):
        found = _listing(str(path))
        if found is not None:
            return found
    return _description(manifest_at(path, step)[1])


def _is_one(path: str | Path) -> bool:
    return files_of(path).sizes([f"{path}/{MANIFEST}"])[0] is not None


def _listing(path: str) -> str | None:
    rows = [("step", "leaves", "bytes", "ranks", "directory")]
    for one in steps(path):
        name = Path(one.path).name
        try:
            found = read_manifest(one.path)
        except CheckpointError as error:
            if not is_whole(one.path, files_of(path)):
                continue
            rows.append((str(one.step), "-", "-", "-", f"{name}: damaged: {error}"))
            continue
        counts = (str(one.step), str(len(found.leaves)), in_bytes(found.num_bytes))
        rows.append((*counts, str(found.ranks), name))
    unfinished = [f"unfinished: {Path(name).name}" for name in stale(path)]
    return "\n".join([*_table(rows), *unfinished]) if len(rows) > 1 else None


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with aligned columns; the last column is as long as its text."""
    # A hostile text must not steer the terminal.
    rows = [tuple(map(_printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _printable(text: str) -> str:
    return "".join(mark if mark.isprintable() else "?" for mark in text)


def _plural(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _bytes_of(leaf: LeafEntry) -> int:
    return leaf.numel * leaf.element.itemsize


def _description(manifest: Manifest) -> str:
    total = sum(map(_bytes_of, manifest.leaves))
    leaves = _plural(len(manifest.leaves), "leaf", "leaves")
    ranks = _plural(manifest.ranks, "rank", "ranks")
    head = f"step {manifest.step}, saved by {ranks}: {leaves}, {in_bytes(total)}"
    lines = [head, *map(_composed, _flats(manifest)), ""]
    rows = [("leaf", "dtype", "shape", "bytes", "")]
    names = {key: f"tied to {other}" for key, other in manifest.ties.items()}
    masters = {master: f"master of {key}" for key, master in manifest.masters.items()}
    for leaf in manifest.leaves:
        note = masters.get(leaf.key, "") if leaf.rank is None else f"of rank {leaf.rank}"
        dtype = str(leaf.dtype).removeprefix("torch.")
        rows.append((leaf.key, dtype, str(leaf.shape), in_bytes(_bytes_of(leaf)), note))
    rows += [(key, "", "", "", note) for key, note in names.items()]
    lines += _table(rows)
    if manifest.values:
        lines += ["", *_table([(key, str(value)) for key, value in manifest.values.items()])]
    lines += ["", *_table([(file.name, in_bytes(file.num_bytes)) for file in manifest.files])]
    lines.append(f"chunks of {in_bytes(manifest.chunk_bytes)}, hashed by {manifest.hash}")
    return "\n".join([*lines, f"digest {manifest.digest}"])


def _flats(manifest: Manifest) -> list[Any]:
    # The composition is for readers only, so its form is not checked when a manifest is read.
    found = manifest.composition.get("values")
    return [value for value in found if isinstance(value, dict)] if isinstance(found, list) else []


def _composed(value: dict[str, Any]) -> str:
    def listed(name: str) -> str:
        found = value.get(name)
        return ", ".join(map(str, found)) if isinstance(found, list) else str(found)

    stores = f", in {listed('stores')}" if value.get("stores") else ""
    text = (
        f"  {value.get('path')}: {value.get('placement')} over {value.get('ranks')}, "
        f"{listed('dtypes')}, buckets of {listed('buckets')} elements{stores}"
    )
    text = _printable(text)
    return text if len(text) <= _MOST_WIDE else f"{text[: _MOST_WIDE - 3]}..."


class Problem(NamedTuple):
    """A part of a checkpoint that is not what was written.

    Attributes:
        path: the file.
        offset: the first byte of the part; ``None`` for the whole file.
        leaves: the keys of leaves with bytes there.
        message: the problem, in words.
    """

    path: str
    offset: int | None
    leaves: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        where = self.path if self.offset is None else f"{self.path} at byte {self.offset}"
        rest = len(self.leaves) - _MOST_LEAVES
        more = f" and {rest} more" if rest > 0 else ""
        held = f" [{', '.join(self.leaves[:_MOST_LEAVES])}{more}]" if self.leaves else ""
        return f"{where}: {self.message}{held}"


class Verified(NamedTuple):
    """The result of :func:`verify`.

    Attributes:
        path: the directory of the checkpoint.
        num_bytes: the bytes that were compared with their hashes.
        problems: the parts that are not what was written; none in a good checkpoint.
    """

    path: str
    num_bytes: int
    problems: tuple[Problem, ...]


@takes(path=PATH, step=integer(0) | None)
def verify(path: str | Path, step: int | None = None) -> Verified:
    """Compare every byte of a checkpoint with its hash.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint.
        step: the step; by default the newest.

    Returns:
        All problems, with file, offset and leaves. A chunk, the length that is hashed at a time, is
        one problem.

    Raises:
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     file = Path(saved.path, "00000.safetensors")
        ...     _ = file.write_bytes(file.read_bytes()[:-1] + b"!")
        ...     (problem,) = verify(path).problems
        ...     problem.offset, problem.leaves
        (0, ('w',))
    """
    known = steps(path) if step is None else []
    # The newest one, damaged or not.
    directory = known[-1].path if known else step_path(path, step)
    found = _verified(directory)
    if found.problems and not is_whole(directory, files_of(path)):
        # A writer has removed it meanwhile.
        return verify(path, step)
    return found


def _verified(directory: str) -> Verified:
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        problem = Problem(f"{directory}/{MANIFEST}", None, (), str(error))
        return Verified(directory, 0, (problem,))
    problems: list[Problem] = []
    compared = 0
    for index in range(len(manifest.files)):
        # A payload opens its files once, and stays closed to a file that fails.
        with Payload(directory, manifest) as payload:
            found = list(_problems_of(payload, index))
        problems += found
        compared += manifest.files[index].num_bytes if not found else 0
    return Verified(directory, compared, tuple(problems))


def _problems_of(payload: Payload, index: int) -> Iterator[Problem]:
    manifest, file = payload.manifest, payload.manifest.files[index]
    path, length = payload.path(index), manifest.chunk_bytes
    spans = [
        (piece.offset, piece.offset + piece.numel * leaf.element.itemsize, leaf.key)
        for leaf in manifest.leaves
        for piece in leaf.pieces
        if piece.file == index
    ]

    def held(start: int, stop: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for low, high, key in spans if low < stop and high > start))

    def read(chunks: Sequence[int]) -> None:
        payload.read(Want(index, at * length, np.empty(1, np.uint8)) for at in chunks)

    try:
        # The length is compared when the file is opened, for the first chunk.
        read([0])
    except CheckpointError as error:
        with explaining(path, "looking for the file"):
            size = files_of(path).sizes([path])[0] or 0
        if size != file.num_bytes:
            yield Problem(path, None, held(size, file.num_bytes), str(error))
            return
    for first in range(0, len(file.chunks), _AT_ONCE):
        chunks = range(first, min(first + _AT_ONCE, len(file.chunks)))
        try:
            read(chunks)
        except CheckpointError:
            for at in chunks:
                try:
                    read([at])
                except CheckpointError as error:
                    yield Problem(
                        path, at * length, held(at * length, (at + 1) * length), str(error)
                    )
