"""Read and check a manifest: every name, number and range, before anything uses one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from zfun.checkpoint.format._manifest import (
    DIGITS,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TAIL_BYTES,
    VERSION,
    FileEntry,
    LeafEntry,
    Manifest,
    Piece,
    check_key,
    fields_of,
)
from zfun.checkpoint.format._order import StoredCut
from zfun.checkpoint.format._plain import DTYPES, parse
from zfun.errors import CorruptCheckpoint
from zfun.options import instance, takes
from zfun.sources.headers import MAX_HEADER_BYTES

_MAX_DIMS = 64
_MAX = 1 << 62
_MAX_RANKS = 1 << 20
_NOT_FINITE = tuple({"$float": name} for name in ("nan", "inf", "-inf"))
_FILE_NAME = re.compile(r"[0-9]{5,7}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]+", re.ASCII)
_MANIFEST, _LEAF, _FILE = map(fields_of, (Manifest, LeafEntry, FileEntry))
_TAIL = re.compile(rb'"sha256":"([0-9a-f]{64})"}\n')


@takes(text=instance(bytes, "bytes", "b'...'"))
def parse_manifest(text: bytes, path: str = MANIFEST) -> Manifest:
    """Parse and check a manifest: every name, number and range, before anything uses one.

    Args:
        text: the bytes of the file.
        path: of the file, for messages.

    Raises:
        CorruptCheckpoint: the bytes are not those that were written, or break the format.

    Example:
        >>> parse_manifest(b"{}")
        Traceback (most recent call last):
        ...
        zfun.errors.CorruptCheckpoint: manifest.json must end with its own hash; got b'{}': ...
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise CorruptCheckpoint(
            f"{path} must have at most {MAX_MANIFEST_BYTES >> 20} MiB; got {len(text) >> 20} MiB",
            path=path,
        )
    tail = _TAIL.fullmatch(text[-TAIL_BYTES:])
    if tail is None:
        raise CorruptCheckpoint(
            f"{path} must end with its own hash; got {text[-20:]!r}: the file is truncated or "
            "no manifest; load another checkpoint",
            path=path,
        )
    digest = hashlib.sha256(text[:-TAIL_BYTES]).hexdigest()
    if digest != tail[1].decode():
        raise CorruptCheckpoint(
            f"{path} must have the bytes that were written; got the hash {digest[:16]}... for "
            f"{tail[1].decode()[:16]}...; load another checkpoint",
            path=path,
        )
    return _Reader(path).manifest(parse(text, path), digest)


