"""The one sum over ranks, so that every kind of group adds in the same order and rounds in the same places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import wide

__all__ = ["sum_in_rank_order"]

# Fewer elements are not worth the way to a compiled kernel.
_FEW = 1 << 13

# So many elements of every term stay in the cache until all are added.
_CHUNK = 1 << 16


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Add tensors as ``((x0 + x1) + x2) + ...``, so that a sum over ranks has the same bits wherever it is taken.

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
        _add_compiled(terms, out)
    else:
        _add_plain(terms, out)
    return out


def _is_compiled(terms: Sequence[Tensor], out: Tensor) -> bool:
    if out.numel() < _FEW or not _jit.compiled() or not _jit.is_plain(out, *terms):
        return False
    # One term is copied: to go past the caches is all that is gained, and what is rounded may lose the bits of a NaN.
    if len(terms) < 2 and not (_jit.is_large(out) and wide(out.dtype) is out.dtype):
        return False
    # Of what autograd records, torch itself makes the sum.
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (out, *terms))) and {x.dtype for x in terms} == {out.dtype}


def _add_compiled(terms: Sequence[Tensor], out: Tensor) -> None:
    from zfun.ops import _sums_cpu

    array, add_up = _jit.as_array(out).reshape(-1), _jit.telling(_sums_cpu.add_up)
    addresses = np.fromiter((term.data_ptr() for term in terms), np.int64, len(terms))
    one = _jit.number(wide(out.dtype))(1.0)
    past = _jit.is_large(out) and out.data_ptr() not in addresses
    _jit.in_parts(array.size, lambda begin, end: add_up(addresses, array, begin, end, one, past))
    torch.autograd.graph.increment_version(out)


def _add_plain(terms: Sequence[Tensor], out: Tensor) -> None:
    if out.dim() == 1 and out.numel() > _CHUNK and not _jit.is_abstract(out):
        for parts in zip(out.split(_CHUNK), *(term.split(_CHUNK) for term in terms), strict=True):
            _add_plain(parts[1:], parts[0])
        return
    first, *rest = terms
    if not rest:
        out.copy_(first)
    elif first.is_floating_point() and first.dtype.itemsize < 4:
        total = first.float()
        for term in rest:
            total += term.float() if term.dtype.itemsize < 2 else term
        out.copy_(total)
    else:
        second, *others = rest
        # The sum starts where it goes, and would overwrite another term before its turn.
        if others and not _jit.is_abstract(out):
            others = [term.clone() if term.is_set_to(out) else term for term in others]
        torch.add(first, second, out=out)
        for term in others:
            out += term
