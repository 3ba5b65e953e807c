"""Checkpoints: a state on a disk by logical leaf, for any composition to load.

``save`` and ``load`` are at the top level, ``zf.save`` and ``zf.load``. See [Note: the format] in
``_manifest`` and [Note: publication] in ``_publish``.
"""

from zfun.checkpoint._background import Saved, check_saves
from zfun.checkpoint._directory import SavedStep, latest, read_manifest, step_path, steps
from zfun.checkpoint._directory import manifest_at as manifest_at
from zfun.checkpoint._fill import read_leaf
from zfun.checkpoint._load import Loaded, load
from zfun.checkpoint._save import save
from zfun.checkpoint._together import agree as agree
from zfun.checkpoint._together import attempt as attempt
from zfun.checkpoint.format._manifest import FileEntry, LeafEntry, Manifest, Piece, format_manifest
from zfun.checkpoint.format._parse import parse_manifest
from zfun.checkpoint.format._payload import Payload, Want
from zfun.checkpoint.tools._convert import convert
from zfun.checkpoint.tools._inspect import Problem, Verified, inspect, verify
from zfun.checkpoint.tools._open import export, leaves, training_state
from zfun.checkpoint.tools._prune import Pruned, prune

__all__ = [
    "FileEntry",
    "LeafEntry",
    "Loaded",
    "Manifest",
    "Payload",
    "Piece",
    "Problem",
    "Pruned",
    "Saved",
    "SavedStep",
    "Verified",
    "Want",
    "check_saves",
    "convert",
    "export",
    "format_manifest",
    "inspect",
    "latest",
    "leaves",
    "load",
    "parse_manifest",
    "prune",
    "read_leaf",
    "read_manifest",
    "save",
    "step_path",
    "steps",
    "training_state",
    "verify",
]
