"""The world that simulated ranks share: whose turn it is, and which collectives wait for whom."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives.backends._diagnosis import SAME_ORDER
from zfun.errors import CollectiveMismatch, OptionError, PeerLost, ZfunError
from zfun.ops._sums import sum_in_rank_order

_Result = TypeVar("_Result")


def evaluate(op: _ops.Op, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute a collective for all ranks from its definition.

    Args:
        op: the collective.
        inputs: the input of each rank, in rank order.
        outs: the output of each rank, or None.

    Returns:
        The result of each rank: its ``out``, else a fresh tensor.

    Example:
        >>> inputs = [torch.tensor([1, 2]), torch.tensor([10, 20])]
        >>> evaluate(_ops.ReduceScatter(), inputs, [None, None])
        [tensor([11]), tensor([22])]
    """
    size = len(inputs)
    match op:
        case _ops.AllGather():
            results = [torch.cat(list(inputs))] * size
        case _ops.ReduceScatter():
            results = (
                sum_in_rank_order(inputs).unflatten(0, (size, inputs[0].numel() // size)).unbind()
            )
        case _ops.AllReduce():
            results = [sum_in_rank_order(inputs)] * size
        case _ops.Broadcast(root):
            results = [inputs[root]] * size
        case _ops.Reduce(root):
            total = sum_in_rank_order(inputs)
            results = [total if rank == root else torch.zeros_like(total) for rank in range(size)]
        case _ops.AllToAll():
            chunks = torch.stack(list(inputs)).unflatten(1, (size, inputs[0].numel() // size))
            results = [received.flatten() for received in chunks.unbind(1)]
        case _ops.UnequalAllToAll(counts):
            parts = [x.split(row) for x, row in zip(inputs, counts, strict=True)]
            results = [torch.cat(received) for received in zip(*parts, strict=True)]
        case _ops.Permute():
            results = [inputs[source] for source in op.sources]
    return [
        result.clone() if out is None else out.copy_(result)
        for result, out in zip(results, outs, strict=True)
    ]


@dataclass(slots=True, eq=False)
class PendingCollective:
    """One collective in progress: the inputs so far, and the results."""

    stream: _ops.Stream
    index: int
    members: tuple[int, ...]
    calls: dict[int, _ops.Collective] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outs: dict[int, Tensor | None] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None

    @property
    def label(self) -> str:
        first = min(self.texts)
        return f"collective {self.index} of its stream ({self.texts[first]})"


@dataclass(slots=True)
class Outcome(Generic[_Result]):
    result: list[_Result] = field(default_factory=list)
    error: BaseException | None = None


class World:
    """The state that the ranks of one simulation share; the rank whose turn it is changes it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._generators = [torch.get_rng_state()] * size
        self._counts: collections.Counter[tuple[object, ...]] = collections.Counter()
        self._pending: dict[tuple[object, ...], PendingCollective] = {}
        self._blocked: dict[int, PendingCollective] = {}
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
        call: _ops.Collective,
        x: Tensor,
        out: Tensor | None,
    ) -> PendingCollective:
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
        pending = self._pending.setdefault(place, PendingCollective(call.stream, index, members))
        pending.calls[rank] = call
        pending.texts[rank] = _ops.describe(call, x.numel(), x.dtype)
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

    def wait(self, rank: int, pending: PendingCollective) -> Tensor:
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

    def original_error(self, outcomes: Sequence[Outcome[_Result]]) -> BaseException | None:
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


def _different(pending: PendingCollective, low: int, high: int) -> Callable[[int], ZfunError]:
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
