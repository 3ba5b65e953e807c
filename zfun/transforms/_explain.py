"""What a schedule sends, what hides it, and when: prices and pictures of data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zfun.collectives import AllGather, ReduceScatter
from zfun.errors import OptionError, checked_options
from zfun.transforms._schedule import Phase, Schedule
from zfun.transforms._tape import MAX_IN_FLIGHT

__all__ = ["Accumulation", "Explanation", "Message", "Span", "Timeline", "explain", "timeline"]


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a step.

    Attributes:
        kind: ``"all_gather"`` or ``"reduce_scatter"``.
        name: ``"params"`` or ``"grads"``, as in the records of :func:`zfun.record`.
        bucket: index of the bucket.
        label: its name.
        phase: ``"start"`` (once after each change of the parameters), ``"forward"`` or ``"backward"``.
        sent_bytes: what each rank sends.
        overlaps: the buckets whose use it runs beside; it is waited for at once where there is none.
    """

    kind: str
    name: str
    bucket: int
    label: str
    phase: Phase
    sent_bytes: int
    overlaps: tuple[int, ...]


class Accumulation(NamedTuple):
    """What one order of accumulation and reduction costs each rank in a step.

    Attributes:
        order: how it is written.
        sent_bytes: parameters and gradients, all micro-batches together.
        held_bytes: the sum of the gradients that is kept between micro-batches.
    """

    order: str
    sent_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a step of a schedule sends and holds; ``print`` it.

    Attributes:
        messages: in the order in which they are started.
        peak_live: the largest number of elements that are gathered at once, padding included.
        peak_bytes: the same in bytes, at its own worst moment.
        accumulation: both orders of :func:`zfun.accumulate` and :func:`zfun.shard_grads`.
        num_micro_batches: for which ``accumulation`` is.
    """

    messages: tuple[Message, ...]
    peak_live: int
    peak_bytes: int
    accumulation: tuple[Accumulation, ...]
    num_micro_batches: int

    def bytes_sent(self, name: str | None = None) -> int:
        """Return what each rank sends in a step of one batch: all of it, or ``"params"`` or ``"grads"`` alone."""
        return sum(message.sent_bytes for message in self.messages if name in (None, message.name))

    def __str__(self) -> str:
        rows = [("phase", "collective", "of", "bytes", "runs beside the use of")]
        for m in self.messages:
            beside = ", ".join(map(str, m.overlaps)) or "nothing"
            rows.append((m.phase, m.kind, m.label, f"{m.sent_bytes:,}", beside))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(f"at most {self.peak_live:,} elements gathered at once, {self.peak_bytes:,} bytes")
        lines += [
            f"{self.num_micro_batches} micro-batches, {a.order}: {a.sent_bytes:,} bytes sent, {a.held_bytes:,} bytes of gradients held"
            for a in self.accumulation
        ]
        return "\n".join(lines)


@checked_options
def explain(schedule: Schedule, *, num_micro_batches: int = 1) -> Explanation:
    """List what a step sends, in which order, and what it runs beside.

    Args:
        schedule: what :func:`zfun.schedule` made.
        num_micro_batches: the number to price both orders of accumulation for.

    Returns:
        The messages of a step with one batch, and the two prices. What the ranks say to each other beside them (loss, norm, votes) is not
        counted, nor are frozen buckets that persist: they are gathered once and for all.

    Raises:
        OptionError: there is no micro-batch.

    Example:
        >>> import torch, zfun as zf
        >>> params = {"a": torch.ones(64), "b": torch.ones(64, 64)}
        >>> trace = zf.trace(lambda p, x: torch.tanh(x * p["a"]) @ p["b"].sum(1), params, torch.ones(64), 4, bucket_bytes=1)
        >>> print(zf.explain(zf.schedule(trace), num_micro_batches=2))
        phase     collective      of           bytes   runs beside the use of
        forward   all_gather      bucket 0: a  384     nothing
        forward   all_gather      bucket 1: b  12,288  0
        backward  reduce_scatter  bucket 1: b  12,288  nothing
        backward  reduce_scatter  bucket 0: a  384     nothing
        backward  all_gather      bucket 0: a  384     nothing
        backward  all_gather      bucket 1: b  12,288  nothing
        at most 4,224 elements gathered at once, 16,896 bytes
        2 micro-batches, accumulate(shard_grads(vg)): 76,032 bytes sent, 4,224 bytes of gradients held
        2 micro-batches, shard_grads(accumulate(vg)): 63,360 bytes sent, 16,896 bytes of gradients held
    """
    if num_micro_batches < 1:
        raise OptionError(f"num_micro_batches must be at least 1; got {num_micro_batches}")
    trace = schedule.trace
    messages = tuple(_messages(schedule))
    once = sum(m.sent_bytes for m in messages if m.phase == "start")
    each = sum(m.sent_bytes for m in messages if m.name == "params") - once
    grads = sum(m.sent_bytes for m in messages if m.name == "grads")
    whole = sum(bucket.numel * bucket.grad_itemsize for bucket in trace.buckets)
    n = num_micro_batches
    return Explanation(
        messages,
        max(schedule.live(), default=0),
        max(schedule.live_bytes(), default=0),
        (
            Accumulation("accumulate(shard_grads(vg))", once + n * (each + grads), whole // trace.size),
            Accumulation("shard_grads(accumulate(vg))", once + n * each + grads, whole),
        ),
        n,
    )


def _messages(schedule: Schedule) -> Iterator[Message]:
    trace, steps = schedule.trace, schedule.steps
    ends = _reductions(schedule)
    for place, step in enumerate(steps):
        bucket = trace.buckets[step.bucket]
        if step.kind == "gather" and not (step.phase == "start" and not bucket.grad_itemsize):
            end = next(i for i in range(place, len(steps)) if steps[i].bucket == step.bucket and steps[i].kind in ("use", "release"))
            nbytes = AllGather().sent_bytes(bucket.numel // trace.size * bucket.sent_itemsize, 0, trace.size)
            yield Message("all_gather", "params", step.bucket, bucket.label, step.phase, nbytes, _uses(schedule, place, end))
        for reduced, end in ends.get(place, ()):
            of = trace.buckets[reduced]
            nbytes = ReduceScatter().sent_bytes(of.numel * of.grad_itemsize, 0, trace.size)
            yield Message("reduce_scatter", "grads", reduced, of.label, "backward", nbytes, _uses(schedule, place, end))


def _uses(schedule: Schedule, start: int, end: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(step.bucket for step in schedule.steps[start:end] if step.kind == "use"))


def _reductions(schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Return at which step each reduction starts, and at which it is waited for, as the tape orders them: from the last bucket on."""
    todo = [b for b, bucket in enumerate(schedule.trace.buckets) if bucket.grad_itemsize]
    ready: set[int] = set()
    in_flight: list[tuple[int, int]] = []
    found: dict[int, list[tuple[int, int]]] = {}
    for place, step in enumerate(schedule.steps):
        if step.kind != "reduce":
            continue
        ready.add(step.bucket)
        while todo and todo[-1] in ready:
            in_flight.append((place, todo.pop()))
            if len(in_flight) > MAX_IN_FLIGHT:
                start, bucket = in_flight.pop(0)
                found.setdefault(start, []).append((bucket, place))
    for start, bucket in in_flight:
        found.setdefault(start, []).append((bucket, len(schedule.steps)))
    return found


