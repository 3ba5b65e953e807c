"""n ranks as threads of one process, which take turns.

One rank runs at a time: until a collective whose result is missing, or to the end. Then the next
rank runs that can continue, in rank order, round and round. A simulation is therefore
deterministic, and each rank has its own state of torch's default random generator, as a process
has.

The last rank to arrive at a collective computes it for all, by the definition of the op
(:func:`evaluate`): a collective of 64 ranks costs one evaluation and 64 wake-ups, not 4032
messages. Process groups move the same values by messages, and tests compare their results with
these, bit by bit.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
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
    UnequalAllToAll,
    check_collective,
    describe,
)
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends._diagnosis import SAME_ORDER
from zfun.errors import CollectiveMismatch, OptionError, PeerLost, ZfunError, check_process
from zfun.ops._sums import sum_in_rank_order
from zfun.options import ANY, FUNCTION, integer, takes

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


@takes(n=integer(1), fn=FUNCTION, args=ANY)
def simulate(
    n: int,
    fn: Callable[Concatenate[Group, _Params], _Result],
    *args: _Params.args,
    **kwargs: _Params.kwargs,
) -> list[_Result]:
    """Call ``fn(group, *args)`` on n ranks, which are threads of this process; return results.

    Ranks take turns: one runs until it waits for the others, then the next, in rank order, so a
    program without threads and clocks of its own gives the same result every time. Each rank has
    its own state of torch's default random generator, at first a copy of the caller's, whose state
    does not change: ``torch.manual_seed``, ``torch.rand`` and dropout act as in processes. Python's
    and numpy's generators are shared. Ranks wait for each other in collectives only: a rank that
    waits for another rank in a lock or a queue of its own waits for ever.

    All ranks receive the same ``args`` objects, so every rank sees in-place changes of another.
    Ranks may share an ``nn.Module`` under :func:`zfun.functional`; ``functional_call`` changes the
    module temporarily, so each rank would need a module of its own, made inside ``fn``. Tensors
    must live on the CPU, since autograd runs the backward pass of other devices on a thread that
    the ranks would share.

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
    world = _World(n)
    outcomes: list[_Outcome[_Result]] = [_Outcome() for _ in range(n)]
    grad_mode = torch.is_grad_enabled()

    def run(rank: int) -> None:
        world.take_turn(rank)
        try:
            with torch.set_grad_enabled(grad_mode):
                outcomes[rank].result.append(
                    fn(_SimulatedGroup(rank, world, tuple(range(n))), *args, **kwargs)
                )
        except BaseException as error:  # noqa: BLE001, the caller of simulate receives every error
            outcomes[rank].error = error
            world.fail(rank, error)
        finally:
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
    before = torch.get_rng_state()
    with _one_forward_ad_level():
        try:
            for thread in threads:
                thread.start()
            world.begin()
            for thread in threads:
                thread.join()
        except BaseException as error:
            # Only the main thread receives an interrupt. The ranks end at their next collective,
            # and the main thread does not wait for them.
            world.fail(None, error)
            raise
        finally:
            torch.set_rng_state(before)
    if (error := world.original_error(outcomes)) is not None:
        raise error
    world.check_nothing_left()
    return [outcome.result[0] for outcome in outcomes]


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
        case UnequalAllToAll(counts):
            parts = [x.split(row) for x, row in zip(inputs, counts, strict=True)]
            results = [torch.cat(received) for received in zip(*parts, strict=True)]
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
        self._process = os.getpid()

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        part = own_part(self, parts)
        self._num_subgroups += 1
        members = tuple(self._members[rank] for rank in part)
        return _SimulatedGroup(
            self._world_rank, self._world, members, (*self._channel, self._num_subgroups)
        )

    @with_ranges
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(
                f"a simulated group moves CPU tensors only; {call.op.kind} got one on {x.device}; "
                "move it to the CPU"
            )
        check_process(self._process, "a simulated group")
        if threading.get_ident() != self._thread:
            raise OptionError(
                f"a simulated group belongs to the thread of its rank; rank {self._world_rank}'s "
                f"was used in another thread ({call.op.kind} {call.name!r}); ranks must not share "
                "what changes while it runs: give each its own module, made inside the rank's "
                "function"
            )
        # A copy, so that the sender may change the input after the start, as with a real message.
        sent = x.detach().clone()
        pending = self._world.arrive(
            self._world_rank,
            self._members,
            self._channel,
            call,
            sent,
            None if out is None else out.detach(),
        )

        def wait() -> Tensor:
            result = self._world.wait(self._world_rank, pending)
            return result if out is None else out

        return Work(wait)

    def __repr__(self) -> str:
        return f"<simulated group: rank {self.rank} of {self.size}>"


