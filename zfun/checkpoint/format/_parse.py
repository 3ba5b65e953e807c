"""Read and check a manifest: every name, number and range, before anything uses one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from zfun.checkpoint.format._hash import DIGITS
from zfun.checkpoint.format._manifest import (
    FORMAT,
    MANIFEST,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    TAIL_BYTES,
    VERSION,
    FileEntry,
    LeafEntry,
    Manifest,
    Piece,
    check_key,
)
from zfun.checkpoint.format._plain import DTYPES, parse
from zfun.errors import CorruptCheckpoint
from zfun.options import TEXT, instance, takes

_MAX_DIMS = 64
_MAX = 1 << 62
_MAX_RANKS = 1 << 20
_NOT_FINITE = tuple({"$float": name} for name in ("nan", "inf", "-inf"))
_FILE_NAME = re.compile(r"[0-9]{5,7}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]+", re.ASCII)
_TAIL = re.compile(rb'"sha256":"([0-9a-f]{64})"}\n')


@takes(text=instance(bytes, "bytes", "b'...'"), path=TEXT)
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

    def entry(self, found: Any, what: str, names: str) -> dict[str, Any]:
        if not isinstance(found, dict) or set(found) != set(names.split()):
            got = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
            self.refuse(f"{what} has the fields {names}; got {got[:100]}")
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
        self.entry(
            found,
            "a manifest",
            "format version step ranks torch chunk_bytes hash files leaves ties masters optional "
            "values rank_values rng loader data composition sha256",
        )
        ranks = self.integer(found["ranks"], "ranks", 1, _MAX_RANKS)
        chunk_bytes = self.integer(found["chunk_bytes"], "chunk_bytes", 4096, 1 << 26)
        if chunk_bytes % 4096:
            self.refuse(f"chunk_bytes is a multiple of 4096; got {chunk_bytes}")
        name = found["hash"]
        if not isinstance(name, str) or name not in DIGITS:
            self.refuse(f"a hash is one of {', '.join(DIGITS)}; got {str(name)[:60]!r}")
        files = tuple(
            self.file(x, chunk_bytes, DIGITS[name]) for x in self.items(found["files"], "files")
        )
        if len({file.name for file in files}) < len(files):
            self.refuse("every file occurs once; got one twice")
        leaves = tuple(
            self.leaf(x, ranks, len(files)) for x in self.items(found["leaves"], "leaves")
        )
        self.check_keys(leaves, ranks)
        self.check_files(leaves, files)
        values = self.by_key(found["values"], "values")
        rank_values = [
            self.by_key(x, "rank_values") for x in self.per_rank(found, "rank_values", ranks)
        ]
        ties = self.by_key(found["ties"], "ties")
        keys = {leaf.key for leaf in leaves}
        for alias, key in ties.items():
            if not isinstance(key, str) or key not in keys or alias in keys:
                self.refuse(f"a tie joins a new key to the key of a leaf; got {alias[:60]!r}")
        masters = self.by_key(found["masters"], "masters")
        for key, master in masters.items():
            if key not in keys or not isinstance(master, str) or master not in keys:
                self.refuse(f"a master weight and its parameter are leaves; got {key[:60]!r}")
        optional = self.items(found["optional"], "optional")
        for key in optional:
            if not isinstance(key, str) or (key not in keys and key not in values):
                self.refuse(f"an optional key is the key of a leaf; got {str(key)[:60]!r}")
        return Manifest(
            step=self.integer(found["step"], "step"),
            ranks=ranks,
            chunk_bytes=chunk_bytes,
            hash=name,
            files=files,
            leaves=leaves,
            ties=ties,
            masters=masters,
            optional=optional,
            values=values,
            rank_values=rank_values,
            rng=self.per_rank(found, "rng", ranks),
            loader=self.per_rank(found, "loader", ranks),
            data=found["data"],
            composition=self.items(found["composition"], "composition", dict),
            digest=digest,
        )

    def per_rank(self, found: dict[str, Any], name: str, ranks: int) -> list[Any]:
        held = self.items(found[name], name)
        if len(held) not in (0, ranks):
            self.refuse(f"{name} has one entry for each of {ranks} ranks, or none; got {len(held)}")
        return held

    def by_key(self, found: Any, what: str) -> dict[str, Any]:
        for key, value in self.items(found, what, dict).items():
            check_key(key, self.refuse)
            if not isinstance(value, (str, int, float)) and value not in _NOT_FINITE:
                self.refuse(f"{what} holds plain values; got {type(value).__name__} for {key[:60]}")
        return found

    def file(self, found: Any, chunk_bytes: int, digits: int) -> FileEntry:
        self.entry(found, "a file", "name bytes data_start chunks")
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
        if len(chunks) != -(-num_bytes // chunk_bytes):
            self.refuse(
                f"{name} of {num_bytes} bytes has {-(-num_bytes // chunk_bytes)} chunks; got "
                f"{len(chunks)}"
            )
        for chunk in chunks:
            is_text = isinstance(chunk, str) and len(chunk) == digits
            if not is_text or not _DIGEST.fullmatch(chunk):
                self.refuse(f"a hash has {digits} hexadecimal digits; got {str(chunk)[:60]!r}")
        return FileEntry(name, num_bytes, start, tuple(chunks))

    def leaf(self, found: Any, ranks: int, num_files: int) -> LeafEntry:
        self.entry(found, "a leaf", "key dtype shape rank pieces")
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

    def piece(self, found: Any, key: str, num_files: int) -> Piece:
        if type(found) is not list or len(found) != 4:
            self.refuse(f"a piece of {key!r} is four integers; got {str(found)[:60]!r}")
        what = f"a piece of {key!r}"
        return Piece(
            self.integer(found[0], what, 0, num_files - 1),
            self.integer(found[1], what),
            self.integer(found[2], what),
            self.integer(found[3], what, 1),
        )

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
        for index, (file, spans) in enumerate(zip(files, _spans(leaves, len(files)), strict=True)):
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


def _spans(leaves: Sequence[LeafEntry], num_files: int) -> Iterator[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_files)]
    for leaf in leaves:
        for piece in leaf.pieces:
            stop = piece.offset + piece.numel * leaf.element.itemsize
            found[piece.file].append((piece.offset, stop))
    yield from found
