"""Numbers of many elements at once, in vector registers: what the loops of compiled kernels are written with.

[Note: units]
A loop goes from unit to unit: 256 bytes of the type that is computed in, 64 elements of float32 or 32 of float64. A value of type ``Lanes``
has a number for each, and LLVM cuts it to the registers of the processor. Left to itself LLVM makes vector code of a loop over elements
too, but goes through all arrays for each register: here all that a unit needs of an array is read, then written, in one go, and the memory
of what comes a few KiB later is asked for by hand, without which it idles wherever there is much arithmetic (together 12 % of a step of
Adam). Nor need the arrays be compared first, lest they overlap.

What is written as a whole, and is too large to be in a cache when it is read again, goes past the caches (``stream``): else each line of it
would be read from memory before it is overwritten. Such writes overtake each other, so that a kernel ends with ``hand_over``.

The body of a loop is a function of the place and of ``like``, which says by its type what is computed with: ``Lanes`` for a unit, and a
plain number for each element behind the last whole unit. So what a tail computes is by its text what a unit computes.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing import templates
from numba.extending import models, register_model
from numba.np import arrayobj

from zfun.ops import _emit
from zfun.ops._emit import ELEMENTS, I32, of
from zfun.ops._numbers import attribute, operation

__all__ = [
    "Lanes",
    "ahead",
    "all_bits",
    "as_bits",
    "ask",
    "copy",
    "count",
    "eight_squares",
    "fma",
    "hand_over",
    "inlined",
    "lanes",
    "larger",
    "largest",
    "put",
    "root",
    "rounded",
    "same_sign",
    "start",
    "stream",
    "streams",
    "sum_of",
    "take",
    "unit_of",
    "zeros",
]

_UNIT_BYTES = 256

# So many bytes ahead memory is asked for.
_AHEAD = 2048
_LINE = 64

_IS_X86 = platform.machine() in ("x86_64", "AMD64")


class Lanes(types.Type):
    """The type of a number of each of some elements."""

    def __init__(self, element: Any, count: int) -> None:
        self.element, self.count = element, count
        super().__init__(name=f"Lanes({element}, {count})")


@register_model(Lanes)
class _InRegisters(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, of(ELEMENTS[fe_type.element], fe_type.count))


def _count(kind: Any) -> int:
    return kind.count if isinstance(kind, Lanes) else 1


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, Lanes) else kind


def _common(*kinds: Any) -> Any:
    """Return the type of what is computed of some numbers, all of one type of element."""
    if len({_element(kind) for kind in kinds}) != 1:
        return None
    return max(kinds, key=_count)


def _alike(builder: Any, kinds: Any, values: Any) -> list[Any]:
    """Emit some numbers as of as many elements as the most of them."""
    most = max(map(_count, kinds))
    return [value if _count(kind) == most else _emit.spread(builder, value, most) for kind, value in zip(kinds, values, strict=True)]


def _define(function: Any, emit: Callable[[Any, Any, Any], Any]) -> None:
    """Make an operator of Python one on ``Lanes``, and on one and a number."""

    class Typing(templates.AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            found = _common(*args) if any(isinstance(kind, Lanes) for kind in args) else None
            return None if found is None else templates.signature(found, *args)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, *_alike(builder, sig.args, args))

    infer: Any = templates.infer_global
    infer(function)(Typing)
    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(function, *kinds)(lower)


def _arithmetic(floating: str, integer: str | None) -> Callable[[Any, Any, Any], Any]:
    def emit(builder: Any, x: Any, y: Any) -> Any:
        name = integer if isinstance(x.type.element, ir.IntType) else floating
        assert name is not None
        return getattr(builder, name)(x, y)

    return emit


_define(operator.add, _arithmetic("fadd", "add"))
_define(operator.sub, _arithmetic("fsub", "sub"))
_define(operator.mul, _arithmetic("fmul", "mul"))
_define(operator.truediv, _arithmetic("fdiv", None))
_define(operator.or_, _arithmetic("or_", "or_"))


def _named(name: str, x: Any) -> str:
    letter = "i" if isinstance(_element(x), types.Integer) else "f"
    vector = f"v{_count(x)}" if isinstance(x, Lanes) else ""
    return f"llvm.{name}.{vector}{letter}{_element(x).bitwidth}"


def _fma(builder: Any, kind: Any, x: Any, y: Any, z: Any) -> Any:
    # llvmlite's own knows no vectors.
    return _emit.call(builder, _named("fma", kind), x.type, x, y, z)


@operation
def lanes(typing: Any, x: Any) -> Any:
    """``lanes(x)``: a number in all lanes of a unit."""
    made = Lanes(x, _UNIT_BYTES * 8 // x.bitwidth)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit.spread(builder, args[0], made.count)

    return made(x), emit


@operation
def unit_of(typing: Any, array: Any) -> Any:
    """``unit_of(array)``: zero in all lanes of a unit, of the type that the elements of an array are computed with."""
    element = types.float64 if array.dtype == types.float64 else types.float32
    made = Lanes(element, _UNIT_BYTES * 8 // element.bitwidth)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(made), None)

    return made(array), emit


@operation
def zeros(typing: Any, like: Any) -> Any:
    """``zeros(like)``: an integer of 64 bits for each sum that :func:`eight_squares` makes of ``like``."""
    made = Lanes(types.int64, like.count // 4)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(made), None)

    return made(like), emit


@operation
def count(typing: Any, like: Any) -> Any:
    """``count(like)``: how many elements a value is of."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), _count(like))

    return types.int64(like), emit


