"""A group of any size in which nothing moves, for planning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import Collective, check_collective
from zfun.collectives._work import Work
from zfun.errors import OptionError
from zfun.options import integer, takes


@final
class _AbstractGroup(Group):
    """One rank of a group without other ranks: results have the right size, dtype and device."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if out is None:
            out = x.detach().new_empty(call.op.output_numel(x.numel(), self.size))
        return Work.done(out)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        part = own_part(self, parts)
        return _AbstractGroup(part.index(self.rank), len(part))

    def __repr__(self) -> str:
        return f"abstract_group({self.size}, rank={self.rank})"


@takes(size=integer(1), rank=integer(0))
def abstract_group(size: int, rank: int = 0) -> Group:
    """Return one rank of a group of any size, in which no data moves.

    Args:
        size: the number of ranks that the group pretends to have.
        rank: the rank of this process in the pretended group.

    Returns:
        A group whose collectives return empty tensors of the right size on the device of their
        input (fake and meta tensors included).

    Raises:
        OptionError: no such rank.

    Example:
        >>> import torch
        >>> from zfun.collectives import gather_values
        >>> gather_values(torch.empty(3, device="meta"), abstract_group(4096), "params").shape
        torch.Size([4096, 3])
    """
    if rank >= size:
        raise OptionError(
            f"abstract_group() needs 0 <= rank < size; got rank {rank}, size {size}; ranks count "
            "from 0"
        )
    # Integers of numpy would stay in layouts, which are cached for all groups of that size.
    return _AbstractGroup(int(rank), int(size))
