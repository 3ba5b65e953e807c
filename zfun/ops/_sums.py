"""The one sum over ranks: every kind of group adds in the same order and rounds alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._tensors import compiled, is_plain

# Below this the call of a compiled kernel costs more than torch's sum.
_FEW = 1 << 13


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Add tensors as ``((x0 + x1) + x2) + ...``, so that all groups make the same bits.

    Floating types of fewer than 32 bits are added in float32 and rounded once, at the end.

    Args:
        terms: one tensor of the same shape and dtype per rank, in rank order; at least one.
        out: where the sum goes. It may be one of the terms.

    Returns:
        The sum, in the dtype of the terms; ``out`` if it was given, else a fresh tensor.

    Example:
        >>> sum_in_rank_order([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
        tensor([11., 22.])
    """
    out = torch.empty_like(terms[0]) if out is None else out
    if _is_compiled(terms, out):
        from zfun.ops import numba

        numba.sum_in_rank_order(terms, out)
    else:
        reference.sum_in_rank_order(terms, out)
    return out


def _is_compiled(terms: Sequence[Tensor], out: Tensor) -> bool:
    if len(terms) < 2 or out.numel() < _FEW or not compiled() or not is_plain(out, *terms):
        return False
    # Tensors that autograd records are added, or refused, by torch itself.
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (out, *terms))) and {
        x.dtype for x in terms
    } == {out.dtype}
