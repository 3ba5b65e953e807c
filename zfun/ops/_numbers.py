"""Single operations that compiled kernels are made of, and that Numba has no name for.

[Note: half types]
Numba knows neither bfloat16 nor arithmetic on float16. Arrays of them travel as integers of 16 bits, bfloat16 as unsigned and float16 as
signed ones, so that the type says which of the two it is. Each operation is one or a few instructions of LLVM, written down here as such:
with integers of Python's width instead, half the lanes of a vector register would carry zeros.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["bits", "fma", "narrow", "pointer", "widen"]


def _operation(emit: Any) -> Any:
    """Make an operation of LLVM callable from compiled code; the first argument is the compiler's."""
    return intrinsic(emit)


_I16, _I32, _F32, _HALF = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()


@_operation
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """``pointer(address, like)``: an address as a pointer to elements of the type of array ``like``."""
    target = types.CPointer(like.dtype)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(types.int64, like), emit


@_operation
def widen(typing: Any, x: Any, like: Any) -> Any:
    """``widen(x, like)``: an element of an array as a number of the type of ``like``, float32 or float64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, kind, target = args[0], x, ir.FloatType() if like == types.float32 else ir.DoubleType()
        if kind == types.uint16:
            value, kind = builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32), types.float32
        elif kind == types.int16:
            value, kind = builder.fpext(builder.bitcast(value, _HALF), _F32), types.float32
        if kind == like:
            return value
        return builder.fpext(value, target) if kind == types.float32 else builder.fptrunc(value, target)

    return like(x, like), emit


@_operation
def narrow(typing: Any, x: Any, like: Any) -> Any:
    """``narrow(x, like)``: a number as an element of array ``like``, rounded to nearest, ties to even."""
    target = like.dtype

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x == target:
            return args[0]
        value = builder.fptrunc(args[0], _F32) if x == types.float64 else args[0]
        if target == types.int16:
            return builder.bitcast(builder.fptrunc(value, _HALF), _I16)
        if target != types.uint16:
            return value
        # Half of the last place that is kept is added, less one where that place is even; what carries over lands in the exponent.
        raw = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(raw, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(raw, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        kept = builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_I32, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(_I32, 16)), _I16)

    return target(x, like), emit


@_operation
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``fma(x, y, z)``: ``x y + z``, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return x(x, x, x), emit


@_operation
def bits(typing: Any, x: Any) -> Any:
    """``bits(x)``: the bits of a float64 as an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), emit
