"""The manifest of a checkpoint: the place of every logical leaf in the payload files.

[Note: the format]
A checkpoint is a directory ``step-00000010`` with a file ``manifest.json`` and payload files
``00000.safetensors``, one for each rank that wrote. The manifest names *logical leaves*: the path
of a tensor in the state, the same for every group size, stage, bucket size, mesh and store. A leaf
is a row of *pieces*, each a range of its elements in stored order at a place in one file: row-major
but for leaves that were cut over model axes, see [Note: stored order]. A
complex number counts as two elements. Padding of buckets is in no file.

The classes here are the schema: their fields are those of the JSON, ``num_bytes`` as ``bytes``.

The payload files are valid safetensors files, for other tools. zfun reads places from the manifest
only. The bytes of a file, the header of safetensors included, are hashed in chunks (XXH64, or
SHA-256), so a reader of a part verifies what it reads. The last field of the manifest is the
SHA-256 of all bytes before.

The hashes find accidents: a flipped bit, a lost block, a mixed-up file. For accidents XXH64 is as
good as SHA-256, and ten times as fast, so that the disk sets the pace. Against a stranger who
may write to the directory no hash inside of the directory helps, because the stranger can write a
manifest too; for that, save with SHA-256, and keep :attr:`Manifest.digest` elsewhere to compare,
because the digest then stands for every bit of the checkpoint. A hostile checkpoint
can give wrong numbers, but runs no code, opens no file outside of its directory, and allocates
no more than the state that it is loaded into.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from zfun.checkpoint.format._order import StoredCut
from zfun.checkpoint.format._plain import dtype_name, real_dtype
from zfun.errors import CheckpointError
from zfun.options import instance, takes

FORMAT = "zfun-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20

MAX_MANIFEST_BYTES = 1 << 28
_MAX_KEY = 4096
TAIL_BYTES = len('"sha256":""}\n') + 64

# The hexadecimal digits of each hash.
DIGITS = {"xxh64": 16, "sha256": 64}


def digest_of(name: str, data: np.ndarray) -> str:
    """Return the hash of contiguous bytes, by a name of ``DIGITS``, in hexadecimal digits."""
    if name == "sha256":
        return hashlib.sha256(data.data).hexdigest()
    return xxhash.xxh64_hexdigest(data.data)


class Piece(NamedTuple):
    """A range of the elements of a leaf, in one file.

    Attributes:
        file: index of the file in the manifest.
        offset: where the piece begins, in bytes of the file.
        first: the first element of the piece in the leaf.
        numel: the number of elements; of complex numbers, twice as many.
    """

    file: int
    offset: int
    first: int
    numel: int


@dataclass(frozen=True, slots=True)
class LeafEntry:
    """One logical leaf.

    Attributes:
        key: the path of the tensor in the state, such as ``"opt_state.mu.h.0.w"``.
        dtype: the dtype.
        shape: the shape of the whole leaf.
        rank: the rank that the value belongs to; ``None`` for a value that all ranks share.
        pieces: the pieces in ascending order, without gaps.
        cuts: the stored order; empty, and not in the JSON, for row-major order.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rank: int | None
    pieces: tuple[Piece, ...]
    cuts: tuple[StoredCut, ...] = ()

    @property
    def element(self) -> torch.dtype:
        """The dtype of the elements in the files, real for complex leaves."""
        return real_dtype(self.dtype)

    @property
    def numel(self) -> int:
        """The number of elements; of complex numbers, twice as many."""
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One payload file.

    Attributes:
        name: the plain name of the file.
        num_bytes: the length of the file.
        data_start: where the header of safetensors ends.
        chunks: the hash of every chunk of ``chunk_bytes`` bytes, in hexadecimal digits.
    """

    name: str
    num_bytes: int
    data_start: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint, without the payload.

    Attributes:
        step: the step of the checkpoint.
        ranks: the number of ranks that wrote.
        chunk_bytes: the length of the chunks that are hashed.
        hash: the hash of chunks: ``"xxh64"`` or ``"sha256"``.
        files: the payload files.
        leaves: the logical leaves.
        ties: the keys that share the tensor of another key.
        masters: by the key of a parameter, the key of its master weight.
        optional: the keys that belong to a loss scale, which a run of another precision lacks.
        values: by key, the numbers, texts and truth values of the state.
        rank_values: for each rank, those that differ from rank to rank.
        rng: for each rank, the states of random generators by name, encoded.
        loader: for each rank, the position of the data loader, encoded.
        data: the caller's own data, encoded.
        composition: how the state was laid out when saved, for readers; loading ignores it.
        digest: the hash of the manifest, which covers the hashes of the files.
    """

    step: int
    ranks: int
    chunk_bytes: int
    hash: str
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]
    ties: Mapping[str, str]
    masters: Mapping[str, str]
    optional: Sequence[str]
    values: Mapping[str, Any]
    rank_values: Sequence[Mapping[str, Any]]
    rng: Sequence[Any]
    loader: Sequence[Any]
    data: Any
    composition: Mapping[str, Any]
    digest: str = field(default="", compare=False)

    @property
    def num_bytes(self) -> int:
        """The bytes of all payload files."""
        return sum(file.num_bytes for file in self.files)


def fields_of(kind: type) -> dict[str, str]:
    """Return the fields of a class by their names in the JSON, without the digest."""
    names = [found.name for found in dataclasses.fields(kind) if found.name != "digest"]
    return {"bytes" if name == "num_bytes" else name: name for name in names}


def check_key(key: Any, refuse: Any) -> None:
    """Refuse a key that is not plain, because tools make names of keys."""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY:
        refuse(f"a key has 1 to {_MAX_KEY} characters; got {str(key)[:60]!r}")
    if not key.isprintable() or key.startswith("/") or ".." in key.split("/"):
        refuse(f"a key is plain, without control characters, and no path upwards; got {key[:60]!r}")


@takes(manifest=instance(Manifest, "a manifest", "zf.checkpoint.read_manifest(path)"))
def format_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest; the last field is the hash of the bytes before.

    Raises:
        CheckpointError: the manifest is too long to be read again.

    Example:
        >>> import tempfile, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     manifest = zf.checkpoint.read_manifest(saved.path)
        >>> zf.checkpoint.parse_manifest(format_manifest(manifest)) == manifest
        True
    """
    head = {"format": FORMAT, "version": VERSION, "torch": str(torch.__version__)}
    body = json.dumps(
        {**head, **_as_json(manifest)}, separators=(",", ":"), allow_nan=False, default=_as_json
    )
    text = body[:-1].encode() + b","
    if len(text) + TAIL_BYTES > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"a manifest has at most {MAX_MANIFEST_BYTES >> 20} MiB; got {len(text) >> 20} MiB; "
            "keep large values in tensors of the state, not in data="
        )
    return text + f'"sha256":"{hashlib.sha256(text).hexdigest()}"}}\n'.encode()


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    found = {name: getattr(value, held) for name, held in fields_of(type(value)).items()}
    # Readers from before model axes know no cuts.
    return {name: x for name, x in found.items() if name != "cuts" or x}