@dataclass(slots=True, eq=False)
class _PendingCollective:
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
    """The state that the ranks of one simulation share; the rank whose turn it is changes it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._generators = [torch.get_rng_state()] * size
        self._counts: collections.Counter[tuple[object, ...]] = collections.Counter()
        self._pending: dict[tuple[object, ...], _PendingCollective] = {}
        self._blocked: dict[int, _PendingCollective] = {}
        self._left: set[int] = set()
        self._failure: Callable[[int], ZfunError] | None = None
        self._consequences: list[ZfunError] = []

    def begin(self) -> None:
        """Give rank 0 the first turn."""
        self._turns[0].release()

    def take_turn(self, rank: int) -> None:
        """Block until it is a rank's turn."""
        self._turns[rank].acquire()
        torch.set_rng_state(self._generators[rank])

    def arrive(
        self,
        rank: int,
        members: tuple[int, ...],
        channel: tuple[int, ...],
        call: Collective,
        x: Tensor,
        out: Tensor | None,
    ) -> _PendingCollective:
        """Add a rank's input to its next collective; the last rank computes all results."""
        if rank in self._left:
            raise OptionError(
                f"a simulated group ends with its simulation; got {call.op.kind} {call.name!r} of "
                "a group that simulate() gave to another call; use the group inside that call only"
            )
        self._raise_failure(rank)
        # Sub-groups of one call have disjoint ranks.
        index = self._counts[rank, channel, call.stream]
        self._counts[rank, channel, call.stream] += 1
        place = (members[0], channel, call.stream, index)
        pending = self._pending.setdefault(place, _PendingCollective(call.stream, index, members))
        pending.calls[rank] = call
        pending.texts[rank] = describe(call, x.numel(), x.dtype)
        pending.inputs[rank] = x
        pending.outs[rank] = out
        first = next(iter(pending.texts))
        if pending.texts[rank] != pending.texts[first]:
            self._fail(_different(pending, *sorted((first, rank))))
            self._raise_failure(rank)
        if len(pending.inputs) < len(members):
            return pending
        del self._pending[place]
        with torch.no_grad():
            results = evaluate(
                call.op,
                [pending.inputs[r] for r in members],
                [pending.outs[r] for r in members],
            )
        pending.results = dict(zip(members, results, strict=True))
        pending.inputs.clear()
        pending.outs.clear()
        return pending

    def wait(self, rank: int, pending: _PendingCollective) -> Tensor:
        """Let the other ranks run until every one of a collective has started it."""
        if pending.results is None:
            self._raise_failure(rank)
            self._blocked[rank] = pending
            self._check_progress()
            self._pass_on(rank)
            self.take_turn(rank)
            del self._blocked[rank]
        if pending.results is None:
            self._raise_failure(rank)
        assert pending.results is not None
        return pending.results.pop(rank)

    def leave(self, rank: int) -> None:
        """End the last turn of a rank that has returned or failed."""
        self._left.add(rank)
        self._check_progress()
        self._pass_on(rank)

    def fail(self, rank: int | None, error: BaseException) -> None:
        """End every rank after an error of one rank or of the main thread."""
        who = "the simulation" if rank is None else f"rank {rank}"
        message = f"{who} failed: {type(error).__name__}: {error}"

        def consequence(other: int) -> ZfunError:
            lost = PeerLost(f"rank {other} ends because {message}", rank=other)
            self._consequences.append(lost)
            return lost

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
        for pending in self._pending.values():
            missing = [rank for rank in pending.members if rank not in pending.texts]
            raise PeerLost(
                f"every rank must take part in every collective; {_ranks(missing)} returned "
                f"without {pending.label}, which {_ranks(pending.texts)} started",
                rank=min(pending.texts),
                collective=pending.label,
            )

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can continue; to none when all have left."""
        self._generators[rank] = torch.get_rng_state()
        for step in range(1, self.size + 1):
            other = (rank + step) % self.size
            if other not in self._left and self._can_run(other):
                self._turns[other].release()
                return

    def _can_run(self, rank: int) -> bool:
        pending = self._blocked.get(rank)
        return pending is None or pending.results is not None or self._failure is not None

    def _check_progress(self) -> None:
        """Note a failure if a rank waits for one that has returned, or if all ranks wait."""
        waiting = {r: where for r, where in self._blocked.items() if where.results is None}
        for rank, pending in waiting.items() if self._left else ():
            gone = [r for r in pending.members if r in self._left and r not in pending.texts]
            if gone:
                label = pending.label
                text = (
                    f"every rank must take part in every collective; {_ranks(gone)} returned, "
                    f"while rank {rank} waits for it in {label}"
                )
                self._fail(lambda other: PeerLost(text, rank=other, collective=label))
                return
        if waiting and len(waiting) + len(self._left) == self.size:
            waits = "; ".join(
                f"rank {rank} in {pending.label}" for rank, pending in sorted(waiting.items())[:8]
            )
            text = f"the ranks wait for each other in different collectives: {waits}; {SAME_ORDER}"
            self._fail(lambda other: CollectiveMismatch(text, rank=other))

    def _fail(self, failure: Callable[[int], ZfunError]) -> None:
        if self._failure is None:
            self._failure = failure

    def _raise_failure(self, rank: int) -> None:
        if self._failure is not None:
            raise self._failure(rank)


def _different(pending: _PendingCollective, low: int, high: int) -> Callable[[int], ZfunError]:
    text = (
        "all ranks must start the same collectives in the same order; at collective "
        f"{pending.index} of its stream rank {low} started {pending.texts[low]}, and rank {high} "
        f"started {pending.texts[high]}"
    )
    return lambda rank: CollectiveMismatch(
        text, rank=rank, collective=pending.texts.get(rank, pending.texts[low])
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
