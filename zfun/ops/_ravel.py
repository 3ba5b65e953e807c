"""Leaves to a flat buffer and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import triton_for
from zfun.ops._table import AddressTable
from zfun.ops._tensors import compiled, is_abstract, is_plain


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
    scale: float | Tensor = 1.0,
    table: AddressTable | None = None,
    adds: bool = False,
) -> None:
    """Copy tensors into a buffer in one pass: cast, scale, zeros in between.

    An element is cast to the dtype of the buffer, or to float32 where that has fewer bits,
    multiplied, and rounded once.

    Args:
        out: the buffer, 1-D, contiguous; all of it is written.
        tensors: the tensors to copy, of any shapes and dtypes; ``None`` leaves a place zero. A
            complex tensor is written as pairs of reals.
        offsets: where each begins, in elements of the buffer.
        scale: factor applied to every element; a number, or a 0-dim tensor on the buffer's device,
            so that the host need not wait for it.
        table: where addresses are kept between the calls for one bucket.
        adds: add to the buffer, with the bits of a second buffer that is added to this one.

    Raises:
        RuntimeError: autograd would have to record the copy.

    Example:
        >>> out = torch.empty(4, dtype=torch.bfloat16)
        >>> ravel_into(out, [torch.tensor([3.0, -4.0])], [1], scale=2.0)
        >>> out
        tensor([ 0.,  6., -8.,  0.], dtype=torch.bfloat16)
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
    if is_abstract(out):
        return
    if taken:
        from zfun.ops import numba

        numba.ravel_into(out, table, float(scale), adds=adds)
        return
    with torch.no_grad():
        target = torch.empty_like(out) if adds else out
        triton = triton_for(target)
        if triton is None or not triton.ravel_into(target, tensors, offsets, scale):
            reference.ravel_into(target, tensors, offsets, scale)
        if adds:
            out.add_(target)


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
