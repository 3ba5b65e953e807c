"""Compiled: the sum of several buffers; see [Note: units]."""

from __future__ import annotations

from typing import Any

from zfun.ops._jit import jit
from zfun.ops._lanes import can_stream, count, hand_over, inlined, put, start, stream, take, unit_of, will_read, will_write
from zfun.ops._numbers import pointer

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
def add_up(addresses: Any, out: Any, begin: Any, end: Any, one: Any, past: Any) -> None:
    """Add the elements from ``begin`` to ``end`` of several buffers, in their order, and round once.

    Args:
        addresses: int64 ``[n]``: where each buffer lies.
        out: where the sum goes, of the dtype of the buffers; it may be one of them.
        begin: the first element.
        end: the element behind the last.
        one: 1, in the dtype that is computed in.
        past: write past the caches: the sum is large, and takes the place of no term.
    """
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
    if past:
        hand_over()
