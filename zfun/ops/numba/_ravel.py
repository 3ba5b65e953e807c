"""Compiled: many tensors to one buffer and back, and the sum of the squares of the buffer.

[Note: one pass]
A buffer is written in blocks that stay in the cache, so its norm costs no second trip to memory.
Tensors are reached by their addresses: one call for a bucket, however many tensors there are. Loops
run over ``range(x.size)`` of slices, because LLVM makes no vector code of a loop whose bounds are
signed numbers that it cannot compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from zfun.ops._table import AddressTable
from zfun.ops._tensors import as_array, number, wide
from zfun.ops.numba._compile import entry, in_parts, jit
from zfun.ops.numba._float_bits import narrow, widen, widened
from zfun.ops.numba._simd import pointer
from zfun.ops.numba._squares import BLOCK, add_block, exact_row, new_row

_NO_ROW = np.zeros(0, np.int64)


@jit
def _copy(source: Any, target: Any, scale: Any, exact: Any) -> None:
    """Copy elements as they are, or times a factor and rounded once."""
    if exact:
        for i in range(target.size):
            target[i] = source[i]
    else:
        for i in range(target.size):
            target[i] = narrow(widen(source[i], scale) * scale, target)


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
def _part(pieces: Any, piece: Any, low: Any, high: Any, like: Any) -> Any:
    """View the elements of a tensor that lie from ``low`` to ``high`` in the buffer."""
    address = pieces[2, piece] + (low - pieces[0, piece]) * like.itemsize
    return carray(pointer(address, like), (high - low,))


@jit
def _ravel(
    pieces: Any, like: Any, out: Any, begin: Any, end: Any, scale: Any, exact: Any, row: Any
) -> None:
    """Write the elements from ``begin`` to ``end`` of a buffer, zeros between the tensors.

    Args:
        pieces: int64 ``[3, n]``: where each tensor begins and ends in the buffer, ascending, and
            its address.
        like: an array of the dtype of the tensors.
        out: the whole buffer.
        begin: first element to write, a multiple of 32.
        end: the element behind the last.
        scale: factor, in the dtype that is computed in.
        exact: copy the elements as they are.
        row: to which the squares are added as by ``add_block``; of length 0 for no norm.
    """
    sums, spare = np.empty(BLOCK // 4, np.float64), np.empty(BLOCK, type(scale))
    piece, block = _first_piece(pieces, begin), (BLOCK if row.size else end - begin)
    at = begin
    while at < end:
        first, limit = at, min(at + block, end)
        while at < limit:
            start = pieces[0, piece] if piece < pieces.shape[1] else limit
            stop = min(start, limit)
            if start > at:
                _zero(out[at:stop])
            else:
                stop = min(pieces[1, piece], limit)
                _copy(_part(pieces, piece, at, stop, like), out[at:stop], scale, exact)
                piece += stop == pieces[1, piece]
            at = stop
        if row.size:
            add_block(widened(out[first:limit], spare), sums, row)


@jit
def _unravel(
    pieces: Any, like: Any, source: Any, begin: Any, end: Any, one: Any, exact: Any
) -> None:
    """Copy the elements from ``begin`` to ``end`` of a buffer to tensors; see :func:`_ravel`."""
    for piece in range(_first_piece(pieces, begin), pieces.shape[1]):
        low, high = max(pieces[0, piece], begin), min(pieces[1, piece], end)
        if low >= end:
            break
        _copy(source[low:high], _part(pieces, piece, low, high, like), one, exact)


def ravel_into(out: Tensor, table: AddressTable, scale: float, measure: bool) -> Tensor | None:
    """Write a buffer, and return the exact sum of its squares if ``measure``."""
    array, ravel = as_array(out), entry(_ravel)
    exact, factor = scale == 1.0 and out.dtype == table.dtype, number(wide(out.dtype))(scale)
    rows: list[Any] = []

    def work(begin: int, end: int) -> None:
        row = new_row() if measure else _NO_ROW
        ravel(table.pieces, table.like, array, begin, end, factor, exact, row)
        rows.append(row)

    in_parts(array.size, work)
    torch.autograd.graph.increment_version(out)
    return exact_row(rows) if measure else None


def unravel_from(source: Tensor, table: AddressTable) -> None:
    """Copy the pieces of a buffer to the tensors of a table."""
    array, unravel = as_array(source), entry(_unravel)
    exact, one = source.dtype == table.dtype, number(wide(table.dtype))(1.0)
    in_parts(
        array.size,
        lambda begin, end: unravel(table.pieces, table.like, array, begin, end, one, exact),
    )
