"""Operations on the bits of numbers, as integers: what exact sums are made of; see [Note: exact sums]."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from zfun.ops import _emit
from zfun.ops._emit import I32, I64
from zfun.ops._lanes_type import Lanes, intrinsic_name, zero
from zfun.ops._numbers import operation

__all__ = ["all_bits", "as_bits", "bits", "eight_squares", "larger", "largest", "number", "sum_of", "zeros"]


@operation
def bits(x: Any) -> Any:
    """``bits(x)``: the bits of a float64 as an int64."""
    return types.int64, lambda builder, value: builder.bitcast(value, I64)


@operation
def number(x: Any) -> Any:
    """``number(x)``: the float64 of the bits of an int64."""
    return types.float64, lambda builder, value: builder.bitcast(value, ir.DoubleType())


# In lanes.


@operation
def eight_squares(x: Any) -> Any:
    """``eight_squares(x)``: of each 32 elements eight sums of their squares."""
    made = Lanes(types.float64, x.count // 4)

    def part(builder: Any, value: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(value, value, ir.Constant(_emit.of(I32, len(places)), places))

    def plus_square(builder: Any, x: Any, y: Any) -> Any:
        return _emit.call(builder, intrinsic_name("fma", made), x.type, x, x, y)

    def emit(builder: Any, value: Any) -> Any:
        units = range(0, x.count, 32)
        eights = [part(builder, value, [unit + place for unit in units for place in range(first, first + 8)]) for first in (0, 8, 16, 24)]
        a, b, c, d = (_emit.widened(builder, eight, x.element, types.float64, made.count) for eight in eights)
        if x.element == types.float32:  # the squares are float64 numbers, so that a sum of two is rounded once either way
            return builder.fadd(plus_square(builder, c, builder.fmul(a, a)), plus_square(builder, d, builder.fmul(b, b)))
        a, b, c, d = (builder.fmul(value, value) for value in (a, b, c, d))
        return builder.fadd(builder.fadd(a, c), builder.fadd(b, d))

    return made, emit


@operation
def zeros(like: Any) -> Any:
    """``zeros(like)``: an integer for each sum that :func:`eight_squares` makes of ``like``."""
    made = Lanes(types.int64, like.count // 4)
    return made, lambda builder, _: zero(made)


@operation
def as_bits(x: Any) -> Any:
    """``as_bits(x)``: the bits of float64 numbers as integers."""
    return Lanes(types.int64, x.count), lambda builder, value: builder.bitcast(value, _emit.of(I64, x.count))


@operation
def larger(x: Any, y: Any) -> Any:
    """``larger(x, y)``: the larger of two integers."""
    return x, lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b)


def _reduced(name: str, x: Any) -> Any:
    return types.int64, lambda builder, value: _emit.call(builder, intrinsic_name(f"vector.reduce.{name}", x), I64, value)


@operation
def sum_of(x: Any) -> Any:
    """``sum_of(x)``: the sum of the integers in all lanes."""
    return _reduced("add", x)


@operation
def all_bits(x: Any) -> Any:
    """``all_bits(x)``: which bits are set in any lane."""
    return _reduced("or", x)


@operation
def largest(x: Any) -> Any:
    """``largest(x)``: the largest of the integers in all lanes."""
    return _reduced("smax", x)