class Span(NamedTuple):
    """One bar of a timeline.

    Attributes:
        lane: ``"compute"``, ``"gather"`` or ``"reduce"``.
        name: what it is.
        bucket: of which bucket; -1 where that is not known.
        start: when it begins.
        end: when it ends.
    """

    lane: str
    name: str
    bucket: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what happens, and how much is gathered meanwhile.

    Attributes:
        spans: the bars.
        live: pairs of a time and the bytes that are gathered from then on.
        unit: of the times.
        labels: names of the buckets.
    """

    spans: tuple[Span, ...]
    live: tuple[tuple[float, int], ...]
    unit: str
    labels: tuple[str, ...]

    @property
    def duration(self) -> float:
        """When the last bar ends."""
        return max((span.end for span in self.spans), default=0.0)

    def chrome_trace(self) -> dict[str, Any]:
        """Return it in the trace event format that Perfetto and ``chrome://tracing`` read; a unit of time is a millisecond there.

        Example:
            >>> Timeline((Span("compute", "forward 0", 0, 0.0, 1.0),), ((0.0, 256),), "unit", ("h",)).chrome_trace()["traceEvents"][-1]
            {'name': 'gathered', 'ph': 'C', 'pid': 0, 'ts': 0.0, 'args': {'bytes': 256}}
        """
        scale = 1e6 if self.unit == "s" else 1e3
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}} for i, lane in enumerate(lanes)]
        bars = [
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": span.start * scale,
                "dur": (span.end - span.start) * scale,
                "args": {"bucket": self.labels[span.bucket] if span.bucket >= 0 else ""},
            }
            for span in self.spans
        ]
        counters = [{"name": "gathered", "ph": "C", "pid": 0, "ts": t * scale, "args": {"bytes": n}} for t, n in self.live]
        return {"traceEvents": [*names, *bars, *counters], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> Path:
        """Write :meth:`chrome_trace` to a JSON file."""
        path = Path(path)
        path.write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
        return path

    def draw(self) -> Any:
        """Draw it with matplotlib (``pip install "zfun[demo]"``), and return the figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        bars, live = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        lanes = [lane for lane in ("gather", "compute", "reduce") if any(span.lane == lane for span in self.spans)]
        colours = {"gather": "#0072B2", "compute": "#009E73", "reduce": "#E69F00"}
        for span in self.spans:
            width = span.end - span.start
            faint = 0.55 if span.name.startswith("backward") else 1.0
            bars.barh(lanes.index(span.lane), width, 0.7, span.start, color=colours[span.lane], alpha=faint, edgecolor="white")
            if span.bucket >= 0 and width > 0.012 * self.duration:
                middle = span.start + width / 2
                bars.text(middle, lanes.index(span.lane), str(span.bucket), ha="center", va="center", color="white", fontsize=8)
        bars.set_yticks(range(len(lanes)), lanes)
        bars.invert_yaxis()
        bars.set_title("dark: forward, light: backward; numbers are those of the buckets", loc="right", fontsize=9)
        times, held = [t for t, _ in self.live], [n / 2**20 for _, n in self.live]
        live.fill_between([*times, self.duration], [*held, held[-1] if held else 0.0], step="post", color="#0072B2", alpha=0.35)
        live.set_ylabel("gathered, MiB")
        live.set_xlabel("seconds" if self.unit == "s" else "time, in units of computing forward through an element")
        live.set_ylim(bottom=0)
        live.set_xlim(0, self.duration or 1.0)
        for axes in (bars, live):
            axes.spines[["top", "right"]].set_visible(False)
        return figure


