"""Messages over MPI, by mpi4py, with the interface of torch's gloo.

Collectives are the direct exchange of gloo's groups, so they have the same bits. See [Note:
collectives by direct exchange].
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

from torch import Tensor

from zfun.collectives._ops import Stream
from zfun.collectives.backends._base import keep_until_exit

# One of these is set for each process that an MPI launcher starts.
_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# Gloo's tags have 31 bits, of which the upper two number the stream. MPI may have fewer bits.
_STREAM_SHIFT = 29
_SPIN_S = 5e-5
_LONGEST_NAP_S = 5e-4


@functools.cache
def load_mpi() -> Any:
    """Return ``mpi4py.MPI`` if an MPI launcher started this process and the package works."""
    if importlib.util.find_spec("mpi4py") is None or not any(map(os.environ.get, _LAUNCHERS)):
        return None
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    if not mpi4py.rc.finalize:
        # Waits for all ranks, and so not after a rank is lost.
        atexit.register(MPI.Finalize)
    # Each stream has a thread.
    return MPI if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None


def runs_over_mpi(rank: int, size: int) -> bool:
    """Whether MPI numbers the ranks as the environment does.

    It does not where the launcher belongs to another MPI than the library, nor in the children of
    torchrun and of :func:`launch`, which inherit the variables of a launcher above them.
    """
    # MPI starts when it is imported.
    mpi = None if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else load_mpi()
    world = None if mpi is None else mpi.COMM_WORLD
    return world is not None and (world.Get_rank(), world.Get_size()) == (rank, size)


@final
class MpiMessages:
    """The messages of a group's ranks. As with gloo, a message that is late breaks all others.

    Args:
        ranks: the ranks of the group, numbered in MPI's world; each of them makes the messages.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._mpi = load_mpi()
        world = self._mpi.COMM_WORLD
        group = world.Get_group().Incl(list(ranks))
        # One for each stream, and one for messages that nobody sends.
        self._comms = [world.Create_group(group, tag) for tag in range(len(Stream) + 1)]
        tag_bits = world.Get_attr(self._mpi.TAG_UB).bit_length() - 1
        self._mask = (1 << min(_STREAM_SHIFT, tag_bits)) - 1
        self.broken = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _MpiMessage:
        comm, (tensor,) = self._comms[tag >> _STREAM_SHIFT], tensors
        return _MpiMessage(self, comm.Isend(self._memory(tensor), peer, tag & self._mask), tensor)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _MpiMessage:
        comm, (tensor,) = self._comms[tag >> _STREAM_SHIFT], tensors
        return _MpiMessage(self, comm.Irecv(self._memory(tensor), peer, tag & self._mask), tensor)

    def _memory(self, tensor: Tensor) -> list[Any]:
        nbytes = tensor.numel() * tensor.dtype.itemsize
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), self._mpi.BYTE]

    def give_up(self) -> None:
        """Break all messages, and end the process without waiting for the other ranks."""
        self.broken = True
        atexit.unregister(self._mpi.Finalize)

    def __del__(self) -> None:
        # A communicator with unfinished messages is kept.
        if hasattr(self, "_mask") and not self.broken and not self._mpi.Is_finalized():
            for comm in self._comms:
                comm.Free()


@final
class _MpiMessage:
    """A message under way."""

    __slots__ = ("_messages", "_request", "_tensor")

    def __init__(self, messages: MpiMessages, request: Any, tensor: Tensor) -> None:
        self._messages = messages
        self._request = request
        self._tensor = tensor

    def wait(self, timeout: timedelta) -> None:
        began, nap_s = time.monotonic(), 0.0
        while not self._request.Test():
            waited_s = time.monotonic() - began
            if self._messages.broken or waited_s > timeout.total_seconds():
                self._messages.give_up()
                # MPI may still write to the memory, or read from it.
                keep_until_exit(self._request, self._tensor)
                raise RuntimeError("a message over MPI did not arrive in time")
            time.sleep(nap_s)
            nap_s = min(waited_s / 8, _LONGEST_NAP_S) if waited_s > _SPIN_S else 0.0
