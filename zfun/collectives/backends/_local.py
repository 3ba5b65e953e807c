"""A group of one rank: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import Collective, check_collective
from zfun.collectives._work import Work


@final
class _SingleGroup(Group):
    """One rank.

    The result is ``out`` or else a copy, because results in larger groups never share memory with
    the input either.
    """

    __slots__ = ("rank", "size")

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, 1)
        x = x.detach()
        if out is None:
            return Work.done(x.clone())
        if not x.is_meta and not out.is_set_to(x):
            out.detach().copy_(x)
        return Work.done(out)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        own_part(self, parts)
        return _SingleGroup()

    def __repr__(self) -> str:
        return "single_group()"


def single_group() -> Group:
    """Return the group of one rank, in which every collective is the identity.

    Returns:
        A group of size 1.

    Example:
        >>> import torch
        >>> from zfun.collectives import gather_values
        >>> gather_values(torch.tensor([3]), single_group(), "answer")
        tensor([[3]])
    """
    return _SingleGroup()
