"""Leaves to a flat buffer and back, and what is read off a buffer in the same breath."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A chunk of this many elements stays in the cache while it is widened to float64.
_CHUNK = 1 << 18


def ravel(
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    numel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scale: float = 1.0,
) -> Tensor:
    """Copy tensors into one new zero-padded buffer.

    Args:
        tensors: what to copy, of any shape; ``None`` leaves its place zero.
        offsets: where each begins, in elements of the buffer.
        numel: length of the buffer, in elements.
        dtype: dtype of the buffer; tensors are cast to it. A complex tensor is written as pairs of real numbers.
        device: where the buffer lives.
        scale: factor applied to every element after the cast.

    Returns:
        The 1-D buffer; what no tensor covers is zero.

    Example:
        >>> ravel([torch.ones(2), None, torch.ones(1)], [0, 2, 4], 6, dtype=torch.float32, device=torch.device("cpu"), scale=0.5)
        tensor([0.5000, 0.5000, 0.0000, 0.0000, 0.5000, 0.0000])
    """
    out = torch.zeros(numel, dtype=dtype, device=device)
    targets, sources = [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        source = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        targets.append(out[offset : offset + source.numel()].view(source.shape))
        sources.append(source)
    if sources:
        torch._foreach_copy_(targets, sources)
    if scale != 1.0:
        out.mul_(scale)
    return out


def unravel(buffer: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """View a piece of a buffer as a tensor of some shape: zero-copy, and differentiable.

    Args:
        buffer: 1-D.
        offset: where the piece begins, in elements of the buffer.
        shape: shape of the result.
        dtype: dtype of the result: that of the buffer, or the complex one over it.

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


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of a real tensor in float64, in an order that depends on its length alone.

    Args:
        x: 1-D, floating.

    Returns:
        A 0-dim float64 tensor.

    Example:
        >>> sum_of_squares(torch.tensor([3.0, 4.0]))
        tensor(25., dtype=torch.float64)
    """
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.split(_CHUNK) if x.numel() else ():
        wide = chunk.double()
        total = total + torch.dot(wide, wide)
    return total


def fingerprint(x: Tensor) -> int:
    """Reduce the bits of a tensor to one integer that differs, in all likelihood, when any bit does.

    It is meant to find accidents (ranks that start from different values), not adversaries. It runs where the tensor lives.

    Args:
        x: any tensor.

    Returns:
        A non-negative integer below 2**63.

    Example:
        >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3)), fingerprint(torch.tensor(0.0)) == fingerprint(torch.tensor(-0.0))
        (True, False)
    """
    raw = x.detach().contiguous().reshape(-1)
    raw = torch.view_as_real(raw.resolve_conj()).reshape(-1) if raw.is_complex() else raw
    data = raw.view(torch.uint8)
    state = x.numel() * 0x9E3779B97F4A7C15 + 1
    for chunk in data.split(8 * _CHUNK) if data.numel() else ():
        tail = -chunk.numel() % 8
        words = (torch.cat([chunk, chunk.new_zeros(tail)]) if tail else chunk.clone()).view(torch.int64)
        places = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=x.device)
        # Two sums with wrap-around: the plain one and one that knows the places; the high bits are folded down so that they count.
        mixed = (words ^ (words >> 29)) * places
        first, second = words.sum().item(), (mixed ^ (mixed >> 31)).sum().item()
        state = ((state ^ int(first)) * 0xBF58476D1CE4E5B9 + int(second)) & ((1 << 64) - 1)
        state ^= state >> 27
    return state & ((1 << 63) - 1)
