"""The one sum over ranks, so that every kind of group adds in the same order and rounds in the same places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["sum_in_rank_order", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are added: float32 for floating types of fewer than 32 bits, else the same.

    Example:
        >>> wide(torch.bfloat16), wide(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Add tensors as ``((x0 + x1) + x2) + ...``, so that a sum over ranks has the same bits wherever it is taken.

    Floating types of fewer than 32 bits are added in float32 and rounded once, at the end.

    Args:
        terms: one tensor of the same shape and dtype per rank, in rank order; at least one.
        out: where the sum goes. It may be the first term or the second.

    Returns:
        The sum, in the dtype of the terms; ``out`` if it was given, else a fresh tensor.

    Example:
        >>> sum_in_rank_order([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
        tensor([11., 22.])
    """
    first, *rest = terms
    out = torch.empty_like(first) if out is None else out
    if not rest:
        return out.copy_(first)
    if first.is_floating_point() and first.dtype.itemsize < 4:
        total = first.float()
        for term in rest:
            total += term.float() if term.dtype.itemsize < 2 else term
        return out.copy_(total)
    torch.add(first, rest[0], out=out)
    for term in rest[1:]:
        out += term
    return out
