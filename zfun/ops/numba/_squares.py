"""Compiled: the exact sum of squares.

[Note: exact sums] The squares of 32 elements, a unit, are added in float64 to eight sums, in one
fixed order. Those are then added without any rounding, so that nothing depends on how a buffer is
cut. For a sum ``|x| < m / 3``, where ``m`` is 1.5 times a power of two, ``x + m`` rounds ``x`` to a
multiple of the last place of ``m``, and the bits of ``x + m``, less the bits of ``m``, are that
multiple as an integer. The integers of all sums are added exactly. The remainder of ``x`` is exact,
and takes another turn with an ``m`` that is 52 bits smaller, until nothing is left: two or three
turns, because a sum has 53 bits. (The idea is that of Demmel and Nguyen's reproducible sums, 2013,
which keep the first few turns.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops._exact import LIMBS, LOWEST, SUMS, UNIT
from zfun.ops._tensors import as_array
from zfun.ops.numba._compile import entry, in_parts, jit
from zfun.ops.numba._float_bits import widened
from zfun.ops.numba._simd import add_unit

# Elements of a block: source, target, widened elements and sums take a third of the first cache.
BLOCK = 1 << 10

_BIAS = 1023
_NO_SIGN = (1 << 63) - 1
_MANTISSA = (1 << 52) - 1


@jit
def _deposit(row: Any, total: Any, place: Any) -> None:
    """Add an integer, times two to the power of ``place``, to the limbs of a long one."""
    limb, shift = place // 32, place % 32
    lower, upper = (total & 0xFFFFFFFF) << shift, (total >> 32) << shift
    row[limb] += lower & 0xFFFFFFFF
    row[limb + 1] += ((lower >> 32) & 0xFFFFFFFF) + (upper & 0xFFFFFFFF)
    row[limb + 2] += upper >> 32


@jit
def add_block(x: Any, sums: Any, row: Any) -> None:
    """Add the squares of a block of floating elements to a row, exactly; see [Note: exact sums].

    Args:
        x: at most ``BLOCK`` elements; a last unit that is not whole counts as if zeros followed.
        sums: float64 ``[BLOCK // 4]``, for the sums of units.
        row: int64 ``[LIMBS + 1]``: the limbs, and last, as float64, the sums that are not finite.
    """
    units, rest = x.size // UNIT, x.size % UNIT
    for unit in range(units):
        add_unit(x, UNIT * unit, sums, SUMS * unit)
    if rest:
        tail = np.empty(UNIT, x.dtype)
        for i in range(UNIT):
            tail[i] = x[UNIT * units + i] if i < rest else 0
        add_unit(tail, 0, sums, SUMS * units)
        units += 1
    squares = sums[: SUMS * units]
    words, top = squares.view(np.int64), np.int64(0)
    for i in range(words.size):
        top = max(top, words[i] & _NO_SIGN)
    exponent = max(top >> 52, 53)
    if exponent > 2040:
        _add_one_by_one(words, row)
        return
    exponent, left = exponent + 2, True
    while left:
        left = _turn(squares, exponent, row)
        exponent = max(exponent - 52, 1)


@jit
def _turn(squares: Any, exponent: Any, row: Any) -> Any:
    """Add the upper 52 bits of sums to a row and leave the rest; whether there is any."""
    base = np.int64((exponent << 52) | (1 << 51))
    m, total, left = base.view(np.float64), np.int64(0), np.int64(0)
    for i in range(squares.size):
        high = np.float64(squares[i] + m)
        rest = np.float64(squares[i] - (high - m))
        total += high.view(np.int64)
        left |= rest.view(np.int64)
        squares[i] = rest
    _deposit(row, total - squares.size * base, exponent - _BIAS - 52 - LOWEST)
    return (left & _NO_SIGN) != 0


@jit
def _add_one_by_one(words: Any, row: Any) -> None:
    """Add sums that are very large, or not finite, to a row."""
    special = row[LIMBS:].view(np.float64)
    for i in range(words.size):
        word = words[i] & _NO_SIGN
        exponent = word >> 52
        if exponent == 2047:
            special[0] += np.int64(words[i]).view(np.float64)
        elif exponent:
            _deposit(row, (word & _MANTISSA) | (1 << 52), exponent - _BIAS - 52 - LOWEST)
        else:
            _deposit(row, word, 1 - _BIAS - 52 - LOWEST)


@jit
def _add_squares(x: Any, begin: Any, end: Any, one: Any, row: Any) -> None:
    """Add the squares of a part of ``x``; ``one`` has the type in which elements are read."""
    sums, spare = np.empty(BLOCK // 4, np.float64), np.empty(BLOCK, type(one))
    for at in range(begin, end, BLOCK):
        add_block(widened(x[at : min(at + BLOCK, end)], spare), sums, row)


def squares_in_bins(x: Tensor) -> Tensor:
    array, add = as_array(x), entry(_add_squares)
    one = np.float64(1) if x.dtype == torch.float64 else np.float32(1)
    rows: list[Any] = []

    def work(begin: int, end: int) -> None:
        row = new_row()
        add(array, begin, end, one, row)
        rows.append(row)

    in_parts(x.numel(), work)
    return exact_row(rows)


def new_row() -> Any:
    """Make the integers that kernels add squares to."""
    return np.zeros(LIMBS + 1, np.int64)


def exact_row(rows: list[Any]) -> Tensor:
    """Add the rows of several parts."""
    if len(rows) < 2:
        return torch.from_numpy(rows[0] if rows else new_row())
    total = np.sum(rows, axis=0)
    total[LIMBS:].view(np.float64)[0] = sum(float(row[LIMBS:].view(np.float64)[0]) for row in rows)
    return torch.from_numpy(total)
