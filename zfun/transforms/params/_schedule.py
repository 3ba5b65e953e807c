"""The schedule as data: when each bucket of sharded parameters is gathered, used and released.

[Note: the schedule]
A *trace* says which buckets a loss uses, in which order, forward and backward.
A *schedule* is a tuple of steps, made by a pure function of the trace and a few options. A schedule
knows no tensors and starts nothing: :func:`zfun.shard_params` runs the schedule,
:func:`zfun.planner.explain` predicts the costs, :func:`zfun.planner.timeline` draws the steps.
Every rank makes the same schedule from the trace of rank 0, so gathers have one order everywhere.

A use stands for all operations on a bucket until another bucket is used. A use ends when the next
use begins, or earlier in backward when the bucket's gradients are complete.

After the last gather of forward, forward gathers ahead for backward, because ranks wait for each
other at the end of forward and would wait for a gather there too. Buckets in use in
forward are released as usual, and regathered for backward.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from zfun.collectives import Group, Mesh
from zfun.errors import OptionError, checked_options

__all__ = [
    "Event",
    "Schedule",
    "ScheduleOptions",
    "Step",
    "Trace",
    "TracedBucket",
    "schedule",
    "secondary_of",
]

Kind: TypeAlias = Literal["gather", "use", "release", "reduce"]
Phase: TypeAlias = Literal["start", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class TracedBucket:
    """A bucket in the form that a schedule takes.

    Attributes:
        label: name of the bucket in messages.
        leaves: path and number of elements of each leaf.
        numel: elements of the gathered bucket, padding included.
        itemsize: bytes of an element in the gathered bucket.
        sent_itemsize: bytes of an element in the all-gather.
        grad_itemsize: bytes of an element of the gradients; 0 for frozen leaves.
        is_floating: whether the elements are floating numbers, which a codec can round.
    """

    label: str
    leaves: tuple[tuple[str, int], ...]
    numel: int
    itemsize: int
    sent_itemsize: int
    grad_itemsize: int
    is_floating: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered bucket."""
        return self.numel * self.itemsize


