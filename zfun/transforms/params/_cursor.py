"""The schedule of a loss, and a cursor that follows the schedule."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from zfun.collectives import Broadcast, Collective, Group, Stream
from zfun.errors import ZfunError
from zfun.transforms.call._trace import Step, Trace, TracedBucket
from zfun.transforms.params._schedule import Schedule, schedule
from zfun.transforms.params._schedule_options import ScheduleOptions

told_order: ContextVar[Trace | None] = ContextVar("told_order", default=None)
"""The order in which losses use their buckets, where it is known before the first call.

Of the buckets of the trace only the number counts. A loss that uses them in another order raises
:class:`UntoldUse`.
"""

# How many buckets stay gathered behind the one in use while the order of use is not known.
WINDOW = 2


class UntoldUse(ZfunError):
    """A loss uses its buckets in another order than :data:`told_order` says."""

    def __init__(self, how: str) -> None:
        super().__init__(f"an order of use was told that the loss does not have: {how}")


@dataclass(frozen=True)
class SchedulePlan:
    """A learnt schedule, and the buckets that backward used in the traced pass.

    ``ahead`` lists them, see [Note: what backward will use]. It is ``None`` until there was a
    backward, and empty for a schedule made of :data:`told_order`, which does not know them.
    """

    schedule: Schedule
    ahead: tuple[int, ...] | None = None
    is_told: bool = False

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """The buckets that stay gathered from forward to backward."""
        held: set[int] = set()
        for step in self.schedule.steps[: self.schedule.turn]:
            if step.phase != "start" and step.kind == "gather":
                held.add(step.bucket)
            elif step.kind == "release":
                held.discard(step.bucket)
        return frozenset(held)

    def forward(self, *, trains: bool) -> Sequence[Step]:
        """Return the steps of forward; gathers for backward only in training."""
        steps = self._forward
        return steps if trains else [step for step in steps if step.phase != "backward"]

    @functools.cached_property
    def _forward(self) -> tuple[Step, ...]:
        return self.schedule.steps[: self.schedule.turn]

    @functools.cached_property
    def backward(self) -> tuple[Step, ...]:
        """The steps after the end of forward."""
        return self.schedule.steps[self.schedule.turn :]


def told_plan(
    order: Trace, buckets: tuple[TracedBucket, ...], size: int, options: ScheduleOptions
) -> SchedulePlan:
    """Return the plan of a loss whose order of use is told."""
    if len(order.buckets) != len(buckets):
        raise UntoldUse(f"it has {len(order.buckets)} buckets, not {len(buckets)}")
    trace = dataclasses.replace(order, buckets=buckets, size=size, leaves=())
    return SchedulePlan(schedule(trace, options), (), is_told=True)


def of_rank_0(value: Any, group: Group, name: str, *, abstract: bool) -> Any:
    """Return the value of rank 0 on every rank; abstract ranks have the same value."""
    if group.size == 1:
        return value
    text = json.dumps(value).encode() if group.rank == 0 or abstract else b""
    length = torch.tensor([len(text)], dtype=torch.int64)
    length = group.start(
        Collective(Broadcast(0), "schedule", f"length of {name}", Stream.CONTROL), length
    ).wait()
    # Fake tensors have no values to read.
    data = torch.zeros(len(text) if abstract else int(length), dtype=torch.uint8)
    if group.rank == 0 and not abstract:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    data = group.start(Collective(Broadcast(0), "schedule", name, Stream.CONTROL), data).wait()
    return value if abstract else json.loads(bytes(data.tolist()))


class ScheduleCursor:
    """The steps of one pass, and this rank's place among the steps."""

    __slots__ = ("followed", "place", "steps")

    def __init__(self, steps: Iterable[Step], *, followed: bool) -> None:
        self.steps = tuple(steps)
        self.place = 0
        self.followed = followed

    def advance_to(self, kind: str, bucket: int) -> Sequence[Step]:
        """Return the steps up to a use or a reduction, if next; else this rank diverges here."""
        if not self.followed:
            return ()
        here = self.place
        for place in range(here, len(self.steps)):
            step = self.steps[place]
            if step.kind in ("use", "reduce"):
                if step.kind != kind or step.bucket != bucket:
                    break
                end = place + 1
                if kind == "reduce" and end < len(self.steps):
                    following = self.steps[end]
                    end += following.kind == "release" and following.bucket == bucket
                self.place = end
                return self.steps[here:end]
        self.followed = False
        return ()

    def advance_to_gather(self, bucket: int, ahead: int, *, again: bool) -> Sequence[Step]:
        """Return the gathers not started yet up to a gather of a bucket, and up to ``ahead`` more.

        That is the next gather of the bucket with ``again``, and the last started one without. The
        reads between these gathers are returned too, and those after the last one.
        """
        gathers = [place for place, step in enumerate(self.steps) if step.kind == "gather"]
        mine = [
            turn
            for turn, place in enumerate(gathers)
            if self.steps[place].bucket == bucket and (place >= self.place) is again
        ]
        if not mine:
            return ()
        turn = (mine[0] if again else mine[-1]) + ahead
        here, end = self.place, gathers[min(turn, len(gathers) - 1)] + 1
        while self.steps[end : end + 1] and self.steps[end].kind == "read":
            end += 1
        self.place = max(here, end)
        return [step for step in self.steps[here:end] if step.kind in ("read", "gather")]

    def rest(self) -> Sequence[Step]:
        """Return the steps left; after divergence, the reads and gathers among these steps."""
        here, self.place = self.place, len(self.steps)
        kinds = ("read", "gather")
        return [step for step in self.steps[here:] if self.followed or step.kind in kinds]
