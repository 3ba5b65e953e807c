"""Sums over ranks in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.ops._tensors import is_abstract

# So many elements of every term stay in the cache until all are added.
_CHUNK = 1 << 16


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor) -> None:
    if out.dim() == 1 and out.numel() > _CHUNK and not is_abstract(out):
        for parts in zip(out.split(_CHUNK), *(term.split(_CHUNK) for term in terms), strict=True):
            sum_in_rank_order(parts[1:], parts[0])
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
        # ``out`` holds the partial sums, and may be the memory of a later term.
        if others and not is_abstract(out):
            others = [term.clone() if term.is_set_to(out) else term for term in others]
        torch.add(first, second, out=out)
        for term in others:
            out += term
