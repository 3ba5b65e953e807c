"""Leaves to a flat buffer and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.ops._tensors import wide

# Below this a copy costs less than its dispatch.
_SMALL = 1 << 12

# A buffer of fewer elements is zeroed as a whole rather than gap by gap.
_FEW = 1 << 18


def ravel_into(
    out: Tensor,
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    scale: float | Tensor,
) -> None:
    if isinstance(scale, Tensor):
        scale = scale.to(wide(out.dtype))
    # A number on a device is not read, so it may be any.
    scaled = isinstance(scale, Tensor) or scale != 1.0
    keeps_zeros = not isinstance(scale, Tensor) and 0.0 < scale < math.inf
    sources: list[Tensor] = []
    lengths: list[int] = []  # of the gaps and of the copies, by turns
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
    targets = [
        piece.view(source.shape) for piece, source in zip(pieces[1::2], sources, strict=True)
    ]
    if len(gaps) > _SMALL // 64 and out.numel() < _FEW:
        out.zero_()
    elif gaps:
        torch._foreach_zero_(gaps)
    # A product that must be rounded to a half type once, after the factor, is made tensor by
    # tensor.
    one_by_one = scaled and out.dtype != wide(out.dtype)
    small = [i for i, source in enumerate(sources) if source.numel() < _SMALL and not one_by_one]
    large = [i for i, source in enumerate(sources) if source.numel() >= _SMALL or one_by_one]
    for i in large:
        _copy_scaled(targets[i], sources[i], scale if scaled else None)
    if small:
        few = [targets[i] for i in small]
        torch._foreach_copy_(few, [sources[i] for i in small])
        # The zeros in between must stay: not negative, not NaN.
        if scaled and (large or not keeps_zeros):
            torch._foreach_mul_(few, scale)
        elif scaled:
            out.mul_(scale)


def _copy_scaled(target: Tensor, source: Tensor, scale: float | Tensor | None) -> None:
    """Copy a tensor as :func:`ravel_into` says."""
    if scale is None:
        target.copy_(source)
    elif source.dtype == wide(target.dtype):
        torch.mul(source, scale, out=target)
    elif target.dtype == wide(target.dtype):
        target.copy_(source).mul_(scale)
    else:
        target.copy_(source.to(wide(target.dtype)).mul_(scale))


def unravel(buffer: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    numel = 1
    for dim in shape:
        numel *= dim
    if dtype.is_complex:
        return torch.view_as_complex(buffer.narrow(0, offset, 2 * numel).view(*shape, 2))
    return buffer.narrow(0, offset, numel).view(tuple(shape))
