"""Numbers of many elements at once, in vector registers: what the loops of compiled kernels are written with.

[Note: units]
A kernel is a loop over elements. One that multiplies, as one would write it:

>>> import numpy as np
>>> from zfun.ops._jit import jit
>>> @jit
... def scaled(x, out, scale):
...     for i in range(out.size):
...         out[i] = x[i] * scale

Here it goes from unit to unit instead: 256 bytes of the type that is computed in, 64 elements of float32 or 32 of float64. What is done at
a place ``i`` is a function, and ``like`` says by its type how many elements it is done to: those of a unit, or one.

>>> @jit
... def _scaled(i, like, x, out, scale):
...     inlined()
...     will_read(x, i, like)                    # not these elements, but those that come some KiB later
...     put(out, i, take(x, i, like) * scale)    # a number in each lane, and an ordinary operator
>>> @jit
... def scaled_in_units(x, out, scale):
...     source, target, unit = start(x), start(out), unit_of(scale)
...     whole = out.size // count(unit) * count(unit)
...     for i in range(0, whole, count(unit)):
...         _scaled(i, unit, source, target, scale)
...     for i in range(whole, out.size):
...         _scaled(i, scale, source, target, scale)

So what a tail computes is by its text what a unit computes.

>>> x = np.arange(70, dtype=np.float32)
>>> first, second = np.zeros_like(x), np.zeros_like(x)
>>> scaled(x, first, np.float32(3)), scaled_in_units(x, second, np.float32(3))
(None, None)
>>> np.array_equal(first, second), second[[0, 63, 64, 69]].tolist()
(True, [0.0, 189.0, 192.0, 207.0])

LLVM, which makes the machine's code, sees vectors of 64 numbers, and cuts them to the registers of the processor:

>>> (code,) = scaled_in_units.inspect_llvm().values()
>>> "fmul <64 x float>" in code, "llvm.prefetch" in code
(True, True)

It makes vector code of the first loop too, but goes through all arrays for each register. Here all that a unit needs of an array is read,
then written, in one go, and memory is asked for by hand, without which it idles wherever there is much arithmetic (together 12 % of a step
of Adam). Nor need the arrays be compared first, lest they overlap.

What is written as a whole, and is too large to be in a cache when it is read again, goes past the caches (``stream``): else each line of it
would be read from memory before it is overwritten. Such writes overtake each other, so that a kernel ends with ``hand_over``.

The operations, in the order of this file:

* units: ``unit_of``, ``count``, ``inlined``;
* from memory: ``start``, ``take``, ``will_read``;
* to memory: ``put``, ``copy``, ``will_write``, ``rounded``; past the caches: ``can_stream``, ``stream``, ``hand_over``;
* arithmetic, beside that of ``_lanes_type``: ``fma``, ``root``, ``same_sign``.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from zfun.ops import _emit
from zfun.ops._emit import I32, I64
from zfun.ops._lanes_type import Lanes, alike, common, element_of, intrinsic_name, num_lanes, zero
from zfun.ops._numbers import operation

__all__ = [
    "can_stream",
    "copy",
    "count",
    "fma",
    "hand_over",
    "inlined",
    "put",
    "root",
    "rounded",
    "same_sign",
    "start",
    "stream",
    "take",
    "unit_of",
    "will_read",
    "will_write",
]

_UNIT_BYTES = 256

# So many bytes ahead memory is asked for.
_AHEAD = 2048
_LINE = 64

_IS_X86 = platform.machine() in ("x86_64", "AMD64")


# Units.


@operation
def unit_of(x: Any) -> Any:
    """``unit_of(x)``: zero in all lanes of a unit, of the type of a number, or that which the elements of an array are computed with."""
    element = x
    if isinstance(x, types.Array):
        element = types.float64 if x.dtype == types.float64 else types.float32
    made = Lanes(element, _UNIT_BYTES * 8 // element.bitwidth)
    return made, lambda builder, _: zero(made)


@operation
def count(like: Any) -> Any:
    """``count(like)``: how many elements a value is of."""
    return types.int64, lambda builder, _: I64(num_lanes(like))


@operation
def inlined() -> Any:
    """``inlined()``: always make this function part of those that call it."""

    def emit(builder: Any) -> None:
        attributes = builder.function.attributes
        if isinstance(attributes, set):
            set.add(attributes, "alwaysinline")  # its own method knows no attribute of a target

    return types.none, emit


# From memory.


@intrinsic
def _start(compiler: Any, array: Any) -> Any:
    """``start(array)``: where its elements lie. Unlike an array, a place has no count of its holders, kept at every turn of a loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return arrayobj.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), emit


start: Any = _start  # all but the first argument is what a call takes


@operation
def take(array: Any, at: Any, like: Any) -> Any:
    """``take(array, at, like)``: the elements from a place on, as many and of the type of ``like``."""

    def emit(builder: Any, data: Any, index: Any, _: Any) -> Any:
        value = _emit.load(builder, array, data, index, num_lanes(like))
        return _emit.widened(builder, value, array.dtype, element_of(like), num_lanes(like))

    return like, emit


