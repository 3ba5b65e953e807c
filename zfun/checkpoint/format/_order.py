"""The order in which the elements of a leaf are stored.

[Note: stored order]
A leaf is stored in row-major order, or, where ranks of model axes held parts of it, part after
part: first the part of rank 0 in row-major order, then that of rank 1. So each rank writes ranges
of its own part, whatever the dimension of the cut, and a run that cuts the leaf in the same way
reads ranges again. Another run reads the leaf whole, and takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.placement import Cut


class StoredCut(NamedTuple):
    """One cut of a leaf; the cuts after it cut its parts.

    Attributes:
        dim: the dimension.
        size: the number of parts.
        parts: of a packed leaf, see :class:`zfun.placement.Cut`.
    """

    dim: int
    size: int
    parts: tuple[int, ...] = ()


def simplified(cuts: Sequence[StoredCut]) -> tuple[StoredCut, ...]:
    """Leave out cuts that change no order: into one part, or all along the first dimension.

    Example:
        >>> simplified([StoredCut(0, 2), StoredCut(0, 3)]), simplified([StoredCut(1, 1)])
        ((), ())
    """
    found = tuple(cut for cut in cuts if cut.size > 1)
    return () if all(cut.dim == 0 and not cut.parts for cut in found) else found


def to_stored(leaf: Tensor, cuts: Sequence[StoredCut]) -> Tensor:
    """Return the elements of a real leaf as a vector in stored order.

    Example:
        >>> to_stored(torch.arange(4).view(2, 2), [StoredCut(1, 2)])
        tensor([0, 2, 1, 3])
    """
    found = [leaf]
    for dim, size, parts in cuts:
        cut = Cut(dim, parts)
        found = [cut.piece(part, rank, size) for part in found for rank in range(size)]
    return torch.cat([part.reshape(-1) for part in found])


def from_stored(x: Tensor, shape: Sequence[int], cuts: Sequence[StoredCut]) -> Tensor:
    """Return a real leaf of a shape from its elements in stored order.

    Example:
        >>> from_stored(torch.tensor([0, 2, 1, 3]), (2, 2), [StoredCut(1, 2)])
        tensor([[0, 1],
                [2, 3]])
    """
    if not x.numel():
        return x.view(*shape)
    local = [*shape]
    for cut in cuts:
        local[cut.dim] //= cut.size
    found = [*x.view(math.prod(cut.size for cut in cuts), *local).unbind(0)]
    for dim, size, parts in reversed(cuts):
        cut = Cut(dim, parts)
        found = [cut.whole(found[at : at + size]) for at in range(0, len(found), size)]
    return found[0]
