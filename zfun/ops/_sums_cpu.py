"""Compiled: the sum of several buffers, and the squares of what was written; see [Note: units]."""

from __future__ import annotations

from typing import Any

import numpy as np

from zfun.ops._jit import jit
from zfun.ops._lanes import can_stream, count, hand_over, inlined, put, rounded, start, stream, take, unit_of, will_read, will_write
from zfun.ops._numbers import pointer
from zfun.ops._squares_cpu import BLOCK, add_block, add_unit, digits, no_sums, settle

__all__ = ["add_up"]


@jit
def _total(addresses: Any, out: Any, at: Any, like: Any) -> Any:
    """Add the terms of a place in their order. All are read before the sum is written, so that it may take the place of any."""
    inlined()
    first = pointer(addresses[0], out)
    will_read(first, at, like)
    total = take(first, at, like)
    for k in range(1, addresses.size):
        term = pointer(addresses[k], out)
        will_read(term, at, like)
        total = total + take(term, at, like)
    return total


@jit
def _add(addresses: Any, out: Any, begin: Any, end: Any, one: Any, past: Any) -> None:
    target, unit = start(out), unit_of(one)
    whole = end - (end - begin) % count(unit)
    if past and can_stream(target, begin):
        for i in range(begin, whole, count(unit)):
            stream(target, i, _total(addresses, out, i, unit))
    else:
        for i in range(begin, whole, count(unit)):
            will_write(target, i, unit)
            put(target, i, _total(addresses, out, i, unit))
    for i in range(whole, end):
        put(target, i, _total(addresses, out, i, one))


@jit
def _add_and_square(addresses: Any, out: Any, begin: Any, one: Any, past: Any, guess: Any, row: Any) -> Any:
    """Add up a whole block, and the squares of what is written on the way; whether the guess was good for that."""
    target, unit = start(out), unit_of(one)
    upper, lower = digits(guess)
    sums = no_sums(unit)
    if past and can_stream(target, begin):
        for i in range(begin, begin + BLOCK, count(unit)):
            value = rounded(_total(addresses, out, i, unit), out)
            stream(target, i, value)
            sums = add_unit(value, upper, lower, sums)
    else:
        for i in range(begin, begin + BLOCK, count(unit)):
            will_write(target, i, unit)
            value = rounded(_total(addresses, out, i, unit), out)
            put(target, i, value)
            sums = add_unit(value, upper, lower, sums)
    return settle(guess, sums, row)


@jit
def add_up(addresses: Any, out: Any, begin: Any, end: Any, one: Any, past: Any, row: Any) -> None:
    """Add the elements from ``begin`` to ``end`` of several buffers, in their order, and round once.

    Args:
        addresses: int64 ``[n]``: where each buffer lies.
        out: where the sum goes, of the dtype of the buffers; it may be one of them.
        begin: the first element, a multiple of 32.
        end: the element behind the last.
        one: 1, in the dtype that is computed in.
        past: write past the caches: the sum is large, and takes the place of no term.
        row: to which the squares are added as by ``add_squares``; of length 0 if nobody asks.
    """
    if not row.size:
        _add(addresses, out, begin, end, one, past)
        if past:
            hand_over()
        return
    spare, guess = np.empty(BLOCK // 4, np.float64), 0
    for block in range(begin, end, BLOCK):
        limit = min(block + BLOCK, end)
        if guess and limit - block == BLOCK:
            if _add_and_square(addresses, out, block, one, past, guess, row):
                continue
        else:
            _add(addresses, out, block, limit, one, False)
        guess = add_block(out[block:limit], guess, spare, row)
    if past:
        hand_over()
