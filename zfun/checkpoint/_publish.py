"""The publication of a checkpoint at one moment.

[Note: publication]
1. The ranks agree on the tree, the step and the name. Rank 0 takes the lock of the directory and
   makes a temporary directory.
2. Each rank writes one payload file there, and waits until the disk has the file.
3. Each rank reports to rank 0. Rank 0 looks for the files of all ranks, writes the manifest, and
   waits until the disk has the manifest and the names.
4. Rank 0 renames the temporary directory: the one moment in which the checkpoint comes to be. In an
   object store, this moment is the write of the manifest; see [Note: commit objects].
5. Rank 0 removes checkpoints that ``keep`` does not keep, and all ranks return or raise together.

A process that dies before 4 leaves a temporary directory, which no reader takes for a checkpoint
and the next save removes.

In the background the ranks cannot use their group, which the steps use. There the reports of 3 and
5 are files in the temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zfun.checkpoint._collect import WriteSource, bytes_of
from zfun.checkpoint._directory import CLAIM, GIVEN_UP, TEMPORARY, locked, name_for
from zfun.checkpoint._parts import PartSpan
from zfun.checkpoint._remove import give_up, prune, remove_stale
from zfun.checkpoint._together import agree, attempt
from zfun.checkpoint.format import _manifest
from zfun.checkpoint.format._order import StoredCut
from zfun.checkpoint.format._parse import parse_manifest
from zfun.checkpoint.format._plain import DTYPES
from zfun.checkpoint.format._write import Hashing, explaining, write_file
from zfun.collectives import Group
from zfun.errors import CheckpointError
from zfun.files import ALIGNMENT, Files
from zfun.sources.headers import MAX_HEADER_BYTES, header_of


class Job:
    """One save: the names, the file of this rank, and the steps that rank 0 takes for all."""

    def __init__(
        self, path: str, group: Group, files: Files, keep: int | None, hashing: Hashing
    ) -> None:
        self.path, self.group, self.files = path.rstrip("/") or "/", group, files
        self.keep, self.hashing = keep, hashing
        self.temporary = ""
        self.final = ""
        self._tried = False
        self._lock = contextlib.ExitStack()

    def begin(self, step: int) -> None:
        """Make the temporary directory; every rank looks whether it is there."""
        temporary, final = self.together(lambda: self._made(step))[0]
        self.temporary, self.final = f"{self.path}/{temporary}", f"{self.path}/{final}"
        self.together(self._look_for_directory)

    def _look_for_directory(self) -> None:
        with explaining(self.temporary, "looking for what rank 0 made"):
            is_seen = self.files.is_directory(self.temporary)
        if not is_seen:
            raise CheckpointError(
                f"all ranks save to one directory, on a disk that they share; this rank does "
                f"not see {self.temporary}, which rank 0 made; pass a path on a shared disk",
                path=self.path,
            )

    def _made(self, step: int) -> list[str] | None:
        if self.group.rank != 0:
            return None
        with explaining(self.path, "the directory"):
            self.files.make_all(self.path)
        self._lock.enter_context(locked(self.path, self.files))
        with explaining(self.path, "the temporary directory"):
            remove_stale(self.path, self.files)
            final = name_for(self.path, step, self.files)
            token = secrets.token_hex(4)
            if not self.files.is_disk:
                self._claim(final, token)
                return [final, final]
            temporary = f"{TEMPORARY}{final}-{token}"
            self.files.make(f"{self.path}/{temporary}")
        return [temporary, final]

    def _claim(self, final: str, token: str) -> None:
        try:
            self.files.create(f"{self.path}/{final}/{CLAIM}", token.encode())
        except FileExistsError:
            raise self._refused(final) from None

    def _refused(self, final: str) -> CheckpointError:
        return CheckpointError(
            f"one job saves to {self.path} at a time; got another one, which took over {final}; "
            "save to another path, or end that job",
            path=self.path,
        )

    def together(self, fn: Callable[[], Any]) -> list[Any]:
        """Return the result of every rank, or end the save on all ranks; see :func:`agree`."""
        value, error = attempt(fn)
        try:
            return agree(self.group, error, value)
        except Exception:
            self.abandon()
            raise

    def in_turn(self, sources: Sequence[WriteSource], report: dict[str, Any]) -> None:
        """Write and publish, with collectives between."""
        reports = self.together(lambda: self.write(sources, report))
        self.together(lambda: self.publish(reports) if self.group.rank == 0 else None)
        self.release()

    def write(
        self, sources: Sequence[WriteSource], report: dict[str, Any], *, gentle: bool = False
    ) -> dict[str, Any]:
        """Write the payload file of this rank, and return the report with the file's pieces."""
        outputs = [(output, source.dtype) for source in sources for output in source.outputs]
        if not outputs:
            return {**report, "file": None, "pieces": []}
        # Direct reads begin at pages.
        header = header_of((_named(*output) for output in outputs), ALIGNMENT)
        if len(header.data) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"the names of one rank's tensors take at most {MAX_HEADER_BYTES} bytes; got "
                f"{len(header.data)}; join small tensors, or use shorter names"
            )

        def blocks() -> Iterator[np.ndarray]:
            yield np.frombuffer(header.data, np.uint8)
            yield from bytes_of(sources)

        name = f"{self.group.rank:05d}.safetensors"
        path = f"{self.temporary}/{name}"
        chunks = write_file(
            self.files, path, blocks(), header.num_bytes, self.hashing, gentle=gentle
        )
        pieces = [
            [output.slot.key, at, output.first, output.numel, output.by_rank]
            for (output, _), at in zip(outputs, header.offsets, strict=True)
        ]
        file = [name, header.num_bytes, len(header.data), chunks]
        return {**report, "file": file, "pieces": pieces}

    def publish(self, reports: Sequence[dict[str, Any]]) -> None:
        """Write the manifest and rename the directory; rank 0 only."""
        manifest = _manifest_of(reports, self.hashing)
        self._check_visible(manifest)
        text = _manifest.format_manifest(manifest)
        # A manifest that cannot be read is a mistake to find now.
        parse_manifest(text)
        name = f"{self.temporary}/{_manifest.MANIFEST}"
        with explaining(name, "the manifest"):
            self._tried = True
            try:
                self.files.create(name, text)
            except FileExistsError:
                if self.files.is_disk:
                    raise
                raise self._refused(Path(self.final).name) from None
        if self.files.is_disk:
            with explaining(self.final, "publishing the checkpoint"):
                self.files.sync_directory(self.temporary)
                self.files.rename(self.temporary, self.final)
                self.files.sync_directory(self.path)
        else:
            with contextlib.suppress(OSError):
                self.files.remove(f"{self.final}/{CLAIM}")
        prune(self.path, self.keep, Path(self.final).name, self.files)

    def _check_visible(self, manifest: _manifest.Manifest) -> None:
        with explaining(self.temporary, "listing the files of all ranks"):
            try:
                seen = self.files.names(self.temporary)
            except FileNotFoundError:
                if self.files.is_disk:
                    raise
                raise self._refused(Path(self.final).name) from None
        if not self.files.is_disk and CLAIM not in seen:
            raise self._refused(Path(self.final).name)
        for entry in manifest.files:
            if entry.name not in seen:
                raise CheckpointError(
                    "all ranks save to one directory, on a disk that they share; rank 0 does not "
                    f"see {entry.name} in {self.temporary}, which another rank wrote; pass a path "
                    "on a shared disk",
                    path=self.path,
                )

    def abandon(self) -> None:
        """Remove the temporary directory of a save that failed; rank 0 only."""
        if self.group.rank != 0 or not self.temporary:
            return
        if self.files.is_disk:
            self.files.remove_all(self.temporary)
            return
        with contextlib.suppress(OSError):
            is_given_up = give_up(self.final, self.files)
            if is_given_up and not self._tried:
                # No request to publish is on its way, so nothing has to stand in its place.
                self.files.remove_all(self.final)

    def look(self) -> bool | None:
        """Return whether rank 0 has published; ``None`` if there is nothing to wait for."""
        with explaining(self.final, "waiting for the checkpoint"):
            if self.files.is_disk:
                if self.files.is_directory(self.final):
                    return True
                if self.files.is_directory(self.temporary):
                    return False
                return True if self.files.is_directory(self.final) else None
            names = [f"{self.final}/{name}" for name in (CLAIM, _manifest.MANIFEST)]
            claim, manifest = self.files.sizes(names)
            if manifest is not None:
                return None if manifest == len(GIVEN_UP) else True
            # Between the two answers rank 0 may have published, and removed the claim.
            return False if claim is not None or self.files.sizes(names)[1] is not None else None

    def release(self) -> None:
        """Release the lock."""
        self._lock.close()


