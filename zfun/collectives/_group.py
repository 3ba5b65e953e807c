"""What a group of ranks is: two numbers and one method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from zfun.collectives._calls import AllGather, AllToAll, Call, Lane
from zfun.collectives._pending import Pending
from zfun.errors import OptionError

__all__ = ["Group", "Wrapper", "own_part"]


@runtime_checkable
class Group(Protocol):
    """A number of ranks that run the same program and start the same collectives in the same order (in each lane).

    Everything is done by :meth:`start`; the other methods are written with it. One thread of a rank uses its group.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
    """

    rank: int
    size: int

    @property
    def debug(self) -> bool:
        """Whether what may be a mistake is looked for, at a price."""
        return False

    @property
    def mesh(self) -> Group:
        """The mesh that this group is an axis of (see :func:`zfun.split`), else the group itself."""
        return self

    @property
    def axis(self) -> str:
        """The name of this axis of a mesh; ``""`` for a group that is none."""
        return ""

    @property
    def numbers(self) -> Sequence[int]:
        """What messages call each rank. In a part of a group that was split these are the ranks of that group."""
        return range(self.size)

    @property
    def lends(self) -> bool:
        """Whether what is borrowed (``Call.borrow``) may be memory of other ranks; if not, a result is best put in place of what is old."""
        return False

    def shows(self, x: Tensor) -> bool:
        """Whether a borrowed all-gather of ``x`` shows it where it lies, and so takes no memory, however long it is kept."""
        return False

    @abstractmethod
    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        """Start a collective.

        Args:
            call: what is done.
            x: contiguous 1-D tensor. It must not be written before the result has been waited for.
            out: contiguous 1-D tensor that receives the result. For an all-reduce and a broadcast it may be ``x``; for an all-gather
                ``x`` may be this rank's slice of it, and then the slice is not copied. Otherwise they must not overlap.

        Returns:
            The pending result: ``out`` if it was given, else a fresh tensor that shares memory with nobody, unless ``call`` says that it is
            borrowed.

        Raises:
            OptionError: the tensors do not fit the call.
            PeerLost: another rank raised, died or did not answer (here or in ``wait``).
            CollectiveMismatch: the ranks started different collectives (here or in ``wait``).
        """
        ...

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """Gather a small tensor of any shape from every rank, at once.

        Args:
            x: a tensor that has the same shape and dtype on all ranks.
            name: what is sent.

        Returns:
            A tensor of shape ``[size, *x.shape]``.
        """
        call = Call(AllGather(), name, lane=Lane.CONTROL)
        return self.start(call, x.detach().contiguous().view(-1)).wait().view(self.size, *x.shape)

    def all_to_all(self, x: Tensor, name: str) -> Tensor:
        """Exchange rows, at once: row j of rank i becomes row i of rank j.

        Args:
            x: ``[size, n]``, of the same shape and dtype on all ranks.
            name: what is sent.

        Returns:
            ``[size, n]``.
        """
        call = Call(AllToAll(), name, lane=Lane.CONTROL)
        return self.start(call, x.detach().contiguous().view(-1)).wait().view(self.size, -1)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8), "barrier")

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return an uninitialised 1-D tensor that this group sends best: over shared memory, where the others read it, with no copy.

        It lives as long as any view of it, whatever becomes of the group. As an input it may be read after ``wait``, until every rank has
        waited for the call: call :meth:`await_readers` before writing to it again, or take a new one.

        Args:
            numel: its length.
            dtype: its dtype.
            device: where it lives.

        Returns:
            The tensor.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        """Return a group of some of the ranks. All ranks call, with the same arguments.

        Args:
            parts: the ranks of each sub-group, ascending; every rank in one part.
            name: what the sub-groups are, for records.

        Returns:
            The sub-group of the part with this rank in it. It ends with this group.

        Raises:
            OptionError: a rank is in no part or in two, or this kind of group cannot be divided.
        """
        raise OptionError(f"{type(self).__name__} cannot be divided; make the groups of its parts and put them together with zf.Mesh()")

    def await_readers(self, x: Tensor) -> None:
        """Return when no other rank reads a tensor of :meth:`buffer` any more: when all have waited for the calls that sent it.

        Results that were borrowed from it (``Call.borrow``) must be given back as well: when nobody looks at them any more, or when their
        rank comes here itself. So all ranks that have borrowed call this before they write; views that they keep then keep their values.

        Args:
            x: a buffer, or a view of it, or this rank's own part of a borrowed result. A view that shows parts of others becomes memory of
                this rank alone. For any other tensor there is nothing to wait for.

        Raises:
            PeerLost: another rank raised, died or did not wait in time.
        """
        return

    def rest(self, x: Tensor) -> None:
        """Say that nobody looks at a borrowed result for a while: memory of other ranks that it shows need not count as this one's.

        Its values stay what they are; to look at it again takes a little longer the first time.

        Args:
            x: the result, or a view of it. For any other tensor there is nothing to do.
        """
        return

    def close(self) -> None:
        """Release connections and threads. A closed group starts nothing more."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def own_part(group: Group, parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the part that has this rank in it.

    Raises:
        OptionError: a rank is in no part or in two.
    """
    together = sorted(rank for part in parts for rank in part)
    if together != list(range(group.size)) or any(list(part) != sorted(part) for part in parts):
        shown = [list(part) for part in parts]
        raise OptionError(f"the parts of a group have each of its ranks once, in ascending order; got {shown} for {group.size} ranks")
    return next(part for part in parts if group.rank in part)


class Wrapper(Group):
    """A group that does what another one does, but for how it starts a collective."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    @property
    def debug(self) -> bool:
        return self._group.debug

    @property
    def lends(self) -> bool:
        return self._group.lends

    def shows(self, x: Tensor) -> bool:
        return self._group.shows(x)

    @property
    def numbers(self) -> Sequence[int]:
        return self._group.numbers

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._group.buffer(numel, dtype, device)

    def await_readers(self, x: Tensor) -> None:
        self._group.await_readers(x)

    def rest(self, x: Tensor) -> None:
        self._group.rest(x)

    def close(self) -> None:
        self._group.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The group itself tells the other ranks why it ends.
        self._group.__exit__(kind, error, trace)
