"""The common part of process groups: watchdog, sub-groups, closing, and errors.

[Note: forks]

A fork inherits the group, the exit hooks and the connections of its parent, but none of the
threads. The group belongs to the process that made the group:

* a collective in a fork raises, because each rank takes part once;
* the exit and the errors of a fork are not published, because the parent goes on;
* a fork keeps the objects of gloo and of the store until its end. Their destructors would wait for
  threads that a fork does not have, and would take the parent's connections out of the epoll
  instance, which a fork shares with the parent.

Shared memory is not mapped in a fork (``shm/_pages``), so a fork that writes to a shard changes
nothing in the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import Collective, Stream
from zfun.collectives.backends._diagnosis import different
from zfun.collectives.backends._local import single_group
from zfun.collectives.backends._watchdog import Watchdog
from zfun.errors import OptionError, ZfunError, check_process

INTERRUPT_TAG = 0x7FFFFFFF  # of no message

MakePart: TypeAlias = "Callable[[dist.Store, int, Sequence[int]], ProcessGroup]"
"""Makes a sub-group from its store, this rank's position, and the global ranks."""


class TransportError(Exception):
    """A message that did not arrive or could not be sent.

    Args:
        peer: the other rank, or None if unknown.
        reason: one sentence.
    """

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Mismatch(Exception):
    """A peer started another collective.

    Args:
        peer: the other rank.
        text: the peer's collective, in words.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer
        self.text = text


class ProcessGroup(Group):
    """The common part of process groups: watchdog, sub-groups, closing, and errors."""

    make_part: MakePart | None = None

    def __init__(
        self,
        torch_group: Any,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        on_close: Callable[[], None] | None,
        numbers: Sequence[int] | None = None,
        holder: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._torch_group = torch_group
        # Connections between the hosts, where the collectives run on devices.
        self._host: Any = None
        self._store = store
        self._timeout_s = timeout_s
        self._on_close = on_close
        self.global_ranks = range(size) if numbers is None else numbers
        self._subgroups: list[ProcessGroup] = []
        self._num_subgroups = 0
        # Messages name the global ranks.
        self._watchdog = Watchdog(
            store,
            self.global_ranks[rank],
            self.global_ranks,
            self._interrupt,
            lambda: self._number_of(self._broken_peer()),
            holder,
            limit_s=timeout_s,
        )
        self._failure: ZfunError | None = None
        self._closed = False
        self._process = os.getpid()
        self._previous_hook = sys.excepthook
        self._hook = self._on_uncaught
        sys.excepthook = self._hook
        atexit.register(self.close)

    @property
    def failure(self) -> ZfunError | None:
        """The error of the first collective that failed, of a sub-group too."""
        failures = [group._failure for group in (self, *self._subgroups)]
        return next((failure for failure in failures if failure is not None), None)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        self._check_open()
        ranks = own_part(self, parts)
        self._num_subgroups += 1
        store = dist.PrefixStore(f"subgroup/{self._num_subgroups}/{ranks[0]}", self._store)
        made = self._part(store, ranks, parts)
        if made is None:
            return single_group()
        self._subgroups.append(made)
        return made

    def _part(
        self, store: dist.Store, ranks: Sequence[int], parts: Sequence[Sequence[int]]
    ) -> ProcessGroup | None:
        """Make the sub-group of some ranks; ``None`` for one rank, which needs no transport."""
        if len(ranks) == 1:
            return None
        if self.make_part is None:
            raise OptionError(
                "a group over mpi cannot be divided; make torch groups of its parts and put them "
                "together with zf.collectives.Mesh()"
            )
        return self.make_part(
            store, ranks.index(self.rank), [self.global_ranks[rank] for rank in ranks]
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # See [Note: forks].
        if self._is_fork():
            keep_until_exit(self._torch_group, self._host, self._store, dist.group.WORLD)
            return
        for group in reversed(self._subgroups):
            group.close()
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.close)
        self._watchdog.close()
        self._release()
        # The last reference to a store closes the connection.
        self._torch_group = None
        del self._store
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._publish_error(error)
        self.close()

    def _is_fork(self) -> bool:
        """Whether this process is a fork of the group's process. See [Note: forks]."""
        return self._process != os.getpid()

    def _publish_error(self, error: BaseException) -> None:
        if self._is_fork():
            return
        for group in (*self._subgroups, self):
            group._watchdog.publish_error(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.strip('_')}: rank {self.rank} of {self.size}>"

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_fork():
            self._watchdog.publish_error(error)
        self._previous_hook(kind, error, trace)

    def _interrupt(self) -> None:
        """End every wait of this rank."""

    def _broken_peer(self) -> int | None:
        """Return a rank whose connection is broken, if any and if the transport can tell."""
        return None

    def _release(self) -> None:
        """Release the resources of the transport."""

    def _number_of(self, peer: int | None) -> int | None:
        return None if peer is None else self.global_ranks[peer]

    def _check_process(self) -> None:
        if self._process != os.getpid():
            check_process(self._process, "a group")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise OptionError(
                "a closed group starts no collectives; make a new one with process_group()"
            )
        self._check_failure()

    def _check_failure(self) -> None:
        if self._failure is not None:
            failure = type(self._failure)(
                str(self._failure),
                rank=self._failure.rank,
                leaf=self._failure.leaf,
                collective=self._failure.collective,
            )
            raise failure from self._failure

    @staticmethod
    def _names(call: Collective, text: str, index: int) -> tuple[str, str | None]:
        """Return the collective in words, and the leaf or the bucket that it moves."""
        leaf = call.part if call.part and call.stream is not Stream.CONTROL else None
        return f"collective {index} of its stream ({text})", leaf

    @contextlib.contextmanager
    def _explained(self, call: Collective, text: str, index: int) -> Iterator[None]:
        """Turn an error of the transport into one that names the lost rank and the leaf."""
        collective, leaf = self._names(call, text, index)
        try:
            yield
        except TransportError as error:
            if self._failure is None:
                self._failure = self._watchdog.explain(
                    self._number_of(error.peer), str(error), collective, leaf
                )
            raise self._failure from error
        except Mismatch as error:
            if self._failure is None:
                verdict = different(
                    index,
                    (self.global_ranks[self.rank], text),
                    (self.global_ranks[error.peer], error.text),
                )
                self._failure = self._watchdog.conclude(verdict, collective, leaf)
            raise self._failure from error
        finally:
            # No other collective can complete either.
            if self._failure is not None:
                self._give_up()

    def _give_up(self) -> None:
        """End every other wait of this rank."""


def break_connections(gloo: Any, rank: int, size: int) -> None:
    """End every wait for a message of gloo, or of mpi.

    Only a connection error ends a wait of gloo. A receive that times out breaks all connections,
    except where the peer's connection is already broken because the peer has just left.
    """
    for step in range(1, size):
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1)], (rank + step) % size, INTERRUPT_TAG).wait(
                timedelta(milliseconds=1)
            )


def keep_until_exit(*things: object) -> None:
    """Let no destructor of these objects run in this process. See [Note: forks]."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextlib.contextmanager
def transport_errors(peer: int | None) -> Iterator[None]:
    """Turn a backend's error about messages to a rank (``None``: any) into a TransportError."""
    try:
        yield
    except ZfunError:
        raise
    except RuntimeError as error:
        raise TransportError(peer, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the sentence of gloo's message that names the cause, without the source location."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        text.partition("] ")[2].partition(". ")[0]
        if text.startswith("[")
        else text.partition(". ")[0]
    )