@operation
def will_read(array: Any, at: Any, like: Any) -> Any:
    """``will_read(array, at, like)``: ask for the memory of a unit to come, which need not be there; nothing for single elements."""
    return types.none, _asking(array, like, write=False)


def _asking(array: Any, like: Any, *, write: bool) -> Any:
    size = array.dtype.bitwidth // 8

    def emit(builder: Any, data: Any, index: Any, _: Any) -> None:
        if not isinstance(like, Lanes):
            return
        for line in range(_AHEAD // 4, _AHEAD // 4 + like.count, _LINE // size):
            address = _emit.place(builder, array, data, builder.add(index, I64(line)), 1)
            # To read or to write, into the second cache, data.
            options = [I32(value) for value in (int(write), 2, 1)]
            _emit.call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.bitcast(address, ir.IntType(8).as_pointer()), *options)

    return emit


# To memory.


@operation
def put(array: Any, at: Any, x: Any) -> Any:
    """``put(array, at, x)``: write elements, rounded to nearest where the array's have fewer bits."""
    return types.none, _writing(array, x, past_caches=0)


def _writing(array: Any, x: Any, *, past_caches: int) -> Any:
    def emit(builder: Any, data: Any, index: Any, value: Any) -> None:
        value = _emit.narrowed(builder, value, element_of(x), array.dtype, num_lanes(x))
        _emit.store(builder, array, data, index, value, num_lanes(x), past_caches=past_caches)

    return emit


@operation
def copy(source: Any, target: Any, at: Any, like: Any) -> Any:
    """``copy(source, target, at, like)``: copy elements of one type as they are."""

    def emit(builder: Any, from_: Any, to: Any, index: Any, _: Any) -> None:
        value = _emit.load(builder, target, builder.bitcast(from_, to.type), index, num_lanes(like))
        _emit.store(builder, target, to, index, value, num_lanes(like))

    return types.none, emit


@operation
def will_write(array: Any, at: Any, like: Any) -> Any:
    """``will_write(array, at, like)``: as :func:`will_read`, for what will be written and was not read."""
    return types.none, _asking(array, like, write=True)


@operation
def rounded(x: Any, array: Any) -> Any:
    """``rounded(x, array)``: what would be read after :func:`put`."""

    def emit(builder: Any, value: Any, _: Any) -> Any:
        value = _emit.narrowed(builder, value, element_of(x), array.dtype, num_lanes(x))
        return _emit.widened(builder, value, array.dtype, element_of(x), num_lanes(x))

    return x, emit


@operation
def can_stream(array: Any, at: Any) -> Any:
    """``can_stream(array, at)``: whether a place is the beginning of a line of the cache, on a processor that can write past it."""

    def emit(builder: Any, data: Any, index: Any) -> Any:
        offset = builder.and_(builder.ptrtoint(builder.gep(data, [index]), I64), I64(_LINE - 1))
        return builder.icmp_unsigned("==", offset, I64(0 if _IS_X86 else _LINE))

    return types.boolean, emit


@operation
def stream(array: Any, at: Any, x: Any) -> Any:
    """``stream(array, at, x)``: as :func:`put`, past the caches, a unit where :func:`can_stream` says that it lies right."""
    return types.none, _writing(array, x, past_caches=_LINE)


@operation
def hand_over() -> Any:
    """``hand_over()``: let what was written by :func:`stream` be seen before all that is written from now on."""

    def emit(builder: Any) -> None:
        if _IS_X86:
            _emit.call(builder, "llvm.x86.sse.sfence", ir.VoidType())

    return types.none, emit


# Arithmetic.


@operation
def fma(x: Any, y: Any, z: Any) -> Any:
    """``fma(x, y, z)``: ``x y + z``, rounded once."""
    made = common(x, y, z)

    def emit(builder: Any, *values: Any) -> Any:
        alikes = alike(builder, (x, y, z), values)
        # llvmlite's own knows no vectors.
        return _emit.call(builder, intrinsic_name("fma", made), alikes[0].type, *alikes)

    return made, emit


@operation
def root(x: Any) -> Any:
    """``root(x)``: the square root, rounded once."""
    return x, lambda builder, value: _emit.call(builder, intrinsic_name("sqrt", x), value.type, value)


@operation
def same_sign(size: Any, x: Any) -> Any:
    """``same_sign(size, x)``: a number where ``x`` is positive, the opposite where it is negative, 0 where it is neither."""

    def emit(builder: Any, *values: Any) -> Any:
        positive, value = alike(builder, (size, x), values)
        nothing = zero(x) if isinstance(x, Lanes) else value.type(0.0)
        down = builder.select(builder.fcmp_ordered("<", value, nothing), builder.fneg(positive), nothing)
        return builder.select(builder.fcmp_ordered(">", value, nothing), positive, down)

    return x, emit
