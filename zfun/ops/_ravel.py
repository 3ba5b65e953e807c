"""Leaves to a flat buffer and back, and what is read off the buffer in the same breath.

[Note: three of a kind]
Each kernel of this package stands here in plain torch and again compiled for the CPU, with one signature. They compute the same bits. Plain
torch is taken for tensors of other devices, for what is not plain memory (abstract tensors, views with a negation pending, tensors that
autograd records) and where ``use("reference")`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import wide
from zfun.ops._norm import exact_row, new_row, squares_in_bins
from zfun.ops._table import AddressTable
from zfun.ops._twins import triton_for

__all__ = ["Measures", "ravel", "ravel_into", "unravel", "unravel_from"]

# Below this a copy costs less than its dispatch.
_SMALL = 1 << 12

_NOTHING = np.zeros(0, np.int64)

# A buffer of fewer elements is zeroed as a whole rather than gap by gap.
_FEW = 1 << 18


class Measures(NamedTuple):
    """What was read off a buffer while it was written.

    Attributes:
        squares: the sum of the squares of its elements, exact, as :func:`squares_in_bins` returns it.
        finite: whether all of them are finite, a 0-dim bool tensor where the buffer lives.
    """

    squares: Tensor
    finite: Tensor


def ravel(
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    numel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scale: float = 1.0,
) -> Tensor:
    """Copy tensors into one new zero-padded buffer; see :func:`ravel_into`.

    Args:
        tensors: what to copy, of any shape; ``None`` leaves its place zero.
        offsets: where each begins, in elements of the buffer.
        numel: length of the buffer, in elements.
        dtype: dtype of the buffer; tensors are cast to it. A complex tensor is written as pairs of real numbers.
        device: where the buffer lives.
        scale: factor applied to every element.

    Returns:
        The 1-D buffer; what no tensor covers is zero.

    Example:
        >>> ravel([torch.ones(2), None, torch.ones(1)], [0, 2, 4], 6, dtype=torch.float32, device=torch.device("cpu"), scale=0.5)
        tensor([0.5000, 0.5000, 0.0000, 0.0000, 0.5000, 0.0000])
    """
    out = torch.empty(numel, dtype=dtype, device=device)
    ravel_into(out, tensors, offsets, scale=scale)
    return out


def ravel_into(
    out: Tensor,
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    *,
    scale: float = 1.0,
    measure: bool = False,
    table: AddressTable | None = None,
) -> Measures | None:
    """Copy tensors into a buffer in one pass: cast, scale, zeros in between, and if asked for the norm and whether all is finite.

    An element is cast to the dtype of the buffer, or to float32 where that has fewer bits, multiplied, and rounded once.

    Args:
        out: the buffer, 1-D, contiguous; all of it is written.
        tensors: what to copy, of any shapes and dtypes; ``None`` leaves its place zero. A complex tensor is written as pairs of reals.
        offsets: where each begins, in elements of the buffer.
        scale: factor applied to every element.
        measure: read the norm off what was written, and whether it is finite.
        table: where addresses are kept between the calls for one bucket.

    Returns:
        What was measured, or None.

    Raises:
        RuntimeError: autograd would have to record the copy.

    Example:
        >>> from zfun.ops import total_of_bins
        >>> out = torch.empty(4, dtype=torch.bfloat16)
        >>> found = ravel_into(out, [torch.tensor([3.0, -4.0])], [1], scale=2.0, measure=True)
        >>> out, total_of_bins(found.squares[None]), found.finite
        (tensor([ 0.,  6., -8.,  0.], dtype=torch.bfloat16), tensor(100., dtype=torch.float64), tensor(True))
    """
    table = AddressTable(kept=False) if table is None else table
    taken = _jit.compiled() and _jit.is_plain(out) and table.point_at(tensors, offsets, out.numel())
    if torch.is_grad_enabled() and (table.needs_grad if taken else any(x is not None and x.requires_grad for x in tensors)):
        raise RuntimeError("ravel_into() is not differentiable; got a tensor that autograd records; detach() it, or use torch.no_grad()")
    with torch.no_grad():
        if taken:
            return _ravel_compiled(out, table, scale, measure)
        triton = triton_for(out)
        if triton is None or not triton.ravel_into(out, tensors, offsets, scale):
            _ravel_plain(out, tensors, offsets, scale)
        return Measures(squares_in_bins(out), torch.isfinite(out).all()) if measure else None


def unravel_from(source: Tensor, tensors: Sequence[Tensor | None], offsets: Sequence[int], *, table: AddressTable | None = None) -> None:
    """Copy the pieces of a buffer into tensors, cast to their dtypes: the inverse of :func:`ravel_into`.

    Args:
        source: the buffer, 1-D, contiguous.
        tensors: where to copy, of any shapes and dtypes; ``None`` for a piece that nobody wants.
        offsets: where the piece of each begins, in elements of the buffer.
        table: where addresses are kept between the calls for one bucket.

    Example:
        >>> w = torch.empty(2, 2, dtype=torch.float64)
        >>> unravel_from(torch.arange(6.0), [w], [1])
        >>> w
        tensor([[1., 2.],
                [3., 4.]], dtype=torch.float64)
    """
    table = AddressTable(kept=False) if table is None else table
    if _jit.compiled() and _jit.is_plain(source) and table.point_at(tensors, offsets, source.numel()):
        from zfun.ops import _ravel_cpu

        array, exact, one = _jit.as_array(source), source.dtype == table.dtype, _jit.number(wide(table.dtype))(1.0)
        kernel = _jit.telling(_ravel_cpu.unravel)
        _jit.in_parts(array.size, lambda begin, end: kernel(table.pieces, table.like, array, begin, end, exact, one))
        torch.autograd.graph.increment_version([x for x in tensors if x is not None])
        return
    triton = triton_for(source)
    if triton is not None and triton.unravel_from(source, tensors, offsets):
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(unravel(source, offset, tensor.shape, tensor.dtype))


def _ravel_compiled(out: Tensor, table: AddressTable, scale: float, measure: bool) -> Measures | None:
    from zfun.ops import _ravel_cpu

    array, exact, factor = _jit.as_array(out), scale == 1.0 and out.dtype == table.dtype, _jit.number(wide(out.dtype))(scale)
    ravel, past = _jit.telling(_ravel_cpu.ravel), _jit.is_large(out)
    found: list[Any] = [new_row()]

    def work(begin: int, end: int) -> None:
        row = new_row() if measure else _NOTHING
        ravel(table.pieces, table.like, array, begin, end, factor, exact, past, row)
        found.append(row)

    _jit.in_parts(array.size, work)
    torch.autograd.graph.increment_version(out)
    if not measure:
        return None
    squares = exact_row(found)
    # The square of a finite float64 may overflow; only the elements tell.
    return Measures(squares, torch.tensor(True) if not squares[-1] else torch.isfinite(out).all())


def _ravel_plain(out: Tensor, tensors: Sequence[Tensor | None], offsets: Sequence[int], scale: float) -> None:
    sources: list[Tensor] = []
    lengths: list[int] = []  # of what is copied and of the gaps, by turns
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        source = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        sources.append(source)
        lengths += [offset - end, source.numel()]
        end = offset + source.numel()
    # One call makes all the views; each by itself would cost more than to copy a small tensor.
    pieces = out.split([*lengths, out.numel() - end])
    gaps = [gap for gap in pieces[::2] if gap.numel()]
    targets = [piece.view(source.shape) for piece, source in zip(pieces[1::2], sources, strict=True)]
    if len(gaps) > _SMALL // 64 and out.numel() < _FEW:
        out.zero_()
    elif gaps:
        torch._foreach_zero_(gaps)
    # Where a factor is rounded to the dtype of the buffer only once it was applied, each tensor is a case of its own.
    one_by_one = scale != 1.0 and out.dtype != wide(out.dtype)
    small = [i for i, source in enumerate(sources) if source.numel() < _SMALL and not one_by_one]
    large = [i for i, source in enumerate(sources) if source.numel() >= _SMALL or one_by_one]
    for i in large:
        _copy_scaled(targets[i], sources[i], scale)
    if small:
        few = [targets[i] for i in small]
        torch._foreach_copy_(few, [sources[i] for i in small])
        # The zeros in between must stay: not negative, not NaN.
        if scale != 1.0 and (large or not 0.0 < scale < math.inf):
            torch._foreach_mul_(few, scale)
        elif scale != 1.0:
            out.mul_(scale)


def _copy_scaled(target: Tensor, source: Tensor, scale: float) -> None:
    """Copy a tensor as :func:`ravel_into` says."""
    if scale == 1.0:
        target.copy_(source)
    elif source.dtype == wide(target.dtype):
        torch.mul(source, scale, out=target)
    elif target.dtype == wide(target.dtype):
        target.copy_(source).mul_(scale)
    else:
        target.copy_(source.to(wide(target.dtype)).mul_(scale))


def unravel(buffer: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """View a piece of a buffer as a tensor of some shape: zero-copy, and differentiable.

    Args:
        buffer: 1-D.
        offset: where the piece begins, in elements of the buffer.
        shape: shape of the result.
        dtype: whether the result is complex. Its precision is that of the buffer.

    Returns:
        A view of ``buffer``.

    Example:
        >>> unravel(torch.arange(6.0), 2, (2, 2), torch.float32)
        tensor([[2., 3.],
                [4., 5.]])
    """
    numel = 1
    for dim in shape:
        numel *= dim
    if dtype.is_complex:
        return torch.view_as_complex(buffer.narrow(0, offset, 2 * numel).view(*shape, 2))
    return buffer.narrow(0, offset, numel).view(tuple(shape))
