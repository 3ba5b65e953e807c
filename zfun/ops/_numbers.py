"""Single operations that compiled kernels are made of, and that Numba has no name for.

[Note: half types]
Numba knows neither bfloat16 nor arithmetic on float16. Arrays of them travel as integers of 16 bits, bfloat16 as unsigned and float16 as
signed ones, so that the type says which of the two it is. Each operation is one or a few instructions of LLVM, written down here as such:
with integers of Python's width instead, half the lanes of a vector register would carry zeros.

Where a loop is more than LLVM turns into vector code by itself, its body is written here for 32 elements at a time, on vectors that LLVM
cuts to whatever the processor has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

__all__ = ["add_unit", "bits", "convert_unit", "fma", "narrow", "pointer", "prefetch", "square_unit", "wide_vectors", "widen"]


def _operation(emit: Any) -> Any:
    """Make an operation of LLVM callable from compiled code; the first argument is the compiler's."""
    return intrinsic(emit)


_I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (8, 16, 32, 64))
_F32, _F64, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
_ELEMENTS = {types.float32: _F32, types.float64: _F64, types.uint16: _I16, types.int16: _I16, types.int64: _I64}


def _of(element: Any, lanes: int) -> Any:
    return element if lanes == 1 else ir.VectorType(element, lanes)


def _constant(element: Any, lanes: int, value: int) -> Any:
    return ir.Constant(_of(element, lanes), value if lanes == 1 else [value] * lanes)


def _widened(builder: Any, value: Any, kind: Any, like: Any, lanes: int = 1) -> Any:
    if kind == types.uint16:
        value = builder.shl(builder.zext(value, _of(_I32, lanes)), _constant(_I32, lanes, 16))
        value, kind = builder.bitcast(value, _of(_F32, lanes)), types.float32
    elif kind == types.int16:
        value, kind = builder.fpext(builder.bitcast(value, _of(_HALF, lanes)), _of(_F32, lanes)), types.float32
    if kind == like:
        return value
    target = _of(_ELEMENTS[like], lanes)
    return builder.fpext(value, target) if kind == types.float32 else builder.fptrunc(value, target)


