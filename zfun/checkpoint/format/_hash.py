"""The hashes of chunks."""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

# The hexadecimal digits of each hash.
DIGITS = {"xxh64": 16, "sha256": 64}


def digest_of(name: str, data: np.ndarray) -> str:
    """Return the hash of bytes in hexadecimal digits.

    Args:
        name: a key of ``DIGITS``.
        data: uint8, contiguous.
    """
    if name == "sha256":
        return hashlib.sha256(data.data).hexdigest()
    return xxhash.xxh64_hexdigest(data.data)
