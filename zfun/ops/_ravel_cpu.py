"""Compiled: many tensors to one buffer and back, and the sum of the squares of what was written.

[Note: one pass]
A buffer is written in blocks that stay in the cache, so that what is read off it (its norm, whether it is finite) costs no second trip to
memory. Tensors are reached by their addresses: one call for a bucket, however many tensors there are. Loops run over ``range(x.size)`` of
slices, because LLVM does not vectorise a loop whose bounds are signed numbers it cannot compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from zfun.ops._jit import jit
from zfun.ops._numbers import bits, narrow, pointer, widen

__all__ = ["add_squares", "carry", "convert", "ravel", "unravel"]

# Elements of a block: 64 KiB of float32 and the 64 KiB they came from are at home in every L2.
_BLOCK = 1 << 14

# Elements whose squares are made at a time: 16 KiB of float64.
_NORM_BLOCK = 1 << 11

_MANTISSA = (1 << 52) - 1


@jit
def convert(source: Any, target: Any, scale: Any) -> None:
    for i in range(target.size):
        target[i] = narrow(widen(source[i], scale) * scale, target)


@jit
def _copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@jit
def _zero(target: Any) -> None:
    for i in range(target.size):
        target[i] = 0


@jit
def _first_piece(stops: Any, place: Any) -> Any:
    """Find the first piece that ends behind a place."""
    low, high = 0, stops.size
    while low < high:
        middle = (low + high) // 2
        if stops[middle] <= place:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def ravel(pieces: Any, like: Any, out: Any, begin: Any, end: Any, scale: Any, exact: Any, fill: Any, bins: Any) -> None:
    """Write the elements from ``begin`` to ``end`` of a buffer.

    Args:
        pieces: int64 ``[3, n]``: where each tensor begins and ends in the buffer, ascending, and its address.
        like: an array of the dtype of the tensors.
        out: the whole buffer.
        begin: first element to write.
        end: the element behind the last.
        scale: factor, in the dtype that is computed in.
        exact: copy the elements as they are.
        fill: write zeros between the tensors.
        bins: int64 ``[4098]``, to which the squares are added as by :func:`add_squares`; of length 0 if nobody asks.
    """
    starts, stops, addresses = pieces[0], pieces[1], pieces[2]
    piece = _first_piece(stops, begin)
    for block in range(begin, end, _BLOCK):
        limit = min(block + _BLOCK, end)
        at = block
        while at < limit:
            start = starts[piece] if piece < starts.size else limit
            if start > at:
                stop = min(start, limit)
                if fill:
                    _zero(out[at:stop])
                at = stop
                continue
            stop = min(stops[piece], limit)
            source = carray(pointer(addresses[piece], like), (stops[piece] - start,))[at - start : stop - start]
            if exact:
                _copy(source, out[at:stop])
            else:
                convert(source, out[at:stop], scale)
            at = stop
            if stop == stops[piece]:
                piece += 1
        if bins.size:
            add_squares(out[block:limit], bins)


@jit
def unravel(pieces: Any, like: Any, source: Any, begin: Any, end: Any, exact: Any, one: Any) -> None:
    """Copy the elements from ``begin`` to ``end`` of a buffer to the tensors; the arguments are those of :func:`ravel`."""
    starts, stops, addresses = pieces[0], pieces[1], pieces[2]
    for piece in range(_first_piece(stops, begin), starts.size):
        start = starts[piece]
        if start >= end:
            break
        low, high = max(start, begin), min(stops[piece], end)
        target = carray(pointer(addresses[piece], like), (stops[piece] - start,))[low - start : high - start]
        if exact:
            _copy(source[low:high], target)
        else:
            convert(source[low:high], target, one)


@jit
def _unit(q: Any) -> Any:
    """Add 32 numbers as the readable twin does, which adds halves until one is left."""
    s0, s1 = (q[0] + q[16]) + (q[8] + q[24]), (q[1] + q[17]) + (q[9] + q[25])
    s2, s3 = (q[2] + q[18]) + (q[10] + q[26]), (q[3] + q[19]) + (q[11] + q[27])
    s4, s5 = (q[4] + q[20]) + (q[12] + q[28]), (q[5] + q[21]) + (q[13] + q[29])
    s6, s7 = (q[6] + q[22]) + (q[14] + q[30]), (q[7] + q[23]) + (q[15] + q[31])
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@jit
def add_squares(x: Any, bins: Any) -> None:
    """Add the squares of each 32 elements, in the order of the readable twin, to integers by exponent.

    Args:
        x: the elements; a last unit that is not whole counts as if zeros followed.
        bins: int64 ``[4098]``. Entry e gets the upper 27 bits of the mantissas with exponent e, entry 2048 + e the lower 26 bits; entry
            4096 holds, as float64, what is not finite of the sums, and entry 4097 becomes 1 when an element is not.
    """
    one = np.float64(1.0)
    squares = np.empty(_NORM_BLOCK, np.float64)
    special = bins[4096:4097].view(np.float64)
    for block in range(0, x.size, _NORM_BLOCK):
        here = x[block : block + _NORM_BLOCK]
        # First the squares, which vectorise, then the integers, which do not.
        for i in range(here.size):
            value = widen(here[i], one)
            squares[i] = value * value
        units = (here.size + 31) // 32
        squares[here.size : 32 * units] = 0.0
        for unit in range(units):
            total = _unit(squares[32 * unit : 32 * unit + 32])
            word = bits(total)
            exponent = word >> 52
            if exponent == 2047 or word < 0:
                # The square of a finite float64 may overflow; only the elements tell.
                special[0] += total
                for value in here[32 * unit : 32 * unit + 32]:
                    if not np.isfinite(widen(value, one)):
                        bins[4097] = 1
                continue
            mantissa = word & _MANTISSA
            if exponent:
                mantissa |= 1 << 52
            else:
                exponent = 1
            bins[exponent] += mantissa >> 26
            bins[2048 + exponent] += mantissa & ((1 << 26) - 1)


@jit
def carry(bins: Any, row: Any, lift: Any) -> None:
    """Carry sums by exponent into the limbs of one long integer, 32 bits each, and append what is not finite.

    Args:
        bins: int64 ``[4098]``, from :func:`add_squares`.
        row: int64, zero; written.
        lift: place in the long integer of the smallest exponent, less one.
    """
    for exponent in range(2048):
        for half in range(2):
            total = bins[2048 * half + exponent]
            if total != 0:
                for part in range(2):
                    place = exponent + lift + (0 if half else 26) + 27 * part
                    piece = (total >> 27 if part else total & ((1 << 27) - 1)) << (place % 32)
                    row[place // 32] += piece & 0xFFFFFFFF
                    row[place // 32 + 1] += piece >> 32
    row[row.size - 1] = bins[4096]
