"""Decide when each bucket is gathered and released. See [Note: the schedule]."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Set

from zfun.errors import OptionError
from zfun.transforms.call._trace import Kind, Phase, Step, Trace
from zfun.transforms.params._schedule_options import ScheduleOptions


def steps_of(trace: Trace, options: ScheduleOptions, persistent: frozenset[int]) -> list[Step]:
    """Return the steps of a schedule.

    Args:
        trace: the uses of buckets, in order.
        options: of the schedule.
        persistent: the buckets that stay gathered until the parameters change.

    Raises:
        OptionError: ``max_live`` is smaller than the buckets that one use needs.
    """
    _check_room(trace, persistent, options.max_live)
    return _Scheduler(trace, options, persistent).run()


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


def with_reads(
    steps: Iterable[Step],
    stored: Set[int],
    ahead: int,
    reads: Callable[[Step], bool] = lambda step: True,
) -> list[Step]:
    """Put a read before each gather of a bucket in a store, ``ahead`` such gathers earlier.

    Args:
        steps: the steps of a schedule.
        stored: the buckets in a store.
        ahead: how many reads may be under way.
        reads: whether a gather sends the shard in the store.

    Example:
        >>> gathers = [Step("gather", bucket, "forward") for bucket in range(3)]
        >>> [f"{step.kind} {step.bucket}" for step in with_reads(gathers, {0, 1, 2}, 1)]
        ['read 0', 'gather 0', 'read 1', 'gather 1', 'read 2', 'gather 2']
    """
    steps = list(steps)
    is_read = [s.kind == "gather" and s.bucket in stored and reads(s) for s in steps]
    todo = [step._replace(kind="read") for step, read in zip(steps, is_read, strict=True) if read]
    out: list[Step] = []
    count = started = 0
    for step, read in zip(steps, is_read, strict=True):
        if not read:
            out.append(step)
            continue
        count += 1
        first = max(started, count)
        out += [*todo[started:first], step, *todo[first : count + ahead]]
        started = max(first, min(count + ahead, len(todo)))
    return out


def _without_regathers(steps: Iterable[Step]) -> list[Step]:
    """Keep each bucket that is released and gathered again before the next use of any bucket.

    The last buckets of forward are the first of backward, so the scheduler releases and gathers
    them at the turn. Every use finds the same buckets gathered as before, so the peak is the same.
    """
    out: list[Step | None] = []
    # The buckets gathered, and the places of the releases, since the last use.
    fresh, released = set[int](), dict[int, int]()
    for step in steps:
        if step.kind == "gather" and step.bucket in released:
            out[released.pop(step.bucket)] = None
            continue
        if step.kind == "gather":
            fresh.add(step.bucket)
        elif step.kind == "release" and step.bucket not in fresh:
            released[step.bucket] = len(out)
        else:
            # A bucket gathered for other ranks alone makes room for the next, so none may stay.
            fresh.clear()
            released.clear()
        out.append(step)
    return [step for step in out if step is not None]


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

    def run(self) -> list[Step]:
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
        # Backward over the secondary group gathers the parts of the gathered buckets.
        phases = (
            ("start", "forward") if self._options.secondary else ("start", "forward", "backward")
        )
        stored = {i for i, bucket in enumerate(self._trace.buckets) if bucket.stored_itemsize}
        return with_reads(
            _without_regathers(self._steps) if self._distance is None else self._steps,
            stored,
            self._options.read_ahead,
            lambda step: step.phase in phases,
        )

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
