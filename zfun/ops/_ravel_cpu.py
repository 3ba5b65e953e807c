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
def _first_piece(pieces: Any, place: Any) -> Any:
    """Find the first piece that ends behind a place."""
    low, high = 0, pieces.shape[1]
    while low < high:
        middle = (low + high) // 2
        if pieces[1, middle] <= place:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def ravel(pieces: Any, like: Any, out: Any, begin: Any, end: Any, scale: Any, exact: Any, past: Any, row: Any) -> None:
    """Write the elements from ``begin`` to ``end`` of a buffer, zeros between the tensors.

    Args:
        pieces: int64 ``[3, n]``: where each tensor begins and ends in the buffer, ascending, and its address.
        like: an array of the dtype of the tensors.
        out: the whole buffer.
        begin: first element to write.
        end: the element behind the last.
        scale: factor, in the dtype that is computed in.
        exact: copy the elements as they are.
        past: write past the caches what is not read again.
        row: to which the squares are added as by :func:`add_squares`; of length 0 if nobody asks.
    """
    spare, guess = np.empty(BLOCK // 4, np.float64), 0
    piece = _first_piece(pieces, begin)
    for block in range(begin, end, BLOCK):
        limit = min(block + BLOCK, end)
        fills = piece < pieces.shape[1] and pieces[0, piece] <= block and pieces[1, piece] >= limit
        if row.size and guess and limit - block == BLOCK and fills:
            # Where one piece fills the block, its squares are added on the way, if a guess is there.
            source = _source(pieces, piece, like)[block - pieces[0, piece] : limit - pieces[0, piece]]
            added = _convert_and_add(source, out[block:limit], scale, guess, row)
            if limit == pieces[1, piece]:
                piece += 1
        else:
            added = False
            piece = _write(pieces, piece, like, out[block:limit], block, scale, exact, past and not row.size)
        if row.size and not added:
            guess = add_block(out[block:limit], guess, spare, row)
    if past:
        hand_over()


@jit
def _source(pieces: Any, piece: Any, like: Any) -> Any:
    return carray(pointer(pieces[2, piece], like), (pieces[1, piece] - pieces[0, piece],))


@jit
def _write(pieces: Any, piece: Any, like: Any, target: Any, begin: Any, scale: Any, exact: Any, past: Any) -> Any:
    """Write the elements of a buffer from ``begin`` on to an array of some of them, and return the piece that comes next.

    Args:
        pieces: as for :func:`ravel`.
        piece: the first that ends behind ``begin``.
        like: as for :func:`ravel`.
        target: where they go.
        begin: the first element.
        scale: as for :func:`ravel`.
        exact: as for :func:`ravel`.
        past: as for :func:`ravel`.
    """
    at, limit = begin, begin + target.size
    while at < limit:
        start = pieces[0, piece] if piece < pieces.shape[1] else limit
        if start > at:
            stop = min(start, limit)
            _zero(target[at - begin : stop - begin])
            at = stop
            continue
        stop = min(pieces[1, piece], limit)
        source = _source(pieces, piece, like)[at - start : stop - start]
        if stop - at >= _SHORT:
            _stream(source, target[at - begin : stop - begin], scale, exact, past)
        elif exact:
            _copy(source, target[at - begin : stop - begin])
        else:
            convert(source, target[at - begin : stop - begin], scale)
        at = stop
        if stop == pieces[1, piece]:
            piece += 1
    return piece


@jit
def unravel(pieces: Any, like: Any, source: Any, begin: Any, end: Any, exact: Any, one: Any) -> None:
    """Copy the elements from ``begin`` to ``end`` of a buffer to the tensors; the arguments are those of :func:`ravel`."""
    for piece in range(_first_piece(pieces, begin), pieces.shape[1]):
        start = pieces[0, piece]
        if start >= end:
            break
        low, high = max(start, begin), min(pieces[1, piece], end)
        target = _source(pieces, piece, like)[low - start : high - start]
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
