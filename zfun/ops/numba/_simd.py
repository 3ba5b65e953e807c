"""Three operations that Numba has no name for, as LLVM's own; the rest of a kernel is plain loops.

==============  ================================================================================
``fma``         Adam and LAMB have the bits of torch's fused kernels, which round once there.
``pointer``     ``ravel``, ``unravel`` and ``add_up`` reach many tensors by their addresses.
``add_unit``    The norm: LLVM makes no vector code of the sums over 32 elements by itself.
==============  ================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

# Places in loops over a part of a buffer are unsigned: none counts from the end, so LLVM makes
# vector code.
place = np.uint64

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def _fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """``fma(x, y, z)``: ``x y + z``, rounded once."""
    return x(x, x, x), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """``pointer(address, like)``: an address as a pointer to elements of the type of an array."""
    target = types.CPointer(like.dtype)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(address, like), emit


@intrinsic
def _add_unit(typing: Any, x: Any, at: Any, sums: Any, to: Any) -> Any:
    """``add_unit(x, at, sums, to)``: the squares of 32 elements, added to eight float64 sums.

    The k-th sum is ``(x[k]² + x[k + 16]²) + (x[k + 8]² + x[k + 24]²)``.
    """
    numbers = ir.VectorType(ir.DoubleType(), 8)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = ir.VectorType(context.get_data_type(x.dtype), 8)
        words, floats = ir.VectorType(_I32, 8), ir.VectorType(ir.FloatType(), 8)

        def squares(first: int) -> Any:
            place = builder.add(args[1], _I64(first))
            address = builder.bitcast(
                _address(context, builder, x, args[0], place), source.as_pointer()
            )
            value = builder.load(address, align=x.dtype.bitwidth // 8)
            if x.dtype == types.uint16:  # bfloat16 has the upper half of the bits of float32
                half = builder.zext(value, words)
                value = builder.bitcast(builder.shl(half, words([16] * 8)), floats)
            value = value if x.dtype == types.float64 else builder.fpext(value, numbers)
            return builder.fmul(value, value)

        a, b, c, d = (squares(first) for first in (0, 8, 16, 24))
        target = _address(context, builder, sums, args[2], args[3])
        total = builder.fadd(builder.fadd(a, c), builder.fadd(b, d))
        builder.store(total, builder.bitcast(target, numbers.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.none(x, at, sums, to), emit


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(arrayobj.make_array(kind)(context, builder, array).data, [at])


# All but the first parameter is an argument of a call in compiled code.
fma: Any = _fma
pointer: Any = _pointer
add_unit: Any = _add_unit
