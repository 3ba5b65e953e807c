"""How kernels see a tensor, and whether compiled kernels may run now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

_Args = ParamSpec("_Args")
_Out = TypeVar("_Out")

# How arrays of each dtype travel to compiled CPU kernels; see [Note: half types].
_CARRIERS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
}
_NUMBERS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}

_PLAIN_TYPES = {Tensor, torch.nn.Parameter}

# The choices of `use`, for the whole process: ranks may be threads, and so are autograd's workers.
# The last one counts. Threads may end theirs in another order.
_chosen: dict[object, str] = {}


@contextlib.contextmanager
def use(kernels: str) -> Iterator[None]:
    """Choose the kernels of this process, for debugging: the plain torch ones give the same bits.

    Args:
        kernels: ``"reference"`` for plain torch everywhere, ``"compiled"`` for compiled kernels
            where there are any, as without this.

    Raises:
        ValueError: the name is neither of the two.

    Example:
        >>> from zfun import ops
        >>> with use("reference"):
        ...     ops.ravel([torch.ones(2)], [0], 3, dtype=torch.float32, device=torch.device("cpu"))
        tensor([1., 1., 0.])
    """
    if kernels not in ("reference", "compiled"):
        raise ValueError(
            f'kernels are "reference" or "compiled"; got {kernels!r}; pass one of the two'
        )
    mine = object()
    _chosen[mine] = kernels
    try:
        yield
    finally:
        del _chosen[mine]


def is_abstract(x: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers: ``meta`` or fake."""
    if type(x) in _PLAIN_TYPES:
        return x.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return x.is_meta or isinstance(x, FakeTensor)


def apart(x: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage has nothing else.

    Libraries that save a tensor of a buffer would save the buffer, or refuse it.
    """
    if is_abstract(x):
        return x
    return torch._C._from_dlpack(torch._C._to_dlpack(x.detach()))


def compiled() -> bool:
    """Whether compiled kernels may run now.

    They may not where :func:`use` switched them off, and not while a compiler, a dispatch mode or
    a transform of torch.func must see torch's own operations.
    """
    return (
        not torch.compiler.is_compiling()
        and [*_chosen.values()][-1:] != ["reference"]
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def uncompiled(fn: Callable[_Args, _Out]) -> Callable[_Args, _Out]:
    """Let a function that starts collectives or writes state run as it is under ``torch.compile``.

    As ``torch.compiler.disable()``, whose import takes a second. Compiled functions that ``fn``
    calls stay compiled. ``fullgraph=True`` around a call is an error of the compiler with the
    reason below.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(fn.__code__, skip)
    marks = {
        "_torchdynamo_disable": True,
        "_torchdynamo_disable_recursive": True,
        "_torchdynamo_disable_msg": (
            f"{fn.__qualname__}() of zfun runs uncompiled; compile the blocks of the loss, and "
            "leave out fullgraph=True around the step"
        ),
    }
    fn.__dict__.update(marks)
    return fn


def is_capturing() -> bool:
    """Whether this thread captures a CUDA graph, which replays kernels and nothing of Python."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_plain(*tensors: Tensor) -> bool:
    """Whether all tensors lie in CPU memory as their dtypes, shapes and addresses say."""
    # A loop, because a generator costs a call for each tensor.
    for x in tensors:
        if not (
            type(x) in _PLAIN_TYPES
            and x.is_cpu
            and x.dtype in _CARRIERS
            and x.layout is torch.strided
            and x.is_contiguous()
            and not x.is_neg()
            and not x._is_zerotensor()
        ):
            return False
    return True


def as_array(x: Tensor) -> Any:
    """View a plain tensor as the array that compiled CPU kernels take."""
    carrier = _CARRIERS[x.dtype]
    x = x.detach() if x.requires_grad else x
    return x.numpy() if carrier is x.dtype else x.view(carrier).numpy()


def number(dtype: torch.dtype) -> Any:
    """Return the type of an element in the arrays of :func:`as_array`."""
    return _NUMBERS[dtype]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers are added: float32 for halves, else the dtype itself.

    Example:
        >>> wide(torch.bfloat16), wide(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