class _Reader:
    """Checks the parts of a manifest, and names the entry at fault."""

    def __init__(self, path: str) -> None:
        self.path = path

    def refuse(self, problem: str) -> NoReturn:
        raise CorruptCheckpoint(f"{self.path}: {problem}; load another checkpoint", path=self.path)

    def entry(self, found: Any, what: str, names: Iterable[str]) -> dict[str, Any]:
        if not isinstance(found, dict) or found.keys() != set(names):
            got = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
            self.refuse(f"{what} has the fields {' '.join(names)}; got {got[:100]}")
        return found

    def integer(self, found: Any, what: str, least: int = 0, most: int = _MAX) -> int:
        if type(found) is not int or not least <= found <= most:
            self.refuse(f"{what} is an integer from {least} to {most}; got {str(found)[:40]!r}")
        return found

    def items(self, found: Any, what: str, kind: type = list) -> Any:
        if type(found) is not kind:
            self.refuse(f"{what} is a {kind.__name__}; got {type(found).__name__}")
        return found

    def manifest(self, found: Any, digest: str) -> Manifest:
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            self.refuse(f"the format of a manifest is {FORMAT!r}")
        if found.get("version") != VERSION:
            self.refuse(
                f"this zfun reads version {VERSION} of the format; got "
                f"{str(found.get('version'))[:40]!r}: read it with a newer zfun"
            )
        names = ("format", "version", "torch", *_MANIFEST, "sha256")
        held = dict(self.entry(found, "a manifest", names))
        self.integer(held["step"], "step")
        ranks = self.integer(found["ranks"], "ranks", 1, _MAX_RANKS)
        chunk_bytes = self.integer(found["chunk_bytes"], "chunk_bytes", 4096, 1 << 26)
        if chunk_bytes % 4096:
            self.refuse(f"chunk_bytes is a multiple of 4096; got {chunk_bytes}")
        name = found["hash"]
        if not isinstance(name, str) or name not in DIGITS:
            self.refuse(f"a hash is one of {', '.join(DIGITS)}; got {str(name)[:60]!r}")
        held["files"] = files = tuple(
            self.file(x, chunk_bytes, DIGITS[name]) for x in self.items(found["files"], "files")
        )
        if len({file.name for file in files}) < len(files):
            self.refuse("every file occurs once; got one twice")
        held["leaves"] = leaves = tuple(
            self.leaf(x, ranks, len(files)) for x in self.items(found["leaves"], "leaves")
        )
        self.check_keys(leaves, ranks)
        self.check_files(leaves, files)
        self.check_values(found, ranks, {leaf.key for leaf in leaves})
        return Manifest(**{name: held[name] for name in _MANIFEST}, digest=digest)

    def check_values(self, found: dict[str, Any], ranks: int, keys: set[str]) -> None:
        """Everything but files and leaves; ``keys`` are those of the leaves."""
        values = self.by_key(found["values"], "values")
        for name in ("rank_values", "rng", "loader"):
            count = len(self.items(found[name], name))
            if count not in (0, ranks):
                self.refuse(f"{name} has one entry for each of {ranks} ranks, or none; got {count}")
        for own in found["rank_values"]:
            self.by_key(own, "rank_values")
        for alias, key in self.by_key(found["ties"], "ties").items():
            if not isinstance(key, str) or key not in keys or alias in keys:
                self.refuse(f"a tie joins a new key to the key of a leaf; got {alias[:60]!r}")
        for key, master in self.by_key(found["masters"], "masters").items():
            if key not in keys or not isinstance(master, str) or master not in keys:
                self.refuse(f"a master weight and its parameter are leaves; got {key[:60]!r}")
        for key in self.items(found["optional"], "optional"):
            if not isinstance(key, str) or (key not in keys and key not in values):
                self.refuse(f"an optional key is the key of a leaf; got {str(key)[:60]!r}")
        self.items(found["composition"], "composition", dict)

    def by_key(self, found: Any, what: str) -> dict[str, Any]:
        for key, value in self.items(found, what, dict).items():
            check_key(key, self.refuse)
            if not isinstance(value, (str, int, float)) and value not in _NOT_FINITE:
                self.refuse(f"{what} holds plain values; got {type(value).__name__} for {key[:60]}")
        return found

    def file(self, found: Any, chunk_bytes: int, digits: int) -> FileEntry:
        self.entry(found, "a file", _FILE)
        name = found["name"]
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            self.refuse(
                "a payload file has a plain name like '00000.safetensors', in the directory of "
                f"the checkpoint; got {str(name)[:60]!r}"
            )
        num_bytes = self.integer(found["bytes"], f"the length of {name}", 8)
        start = self.integer(
            found["data_start"], f"data_start of {name}", 8, min(num_bytes, 8 + MAX_HEADER_BYTES)
        )
        chunks = self.items(found["chunks"], f"chunks of {name}")
        count = -(-num_bytes // chunk_bytes)
        if len(chunks) != count:
            self.refuse(f"{name} of {num_bytes} bytes has {count} chunks; got {len(chunks)}")
        for chunk in chunks:
            is_text = isinstance(chunk, str) and len(chunk) == digits
            if not is_text or not _DIGEST.fullmatch(chunk):
                self.refuse(f"a hash has {digits} hexadecimal digits; got {str(chunk)[:60]!r}")
        return FileEntry(name, num_bytes, start, tuple(chunks))

    def leaf(self, found: Any, ranks: int, num_files: int) -> LeafEntry:
        # Leaves from before model axes, and most others, have no cuts.
        own: list[Any] = []
        found = self.entry(
            {"cuts": own, **found} if isinstance(found, dict) else found, "a leaf", _LEAF
        )
        key, dtype = found["key"], found["dtype"]
        check_key(key, self.refuse)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.refuse(f"leaf {key!r} has a dtype of torch; got {str(dtype)[:60]!r}")
        shape = self.items(found["shape"], f"the shape of {key!r}")
        if len(shape) > _MAX_DIMS:
            self.refuse(f"leaf {key!r} has at most {_MAX_DIMS} dims; got {len(shape)}")
        rank = found["rank"]
        entry = LeafEntry(
            key,
            DTYPES[dtype],
            tuple(self.integer(dim, f"a dim of {key!r}") for dim in shape),
            None if rank is None else self.integer(rank, f"rank of {key!r}", 0, ranks - 1),
            tuple(
                self.piece(x, key, num_files)
                for x in self.items(found["pieces"], f"the pieces of {key!r}")
            ),
            self.cuts(found["cuts"], key, shape),
        )
        end = 0
        for piece in entry.pieces:
            if piece.first != end:
                self.refuse(
                    f"the pieces of leaf {key!r} follow each other without gap or overlap; got "
                    f"one at {piece.first} after {end}"
                )
            end += piece.numel
        if end != entry.numel:
            self.refuse(f"leaf {key!r} of shape {shape} has {entry.numel} elements; got {end}")
        return entry

    def cuts(self, found: Any, key: str, shape: Sequence[int]) -> tuple[StoredCut, ...]:
        what, local = f"a cut of {key!r}", [*shape]
        cuts = self.items(found, f"the cuts of {key!r}")
        if len(cuts) > _MAX_DIMS:
            self.refuse(f"leaf {key!r} is cut at most {_MAX_DIMS} times; got {len(cuts)}")
        for cut in cuts:
            if type(cut) is not list or len(cut) != 3 or not shape:
                self.refuse(f"{what} is a dim, a number of parts and a list; got {str(cut)[:60]!r}")
            dim = self.integer(cut[0], what, 0, len(shape) - 1)
            size = self.integer(cut[1], what, 1, _MAX_RANKS)
            parts = [self.integer(x, what) for x in self.items(cut[2], what)] or [local[dim]]
            if sum(parts) != local[dim] or any(part % size for part in parts):
                self.refuse(f"{what} divides its parts; got {str(cut)[:60]!r} of shape {local}")
            local[dim] //= size
        return tuple(StoredCut(dim, size, tuple(parts)) for dim, size, parts in cuts)

    def piece(self, found: Any, key: str, num_files: int) -> Piece:
        if type(found) is not list or len(found) != 4:
            self.refuse(f"a piece of {key!r} is four integers; got {str(found)[:60]!r}")
        what = f"a piece of {key!r}"
        # The least and the most of file, offset, first and numel.
        limits = ((0, num_files - 1), (0, _MAX), (0, _MAX), (1, _MAX))
        for number, (least, most) in zip(found, limits, strict=True):
            self.integer(number, what, least, most)
        return Piece(*found)

    def check_keys(self, leaves: Sequence[LeafEntry], ranks: int) -> None:
        """Each key is one shared leaf, or one leaf for each rank."""
        held: dict[str, list[int | None]] = {}
        for leaf in leaves:
            held.setdefault(leaf.key, []).append(leaf.rank)
        every = list(range(ranks))
        for key, found in held.items():
            if found != [None] and found != every:
                self.refuse(
                    f"leaf {key!r} occurs once, or once for each of {ranks} ranks in order; got "
                    f"the ranks {found[:8]}"
                )

    def check_files(self, leaves: Sequence[LeafEntry], files: Sequence[FileEntry]) -> None:
        """The pieces in a file follow each other from the header to the end."""
        spans_of: list[list[tuple[int, int]]] = [[] for _ in files]
        for leaf in leaves:
            for piece in leaf.pieces:
                stop = piece.offset + piece.numel * leaf.element.itemsize
                spans_of[piece.file].append((piece.offset, stop))
        for index, (file, spans) in enumerate(zip(files, spans_of, strict=True)):
            end = file.data_start
            for start, stop in sorted(spans):
                if start != end:
                    self.refuse(
                        f"the pieces in {file.name} follow each other without gap or overlap; "
                        f"got one at byte {start} after {end}"
                    )
                end = stop
            if end != file.num_bytes:
                self.refuse(
                    f"file {index} ({file.name}) ends with the last piece; got {file.num_bytes} "
                    f"bytes and pieces up to {end}"
                )
