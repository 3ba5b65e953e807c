"""A group of ranks: a rank, a size, a way to start a collective, and one optional capability."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from zfun.collectives._ops import Collective, Stream
from zfun.collectives._work import Work
from zfun.errors import OptionError
from zfun.options import DEVICE, ITERABLE, integer, takes

Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]
"""``(numel, dtype, device)`` to an uninitialised 1-D tensor."""

Aside: TypeAlias = Callable[[Stream, torch.device], AbstractContextManager[None] | None]
"""``(stream, device)`` to a context whose work a device queues beside the caller's work; ``None``
for tensors of another device."""


@runtime_checkable
class Group(Protocol):
    """Ranks that run one program: within a stream all start the same collectives in one order.

    A group is its size, this rank, and :meth:`start`. Everything else that ranks do together is a
    function over a group. One thread of a rank uses the group.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        """Start a collective.

        Args:
            call: the collective.
            x: contiguous 1-D tensor, not written before the result has been waited for.
            out: contiguous 1-D tensor that receives the result. The output of an all-reduce or a
                broadcast may be ``x``. The input of an all-gather may be this rank's slice of the
                output, which is then not copied. Otherwise the two must not overlap.

        Returns:
            A handle whose ``wait()`` returns ``out``, or else a fresh tensor that shares memory
            with no other, unless the collective is ``zero_copy``.

        Raises:
            OptionError: the tensors do not fit the collective.
            PeerLost: another rank raised, died or did not answer (here or in ``wait``).
            CollectiveMismatch: the ranks started different collectives (here or in ``wait``).
        """
        ...

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        """Return a group of some of the ranks. All ranks call, with the same arguments.

        Args:
            parts: the ranks of each sub-group, ascending; every rank in one part.
            name: a name of the sub-groups, for records.

        Returns:
            The sub-group of the part with this rank in it. The sub-group ends with this group.

        Raises:
            OptionError: a rank is in no part or in two, or this kind of group is not divisible.
        """
        raise OptionError(
            f"{type(self).__name__} cannot be divided; make the groups of its parts and put them "
            "together with zf.collectives.Mesh()"
        )

    def close(self) -> None:
        """Release connections and threads. A closed group starts nothing more."""
        return

    @property
    def allocate(self) -> Allocate | None:
        """A function that makes symmetric buffers, or None for a group without shared memory.

        The other ranks read a *symmetric buffer* where it lies, without a copy.
        :func:`zfun.collectives.allocate` calls this function.
        """
        return None

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "a group cannot be pickled or copied, because the connections belong to this process; "
            f"got {self!r}; make a group in each process with zf.process_group()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Wrapper(Group):
    """A group that starts collectives on another group.

    Args:
        group: the other group.

    Attributes:
        wrapped: the other group.
    """

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self.wrapped = group

    @property
    def failure(self) -> Exception | None:
        """The error of the first collective that failed, as far as the group tells."""
        return getattr(self.wrapped, "failure", None)

    @property
    def allocate(self) -> Allocate | None:
        return self.wrapped.allocate

    def close(self) -> None:
        self.wrapped.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The wrapped group tells the other ranks why this rank ends.
        self.wrapped.__exit__(kind, error, trace)


def own_part(group: Group, parts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the part that has this rank in it.

    Raises:
        OptionError: a rank is in no part or in two.
    """
    together = sorted(rank for part in parts for rank in part)
    is_sorted = all(list(part) == sorted(part) for part in parts)
    if together != list(range(group.size)) or not is_sorted:
        shown = [list(part) for part in parts]
        raise OptionError(
            f"the parts of a group have each of its ranks once, in ascending order; got {shown} "
            f"for {group.size} ranks"
        )
    return next(part for part in parts if group.rank in part)


@takes(numel=integer(0), device=DEVICE)
def allocate(
    group: Group, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return an uninitialised 1-D tensor, a symmetric buffer if the group has shared memory.

    The tensor lives as long as any view of it. As an input of a collective the tensor may be read
    by other ranks after ``wait``: call :func:`await_readers` before writing to it again, or
    allocate another tensor.

    Args:
        group: the ranks.
        numel: the length.
        dtype: the dtype.
        device: where the tensor lives.

    Returns:
        The tensor; from :func:`torch.empty` where the group has no memory of its own.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: allocate(group, 3, torch.float32).shape)[0]
        torch.Size([3])
    """
    make, where = group.allocate, torch.device(device)
    return (
        torch.empty(numel, dtype=dtype, device=where) if make is None else make(numel, dtype, where)
    )


@takes(tensors=ITERABLE)
def await_readers(group: Group, tensors: Iterable[Tensor]) -> None:
    """Wait until no other rank reads tensors that are about to be written in place.

    All ranks call before they write to symmetric buffers (:func:`allocate`), or to this rank's
    pieces of zero-copy results. Views of such results keep the old values.
    For tensors that no other rank can read, and for groups without shared memory, there is
    nothing to wait for.

    Args:
        group: the ranks.
        tensors: about to be written.

    Raises:
        PeerLost: another rank raised, died or did not finish in time.

    Example:
        >>> from zfun.collectives import single_group
        >>> await_readers(single_group(), [torch.ones(3)])
    """
    wait = _asked(group, "await_readers")
    if wait is not None:
        wait([x for x in tensors if isinstance(x, Tensor) and x.is_cpu])


@takes()
def is_symmetric(group: Group) -> bool:
    """Whether ranks read each other's memory, so that a zero-copy all-gather copies nothing.

    Args:
        group: any group. A mesh is symmetric if one of its axes is.

    Returns:
        The same answer on all ranks.

    Example:
        >>> from zfun.collectives import single_group
        >>> is_symmetric(single_group())
        False
    """
    return bool(_asked(group, "is_symmetric"))


@takes()
def is_checked(group: Group) -> bool:
    """Whether :func:`zfun.collectives.checked` made a group, or the group that it wraps.

    Args:
        group: any group.

    Returns:
        Whether its ranks compare the collectives that they start.

    Example:
        >>> from zfun.collectives import checked, single_group
        >>> is_checked(checked(single_group()))
        True
    """
    return bool(_asked(group, "is_checked"))


def queue_aside(groups: Iterable[Group]) -> Aside | None:
    """Return where collectives wait for each other without the host, if none waits on the host."""
    found = [None if is_checked(group) else _asked(group, "aside") for group in groups]
    return found[-1] if all(found) else None


@takes()
def global_ranks(group: Group) -> Sequence[int]:
    """Return the number of each rank in the group that was split, for messages.

    Args:
        group: any group.

    Returns:
        For each rank of the group a number.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> list(global_ranks(split(abstract_group(6, rank=4), inner=3).inner))
        [3, 4, 5]
    """
    found: Sequence[int] | None = _asked(group, "global_ranks")
    return range(group.size) if found is None else found


def _asked(group: Group, name: str) -> Any:
    """Return an attribute of a group, or of the group that it wraps, or None."""
    while not hasattr(group, name) and isinstance(group, Wrapper):
        group = group.wrapped
    return getattr(group, name, None)
