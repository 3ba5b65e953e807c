"""What a group of ranks is: two numbers and one method."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from zfun.collectives._calls import AllGather, Call, Lane
from zfun.collectives._pending import Pending

__all__ = ["Group", "Wrapper"]


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

    @abstractmethod
    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        """Start a collective.

        Args:
            call: what is done.
            x: contiguous 1-D tensor. It must not be written before the result has been waited for.
            out: contiguous 1-D tensor that receives the result. For an all-reduce and a broadcast it may be ``x``; for an all-gather
                ``x`` may be this rank's slice of it, and then the slice is not copied. Otherwise they must not overlap.

        Returns:
            The pending result: ``out`` if it was given, else a fresh tensor that shares memory with nobody.

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

    def await_readers(self, x: Tensor) -> None:
        """Return when no other rank reads a tensor of :meth:`buffer` any more: when all have waited for the calls that sent it.

        Args:
            x: a buffer, or a view of it. For any other tensor there is nothing to wait for.

        Raises:
            PeerLost: another rank raised, died or did not wait in time.
        """
        return

    def close(self) -> None:
        """Release connections and threads. A closed group starts nothing more."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Wrapper(Group):
    """A group that does what another one does, but for how it starts a collective."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    @property
    def debug(self) -> bool:
        return self._group.debug

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._group.buffer(numel, dtype, device)

    def await_readers(self, x: Tensor) -> None:
        self._group.await_readers(x)

    def close(self) -> None:
        self._group.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The group itself tells the other ranks why it ends.
        self._group.__exit__(kind, error, trace)
