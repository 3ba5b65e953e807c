"""The format of a checkpoint: manifest and payload files, without ranks and without states."""

from zfun.checkpoint.format._hash import digest_of
from zfun.checkpoint.format._manifest import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    LeafEntry,
    Manifest,
    Piece,
    check_key,
    format_manifest,
)
from zfun.checkpoint.format._parse import parse_manifest
from zfun.checkpoint.format._payload import Payload, Want
from zfun.checkpoint.format._plain import DTYPES, decode, encode
from zfun.checkpoint.format._write import (
    PlannedFile,
    WrittenFile,
    be_gentle,
    explaining,
    plan_file,
    write_file,
)

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "FORMAT",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "FileEntry",
    "LeafEntry",
    "Manifest",
    "Payload",
    "Piece",
    "PlannedFile",
    "Want",
    "WrittenFile",
    "be_gentle",
    "check_key",
    "decode",
    "digest_of",
    "encode",
    "explaining",
    "format_manifest",
    "parse_manifest",
    "plan_file",
    "write_file",
]
