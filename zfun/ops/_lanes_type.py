"""The type of a number in each of many lanes, as Numba and LLVM are told of it, and what ``+ - * /`` and ``|`` do with it.

Read ``_lanes`` first: it shows what the type is for. To Numba a value of type ``Lanes(float32, 64)`` is one number like any other; to LLVM
it is a vector of 64 floats. Three things make a type: the class, which the compiler reasons with; its model, which says what stands for a
value in LLVM's code; and for each operator the type of the result, and the instruction. An operator takes a plain number on one side, too:
it is put in all lanes first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing import templates
from numba.extending import models, register_model

from zfun.ops import _emit

__all__ = ["Lanes", "alike", "common", "element_of", "intrinsic_name", "num_lanes", "zero"]


class Lanes(types.Type):
    """The type of a number in each of ``count`` lanes.

    Args:
        element: the type of a number.
        count: how many there are.
    """

    def __init__(self, element: Any, count: int) -> None:
        self.element, self.count = element, count
        super().__init__(name=f"Lanes({element}, {count})")


@register_model(Lanes)
class _InRegisters(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _emit.of(_emit.ELEMENTS[fe_type.element], fe_type.count))


def num_lanes(kind: Any) -> int:
    """Return of how many elements the values of a type are: a plain number is of one."""
    return kind.count if isinstance(kind, Lanes) else 1


def element_of(kind: Any) -> Any:
    """Return the type of one of these elements."""
    return kind.element if isinstance(kind, Lanes) else kind


def common(*kinds: Any) -> Any:
    """Return the type of what is computed of some numbers; ``None`` where their elements are not of one type."""
    return max(kinds, key=num_lanes) if len({element_of(kind) for kind in kinds}) == 1 else None


def alike(builder: Any, kinds: Any, values: Any) -> list[Any]:
    """Emit numbers of as many lanes as the most of them."""
    most = max(map(num_lanes, kinds))
    return [value if num_lanes(kind) == most else _emit.spread(builder, value, most) for kind, value in zip(kinds, values, strict=True)]


def zero(kind: Lanes) -> Any:
    """Return what stands for zero in all lanes."""
    return ir.Constant(_emit.of(_emit.ELEMENTS[kind.element], kind.count), None)


def intrinsic_name(name: str, kind: Any) -> str:
    """Return the full name of one of LLVM's own functions: ``llvm.sqrt.v64f32`` is ``sqrt`` of 64 floats."""
    element = element_of(kind)
    letter = "i" if isinstance(element, types.Integer) else "f"
    vector = f"v{kind.count}" if isinstance(kind, Lanes) else ""
    return f"llvm.{name}.{vector}{letter}{element.bitwidth}"


def _define(function: Any, floating: str, integer: str | None) -> None:
    """Make an operator of Python one on ``Lanes``, and on one and a number: an instruction for floating elements, and one for integers."""

    class Typing(templates.AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            found = common(*args) if any(isinstance(kind, Lanes) for kind in args) else None
            return None if found is None else templates.signature(found, *args)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, y = alike(builder, sig.args, args)
        instruction = integer if isinstance(x.type.element, ir.IntType) else floating
        assert instruction is not None
        return getattr(builder, instruction)(x, y)

    infer: Callable[..., Any] = templates.infer_global
    infer(function)(Typing)
    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(function, *kinds)(lower)


_define(operator.add, "fadd", "add")
_define(operator.sub, "fsub", "sub")
_define(operator.mul, "fmul", "mul")
_define(operator.truediv, "fdiv", None)
_define(operator.or_, "or_", "or_")