def _named(output: PartSpan, dtype: torch.dtype) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """Name a range for other tools: a whole real leaf by its key, in its shape."""
    slot = output.slot
    is_whole = output.numel == slot.numel and slot.is_all
    name = slot.key if is_whole else f"{slot.key}[{output.first}:{output.first + output.numel}]"
    return name, dtype, slot.shape if is_whole and not slot.dtype.is_complex else (output.numel,)


def _manifest_of(reports: Sequence[dict[str, Any]], hashing: Hashing) -> _manifest.Manifest:
    """Join the reports of all ranks."""
    files: list[_manifest.FileEntry] = []
    pieces: dict[tuple[str, int | None], list[_manifest.Piece]] = {}
    for rank, report in enumerate(reports):
        for key, at, first, numel, is_own in report["pieces"]:
            place = (key, rank if is_own else None)
            pieces.setdefault(place, []).append(_manifest.Piece(len(files), at, first, numel))
        if report["file"] is not None:
            name, num_bytes, data_start, chunks = report["file"]
            files.append(_manifest.FileEntry(name, num_bytes, data_start, tuple(chunks)))

    def entry(described: list[Any], rank: int | None = None) -> _manifest.LeafEntry:
        key, dtype, shape, cuts = described
        held = sorted(pieces.get((key, rank), ()), key=lambda piece: piece.first)
        orders = tuple(StoredCut(dim, size, tuple(parts)) for dim, size, parts in cuts)
        return _manifest.LeafEntry(key, DTYPES[dtype], tuple(shape), rank, tuple(held), orders)

    # Along a model axis ranks hold other leaves, and otherwise rank 0 tells what all ranks share.
    told = [report["shared"] for report in reversed(reports) if "shared" in report]
    shared = told[-1]
    joined: dict[str, str] = {}
    for key in shared["joined"]:
        counts: dict[str, int] = {}
        for each in told:
            for path, count in json.loads(each["values"].get(key, "{}")).items():
                counts[path] = max(count, counts.get(path, 0))
        if len(told) > 1:
            joined[key] = json.dumps(counts)
    for name in ("ties", "masters", "values"):
        shared[name] = {key: x for each in told for key, x in each[name].items()}
    shared["values"] |= joined
    del shared["joined"]
    shared["optional"] = [*dict.fromkeys(key for each in told for key in each["optional"])]
    described = {leaf[0]: leaf for each in told for leaf in each.pop("leaves")}
    leaves = [entry(leaf) for leaf in described.values()]
    for own in zip(*(report["own"] for report in reports), strict=True):
        leaves += (entry(described, rank) for rank, described in enumerate(own))
    own_values = [report["values"] for report in reports]
    return _manifest.Manifest(
        ranks=len(reports),
        chunk_bytes=hashing.chunk_bytes,
        hash=hashing.name,
        files=tuple(files),
        leaves=tuple(leaves),
        rank_values=own_values if any(own_values) else [],
        rng=[report["rng"] for report in reports],
        loader=[report["loader"] for report in reports],
        **shared,
    )
