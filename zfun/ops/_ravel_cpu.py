"""Compiled: many tensors to one buffer and back, and the sum of the squares of what was written.

[Note: one pass]
A buffer is written in blocks that stay in the cache, so that what is read off it (its norm, whether it is finite) costs no second trip to
memory. Tensors are reached by their addresses: one call for a bucket, however many tensors there are. Loops run over ``range(x.size)`` of
slices, because LLVM does not vectorise a loop whose bounds are signed numbers it cannot compare.

Long pieces go from unit to unit, as [Note: units] says; squares are added as [Note: exact sums] says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from zfun.ops._jit import jit
from zfun.ops._lanes import can_stream, copy, count, hand_over, put, rounded, start, stream, take, unit_of, will_read, will_write
from zfun.ops._numbers import narrow, pointer, widen
from zfun.ops._squares_cpu import BLOCK, add_block, add_unit, digits, no_sums, settle

__all__ = ["convert", "ravel", "unravel"]

# Fewer elements are not worth asking for their memory.
_SHORT = 1 << 9


@jit
def convert(source: Any, target: Any, scale: Any) -> None:
    for i in range(target.size):
        target[i] = narrow(widen(source[i], scale) * scale, target)


@jit
def _stream(source: Any, target: Any, scale: Any, exact: Any, past: Any) -> None:
    """Convert what comes from memory, or copy it as it is; ``past`` the caches if that can be."""
    x, out, unit = start(source), start(target), unit_of(scale)
    whole = target.size // count(unit) * count(unit)
    first = 0
    if past and can_stream(out, 0) and not exact:
        for i in range(0, whole, count(unit)):
            will_read(x, i, unit)
            stream(out, i, take(x, i, unit) * scale)
        first = whole
    for i in range(first, whole, count(unit)):
        will_read(x, i, unit)
        will_write(out, i, unit)
        if exact:
            copy(x, out, i, unit)
        else:
            put(out, i, take(x, i, unit) * scale)
    if exact:
        _copy(source[whole:], target[whole:])
    else:
        convert(source[whole:], target[whole:], scale)


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
def ravel(pieces: Any, like: Any, out: Any, begin: Any, end: Any, scale: Any, exact: Any, fill: Any, past: Any, row: Any) -> None:
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
        past: write past the caches what is not read again.
        row: to which the squares are added as by :func:`add_squares`; of length 0 if nobody asks.
    """
    starts, stops, addresses = pieces[0], pieces[1], pieces[2]
    spare, guess = np.empty(BLOCK // 4, np.float64), 0
    piece = _first_piece(stops, begin)
    for block in range(begin, end, BLOCK):
        limit = min(block + BLOCK, end)
        # Where one piece fills the block, its squares are added on the way, if a guess is there.
        added = False
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
            if stop - at == BLOCK and row.size and guess:
                added = _convert_and_add(source, out[at:stop], scale, guess, row)
            elif stop - at >= _SHORT:
                _stream(source, out[at:stop], scale, exact, past and not row.size)
            elif exact:
                _copy(source, out[at:stop])
            else:
                convert(source, out[at:stop], scale)
            at = stop
            if stop == stops[piece]:
                piece += 1
        if row.size and not added:
            guess = add_block(out[block:limit], guess, spare, row)
    if past:
        hand_over()


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
        if target.size >= _SHORT:
            _stream(source[low:high], target, one, exact, False)
        elif exact:
            _copy(source[low:high], target)
        else:
            convert(source[low:high], target, one)


@jit
def _convert_and_add(source: Any, target: Any, scale: Any, guess: Any, row: Any) -> Any:
    """Convert a whole block and add the squares of what was written; whether the guess was good for that."""
    upper, lower = digits(guess)
    x, out, unit = start(source), start(target), unit_of(scale)
    sums = no_sums(unit)
    for i in range(0, BLOCK, count(unit)):
        will_read(x, i, unit)
        will_write(out, i, unit)
        value = rounded(take(x, i, unit) * scale, out)
        put(out, i, value)
        sums = add_unit(value, upper, lower, sums)
    return settle(guess, sums, row)
