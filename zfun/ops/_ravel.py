"""Leaves to a flat buffer and back, and the norm of the buffer in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import triton_for
from zfun.ops._norm import squares_in_bins
from zfun.ops._table import AddressTable
from zfun.ops._tensors import compiled, is_abstract, is_plain


class Measures(NamedTuple):
    """The norm of a buffer, and whether the buffer is finite, read while it was written.

    Attributes:
        squares: the sum of the squares of its elements, exact, as :func:`squares_in_bins` returns
            it.
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
        tensors: the tensors to copy, of any shape; ``None`` leaves a place zero.
        offsets: where each begins, in elements of the buffer.
        numel: length of the buffer, in elements.
        dtype: dtype of the buffer; tensors are cast to it. A complex tensor is written as pairs of
            real numbers.
        device: where the buffer lives.
        scale: factor applied to every element.

    Returns:
        The 1-D buffer; elements that no tensor covers are zero.

    Example:
        >>> cpu, leaves = torch.device("cpu"), [torch.ones(2), None, torch.ones(1)]
        >>> ravel(leaves, [0, 2, 4], 6, dtype=torch.float32, device=cpu, scale=0.5)
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
    """Copy tensors into a buffer in one pass: cast, scale, zeros in between, norm on request.

    An element is cast to the dtype of the buffer, or to float32 where that has fewer bits,
    multiplied, and rounded once.

    Args:
        out: the buffer, 1-D, contiguous; all of it is written.
        tensors: the tensors to copy, of any shapes and dtypes; ``None`` leaves a place zero. A
            complex tensor is written as pairs of reals.
        offsets: where each begins, in elements of the buffer.
        scale: factor applied to every element.
        measure: take the norm of the buffer, and test whether all elements are finite.
        table: where addresses are kept between the calls for one bucket.

    Returns:
        The measures, or None.

    Raises:
        RuntimeError: autograd would have to record the copy.

    Example:
        >>> from zfun.ops import total_of_bins
        >>> out = torch.empty(4, dtype=torch.bfloat16)
        >>> found = ravel_into(out, [torch.tensor([3.0, -4.0])], [1], scale=2.0, measure=True)
        >>> out
        tensor([ 0.,  6., -8.,  0.], dtype=torch.bfloat16)
        >>> total_of_bins(found.squares[None]), found.finite
        (tensor(100., dtype=torch.float64), tensor(True))
    """
    table = AddressTable(kept=False) if table is None else table
    taken = compiled() and is_plain(out) and table.point_at(tensors, offsets, out.numel())
    recorded = (
        table.needs_grad if taken else any(x is not None and x.requires_grad for x in tensors)
    )
    if torch.is_grad_enabled() and recorded:
        raise RuntimeError(
            "ravel_into() is not differentiable; got a tensor that autograd records; detach() "
            "it, or use torch.no_grad()"
        )
    if is_abstract(out) and not measure:
        return None
    with torch.no_grad():
        if taken:
            from zfun.ops import numba

            squares = numba.ravel_into(out, table, scale, measure)
            # The square of a finite float64 may overflow; only the elements tell.
            is_finite = squares is not None and not squares[-1]
        else:
            triton = triton_for(out)
            if triton is None or not triton.ravel_into(out, tensors, offsets, scale):
                reference.ravel_into(out, tensors, offsets, scale)
            squares, is_finite = squares_in_bins(out) if measure else None, False
        if squares is None:
            return None
        finite = out.new_ones((), dtype=torch.bool) if is_finite else torch.isfinite(out).all()
        return Measures(squares, finite)


def unravel_from(
    source: Tensor,
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    *,
    table: AddressTable | None = None,
) -> None:
    """Copy the pieces of a buffer into tensors, with a cast: the inverse of :func:`ravel_into`.

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
    if compiled() and is_plain(source) and table.point_at(tensors, offsets, source.numel()):
        from zfun.ops import numba

        numba.unravel_from(source, table)
        torch.autograd.graph.increment_version([x for x in tensors if x is not None])
        return
    triton = triton_for(source)
    if triton is None or not triton.unravel_from(source, tensors, offsets):
        reference.unravel_from(source, tensors, offsets)


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
    return reference.unravel(buffer, offset, shape, dtype)
