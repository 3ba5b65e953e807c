"""Pieces of LLVM's code that the operations of compiled kernels are made of; see [Note: half types].

Each takes a builder of code first. ``lanes`` is of how many elements a value is: a vector, or a number where it is 1.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

__all__ = ["ELEMENTS", "I32", "I64", "call", "constant", "load", "narrowed", "of", "place", "spread", "store", "widened"]

_I16, I32, I64 = (ir.IntType(width) for width in (16, 32, 64))
_F32, _F64, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
ELEMENTS = {types.float32: _F32, types.float64: _F64, types.uint16: _I16, types.int16: _I16, types.int64: I64}


def of(element: Any, lanes: int) -> Any:
    return element if lanes == 1 else ir.VectorType(element, lanes)


def constant(element: Any, lanes: int, value: int) -> Any:
    return ir.Constant(of(element, lanes), value if lanes == 1 else [value] * lanes)


def spread(builder: Any, number: Any, lanes: int) -> Any:
    """Emit a vector of one number."""
    nothing = ir.Constant(of(number.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, ir.Constant(I32, 0)), nothing, constant(I32, lanes, 0))


def widened(builder: Any, value: Any, kind: Any, like: Any, lanes: int = 1) -> Any:
    """Emit an element of an array of some kind as a number of another."""
    if kind == types.uint16:
        value = builder.shl(builder.zext(value, of(I32, lanes)), constant(I32, lanes, 16))
        value, kind = builder.bitcast(value, of(_F32, lanes)), types.float32
    elif kind == types.int16:
        value, kind = builder.fpext(builder.bitcast(value, of(_HALF, lanes)), of(_F32, lanes)), types.float32
    if kind == like:
        return value
    target = of(ELEMENTS[like], lanes)
    return builder.fpext(value, target) if kind == types.float32 else builder.fptrunc(value, target)


def narrowed(builder: Any, value: Any, kind: Any, target: Any, lanes: int = 1) -> Any:
    """Emit a number as an element of an array, rounded to nearest, ties to even."""
    if kind == target:
        return value
    if target == types.float64:
        return builder.fpext(value, of(_F64, lanes))
    value = builder.fptrunc(value, of(_F32, lanes)) if kind == types.float64 else value
    if target == types.int16:
        return builder.bitcast(builder.fptrunc(value, of(_HALF, lanes)), of(_I16, lanes))
    if target != types.uint16:
        return value
    # Half of the last place that is kept is added, less one where that place is even; what carries over lands in the exponent.
    raw = builder.bitcast(value, of(I32, lanes))
    odd = builder.and_(builder.lshr(raw, constant(I32, lanes, 16)), constant(I32, lanes, 1))
    rounded = builder.add(raw, builder.add(odd, constant(I32, lanes, 0x7FFF)))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), constant(I32, lanes, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, constant(I32, lanes, 16)), of(_I16, lanes))


def place(builder: Any, kind: Any, data: Any, index: Any, lanes: int) -> Any:
    """Emit the address of some elements of an array, whose first lies at ``data``."""
    return builder.bitcast(builder.gep(data, [index]), of(ELEMENTS[kind.dtype], lanes).as_pointer())


def load(builder: Any, kind: Any, data: Any, index: Any, lanes: int) -> Any:
    return builder.load(place(builder, kind, data, index, lanes), align=kind.dtype.bitwidth // 8)


def store(builder: Any, kind: Any, data: Any, index: Any, value: Any, lanes: int, *, past_caches: int = 0) -> None:
    """Emit a store; ``past_caches`` is the alignment of one that goes to memory at once."""
    written = builder.store(value, place(builder, kind, data, index, lanes), align=past_caches or kind.dtype.bitwidth // 8)
    if past_caches:
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emit a call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
