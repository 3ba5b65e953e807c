"""Compiled: many tensors to one buffer, or added to one.

Tensors are reached by their addresses: one call for a bucket, however many tensors there are. Loops
run over ``range(x.size)`` of slices, because LLVM makes no vector code of a loop whose bounds are
signed numbers that it cannot compare.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import carray
from torch import Tensor

from zfun.ops._table import AddressTable
from zfun.ops._tensors import as_array, number, wide
from zfun.ops.numba._compile import entry, in_parts, jit
from zfun.ops.numba._float_bits import narrow, rounded, widen
from zfun.ops.numba._simd import pointer


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
def _add(source: Any, target: Any, scale: Any) -> None:
    """Add elements, times a factor and rounded; the sum is rounded once more."""
    for i in range(target.size):
        term = rounded(widen(source[i], scale) * scale, target)
        target[i] = narrow(widen(target[i], scale) + term, target)


@jit
def _zero(target: Any) -> None:
    for i in range(target.size):
        target[i] = 0


@jit
def _add_zero(target: Any, scale: Any) -> None:
    """Add zeros, which make -0 a zero."""
    for i in range(target.size):
        target[i] = narrow(widen(target[i], scale) + 0, target)


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
    pieces: Any, like: Any, out: Any, begin: Any, end: Any, scale: Any, exact: Any, adds: Any
) -> None:
    """Write, or add to, the elements from ``begin`` to ``end`` of a buffer.

    There are zeros between the tensors. ``pieces`` are int64 ``[3, n]``: where each tensor begins
    and ends in the buffer, ascending, and its address. ``like`` is an array of the dtype of the
    tensors.
    """
    piece, at = _first_piece(pieces, begin), begin
    while at < end:
        start = pieces[0, piece] if piece < pieces.shape[1] else end
        stop = min(start, end)
        if start > at:
            if adds:
                _add_zero(out[at:stop], scale)
            else:
                _zero(out[at:stop])
        else:
            stop = min(pieces[1, piece], end)
            part = _part(pieces, piece, at, stop, like)
            if adds:
                _add(part, out[at:stop], scale)
            else:
                _copy(part, out[at:stop], scale, exact)
            piece += stop == pieces[1, piece]
        at = stop


def ravel_into(out: Tensor, table: AddressTable, scale: float, *, adds: bool) -> None:
    """Write a buffer, or add to it."""
    array, ravel = as_array(out), entry(_ravel)
    exact, factor = scale == 1.0 and out.dtype == table.dtype, number(wide(out.dtype))(scale)
    in_parts(
        array.size,
        lambda begin, end: ravel(table.pieces, table.like, array, begin, end, factor, exact, adds),
    )
    torch.autograd.graph.increment_version(out)