@operation
def inlined(typing: Any) -> Any:
    """``inlined()``: always make this function part of those that call it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        attribute(builder, "alwaysinline")
        return context.get_dummy_value()

    return types.none(), emit


@operation
def start(typing: Any, array: Any) -> Any:
    """``start(array)``: where its elements lie. Unlike an array, a place has no count of its holders, kept at every turn of a loop."""
    made = types.CPointer(array.dtype)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return arrayobj.make_array(array)(context, builder, args[0]).data

    return made(array), emit


@operation
def take(typing: Any, array: Any, at: Any, like: Any) -> Any:
    """``take(array, at, like)``: the elements from a place on, as many and of the type of ``like``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _emit.load(builder, array, args[0], args[1], _count(like))
        return _emit.widened(builder, value, array.dtype, _element(like), _count(like))

    return like(array, types.int64, like), emit


@operation
def put(typing: Any, array: Any, at: Any, x: Any) -> Any:
    """``put(array, at, x)``: write elements, rounded to nearest where the array's have fewer bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _emit.narrowed(builder, args[2], _element(x), array.dtype, _count(x))
        _emit.store(builder, array, args[0], args[1], value, _count(x))
        return context.get_dummy_value()

    return types.none(array, types.int64, x), emit


@operation
def stream(typing: Any, array: Any, at: Any, x: Any) -> Any:
    """``stream(array, at, x)``: as :func:`put`, past the caches, a unit where :func:`streams` says that it lies right."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _emit.narrowed(builder, args[2], _element(x), array.dtype, _count(x))
        _emit.store(builder, array, args[0], args[1], value, _count(x), past_caches=_LINE)
        return context.get_dummy_value()

    return types.none(array, types.int64, x), emit


@operation
def streams(typing: Any, array: Any, at: Any) -> Any:
    """``streams(array, at)``: whether a place is the beginning of a line of the cache, on a processor that can write past it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.ptrtoint(builder.gep(args[0], [args[1]]), ir.IntType(64))
        offset = builder.and_(place, ir.Constant(ir.IntType(64), _LINE - 1))
        return builder.icmp_unsigned("==", offset, ir.Constant(ir.IntType(64), 0 if _IS_X86 else _LINE))

    return types.boolean(array, types.int64), emit


@operation
def hand_over(typing: Any) -> Any:
    """``hand_over()``: let what was written by :func:`stream` be seen before all that is written from now on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            _emit.call(builder, "llvm.x86.sse.sfence", ir.VoidType())
        return context.get_dummy_value()

    return types.none(), emit


@operation
def copy(typing: Any, source: Any, target: Any, at: Any, like: Any) -> Any:
    """``copy(source, target, at, like)``: copy elements of one type as they are."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _emit.load(builder, target, builder.bitcast(args[0], args[1].type), args[2], _count(like))
        _emit.store(builder, target, args[1], args[2], value, _count(like))
        return context.get_dummy_value()

    return types.none(source, target, types.int64, like), emit


@operation
def rounded(typing: Any, x: Any, array: Any) -> Any:
    """``rounded(x, array)``: what would be read after :func:`put`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _emit.narrowed(builder, args[0], _element(x), array.dtype, _count(x))
        return _emit.widened(builder, value, array.dtype, _element(x), _count(x))

    return x(x, array), emit


