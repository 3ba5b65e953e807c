"""One integer that stands for all bits of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.ops._tensors import is_abstract

# Bytes that are hashed at a time: they stay in the cache.
_CHUNK_BYTES = 1 << 18


def fingerprint(x: Tensor, dtype: torch.dtype | None = None) -> int:
    """Reduce a tensor to one integer that differs, in all likelihood, when any bit does.

    It is meant to find accidents (ranks that start from different values), not adversaries. It runs
    where the tensor lives.

    Args:
        x: any tensor.
        dtype: the dtype to which the elements of a floating tensor are rounded first.

    Returns:
        A non-negative integer below 2**63; 0 for a tensor without numbers.

    Example:
        >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3))
        True
        >>> fingerprint(torch.tensor(0.0)) == fingerprint(torch.tensor(-0.0))
        False
    """
    if is_abstract(x):
        return 0
    raw = x.detach().resolve_conj().resolve_neg()
    if not raw.is_contiguous() or raw.numel() == 1:
        # A tensor of one element counts as contiguous whatever its stride.
        raw = raw.clone(memory_format=torch.contiguous_format)
    raw = (torch.view_as_real(raw) if raw.is_complex() else raw).reshape(-1)
    rounded = dtype if dtype is not None and x.is_floating_point() else raw.dtype
    state = x.numel() * 0x9E3779B97F4A7C15 + 1
    # Piece by piece, so that no second copy of a large tensor exists.
    for piece in raw.split(max(1, _CHUNK_BYTES // rounded.itemsize)) if raw.numel() else ():
        chunk = piece.to(rounded).view(torch.uint8)
        tail = -chunk.numel() % 8
        words = (torch.cat([chunk, chunk.new_zeros(tail)]) if tail else chunk.clone()).view(
            torch.int64
        )
        places = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=x.device)
        # Two sums with wrap-around: of the words, and of the words times their places. The high
        # bits are folded into the low ones, because a product carries bits only upwards.
        mixed = (words ^ (words >> 29)) * places
        first, second = words.sum().item(), (mixed ^ (mixed >> 31)).sum().item()
        state = ((state ^ int(first)) * 0xBF58476D1CE4E5B9 + int(second)) & ((1 << 64) - 1)
        state ^= state >> 27
    return state & ((1 << 63) - 1)
