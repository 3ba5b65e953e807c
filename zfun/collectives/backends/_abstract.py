"""A group of any size in which nothing moves, for planning.

[Note: boards]
Nothing moves in an abstract group, and almost no program asks what the other ranks have sent: all
ranks have tensors of the same shapes. The stages of a pipeline have not, so a rank tells the next
one the shapes of its messages (:func:`zfun.collectives.start_json`). Abstract ranks leave these on
a :class:`ShapeBoard`. A rank that reads what nobody has left yet ends with :class:`NotLeftYet`,
which names the rank that leaves it: whoever runs the ranks runs that one first, and then this one
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import Collective, check_collective
from zfun.collectives._work import Work
from zfun.errors import OptionError
from zfun.options import integer, takes


class NotLeftYet(Exception):
    """A rank needs what another one has not left on a board yet.

    Attributes:
        rank: the other one, by its global rank.
        key: of the value.
    """

    def __init__(self, rank: int, key: tuple[Any, ...]) -> None:
        super().__init__(f"rank {rank} has not run yet")
        self.rank = rank
        self.key = key


class ShapeBoard:
    """Values that ranks of an abstract group leave for each other; see [Note: boards].

    Attributes:
        values: by the global rank that has left them, and a key.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[int, tuple[Any, ...]], Any] = {}

    def find(self, rank: int, key: tuple[Any, ...]) -> Any:
        """Return the value that a rank has left, or ``None``."""
        return self.values.get((rank, key))

    def read(self, rank: int, key: tuple[Any, ...]) -> Any:
        """Return the value that a rank has left.

        Raises:
            NotLeftYet: there is none.
        """
        found = self.find(rank, key)
        if found is None:
            raise NotLeftYet(rank, key)
        return found

    def lets_go_on(self, missing: NotLeftYet | None) -> bool:
        """Whether a rank that ended so can go on now; a rank that has not run yet can."""
        return missing is None or self.find(missing.rank, missing.key) is not None


@final
class _AbstractGroup(Group):
    """One rank of a group without other ranks: results have the right size, dtype and device."""

    __slots__ = ("board", "global_ranks", "rank", "size")

    def __init__(self, rank: int, numbers: Sequence[int], board: ShapeBoard | None) -> None:
        self.rank = rank
        self.size = len(numbers)
        self.global_ranks = numbers
        self.board = board

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if out is None:
            out = x.new_empty(call.op.output_numel(x.numel(), self.size))
        return Work.done(out)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        part = own_part(self, parts)
        numbers = [self.global_ranks[rank] for rank in part]
        return _AbstractGroup(part.index(self.rank), numbers, self.board)

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
    return _AbstractGroup(int(rank), range(int(size)), None)


def group_with_board(size: int, rank: int, board: ShapeBoard) -> Group:
    """Return an abstract group whose ranks leave values for each other."""
    return _AbstractGroup(rank, range(size), board)


def is_abstract_group(group: Group) -> bool:
    """Whether a group has one rank alone, whose collectives are complete at once."""
    return isinstance(group, _AbstractGroup)
