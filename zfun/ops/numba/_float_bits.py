"""Numbers of half types in compiled kernels, by their bits.

[Note: half types] Numba knows neither bfloat16 nor float16. Arrays of them travel as integers of 16
bits, bfloat16 as unsigned and float16 as signed ones, so that the type says which of the two it is.
``widen`` makes a float32 (or float64) of an element, and ``narrow`` rounds to nearest, ties to
even; for elements that are floating already, both are ordinary conversions. Every branch is a
conditional expression, so LLVM makes vector code of the loops around it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from zfun.ops.numba._compile import jit

_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x7FC00000)


@jit
def _from_bfloat16(x: Any) -> Any:
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@jit
def _to_bfloat16(x: Any) -> Any:
    # Half of the last place that is kept is added, less one where that place is even. A carry ends
    # in the exponent, where it belongs.
    word = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
    word = np.uint32(word + np.uint32(odd + np.uint32(0x7FFF))) if x == x else _QUIET
    return np.uint16(np.uint32(word >> np.uint32(16)))


@jit
def _from_float16(x: Any) -> Any:
    word = np.uint32(np.uint32(np.uint16(x)) << np.uint32(13))
    sign = np.uint32(np.uint32(word << np.uint32(3)) & np.uint32(0x80000000))
    word = np.uint32(word & np.uint32(0x0FFFE000))
    exponent = np.uint32(word & np.uint32(0x0F800000))
    # The bias of float32 is larger by 112; infinity and NaN have the largest exponent of float32.
    normal = np.uint32(word + np.uint32(112 << 23))
    normal = np.uint32(normal | _INFINITY) if exponent == np.uint32(0x0F800000) else normal
    # A subnormal number: its bits are put below a one, which is taken away again.
    small = np.uint32(word + np.uint32(113 << 23)).view(np.float32) - np.float32(2.0**-14)
    found = np.float32(small).view(np.uint32) if exponent == np.uint32(0) else normal
    return np.uint32(found | sign).view(np.float32)


@jit
def _to_float16(x: Any) -> Any:
    word = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(word & np.uint32(0x80000000)) >> np.uint32(16))
    word = np.uint32(word & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(word >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(word - np.uint32(112 << 23)) + np.uint32(odd + np.uint32(0xFFF)))
    normal = np.uint32(normal >> np.uint32(13))
    # Below 2**-14 the addition of 1/2 rounds to the places that float16 has.
    small = np.uint32(word).view(np.float32) + np.float32(0.5)
    lower = np.uint32(np.float32(small).view(np.uint32) - np.uint32(126 << 23))
    found = lower if word < np.uint32(113 << 23) else normal
    large = np.uint32(0x7E00) if word > _INFINITY else np.uint32(0x7C00)
    found = large if word >= np.uint32(143 << 23) else found
    return np.int16(np.uint16(np.uint32(found | sign)))


_FLOATS = {types.float32: np.float32, types.float64: np.float64}


def widen(x: Any, like: Any) -> Any:
    """Return an element of an array as a number of the type of ``like``, float32 or float64."""
    raise NotImplementedError  # compiled code has its own


@overload(widen, strict=False)
def _widen(x: Any, like: Any) -> Any:
    number = _FLOATS[like]
    if x == types.uint16:
        return lambda x, like: number(_from_bfloat16(x))
    if x == types.int16:
        return lambda x, like: number(_from_float16(x))
    return lambda x, like: number(x)


def narrow(x: Any, array: Any) -> Any:
    """Return a number as an element of an array, rounded to nearest, ties to even."""
    raise NotImplementedError


@overload(narrow, strict=False)
def _narrow(x: Any, array: Any) -> Any:
    if array.dtype == types.uint16:
        return lambda x, array: _to_bfloat16(np.float32(x))
    if array.dtype == types.int16:
        return lambda x, array: _to_float16(np.float32(x))
    number = _FLOATS[array.dtype]
    return lambda x, array: number(x)


def rounded(x: Any, array: Any) -> Any:
    """Return a number as it is read again after it was written to an array."""
    raise NotImplementedError


@overload(rounded, strict=False)
def _rounded(x: Any, array: Any) -> Any:
    return lambda x, array: widen(narrow(x, array), x)


def widened(x: Any, spare: Any) -> Any:
    """Return an array that ``add_unit`` can read: ``x``, or ``spare`` with the numbers of ``x``."""
    raise NotImplementedError


@overload(widened, strict=False)
def _widened(x: Any, spare: Any) -> Any:
    if x.dtype in (spare.dtype, types.uint16):
        return lambda x, spare: x

    def convert(x: Any, spare: Any) -> Any:
        target = spare[: x.size]
        for i in range(target.size):
            target[i] = widen(x[i], spare[0])
        return target

    return convert
