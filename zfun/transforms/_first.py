"""The first step of a loss on sharded parameters as data: what is done while the order of use is still being learnt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from zfun.transforms.params._cursor import WINDOW, ScheduleCursor
from zfun.transforms.params._schedule import Schedule, Step

__all__ = ["first_steps"]


def first_steps(schedule: Schedule) -> tuple[Step, ...]:
    """Return what the first step does, after which the schedule is known.

    It gathers in the order of the layout, as far ahead as the schedule's options say, keeps the two buckets used last, and in backward a
    trained one until its gradients are complete; see [Note: the life of a parameter].

    Args:
        schedule: what is learnt.

    Returns:
        The steps, in order. What is left gathered after them is freed when all gradients have been summed.

    Example:
        >>> from zfun.transforms import Trace, TracedBucket
        >>> from zfun.transforms.params._schedule import schedule
        >>> blocks = tuple(TracedBucket(f"h.{i}", ((f"h.{i}", 64),), 64, 4, 4, 4) for i in range(3))
        >>> steps = first_steps(schedule(Trace(blocks, 2, (2, 1, 0)), prefetch=0))
        >>> [f"{step.kind} {step.bucket}" for step in steps if step.phase == "forward"][:6]
        ['gather 0', 'gather 1', 'gather 2', 'use 2', 'use 1', 'release 2']
    """
    return tuple(_First(schedule).run())


class _First:
    """Walks through a trace as gathered parameters do without a plan."""

    def __init__(self, schedule: Schedule) -> None:
        options = schedule.options
        self._trace, self._persistent = schedule.trace, schedule.persistent
        # Off the schedule memory is not bounded; what can be done is not to gather ahead.
        self._ahead = options.prefetch if options.max_live is None else 0
        self._pending: list[int] = []
        self._there: list[int] = []
        self._steps: list[Step] = []
        self._phase: Literal["forward", "backward"] = "forward"

    def run(self) -> list[Step]:
        count, trace = len(self._trace.buckets), self._trace
        self._begin(range(count))
        for place, bucket in enumerate(trace.forward):
            recent = list(dict.fromkeys(reversed(trace.forward[: place + 1])))[:WINDOW]
            self._release(b for b in self._there if b not in recent)
            self._use(bucket)
        self._gather(self._course.rest())
        for bucket in sorted(self._persistent):
            self._use(bucket)
        self._release([*self._pending, *self._there])
        self._phase = "backward"
        order = [*dict.fromkeys([*trace.forward, *range(count)])][::-1]
        self._begin(b for b in order if b not in self._persistent)
        reduced = set[int]()
        for event in trace.backward:
            if event.kind == "use":
                self._release([b for b in self._there if b != event.bucket and not trace.buckets[b].grad_itemsize][: 1 - WINDOW])
                self._use(event.bucket)
            else:
                self._write("reduce", event.bucket)
                self._release([event.bucket])
                reduced.add(event.bucket)
        self._gather(self._course.rest())
        for bucket in range(count - 1, -1, -1):
            if trace.buckets[bucket].grad_itemsize and bucket not in reduced:
                self._write("reduce", bucket)
        return self._steps

    def _begin(self, buckets: Iterable[int]) -> None:
        self._course = ScheduleCursor((Step("gather", b, self._phase) for b in buckets), followed=False)

    def _use(self, bucket: int) -> None:
        if bucket not in self._there:
            self._gather(self._course.advance_to_gather(bucket, self._ahead, again=bucket not in self._pending))
        if bucket not in [*self._there, *self._pending]:
            # It was freed in this pass, and all ranks come together to gather it again.
            self._gather([*(self._course.rest() if self._phase == "forward" else ()), Step("gather", bucket, self._phase)])
        self._write("use", bucket)
        if bucket in self._pending:
            self._pending.remove(bucket)
            self._there.append(bucket)

    def _gather(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._write("gather", step.bucket)
            self._pending.append(step.bucket)

    def _release(self, buckets: Iterable[int]) -> None:
        for bucket in list(buckets):
            if bucket not in self._persistent and bucket in [*self._there, *self._pending]:
                self._write("release", bucket)
                (self._there if bucket in self._there else self._pending).remove(bucket)

    def _write(self, kind: Literal["gather", "use", "release", "reduce"], bucket: int) -> None:
        self._steps.append(Step(kind, bucket, self._phase))
