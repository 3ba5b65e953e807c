"""Single operations that compiled kernels are made of, and that Numba has no name for.

[Note: half types]
Numba knows neither bfloat16 nor arithmetic on float16. Arrays of them travel as integers of 16 bits, bfloat16 as unsigned and float16 as
signed ones, so that the type says which of the two it is. Each operation is one or a few instructions of LLVM, written down as such in
``_emit``: with integers of Python's width instead, half the lanes of a vector register would carry zeros.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zfun.ops import _emit

__all__ = ["attribute", "bits", "narrow", "number", "operation", "pointer", "widen"]


def operation(emit: Any) -> Any:
    """Make an operation of LLVM callable from compiled code; the first argument is the compiler's."""
    return intrinsic(emit)


def attribute(builder: Any, text: str) -> None:
    """Give the function that is being compiled an attribute."""
    attributes = builder.function.attributes
    if isinstance(attributes, set):
        set.add(attributes, text)  # its own method knows no attribute of a target


@operation
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """``pointer(address, like)``: an address as a pointer to elements of the type of array ``like``."""
    target = types.CPointer(like.dtype)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(types.int64, like), emit


@operation
def widen(typing: Any, x: Any, like: Any) -> Any:
    """``widen(x, like)``: an element of an array as a number of the type of ``like``, float32 or float64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit.widened(builder, args[0], x, like)

    return like(x, like), emit


@operation
def narrow(typing: Any, x: Any, like: Any) -> Any:
    """``narrow(x, like)``: a number as an element of array ``like``, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit.narrowed(builder, args[0], x, like.dtype)

    return like.dtype(x, like), emit


@operation
def bits(typing: Any, x: Any) -> Any:
    """``bits(x)``: the bits of a float64 as an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), emit


@operation
def number(typing: Any, x: Any) -> Any:
    """``number(x)``: the float64 of the bits of an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), emit
