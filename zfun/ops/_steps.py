"""The way from a step on tensors to its compiled kernel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import wide
from zfun.ops._norm import exact_row, new_row
from zfun.ops._twins import triton_for

__all__ = ["lamb_apply", "lamb_moments", "step"]

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
        Whether there is a kernel for such tensors, or nothing to do because they are abstract; if not, nothing was done. Which twin runs
        does not depend on the gradient.
    """
    triton = triton_for(param)
    if triton is not None:
        return bool(triton.step(rule, param, grad, moments, change, out, scale, constants))
    if not _takes(param, *moments, *(() if change is None else (change,))):
        return _jit.is_abstract(param)
    grad = _readable(grad, wide(param.dtype))
    from zfun.ops import _steps_cpu

    kernel = _jit.telling(getattr(_steps_cpu, rule))
    number = _jit.number(wide(param.dtype))
    copy = out if out is not None and _jit.is_plain(out) else None
    arrays = [_jit.as_array(x) for x in (param, grad, *moments)]
    arrays.append(np.zeros(0, _jit.number(param.dtype)) if change is None else _jit.as_array(change))
    arrays.append(_NO_COPY if copy is None else _jit.as_array(copy))
    factor = number(float(scale))
    numbers = tuple(number(x) for x in _steps_cpu.CONSTANTS[rule](**constants))
    _jit.in_parts(param.numel(), lambda begin, end: kernel(*arrays, begin, end, factor, numbers))
    written = [*moments, *([param] if change is None else [change]), *([] if copy is None else [copy])]
    torch.autograd.graph.increment_version(written)
    if out is not None and copy is None:
        out.copy_(param)
    return True


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | Tensor,
    constants: Mapping[str, float],
) -> list[Tensor] | None:
    """Take the first half of a step of LAMB with its compiled kernel.

    Returns:
        The squares of the parameters of each segment and then those of their directions, as ``squares_in_bins`` returns them; None where
        there is no kernel for such tensors, and nothing was done.
    """
    # Directions are computed again from what is kept of the moments: of half types that is not what they were computed from.
    if triton_for(param) is not None or param.dtype != wide(param.dtype) or not _takes(param, mu, nu):
        return None
    from zfun.ops import _steps_cpu

    kernel, number = _jit.telling(_steps_cpu.lamb_moments), _jit.number(param.dtype)
    arrays = [_jit.as_array(x) for x in (param, _readable(grad, param.dtype), mu, nu)]
    factor, numbers = number(float(scale)), tuple(number(x) for x in _steps_cpu.CONSTANTS["lamb"](**constants))
    # What is in no segment has moments too: every second piece is a segment, and the others lie between.
    places = np.array([0, *itertools.chain.from_iterable(segments), param.numel()], np.int64)
    pieces = np.stack([places[:-1], places[1:]], 1)
    found: list[Any] = []

    def work(begin: int, end: int) -> None:
        rows = np.stack([new_row()] * 2 * len(pieces)).reshape(len(pieces), 2, -1)
        kernel(*arrays, begin, end, factor, numbers, pieces, rows)
        found.append(rows[1::2])

    _jit.in_parts(param.numel(), work)
    torch.autograd.graph.increment_version([mu, nu])
    return [exact_row([rows[k, which] for rows in found]) for which in range(2) for k in range(len(segments))]


def lamb_apply(
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    change: Tensor | None,
    out: Tensor | None,
    segments: Sequence[tuple[int, int]],
    factors: Sequence[float],
    constants: Mapping[str, float],
) -> None:
    """Take the second half of a step of LAMB, each segment times its factor; :func:`lamb_moments` has taken the first."""
    from zfun.ops import _steps_cpu

    kernel, number = _jit.telling(_steps_cpu.lamb_apply), _jit.number(param.dtype)
    copy = out if out is not None and _jit.is_plain(out) else None
    to = change if change is None or _takes(change, param) else torch.empty_like(param)
    arrays = [_jit.as_array(x) for x in (param, mu, nu)]
    arrays.append(np.zeros(0, number) if to is None else _jit.as_array(to))
    arrays.append(_NO_COPY if copy is None else _jit.as_array(copy))
    numbers = tuple(number(x) for x in _steps_cpu.CONSTANTS["lamb"](**constants))
    end = 0
    for start, stop in [*segments, (param.numel(), param.numel())]:
        if to is not None:
            to[end:start].zero_()
        elif copy is not None:
            copy[end:start].copy_(param[end:start])
        end = stop
    pieces, far = np.array(segments, np.int64).reshape(-1, 2), np.array(factors, number)
    _jit.in_parts(param.numel(), lambda begin, end: kernel(*arrays, begin, end, numbers, pieces, far))
    torch.autograd.graph.increment_version([param if to is None else to])
    if change is not None and to is not change and to is not None:
        change.copy_(to)
    if out is not None and copy is None:
        out.copy_(param)


def _takes(param: Tensor, *others: Tensor) -> bool:
    return _jit.compiled() and _jit.is_plain(param, *others) and all(x.dtype == param.dtype for x in others)


def _readable(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad if _jit.is_plain(grad) else grad.to(dtype).resolve_neg().contiguous()