def _narrowed(builder: Any, value: Any, kind: Any, target: Any, lanes: int = 1) -> Any:
    if kind == target:
        return value
    value = builder.fptrunc(value, _of(_F32, lanes)) if kind == types.float64 else value
    if target == types.int16:
        return builder.bitcast(builder.fptrunc(value, _of(_HALF, lanes)), _of(_I16, lanes))
    if target != types.uint16:
        return value
    # Half of the last place that is kept is added, less one where that place is even; what carries over lands in the exponent.
    raw = builder.bitcast(value, _of(_I32, lanes))
    odd = builder.and_(builder.lshr(raw, _constant(_I32, lanes, 16)), _constant(_I32, lanes, 1))
    rounded = builder.add(raw, builder.add(odd, _constant(_I32, lanes, 0x7FFF)))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _constant(_I32, lanes, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, _constant(_I32, lanes, 16)), _of(_I16, lanes))


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int) -> Any:
    """Emit the address of some elements of an array."""
    data = arrayobj.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _of(_ELEMENTS[kind.dtype], lanes).as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int) -> Any:
    return builder.load(_place(context, builder, kind, array, index, lanes), align=kind.dtype.bitwidth // 8)


def _store(context: Any, builder: Any, kind: Any, array: Any, index: Any, value: Any, lanes: int) -> None:
    builder.store(value, _place(context, builder, kind, array, index, lanes), align=kind.dtype.bitwidth // 8)


def _spread(builder: Any, number: Any, lanes: int) -> Any:
    """Emit a vector of one number."""
    nothing = ir.Constant(_of(number.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, ir.Constant(_I32, 0)), nothing, _constant(_I32, lanes, 0))


def _eight_squares(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Emit the squares of 32 elements, added by halves until eight are left: what a unit of the exact norm is."""
    lanes = 32
    x = _widened(builder, _load(context, builder, kind, array, index, lanes), kind.dtype, types.float64, lanes)
    x = builder.fmul(x, x)
    while lanes > 8:
        lanes //= 2
        lower, upper = (ir.Constant(_of(_I32, lanes), [*range(first, first + lanes)]) for first in (0, lanes))
        x = builder.fadd(builder.shuffle_vector(x, x, lower), builder.shuffle_vector(x, x, upper))
    return x


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
        return _widened(builder, args[0], x, like)

    return like(x, like), emit


@_operation
def narrow(typing: Any, x: Any, like: Any) -> Any:
    """``narrow(x, like)``: a number as an element of array ``like``, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _narrowed(builder, args[0], x, like.dtype)

    return like.dtype(x, like), emit


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


@_operation
def wide_vectors(typing: Any) -> Any:
    """``wide_vectors()``: let the loops of this function fill registers of 512 bits, which LLVM leaves out on some processors."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        attributes = builder.function.attributes
        if isinstance(attributes, set):
            set.add(attributes, '"prefer-vector-width"="512"')  # its own method knows no attribute of a target
        return context.get_dummy_value()

    return types.none(), emit


@_operation
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, index)``: ask for the memory of an element, which need not be there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        items, at = args
        place = builder.bitcast(_place(context, builder, signature.args[0], items, at, 1), _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [place, *(ir.Constant(_I32, value) for value in (0, 2, 1))])  # to read, into the second cache, data
        return context.get_dummy_value()

    return types.none(array, types.int64), emit


@_operation
def convert_unit(typing: Any, source: Any, target: Any, at: Any, scale: Any) -> Any:
    """``convert_unit(source, target, at, scale)``: 32 elements from ``at`` on, widened, times ``scale``, narrowed."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x, to, index, factor), lanes = args, 32
        value = _widened(builder, _load(context, builder, source, x, index, lanes), source.dtype, scale, lanes)
        value = builder.fmul(value, _spread(builder, factor, lanes))
        _store(context, builder, target, to, index, _narrowed(builder, value, scale, target.dtype, lanes), lanes)
        return context.get_dummy_value()

    return types.none(source, target, types.int64, scale), emit


@_operation
def square_unit(typing: Any, x: Any, at: Any, out: Any, to: Any) -> Any:
    """``square_unit(x, at, out, to)``: the eight sums of the squares of 32 elements, at eight places of a float64 array."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(context, builder, out, args[2], args[3], _eight_squares(context, builder, x, args[0], args[1]), 8)
        return context.get_dummy_value()

    return types.none(x, types.int64, out, types.int64), emit


@_operation
def add_unit(typing: Any, x: Any, at: Any, upper: Any, lower: Any, sums: Any) -> Any:
    """``add_unit(x, at, upper, lower, sums)``: what :func:`square_unit` makes, added to integers as [Note: exact sums] says.

    ``sums`` is int64 ``[4, 8]``, flat: the bits of the upper digits and of the lower ones, what is left of any, and the largest number.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, one, two, into = args
        value = _eight_squares(context, builder, x, array, index)
        first, second = _spread(builder, one, 8), _spread(builder, two, 8)
        high = builder.fadd(value, first)
        rest = builder.fsub(value, builder.fsub(high, first))
        low = builder.fadd(rest, second)
        left = builder.fsub(rest, builder.fsub(low, second))
        places = [ir.Constant(_I64, 8 * row) for row in range(4)]
        before = [_load(context, builder, sums, into, place, 8) for place in places]
        raw, highs, lows, lefts = (builder.bitcast(v, _of(_I64, 8)) for v in (value, high, low, left))
        after = [
            builder.add(before[0], highs),
            builder.add(before[1], lows),
            builder.or_(before[2], lefts),
            builder.select(builder.icmp_signed(">", before[3], raw), before[3], raw),
        ]
        for place, result in zip(places, after, strict=True):
            _store(context, builder, sums, into, place, result, 8)
        return context.get_dummy_value()

    return types.none(x, types.int64, types.float64, types.float64, sums), emit
