"""Files of weights beside a sharded state: whether the Trainer of zfun has written them.

[Note: files of weights]
``transformers`` resumes from the files of weights in a checkpoint, whoever has written them. The
Trainer of zfun loads its sharded state in their place while the files are its own: of the size and
the time that the state has noted, or else, as in a copy of the folder, of the noted hash. Other
files are loaded as ``transformers`` loads them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from zfun import checkpoint
from zfun.checkpoint.format import decode

_NOTED = "weights"
# Of transformers, whole or in pieces, and of PEFT, also in a folder for each adapter.
_PATTERNS = ("model*.safetensors*", "pytorch_model*.bin*", "adapter_model*", "*/adapter_model*")


def weights_in(folder: str | Path) -> dict[str, list[Any]]:
    """Return size, time and hash of each file of weights in a folder."""
    return {name: [*_stat(path), _hash(path)] for name, path in _paths(Path(folder)).items()}


def note(weights: dict[str, list[Any]]) -> dict[str, Any]:
    """Return what a state notes beside it."""
    return {_NOTED: weights}


def are_own(folder: Path, state: Path) -> bool:
    """Whether the files of weights in a folder are those that a state has noted, or none."""
    data = decode(checkpoint.manifest_at(state, None)[1].data)
    noted = ((data or {}).get("extra") or {}).get(_NOTED)
    found = _paths(folder)
    # Earlier versions have noted none.
    if noted is None or not found:
        return True
    return noted.keys() == found.keys() and all(
        _is_same(x, *noted[name]) for name, x in found.items()
    )


def is_own(cls: type, name: str) -> bool:
    """Whether a method of a Trainer is that of zfun and transformers, and no user has another."""
    found = (vars(x)[name] for x in cls.__mro__ if name in vars(x))
    modules = (getattr(x, "__module__", "").partition(".")[0] for x in found)
    return all(module in ("zfun", "transformers") for module in modules)


def _paths(folder: Path) -> dict[str, Path]:
    found = (path for pattern in _PATTERNS for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): path for path in found}


def _stat(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _is_same(path: Path, size: int, time: int, digest: str) -> bool:
    found = _stat(path)
    return found == (size, time) or (found[0] == size and _hash(path) == digest)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh64).hexdigest()
