"""XXH64, compiled: a hash of 64 bits at the speed of memory.

The specification is that of xxHash, https://github.com/Cyan4973/xxHash, with the seed 0, so
``xxhsum -H1`` gives the same digits. Each step maps the state one to one, so a change within eight
bytes always changes the hash.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zfun.ops.numba._compile import entry, jit

__all__ = ["xxh64"]

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_ZERO = np.uint64(0)
_BITS = np.uint64(64)


@jit
def _rotated(x: Any, count: Any) -> Any:
    return (x << count) | (x >> (_BITS - count))


@jit
def _round(state: Any, word: Any) -> Any:
    return _rotated(state + word * _P2, np.uint64(31)) * _P1


@jit
def _merged(state: Any, lane: Any) -> Any:
    return (state ^ _round(_ZERO, lane)) * _P1 + _P4


@jit
def _xxh64(words: Any, rest: Any, out: Any) -> None:
    """Hash whole words of 64 bits and the 0 to 7 bytes behind.

    Args:
        words: uint64.
        rest: uint8.
        out: uint64 ``[1]``, which receives the hash.
    """
    length = words.size
    stop = length // 4 * 4
    if stop:
        a, b, c, d = _P1 + _P2, _P2, _ZERO, _ZERO - _P1
        for at in range(0, stop, 4):
            a = _round(a, words[at])
            b = _round(b, words[at + 1])
            c = _round(c, words[at + 2])
            d = _round(d, words[at + 3])
        h = (
            _rotated(a, np.uint64(1))
            + _rotated(b, np.uint64(7))
            + _rotated(c, np.uint64(12))
            + _rotated(d, np.uint64(18))
        )
        h = _merged(_merged(_merged(_merged(h, a), b), c), d)
    else:
        h = _P5
    h += np.uint64(length * 8 + rest.size)
    for at in range(stop, length):
        h = _rotated(h ^ _round(_ZERO, words[at]), np.uint64(27)) * _P1 + _P4
    first = 0
    if rest.size >= 4:
        half = np.uint64(rest[0]) | (np.uint64(rest[1]) << np.uint64(8))
        half |= (np.uint64(rest[2]) << np.uint64(16)) | (np.uint64(rest[3]) << np.uint64(24))
        h = _rotated(h ^ (half * _P1), np.uint64(23)) * _P2 + _P3
        first = 4
    for at in range(first, rest.size):
        h = _rotated(h ^ (np.uint64(rest[at]) * _P5), np.uint64(11)) * _P1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    out[0] = h ^ (h >> np.uint64(32))


def xxh64(data: np.ndarray) -> int:
    """Return the XXH64 of bytes.

    Args:
        data: uint8, contiguous.
    """
    whole = len(data) // 8 * 8
    out = np.zeros(1, np.uint64)
    entry(_xxh64)(data[:whole].view("<u8"), data[whole:], out)
    return int(out[0])
