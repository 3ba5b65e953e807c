"""The schedule as data: when each bucket of sharded parameters is read, gathered, used, released.

[Note: the schedule]
A *trace* says which buckets a loss uses, in which order, forward and backward.
A *schedule* is a tuple of steps, made by a pure function of the trace and a few options. A schedule
knows no tensors and starts nothing: :func:`zfun.shard_params` runs the schedule,
:func:`zfun.planner.explain` predicts the costs, :func:`zfun.planner.timeline` draws the steps.
Every rank makes the same schedule from the trace of rank 0, so gathers have one order everywhere.

A use stands for all operations on a bucket until another bucket is used. A use ends when the next
use begins, or earlier in backward when the bucket's gradients are complete.

After the last gather of forward, forward gathers ahead for backward, because ranks wait for each
other at the end of forward and would wait for a gather there too. The last buckets
of forward stay, because backward begins with them; the others are released, and regathered for
backward.

Where shards lie in a store, each gather has a *read* before, which starts to bring this rank's
shard from the store. The read of a gather follows the gather ``read_ahead`` places before, so the
store works while the loss computes, and at most ``read_ahead`` reads are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zfun.options import instance, takes
from zfun.tables import html_table, in_bytes
from zfun.transforms.call._trace import Phase, Step, Trace, TracedBucket
from zfun.transforms.params._schedule_options import OPTIONS, ScheduleOptions
from zfun.transforms.params._scheduler import steps_of


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each bucket is gathered, used and released in a step: data.

    Attributes:
        trace: the uses.
        steps: in order.
        persistent: the buckets that stay gathered from one change of the parameters to the next.
        options: the options of the schedule.
    """

    trace: Trace
    steps: tuple[Step, ...]
    persistent: frozenset[int]
    options: ScheduleOptions = field(default_factory=ScheduleOptions)

    def __repr__(self) -> str:
        count = sum(step.kind == "gather" for step in self.steps)
        peak = in_bytes(max(self.live_bytes(), default=0))
        return (
            f"Schedule({len(self.trace.buckets)} buckets over {self.trace.size} ranks: {count} "
            f"gathers, at most {peak} gathered at once)"
        )

    def _repr_html_(self) -> str:
        rows = [
            (step.phase, step.kind, self.trace.buckets[step.bucket].label, in_bytes(live))
            for step, live in zip(self.steps, self.live_bytes(), strict=True)
        ]
        return html_table(repr(self), ("phase", "step", "bucket", "gathered after"), rows)

    @property
    def turn(self) -> int:
        """The place of the first step after the end of forward.

        Reads and gathers for backward may come before.
        """
        later = (
            place
            for place, step in enumerate(self.steps)
            if step.phase == "backward" and step.kind not in ("read", "gather")
        )
        return next(later, len(self.steps))

    def live(self) -> list[int]:
        """Return how many elements are gathered after each step."""
        return self._running(lambda bucket: bucket.numel)

    def live_bytes(self) -> list[int]:
        """Return how many bytes are gathered after each step."""
        return self._running(lambda bucket: bucket.nbytes)

    def _running(self, size: Callable[[TracedBucket], int]) -> list[int]:
        now = 0
        found: list[int] = []
        for step in self.steps:
            now += {"gather": 1, "release": -1}.get(step.kind, 0) * size(
                self.trace.buckets[step.bucket]
            )
            found.append(now)
        return found

    def order(self, phase: Phase) -> tuple[int, ...]:
        """Return the buckets that one phase gathers, in order."""
        return tuple(
            step.bucket for step in self.steps if step.kind == "gather" and step.phase == phase
        )


SCHEDULE = instance(Schedule, "a schedule", "zf.planner.schedule(trace)")


@takes(
    trace=instance(Trace, "a trace", "zf.planner.trace(loss, params, batch, 8)"),
    options=OPTIONS | None,
)
def schedule(trace: Trace, options: ScheduleOptions | None = None) -> Schedule:
    """Decide when each bucket is gathered and released.

    Args:
        trace: the uses of buckets, in order.
        options: by default those of ``ScheduleOptions()``.

    Returns:
        The schedule. Equal arguments give equal schedules.

    Raises:
        OptionError: ``max_live`` is smaller than the buckets that one use needs.

    Example:
        >>> blocks = tuple(TracedBucket(f"h.{i}", ((f"h.{i}", 64),), 64, 4, 4, 4) for i in range(3))
        >>> steps = schedule(Trace(blocks, 2, (0, 1, 2))).steps
        >>> [f"{step.kind} {step.bucket}" for step in steps if step.phase == "forward"][:6]
        ['gather 0', 'gather 1', 'use 0', 'release 0', 'gather 2', 'use 1']
    """
    options = options or ScheduleOptions()
    persistent = options.persistent(trace.buckets)
    steps = steps_of(trace, options, persistent)
    return Schedule(trace, tuple(steps), persistent, options)
