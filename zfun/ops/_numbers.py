"""Single operations that compiled kernels are made of, and that Numba has no name for.

[Note: half types]
Numba knows neither bfloat16 nor arithmetic on float16. Arrays of them travel as integers of 16 bits, bfloat16 as unsigned and float16 as
signed ones, so that the type says which of the two it is. Each operation is one or a few instructions of LLVM, written down as such in
``_emit``: with integers of Python's width instead, half the lanes of a vector register would carry zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from zfun.ops import _emit

__all__ = ["narrow", "operation", "pointer", "widen"]


def operation(define: Callable[..., tuple[Any, Callable[..., Any]]]) -> Any:
    """Make an operation that compiled code can call, of a few instructions of LLVM.

    Args:
        define: called when code is compiled that calls the operation, with the types of the arguments. It returns the type of the result,
            and a function that emits the instructions: called with LLVM's builder of code and what stands for the values of the arguments,
            it returns what stands for the result.

    Returns:
        The operation.

    Example:
        >>> from zfun.ops._jit import jit
        >>> @operation
        ... def halved(x):
        ...     return x, lambda builder, value: builder.fmul(value, value.type(0.5))
        >>> @jit
        ... def quarter(x):
        ...     return halved(halved(x))
        >>> quarter(3.0)
        0.75
    """

    def typed(compiler: Any, *kinds: Any) -> Any:
        result, emit = define(*kinds)

        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if result == types.none else value

        return result(*kinds), lower

    # What Numba reads the number of arguments off: the first one is the compiler's.
    first, arguments = inspect.Parameter("compiler", inspect.Parameter.POSITIONAL_ONLY), inspect.signature(define).parameters.values()
    functools.update_wrapper(typed, define).__signature__ = inspect.Signature([first, *arguments])  # type: ignore[attr-defined]
    return intrinsic(typed)


@operation
def pointer(address: Any, like: Any) -> Any:
    """``pointer(address, like)``: an address as a pointer to elements of the type of array ``like``."""
    target = types.CPointer(like.dtype)
    return target, lambda builder, place, _: builder.inttoptr(place, _emit.ELEMENTS[like.dtype].as_pointer())


@operation
def widen(x: Any, like: Any) -> Any:
    """``widen(x, like)``: an element of an array as a number of the type of ``like``, float32 or float64."""
    return like, lambda builder, value, _: _emit.widened(builder, value, x, like)


@operation
def narrow(x: Any, like: Any) -> Any:
    """``narrow(x, like)``: a number as an element of array ``like``, rounded to nearest, ties to even."""
    return like.dtype, lambda builder, value, _: _emit.narrowed(builder, value, x, like.dtype)
