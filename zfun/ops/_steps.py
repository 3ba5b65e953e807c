"""The way from a step on tensors to its compiled kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._twins import triton_for

__all__ = ["step"]

_COMPUTED_IN = (torch.float32, torch.float64)
_NO_COPY = np.zeros(0, np.uint16)


def step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    out: Tensor | None,
    scale: float | Tensor,
    constants: Mapping[str, float],
) -> bool:
    """Take a step with the compiled kernel of a rule.

    Args:
        rule: name of the kernel in ``_steps_cpu``.
        param: parameters.
        grad: gradients.
        moments: what else the step reads and writes.
        change: where the change goes, or None.
        out: where a copy of the parameters goes, or None.
        scale: factor of the gradient.
        constants: by name, in any order.

    Returns:
        Whether there is a kernel for such tensors; if not, nothing was done. Which twin runs does not depend on the gradient.
    """
    triton = triton_for(param)
    if triton is not None:
        return bool(triton.step(rule, param, grad, moments, change, out, scale, constants))
    held = [param, *moments, *(() if change is None else (change,))]
    if not _jit.compiled() or param.dtype not in _COMPUTED_IN or not _jit.is_plain(*held) or any(x.dtype != param.dtype for x in held):
        return False
    if not _jit.is_plain(grad):
        grad = grad.to(param.dtype).resolve_neg().contiguous()
    from zfun.ops import _steps_cpu

    kernel = _jit.telling(getattr(_steps_cpu, rule))
    number = _jit.number(param.dtype)
    copy = out if out is not None and _jit.is_plain(out) else None
    arrays = [_jit.as_array(x) for x in (param, grad, *moments)]
    arrays.append(np.zeros(0, number) if change is None else _jit.as_array(change))
    arrays.append(_NO_COPY if copy is None else _jit.as_array(copy))
    factor, one = number(float(scale)), number(1.0)
    numbers = tuple(number(x) for x in _steps_cpu.CONSTANTS[rule](**constants))
    _jit.in_parts(param.numel(), lambda begin, end: kernel(*arrays, begin, end, factor, one, numbers))
    written = [*moments, *([param] if change is None else [change]), *([] if copy is None else [copy])]
    torch.autograd.graph.increment_version(written)
    if out is not None and copy is None:
        out.copy_(param)
    return True
