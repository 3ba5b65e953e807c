"""Stand-ins on the CPU that are as strict as a device: nothing is there before a wait for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zfun.collectives import Collective, Group, Stream, Work
from zfun.collectives._group import Wrapper


@dataclass
class _Rank:
    """The collectives under way on one rank, which all of its groups share.

    Attributes:
        num_pending: collectives that nobody has waited for.
        chain: the collectives that were started on the queue that is in use, if it is one beside
            the queue that computes.
    """

    num_pending: int = 0
    chain: list[_Pending] | None = None


@dataclass
class _Pending:
    """A collective whose tensors belong to the transport.

    Attributes:
        text: the collective, for messages.
        x: the input, and the bytes that it had.
        out: the output, and the bytes that it has until the wait.
    """

    text: str
    x: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor] | None
    chain: list[_Pending] = field(default_factory=list)

    def written(self, out: Tensor) -> None:
        """Freeze anew the inputs of the queue that an output lies on, as that of a sum in place."""
        for hop in self.chain:
            if _share_memory(out, hop.x[0]):
                hop.x = _frozen(hop.x[0])

    def check_out(self) -> None:
        if self.out is not None:
            _check(*self.out, f"the output of {self.text} before its wait")

    def check(self) -> None:
        """Check the inputs of this collective and of the hops before it on its queue."""
        for hop in self.chain or [self]:
            _check(*hop.x, f"the input of {hop.text} before its wait")


class StrictGroup(Wrapper):
    """A group that holds back results and outputs until a wait, and checks inputs then.

    An output has the bytes 255 from the start to the wait, which are NaN as floats, and nobody may
    write to it. Nobody may write to an input either.

    Args:
        group: the group that moves the values.
        queues: whether the group says, as that of nccl does, that a device waits and not the host.
            The values of a queue beside the one that computes are there after a wait on that queue,
            but inputs stay frozen until the queue that computes waits.
    """

    def __init__(self, group: Group, *, queues: bool, rank: _Rank | None = None) -> None:
        super().__init__(group)
        self._is_queued = queues
        self._rank = _Rank() if rank is None else rank
        self.aside = self._aside if queues else None

    def _aside(self, stream: Stream, device: torch.device) -> AbstractContextManager[None]:
        return self._queue()

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        assert self._rank.chain is None
        self._rank.chain = []
        try:
            yield
        finally:
            self._rank.chain = None

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        state = self._rank
        started = self.wrapped.start(call, x)
        into = None if out is None else _poisoned(out.detach(), x.detach())
        pending = _Pending(f"{call.op.kind} {call.name!r} ({call.part})", _frozen(x), into)
        if state.chain is not None:
            state.chain.append(pending)
            pending.chain = state.chain
            if out is not None:
                pending.written(out)
        state.num_pending += 1

        def wait() -> Tensor:
            pending.check_out()
            if state.chain is None:
                pending.check()
            state.num_pending -= 1
            result = started.wait()
            if out is None:
                return result
            out.copy_(result)
            pending.written(out)
            return out

        return Work(wait)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        made = self.wrapped.subgroup(parts, name)
        return StrictGroup(made, queues=self._is_queued, rank=self._rank)

    def check_nothing_left(self) -> None:
        """Check that each collective was waited for."""
        assert self._rank.num_pending == 0


@dataclass
class _Event:
    """The end of a copy.

    Attributes:
        copy: ends the copy; ``None`` once it has ended.
    """

    queue: StrictQueue
    copy: Callable[[], None] | None

    def query(self) -> bool:
        return self.copy is None

    def synchronize(self) -> None:
        self.queue.run_to(self, "host")


class StrictQueue:
    """A queue of copies that ends a copy when somebody waits for it, and no earlier.

    Until then the target has the bytes 255, nobody may write to the source or the target, and
    nobody may free them, because their memory could be used again.

    Args:
        heard: is called with ``"start"``, and with ``"device"`` or ``"host"`` for who waits.
    """

    def __init__(self, heard: Callable[[str], object] = lambda kind: None) -> None:
        self._heard = heard
        self._left: list[_Event] = []

    def start(self, out: Tensor, x: Tensor, after: _Event | None = None) -> _Event:
        self._heard("start")
        _bytes(out).fill_(255)
        tensors = weakref.ref(out), weakref.ref(x)
        before: list[Tensor] = []
        if after is None or after.query():
            before.append(_bytes(x).clone())

        def copy() -> None:
            target, source = (tensor() for tensor in tensors)
            assert target is not None, "the target of a copy was freed before its end"
            assert source is not None, "the source of a copy was freed before its end"
            if after is not None:
                after.queue.run_to(after, None)
            for data in before:
                _check(source, data, "the source of a copy before its end")
            assert bool((_bytes(target) == 255).all()), "somebody wrote to the target of a copy"
            target.copy_(source)

        event = _Event(self, copy)
        self._left.append(event)
        return event

    def wait(self, event: _Event) -> None:
        self.run_to(event, "device")

    def run_to(self, event: _Event, waiting: str | None) -> None:
        """End the copies up to one, in order."""
        if waiting is not None:
            self._heard(waiting)
        while event.copy is not None:
            first = self._left.pop(0)
            copy, first.copy = first.copy, None
            assert copy is not None
            copy()

    def slot(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


def _frozen(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), _bytes(x).clone()


def _poisoned(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Fill an output, but for the part that the input lies in."""
    sent = x.clone()
    _bytes(out).fill_(255)
    if _share_memory(out, x):
        x.copy_(sent)
    return _frozen(out)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _check(x: Tensor, before: Tensor, text: str) -> None:
    if not torch.equal(_bytes(x), before):
        raise AssertionError(f"somebody wrote to {text}")