def _asking(array: Any, like: Any, *, write: bool) -> Any:
    size = array.dtype.bitwidth // 8

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if isinstance(like, Lanes):
            for line in range(_AHEAD // 4, _AHEAD // 4 + like.count, _LINE // size):
                index = builder.add(args[1], ir.Constant(ir.IntType(64), line))
                place = builder.bitcast(_emit.place(builder, array, args[0], index, 1), ir.IntType(8).as_pointer())
                # To read or to write, into the second cache, data.
                options = [ir.Constant(I32, value) for value in (int(write), 2, 1)]
                _emit.call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *options)
        return context.get_dummy_value()

    return types.none(array, types.int64, like), emit


@operation
def ahead(typing: Any, array: Any, at: Any, like: Any) -> Any:
    """``ahead(array, at, like)``: ask for the memory of a unit to come, which need not be there; nothing for single elements."""
    return _asking(array, like, write=False)


@operation
def ask(typing: Any, array: Any, at: Any, like: Any) -> Any:
    """``ask(array, at, like)``: as :func:`ahead`, for what will be written and was not read."""
    return _asking(array, like, write=True)


@operation
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``fma(x, y, z)``: ``x y + z``, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fma(builder, made, *_alike(builder, (x, y, z), args))

    made = _common(x, y, z)
    return made(x, y, z), emit


@operation
def root(typing: Any, x: Any) -> Any:
    """``root(x)``: the square root, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit.call(builder, _named("sqrt", x), args[0].type, args[0])

    return x(x), emit


@operation
def same_sign(typing: Any, size: Any, x: Any) -> Any:
    """``same_sign(size, x)``: a number where ``x`` is positive, the opposite where it is negative, 0 where it is neither."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        positive, value = _alike(builder, (size, x), args)
        zero = ir.Constant(value.type, 0.0 if _count(x) == 1 else None)
        down = builder.select(builder.fcmp_ordered("<", value, zero), builder.fneg(positive), zero)
        return builder.select(builder.fcmp_ordered(">", value, zero), positive, down)

    return x(size, x), emit


@operation
def eight_squares(typing: Any, x: Any) -> Any:
    """``eight_squares(x)``: of each 32 elements eight sums of their squares, as [Note: exact sums] says."""
    made = Lanes(types.float64, x.count // 4)

    def part(builder: Any, value: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(value, value, ir.Constant(of(I32, len(places)), places))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        units = range(0, x.count, 32)
        eights = [part(builder, args[0], [unit + place for unit in units for place in range(first, first + 8)]) for first in (0, 8, 16, 24)]
        a, b, c, d = (_emit.widened(builder, eight, x.element, types.float64, made.count) for eight in eights)
        if x.element == types.float32:  # the squares are float64 numbers, so that a sum of two is rounded once either way
            return builder.fadd(_fma(builder, made, c, c, builder.fmul(a, a)), _fma(builder, made, d, d, builder.fmul(b, b)))
        a, b, c, d = (builder.fmul(value, value) for value in (a, b, c, d))
        return builder.fadd(builder.fadd(a, c), builder.fadd(b, d))

    return made(x), emit


@operation
def as_bits(typing: Any, x: Any) -> Any:
    """``as_bits(x)``: the bits of float64 numbers as integers."""
    made = Lanes(types.int64, x.count)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(made))

    return made(x), emit


@operation
def larger(typing: Any, x: Any, y: Any) -> Any:
    """``larger(x, y)``: the larger of two integers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return x(x, y), emit


def _reduced(name: str, x: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit.call(builder, _named(f"vector.reduce.{name}", x), ir.IntType(64), args[0])

    return types.int64(x), emit


@operation
def sum_of(typing: Any, x: Any) -> Any:
    """``sum_of(x)``: the sum of the integers in all lanes."""
    return _reduced("add", x)


@operation
def all_bits(typing: Any, x: Any) -> Any:
    """``all_bits(x)``: which bits are set in any lane."""
    return _reduced("or", x)


@operation
def largest(typing: Any, x: Any) -> Any:
    """``largest(x)``: the largest of the integers in all lanes."""
    return _reduced("smax", x)