class Event(NamedTuple):
    """An event of backward: a use of a bucket, or the completion of the gradients.

    Attributes:
        kind: ``"use"`` or ``"reduce"``.
        bucket: index of the bucket.
    """

    kind: Literal["use", "reduce"]
    bucket: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The buckets that a loss uses, in order.

    The first step records a trace; so does :func:`zfun.planner.trace`, without a step.

    Attributes:
        buckets: of the trained leaves, then of the frozen ones.
        size: number of ranks that share each bucket.
        forward: indices of the buckets in the order of use; a bucket may appear several times.
        backward: the events of backward; by default the uses of forward in reverse.
        leaves: paths of the leaves in the order of the first use in forward, for ``order=`` of
            :func:`zfun.shard`; by default bucket by bucket.

    Example:
        >>> block = TracedBucket("h", (("h.w", 64),), 64, 4, 4, 4)
        >>> Trace((block, block), 2, (0, 1)).backward[:2]
        (Event(kind='use', bucket=1), Event(kind='reduce', bucket=1))
    """

    buckets: tuple[TracedBucket, ...]
    size: int
    forward: tuple[int, ...]
    backward: tuple[Event, ...] = ()
    leaves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.leaves:
            used = [
                path
                for bucket in dict.fromkeys(self.forward)
                for path, _ in self.buckets[bucket].leaves
            ]
            object.__setattr__(self, "leaves", tuple(used))
        if not self.backward:
            object.__setattr__(self, "backward", tuple(self._reversed()))

    def _reversed(self) -> Iterator[Event]:
        for i in range(len(self.forward) - 1, -1, -1):
            bucket = self.forward[i]
            yield Event("use", bucket)
            if self.buckets[bucket].grad_itemsize and bucket not in self.forward[:i]:
                yield Event("reduce", bucket)


class Step(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: ``"gather"`` (the start), ``"use"`` (wait for the gather, and compute), ``"release"``,
            or ``"reduce"`` (the gradients are complete).
        bucket: index of the bucket.
        phase: the phase that needs the step: ``"start"`` (once after each change of the
            parameters), ``"forward"`` or ``"backward"``.
    """

    kind: Kind
    bucket: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """When stage 3 gathers and releases buckets. No option changes a bit of the result.

    Attributes:
        prefetch: how many buckets are gathered ahead of use, forward and backward. Each costs the
            memory of a bucket.
        max_live: the largest number of elements gathered at once, padding included; ``None`` sets
            no bound. A gather ahead of use waits until there is room. A gather that cannot wait
            evicts the bucket that is needed latest, which is then gathered again.
        reuse_distance: a bucket stays gathered after a use if fewer elements than this number are
            used before the next use of the bucket, from forward into backward too. By default a
            bucket that is used again in the same pass stays, and none stays from forward to
            backward.
        persistence: a bucket of which no leaf has more elements than this stays gathered until the
            parameters change. Give :func:`zfun.shard` the same number, so that small leaves lie in
            buckets of their own.
        max_persistent: the largest number of elements that stay so, counted in the order of the
            layout; ``None`` sets no bound.
        secondary: over a mesh, each rank keeps a part of the buckets that forward has gathered, and
            backward gathers these parts over the inner axis alone, so that parameters cross between
            rows once in a step. Costs the memory of ``1/mesh.inner.size`` of the parameters during
            a step (hpZ; Wang et al., "ZeRO++", 2023).

    Raises:
        OptionError: a number is negative or not an integer.

    Example:
        >>> ScheduleOptions(prefetch=2).max_live is None
        True
    """

    prefetch: int = 1
    max_live: int | None = None
    reuse_distance: int | None = None
    persistence: int = 0
    max_persistent: int | None = None
    secondary: bool = False

    def __post_init__(self) -> None:
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise OptionError(
                f"prefetch is a number of buckets; got {self.prefetch!r}; 0 gathers each when it "
                "is used"
            )
        for name, value, remedy in (
            ("max_live", self.max_live, "None sets no bound"),
            (
                "reuse_distance",
                self.reuse_distance,
                "0 releases a bucket after each use, None after its last one in a pass",
            ),
            ("persistence", self.persistence, "0 keeps nothing gathered"),
            ("max_persistent", self.max_persistent, "None sets no bound"),
        ):
            if (value is not None or name == "persistence") and (
                type(value) is not int or value < 0
            ):
                raise OptionError(f"{name} is a number of elements; got {value!r}; {remedy}")
        if type(self.secondary) is not bool:
            raise OptionError(
                f"secondary is True or False; got {self.secondary!r}; the inner axis is that of "
                "the mesh itself"
            )

    def persistent(self, buckets: tuple[TracedBucket, ...]) -> frozenset[int]:
        """Return the indices of the buckets that stay gathered until the parameters change."""
        chosen, total = set(), 0
        for index, bucket in enumerate(buckets):
            is_small = self.persistence > 0 and all(
                numel <= self.persistence for _, numel in bucket.leaves
            )
            if is_small and (
                self.max_persistent is None or total + bucket.numel <= self.max_persistent
            ):
                chosen.add(index)
                total += bucket.numel
        return frozenset(chosen)

    def schedule(self, trace: Trace) -> Schedule:
        """Decide when each bucket is gathered and released."""
        persistent = self.persistent(trace.buckets)
        _check_room(trace, persistent, self.max_live)
        return _Scheduler(trace, self, persistent).run()


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
    options: ScheduleOptions = ScheduleOptions()

    @property
    def turn(self) -> int:
        """The place of the first step after the end of forward.

        Gathers for backward may come before.
        """
        later = (
            place
            for place, step in enumerate(self.steps)
            if step.phase == "backward" and step.kind != "gather"
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


@checked_options
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
    return (options or ScheduleOptions()).schedule(trace)


def secondary_of(group: Group, options: ScheduleOptions) -> Group | None:
    """Return the group over which backward gathers parameters of ``group``; ``None`` for ``group``.

    Raises:
        OptionError: ``options.secondary`` is set, and the group is no mesh.

    Example:
        >>> import zfun as zf
        >>> mesh = zf.split(zf.collectives.abstract_group(8), inner=2)
        >>> secondary_of(mesh, ScheduleOptions(secondary=True)) is mesh.inner
        True
    """
    if not options.secondary:
        return None
    if not isinstance(group, Mesh):
        raise OptionError(
            f"secondary=True gathers over the inner axis of a mesh; got {group!r}; shard the "
            "parameters over a mesh, as zf.split(group, inner=n) makes it, or leave secondary out"
        )
    return group.inner


def _check_room(trace: Trace, persistent: frozenset[int], max_live: int | None) -> None:
    if max_live is None or not trace.buckets:
        return
    kept = sum(trace.buckets[b].numel for b in persistent)
    rest = [bucket for b, bucket in enumerate(trace.buckets) if b not in persistent]
    largest = max(rest, key=lambda bucket: bucket.numel, default=None)
    if kept + (largest.numel if largest else 0) > max_live:
        what = (
            f"{largest.label} has {largest.numel} elements with padding"
            if largest
            else "nothing else is gathered"
        )
        beside = f" and {kept} persist" if kept else ""
        raise OptionError(
            f"max_live must hold the largest bucket beside what persists; got {max_live}, where "
            f"{what}{beside}; use a larger max_live, or smaller buckets (bucket_bytes)"
        )


class _Scheduler:
    """Walks through a trace and writes the steps down."""

    def __init__(self, trace: Trace, options: ScheduleOptions, persistent: frozenset[int]) -> None:
        self._trace = trace
        self._options = options
        self._prefetch = options.prefetch
        self._room = math.inf if options.max_live is None else options.max_live
        self._distance = options.reuse_distance
        self._persistent = persistent
        # Both passes as one sequence, because a bucket may stay from forward to backward.
        self._uses = [
            *trace.forward,
            *(event.bucket for event in trace.backward if event.kind == "use"),
        ]
        self._turn = len(trace.forward)
        self._before = [0]
        self._places: list[list[int]] = [[] for _ in trace.buckets]
        for place, bucket in enumerate(self._uses):
            self._before.append(self._before[-1] + trace.buckets[bucket].numel)
            self._places[bucket].append(place)
        # The last use of each gathered bucket; None before the first use.
        self._held: dict[int, int | None] = {}
        self._steps: list[Step] = []
        self._phase: Phase = "start"

    def run(self) -> Schedule:
        for bucket in sorted(self._persistent):
            self._write("gather", bucket)
            self._room -= self._trace.buckets[bucket].numel
        self._phase = "forward"
        for now, bucket in enumerate(self._trace.forward):
            self._use(bucket, now)
        self._release_where(lambda bucket: not self._stays(bucket, self._turn))
        self._gather_for_others(set(self._trace.forward), self._turn)
        self._phase, now = "backward", self._turn
        reduced, used = set[int](), set[int]()
        for event in self._trace.backward:
            if event.kind == "use":
                self._use(event.bucket, now)
                used.add(event.bucket)
                now += 1
            else:
                self._reduce(event.bucket, now)
                reduced.add(event.bucket)
        used |= self._held.keys()
        self._release_where(lambda _: True)
        self._gather_for_others(used, now)
        for bucket in range(len(self._trace.buckets) - 1, -1, -1):
            if self._trace.buckets[bucket].grad_itemsize and bucket not in reduced:
                self._write("reduce", bucket)
        return Schedule(self._trace, tuple(self._steps), self._persistent, self._options)

    def _use(self, bucket: int, now: int) -> None:
        for other in [b for b in self._held if b != bucket and not self._stays(b, now)]:
            self._release(other)
        if bucket not in self._held and bucket not in self._persistent:
            self._gather(bucket, now)
        self._gather_ahead(bucket, now)
        self._write("use", bucket)
        if bucket in self._held:
            self._held[bucket] = now

    def _gather_ahead(self, bucket: int, now: int) -> None:
        ahead = sum(last is None and b != bucket for b, last in self._held.items())
        for place in range(now + 1, len(self._uses)):
            following = self._uses[place]
            if ahead >= self._prefetch:
                return
            if (
                following != bucket
                and following not in self._held
                and following not in self._persistent
            ):
                phase: Phase = "forward" if place < self._turn else "backward"
                # Forward gathers a bucket that only backward uses for other ranks first.
                is_due = phase == self._phase or following in self._trace.forward
                if self._trace.buckets[following].numel > self._room or not is_due:
                    return
                self._gather(following, now, phase)
                ahead += 1

    def _reduce(self, bucket: int, now: int) -> None:
        self._write("reduce", bucket)
        if (
            bucket in self._held
            and self._next_use(bucket, now) == len(self._uses)
            and not self._stays(bucket, now)
        ):
            self._release(bucket)

    def _release_where(self, condition: Callable[[int], bool]) -> None:
        for bucket in [b for b in self._held if condition(b)]:
            self._release(bucket)

    def _gather_for_others(self, there: set[int], now: int) -> None:
        """Gather the buckets that a pass does not use, because another rank may use the buckets."""
        for bucket in range(len(self._trace.buckets)):
            if bucket not in there and bucket not in self._persistent:
                self._gather(bucket, now)
                self._release(bucket)

    def _stays(self, bucket: int, now: int) -> bool:
        last, following = self._held[bucket], self._next_use(bucket, now)
        if last is None:
            return True
        if following == len(self._uses) and (last >= self._turn or self._distance is None):
            return False
        # A bucket without a use in backward stays to the end of backward for other ranks, or is
        # gathered at the end.
        if self._distance is None:
            return (following < self._turn) == (last < self._turn)
        return self._before[following] - self._before[last + 1] < self._distance

    def _next_use(self, bucket: int, now: int) -> int:
        """Return the position of the first use from ``now`` on, or the number of uses."""
        places = self._places[bucket]
        index = bisect.bisect_left(places, now)
        return places[index] if index < len(places) else len(self._uses)

    def _gather(self, bucket: int, now: int, phase: Phase | None = None) -> None:
        numel = self._trace.buckets[bucket].numel
        while numel > self._room:
            self._release(max(self._held, key=lambda b: self._next_use(b, now)))
        self._write("gather", bucket, phase)
        self._held[bucket] = None
        self._room -= numel

    def _release(self, bucket: int) -> None:
        self._write("release", bucket)
        del self._held[bucket]
        self._room += self._trace.buckets[bucket].numel

    def _write(self, kind: Kind, bucket: int, phase: Phase | None = None) -> None:
        self._steps.append(Step(kind, bucket, phase or self._phase))