@checked_options
def timeline(schedule: Schedule, *, gather_cost: float = 0.5, reduce_cost: float = 0.5, backward_cost: float = 2.0) -> Timeline:
    """Lay a schedule out in time, under a model: what waits for what, and how long each thing takes.

    Gathers, reductions and computation each go one after the other, and beside each other. A gather starts when the computation before it
    in the schedule has ended; a use waits for its gather. One bucket's forward computation takes as many units as it has elements.

    Args:
        schedule: what :func:`zfun.schedule` made.
        gather_cost: how long it takes to gather an element, in units of computing forward through it.
        reduce_cost: the same for reducing it.
        backward_cost: the same for computing backward through it.

    Returns:
        The timeline, in units; nothing of it is measured.

    Raises:
        OptionError: a negative cost.

    Example:
        >>> import torch, zfun as zf
        >>> params = [torch.ones(64, 64) for _ in range(4)]
        >>> chain = lambda p, x: (x @ p[0] @ p[1] @ p[2] @ p[3]).sum()
        >>> trace = zf.trace(chain, params, torch.ones(1, 64), 4, bucket_bytes=1)
        >>> [round(zf.timeline(zf.schedule(trace, prefetch=n)).duration / 64**2, 2) for n in (0, 1, 2)]
        [15.0, 12.5, 12.5]
    """
    for name, cost in (("gather_cost", gather_cost), ("reduce_cost", reduce_cost), ("backward_cost", backward_cost)):
        if cost < 0:
            raise OptionError(f"{name} is a time for one element; got {cost}; 0 takes no time")
    return _Clock(schedule, gather_cost, reduce_cost, backward_cost).run()


@dataclass(slots=True)
class _Clock:
    """Walks through a schedule with a watch for each lane."""

    schedule: Schedule
    gather_cost: float
    reduce_cost: float
    backward_cost: float
    spans: list[Span] = dataclasses.field(default_factory=list)

    def run(self) -> Timeline:
        trace = self.schedule.trace
        free = {"compute": 0.0, "gather": 0.0, "reduce": 0.0}
        there: dict[int, float] = {}
        live: list[tuple[float, int]] = []
        used: set[tuple[str, int]] = set()
        reductions = _reductions(self.schedule)
        for place, (step, held) in enumerate(zip(self.schedule.steps, self.schedule.live_bytes(), strict=True)):
            numel = trace.buckets[step.bucket].numel
            if step.kind == "gather":
                there[step.bucket] = self._span(free, "gather", step.phase, step.bucket, free["compute"], numel * self.gather_cost)
                live.append((free["compute"], held))
            elif step.kind == "use":
                cost = numel * (self.backward_cost if step.phase == "backward" else 1.0)
                self._span(free, "compute", step.phase, step.bucket, there.get(step.bucket, 0.0), cost)
                used.add((step.phase, step.bucket))
            elif step.kind == "reduce" and ("forward", step.bucket) in used and ("backward", step.bucket) not in used:
                # Backward needed no value of it: the gradient of its leaves is made, and none of what came before.
                self._span(free, "compute", step.phase, step.bucket, 0.0, numel * self.backward_cost / 2)
            elif step.kind == "release":
                live.append((free["compute"], held))
            for bucket, _ in reductions.get(place, ()):
                cost = trace.buckets[bucket].numel * self.reduce_cost
                self._span(free, "reduce", "backward", bucket, free["compute"], cost)
        return Timeline(tuple(self.spans), tuple(live), "unit", tuple(bucket.label for bucket in trace.buckets))

    def _span(self, free: dict[str, float], lane: str, phase: str, bucket: int, earliest: float, cost: float) -> float:
        start = max(free[lane], earliest)
        free[lane] = start + cost
        self.spans.append(Span(lane, f"{phase} {bucket}", bucket, start, free[lane]))
        return free[lane]
