"""n ranks as threads of one process.

The last rank to arrive at a collective computes it for all, by the definition of the op
(:func:`evaluate`), and wakes the others: a collective of 64 ranks costs one evaluation and 64
wake-ups, not 4032 messages. Process groups move the same values by messages, and tests compare
their results with these, bit by bit.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, Generic, ParamSpec, TypeVar, final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch import eager_transforms

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    check_collective,
    describe,
)
from zfun.collectives._work import Work
from zfun.errors import CollectiveMismatch, OptionError, PeerLost, ZfunError
from zfun.ops._sums import sum_in_rank_order

__all__ = ["evaluate", "simulate"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def simulate(
    n: int,
    fn: Callable[Concatenate[Group, _Params], _Result],
    *args: _Params.args,
    **kwargs: _Params.kwargs,
) -> list[_Result]:
    """Call ``fn(group, *args)`` on n ranks, which are threads of this process; return results.

    All ranks receive the same ``args`` objects, so every rank sees in-place changes of another.
    The ranks share torch's global random generator, whose draws come in no fixed order; give each
    rank a ``torch.Generator``. ``functional_call`` changes an ``nn.Module`` temporarily, so each
    rank needs a module of its own, made inside ``fn``. Tensors must live on the CPU, since autograd
    runs the backward pass of other devices on a thread that the ranks would share.

    Args:
        n: the number of ranks, one to some hundreds.
        fn: the program of a rank.
        args: passed to ``fn`` after the group.
        kwargs: passed to ``fn``.

    Returns:
        The results in rank order.

    Raises:
        CollectiveMismatch: the ranks started different collectives, or wait for each other in a
            circle.
        PeerLost: a rank returned while others waited for it.
        Exception: the error of ``fn`` on the lowest rank that failed first; the other ranks end at
            once.

    Example:
        >>> import torch
        >>> from zfun.collectives import all_reduce
        >>> simulate(2, lambda group: all_reduce(torch.tensor(group.rank + 1), group).item())
        [3, 3]
    """
    if n < 1:
        raise OptionError(f"simulate() needs at least one rank; got {n}")
    _know_the_processor()
    world = _World(n)
    outcomes: list[_Outcome[_Result]] = [_Outcome() for _ in range(n)]
    grad_mode = torch.is_grad_enabled()
    # A thread needs the interpreter's lock twice to start, and the ranks that already run would
    # compete for the lock.
    all_started = threading.Event()

    def run(rank: int) -> None:
        all_started.wait()
        try:
            with torch.set_grad_enabled(grad_mode):
                outcomes[rank].result.append(
                    fn(_SimulatedGroup(rank, world, tuple(range(n))), *args, **kwargs)
                )
        except BaseException as error:  # noqa: BLE001, the caller of simulate receives every error
            outcomes[rank].error = error
            world.fail(rank, error)
        else:
            world.leave(rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"rank {rank} of {n}",
            daemon=True,
        )
        for rank in range(n)
    ]
    with _one_forward_ad_level():
        try:
            for thread in threads:
                thread.start()
            all_started.set()
            for thread in threads:
                thread.join()
        except BaseException as error:
            # Only the main thread receives an interrupt. The ranks end at their next collective,
            # and the main thread does not wait for them.
            world.fail(None, error)
            all_started.set()
            raise
    if (error := world.original_error(outcomes)) is not None:
        raise error
    world.check_nothing_left()
    return [outcome.result[0] for outcome in outcomes]


@functools.cache
def _know_the_processor() -> None:
    """Let MKL detect the processor before two ranks call a vector function at the same time.

    The first call of a vector function (``exp``, ``tanh``, ...) detects the processor, and sets a
    temporary value meanwhile. A second thread may read this value and use the code of another
    processor, with other last bits.
    """
    torch.zeros(1, device="cpu").exp()


def evaluate(op: Op, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute a collective for all ranks from its definition.

    Args:
        op: the collective.
        inputs: the input of each rank, in rank order.
        outs: the output of each rank, or None.

    Returns:
        The result of each rank: its ``out``, else a fresh tensor.

    Example:
        >>> evaluate(ReduceScatter(), [torch.tensor([1, 2]), torch.tensor([10, 20])], [None, None])
        [tensor([11]), tensor([22])]
    """
    size = len(inputs)
    match op:
        case AllGather():
            results = [torch.cat(list(inputs))] * size
        case ReduceScatter():
            results = (
                sum_in_rank_order(inputs).unflatten(0, (size, inputs[0].numel() // size)).unbind()
            )
        case AllReduce():
            results = [sum_in_rank_order(inputs)] * size
        case Broadcast(root):
            results = [inputs[root]] * size
        case Reduce(root):
            total = sum_in_rank_order(inputs)
            results = [total if rank == root else torch.zeros_like(total) for rank in range(size)]
        case AllToAll():
            chunks = torch.stack(list(inputs)).unflatten(1, (size, inputs[0].numel() // size))
            results = [received.flatten() for received in chunks.unbind(1)]
        case Permute():
            results = [inputs[source] for source in op.sources]
    return [
        result.clone() if out is None else out.copy_(result)
        for result, out in zip(results, outs, strict=True)
    ]


@final
class _SimulatedGroup(Group):
    """One rank of a simulated group.

    All groups of a simulation share a world, so that the world notices ranks which wait for each
    other in different groups.
    """

    def __init__(
        self,
        world_rank: int,
        world: _World,
        members: tuple[int, ...],
        channel: tuple[int, ...] = (),
    ) -> None:
        self.rank = members.index(world_rank)
        self.size = len(members)
        self._world_rank = world_rank
        self._world = world
        self._members = members
        # Distinguishes the collectives of this group from those of groups with the same members.
        self._channel = channel
        self._num_subgroups = 0
        self._thread = threading.get_ident()

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        part = own_part(self, parts)
        self._num_subgroups += 1
        members = tuple(self._members[rank] for rank in part)
        return _SimulatedGroup(
            self._world_rank, self._world, members, (*self._channel, self._num_subgroups)
        )

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(
                f"a simulated group moves CPU tensors only; {call.op.kind} got one on {x.device}; "
                "move it to the CPU"
            )
        if threading.get_ident() != self._thread:
            raise OptionError(
                f"a simulated group belongs to the thread of its rank; rank {self._world_rank}'s "
                f"was used in another thread ({call.op.kind} {call.name!r}); ranks must not share "
                "what changes while it runs: give each its own module, made inside the rank's "
                "function"
            )
        # A copy, so that the sender may change the input after the start, as with a real message.
        sent = x.detach().clone()
        meeting = self._world.arrive(
            self._world_rank,
            self._members,
            self._channel,
            call,
            sent,
            None if out is None else out.detach(),
        )

        def wait() -> Tensor:
            result = self._world.wait(self._world_rank, meeting)
            return result if out is None else out

        return Work(wait)

    def __repr__(self) -> str:
        return f"<simulated group: rank {self.rank} of {self.size}>"


@dataclass(slots=True, eq=False)
class _Meeting:
    """One collective in progress: the inputs so far, and the results."""

    stream: Stream
    index: int
    members: tuple[int, ...]
    calls: dict[int, Collective] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outs: dict[int, Tensor | None] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None

    @property
    def label(self) -> str:
        first = min(self.texts)
        return f"collective {self.index} of its stream ({self.texts[first]})"


@dataclass(slots=True)
class _Outcome(Generic[_Result]):
    result: list[_Result] = field(default_factory=list)
    error: BaseException | None = None


class _World:
    """The state that the ranks of one simulation share, under one lock."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[object, ...]] = collections.Counter()
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._blocked: dict[int, tuple[_Meeting, threading.Lock]] = {}
        self._left: set[int] = set()
        self._failure: Callable[[int], ZfunError] | None = None
        self._consequences: list[ZfunError] = []

    def arrive(
        self,
        rank: int,
        members: tuple[int, ...],
        channel: tuple[int, ...],
        call: Collective,
        x: Tensor,
        out: Tensor | None,
    ) -> _Meeting:
        """Add a rank's input to its next collective; the last rank computes all results."""
        with self._lock:
            self._raise_failure(rank)
            # Sub-groups of one call have disjoint ranks.
            index = self._counts[rank, channel, call.stream]
            self._counts[rank, channel, call.stream] += 1
            place = (members[0], channel, call.stream, index)
            meeting = self._meetings.setdefault(place, _Meeting(call.stream, index, members))
            meeting.calls[rank] = call
            meeting.texts[rank] = describe(call, x.numel(), x.dtype)
            meeting.inputs[rank] = x
            meeting.outs[rank] = out
            first = next(iter(meeting.texts))
            if meeting.texts[rank] != meeting.texts[first]:
                self._fail(_different(meeting, *sorted((first, rank))))
                self._raise_failure(rank)
            if len(meeting.inputs) < len(members):
                return meeting
            del self._meetings[place]
        try:
            with torch.no_grad():
                results = evaluate(
                    call.op,
                    [meeting.inputs[r] for r in members],
                    [meeting.outs[r] for r in members],
                )
        except BaseException as error:
            self.fail(rank, error)
            raise
        with self._lock:
            meeting.results = dict(zip(members, results, strict=True))
            meeting.inputs.clear()
            meeting.outs.clear()
            for waiter in [r for r, (where, _) in self._blocked.items() if where is meeting]:
                self._blocked.pop(waiter)[1].release()
        return meeting

    def wait(self, rank: int, meeting: _Meeting) -> Tensor:
        """Block until every rank has started a collective."""
        if meeting.results is None:
            gate = threading.Lock()
            gate.acquire()
            with self._lock:
                self._raise_failure(rank)
                if meeting.results is None:
                    self._blocked[rank] = (meeting, gate)
                    self._check_progress()
                else:
                    gate.release()
            gate.acquire()
        if meeting.results is None:
            with self._lock:
                self._raise_failure(rank)
        assert meeting.results is not None
        return meeting.results.pop(rank)

    def leave(self, rank: int) -> None:
        """Note that a rank has returned."""
        with self._lock:
            self._left.add(rank)
            if self._failure is None:
                self._check_progress()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """End every rank after an error of one rank or of the main thread."""
        who = "the simulation" if rank is None else f"rank {rank}"
        message = f"{who} failed: {type(error).__name__}: {error}"

        def consequence(other: int) -> ZfunError:
            lost = PeerLost(f"rank {other} ends because {message}", rank=other)
            self._consequences.append(lost)
            return lost

        with self._lock:
            self._fail(consequence)

    def original_error(self, outcomes: Sequence[_Outcome[_Result]]) -> BaseException | None:
        """Return the error of the lowest rank that did not fail because of another rank."""
        for rank, outcome in enumerate(outcomes):
            error = outcome.error
            if error is not None and not any(
                link is lost for link in _chain(error) for lost in self._consequences
            ):
                error.add_note(f"raised on rank {rank} of {self.size} simulated ranks")
                return error
        return None

    def check_nothing_left(self) -> None:
        """Raise if a collective was started by some ranks only, even if no rank waited for it."""
        for meeting in self._meetings.values():
            missing = [rank for rank in meeting.members if rank not in meeting.texts]
            raise PeerLost(
                f"every rank must take part in every collective; {_ranks(missing)} returned "
                f"without {meeting.label}, which {_ranks(meeting.texts)} started",
                rank=min(meeting.texts),
                collective=meeting.label,
            )

    def _check_progress(self) -> None:
        """Raise if no rank can continue: a rank waits for one that has returned, or all wait."""
        for rank, (meeting, _) in self._blocked.items() if self._left else ():
            gone = [r for r in meeting.members if r in self._left and r not in meeting.texts]
            if gone:
                label = meeting.label
                text = (
                    f"every rank must take part in every collective; {_ranks(gone)} returned, "
                    f"while rank {rank} waits for it in {label}"
                )
                self._fail(lambda other: PeerLost(text, rank=other, collective=label))
                return
        if self._blocked and len(self._blocked) + len(self._left) == self.size:
            waits = "; ".join(
                f"rank {rank} in {meeting.label}"
                for rank, (meeting, _) in sorted(self._blocked.items())[:8]
            )
            text = f"the ranks wait for each other in different collectives: {waits}"
            self._fail(lambda other: CollectiveMismatch(text, rank=other))

    def _fail(self, failure: Callable[[int], ZfunError]) -> None:
        if self._failure is None:
            self._failure = failure
        for _, gate in self._blocked.values():
            gate.release()
        self._blocked.clear()

    def _raise_failure(self, rank: int) -> None:
        if self._failure is not None:
            raise self._failure(rank)


def _different(meeting: _Meeting, low: int, high: int) -> Callable[[int], ZfunError]:
    text = (
        "all ranks must start the same collectives in the same order; at collective "
        f"{meeting.index} of its stream rank {low} started {meeting.texts[low]}, and rank {high} "
        f"started {meeting.texts[high]}"
    )
    return lambda rank: CollectiveMismatch(
        text, rank=rank, collective=meeting.texts.get(rank, meeting.texts[low])
    )


def _ranks(ranks: Sequence[int] | dict[int, str]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


@contextlib.contextmanager
def _one_forward_ad_level() -> Iterator[None]:
    """Hold torch's forward-mode level open while the ranks run.

    The level is per process and not per thread: the first rank to leave a ``torch.func.jvp`` would
    clear the tangents of the others. An additional nesting level makes the ``jvp`` calls of the
    ranks neither open nor close the level.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    with forward_ad.dual_level():
        eager_transforms.JVP_NESTING += 1  # type: ignore[assignment]
        try:
            yield
        finally:
            eager_transforms.JVP_NESTING -= 1  # type: ignore[assignment]
