"""Compiled: the exact sum of squares.

[Note: exact sums]
The squares of 32 elements, a unit, are added in float64 to eight sums, in one fixed order. Those are then added without any rounding, so
that nothing depends on how a buffer is cut. To a sum ``x < m / 2``, where ``m`` is a power of two, ``m`` is added: what stays of ``x`` is a
multiple of ``m / 2**52``, and the bits of the result, less those of ``m``, are that multiple. Such integers are added as integers. What was
cut off, which is exact, goes the same way with another ``m``, of 52 bits less. Two turns take some 100 bits below the largest sum, as a
rule more than there are, since a sum has 53 of its own; whether something is left is seen, and then there are more turns. (The idea is
that of Demmel and Nguyen's reproducible sums, 2013, which keep the first few turns.) ``m`` is guessed from the block before, so that
elements are read once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zfun.ops._bits import all_bits, as_bits, bits, eight_squares, larger, largest, number, sum_of, zeros
from zfun.ops._jit import jit
from zfun.ops._lanes import count, inlined, put, start, take, unit_of, will_read
from zfun.ops._norm import LIMBS, LOWEST
from zfun.ops._numbers import widen

__all__ = ["BLOCK", "add_block", "add_squares", "add_unit", "digits", "no_sums", "settle"]

# Elements of a block, of 2048 sums: the integers that they make, of 51 bits each, do not overflow together.
BLOCK = 1 << 13

_BIAS = 1023
_NO_SIGN = (1 << 63) - 1
_MANTISSA = (1 << 52) - 1

# The guess for m is larger than the last block's largest sum by this many places.
_MARGIN = 5


@jit
def _power(exponent: Any, half: Any) -> Any:
    """Make a power of two, or one and a half of it, of its biased exponent."""
    return number((exponent << 52) | (half << 51))


@jit
def _deposit(row: Any, total: Any, place: Any) -> None:
    """Add an integer, times two to the power of ``place``, to the limbs of a long one."""
    limb, shift = place // 32, place % 32
    lower, upper = (total & 0xFFFFFFFF) << shift, (total >> 32) << shift
    row[limb] += lower & 0xFFFFFFFF
    row[limb + 1] += ((lower >> 32) & 0xFFFFFFFF) + (upper & 0xFFFFFFFF)
    row[limb + 2] += upper >> 32


@jit
def digits(guess: Any) -> Any:
    """Make what cuts the upper digits off a sum, and then the lower ones."""
    return _power(guess, 0), _power(guess - 52, 1)


@jit
def settle(guess: Any, sums: Any, row: Any) -> Any:
    """Add to a row what :func:`add_unit` summed up; whether the guess was good."""
    high, low, left, top = sums
    if (all_bits(left) & _NO_SIGN) != 0 or largest(top) >= (guess - 1) << 52:
        return False
    num_sums = BLOCK // 4
    _deposit(row, sum_of(high) - num_sums * (guess << 52), guess - _BIAS - 52 - LOWEST)
    _deposit(row, sum_of(low) - num_sums * (((guess - 52) << 52) | (1 << 51)), guess - _BIAS - 104 - LOWEST)
    return True


@jit
def add_unit(x: Any, upper: Any, lower: Any, sums: Any) -> Any:
    """Add the squares of a unit to sums of integers: the bits of the upper digits and of the lower, what is left, the largest."""
    inlined()
    value = eight_squares(x)
    high = value + upper
    rest = value - (high - upper)
    low = rest + lower
    left = rest - (low - lower)
    return sums[0] + as_bits(high), sums[1] + as_bits(low), sums[2] | as_bits(left), larger(sums[3], as_bits(value))


@jit
def no_sums(unit: Any) -> Any:
    inlined()
    return zeros(unit), zeros(unit), zeros(unit), zeros(unit)


@jit
def add_block(x: Any, guess: Any, spare: Any, row: Any) -> Any:
    """Add the squares of a block to a row; returns the guess for the next."""
    units, data, unit = x.size // 32, start(x), unit_of(x)
    if guess != 0 and x.size == BLOCK:
        upper, lower = digits(guess)
        sums = no_sums(unit)
        for i in range(0, BLOCK, count(unit)):
            will_read(data, i, unit)
            sums = add_unit(take(data, i, unit), upper, lower, sums)
        if settle(guess, sums, row):
            return guess
    for i in range(0, 32 * units, 32):
        put(start(spare), i // 4, eight_squares(take(data, i, unit_of(spare))))
    if x.size % 32:
        tail, one = np.zeros(32, np.float64), np.float64(1.0)
        for i in range(x.size % 32):
            tail[i] = widen(x[32 * units + i], one) * widen(x[32 * units + i], one)
        for i in range(8):
            spare[8 * units + i] = (tail[i] + tail[i + 16]) + (tail[i + 8] + tail[i + 24])
        units += 1
    squares = spare[: 8 * units]
    words, top = squares.view(np.int64), np.int64(0)
    for i in range(words.size):
        top = max(top, words[i] & _NO_SIGN)
    exponent = max(top >> 52, 53)
    if exponent > 2040:
        _add_one_by_one(squares, row)
        return 0
    first, left = exponent + 2, True
    half = 0
    while left:
        left = _turn(squares, first, half, row)
        first, half = max(first - 52, 1), 1
    return exponent + _MARGIN


@jit
def _turn(squares: Any, first: Any, half: Any, row: Any) -> Any:
    """Add the upper 52 bits of sums to a row and leave the rest; whether there is any."""
    m, total, left = _power(first, half), np.int64(0), np.int64(0)
    for i in range(squares.size):
        high = squares[i] + m
        total += bits(high)
        squares[i] = squares[i] - (high - m)
    words = squares.view(np.int64)
    for i in range(words.size):
        left |= words[i]
    _deposit(row, total - squares.size * ((first << 52) | (half << 51)), first - _BIAS - 52 - LOWEST)
    return (left & _NO_SIGN) != 0


@jit
def _add_one_by_one(squares: Any, row: Any) -> None:
    """Add sums that are very large, or not finite, to a row."""
    special = row[LIMBS:].view(np.float64)
    for i in range(squares.size):
        word = bits(squares[i]) & _NO_SIGN
        exponent = word >> 52
        if exponent == 2047:
            special[0] += squares[i]
        elif exponent:
            _deposit(row, (word & _MANTISSA) | (1 << 52), exponent - _BIAS - 52 - LOWEST)
        else:
            _deposit(row, word, 1 - _BIAS - 52 - LOWEST)


@jit
def add_squares(x: Any, begin: Any, end: Any, row: Any) -> None:
    """Add the squares of the elements from ``begin`` to ``end``, exactly; see [Note: exact sums].

    Args:
        x: the elements; a last unit that is not whole counts as if zeros followed.
        begin: the first, a multiple of 32.
        end: the element behind the last.
        row: int64 ``[LIMBS + 1]``: the limbs, and at last, as float64, what is not finite of the sums.
    """
    spare, guess = np.empty(BLOCK // 4, np.float64), 0
    for at in range(begin, end, BLOCK):
        guess = add_block(x[at : min(at + BLOCK, end)], guess, spare, row)
