"""Schedules in time: bars of computation and collectives, and the bytes that are gathered."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zfun.errors import OptionError, checked_options
from zfun.planner._explain import reductions_of
from zfun.transforms import Schedule

__all__ = ["Span", "Timeline", "timeline"]


class Span(NamedTuple):
    """One bar of a timeline.

    Attributes:
        lane: ``"compute"``, ``"gather"`` or ``"reduce"``.
        name: phase, and the bucket where there is one.
        bucket: index of the bucket; -1 where the bar belongs to no single bucket.
        start: time of the beginning.
        end: time of the end.
    """

    lane: str
    name: str
    bucket: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars of computation and collectives in time, and the bytes that are gathered meanwhile.

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
        """The time at which the last bar ends."""
        return max((span.end for span in self.spans), default=0.0)

    def chrome_trace(self) -> dict[str, Any]:
        """Return the bars in the trace event format of Perfetto and ``chrome://tracing``.

        A unit of time becomes a millisecond.

        Example:
            >>> span = Span("compute", "forward 0", 0, 0.0, 1.0)
            >>> found = Timeline((span,), ((0.0, 256),), "unit", ("h",))
            >>> found.chrome_trace()["traceEvents"][-1]
            {'name': 'gathered', 'ph': 'C', 'pid': 0, 'ts': 0.0, 'args': {'bytes': 256}}
        """
        scale = 1e6 if self.unit == "s" else 1e3
        rows = _rows(self.spans)
        lanes = list(dict.fromkeys(rows))
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, (lane, _) in enumerate(lanes)
        ]
        bars = [
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(row),
                "ts": span.start * scale,
                "dur": (span.end - span.start) * scale,
                "args": {"bucket": self.labels[span.bucket] if span.bucket >= 0 else ""},
            }
            for span, row in zip(self.spans, rows, strict=True)
        ]
        counters = [
            {"name": "gathered", "ph": "C", "pid": 0, "ts": t * scale, "args": {"bytes": n}}
            for t, n in self.live
        ]
        return {"traceEvents": [*names, *bars, *counters], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> Path:
        """Write :meth:`chrome_trace` to a JSON file."""
        path = Path(path)
        path.write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
        return path

    def draw(self) -> Any:
        """Draw the bars with matplotlib (``pip install "zfun[demo]"``), and return the figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        bars, live = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        rows = _rows(self.spans)
        lanes = [
            (lane, row)
            for lane in ("gather", "compute", "reduce")
            for row in range(len(rows))
            if (lane, row) in rows
        ]
        colours = {
            "gather": "#0072B2",
            "compute": "#009E73",
            "reduce": "#E69F00",
            "update": "#CC79A7",
        }
        for span, row in zip(self.spans, rows, strict=True):
            width = span.end - span.start
            lane = "update" if (span.lane, span.name) == ("compute", "update") else span.lane
            faint = 0.55 if span.name.startswith("backward") else 1.0
            bars.barh(
                lanes.index(row),
                width,
                0.7,
                span.start,
                color=colours[lane],
                alpha=faint,
                edgecolor="white",
            )
            if span.bucket >= 0 and width > 0.012 * self.duration:
                middle = span.start + width / 2
                bars.text(
                    middle,
                    lanes.index(row),
                    str(span.bucket),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
        bars.set_yticks(range(len(lanes)), [lane if row == 0 else "" for lane, row in lanes])
        bars.invert_yaxis()
        updated = (
            ", pink: the optimizer" if any(span.name == "update" for span in self.spans) else ""
        )
        bars.set_title(
            f"dark: forward, light: backward{updated}; numbers are those of the buckets",
            loc="right",
            fontsize=9,
        )
        times, held = [t for t, _ in self.live], [n / 2**20 for _, n in self.live]
        live.fill_between(
            [*times, self.duration],
            [*held, held[-1] if held else 0.0],
            step="post",
            color="#0072B2",
            alpha=0.35,
        )
        live.set_ylabel("gathered, MiB")
        live.set_xlabel(
            "seconds"
            if self.unit == "s"
            else "time, in units of computing forward through an element"
        )
        live.set_ylim(bottom=0)
        live.set_xlim(0, self.duration or 1.0)
        for axes in (bars, live):
            axes.spines[["top", "right"]].set_visible(False)
        return figure


def _rows(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """Return the lane and row of each bar: the first row of the lane that is free at that time."""
    ends: dict[tuple[str, int], float] = {}
    rows = [("", 0)] * len(spans)
    for place in sorted(range(len(spans)), key=lambda place: spans[place].start):
        span = spans[place]
        row = next(
            row for row in itertools.count() if ends.get((span.lane, row), span.start) <= span.start
        )
        rows[place] = span.lane, row
        ends[rows[place]] = span.end
    return rows


@checked_options
def timeline(
    schedule: Schedule,
    *,
    gather_cost: float = 0.5,
    reduce_cost: float = 0.5,
    backward_cost: float = 2.0,
) -> Timeline:
    """Lay a schedule out in time, under a model of the durations.

    Gathers, reductions and computation are three queues that run beside each other. A gather starts
    at the end of the computation that precedes the gather in the schedule; a use waits for the
    gather of the bucket. The forward computation of a bucket takes one unit for each element.

    Args:
        schedule: made by :func:`zfun.planner.schedule`.
        gather_cost: time to gather an element, in units of the forward time of an element.
        reduce_cost: time to reduce an element.
        backward_cost: time of backward for an element.

    Returns:
        The timeline, in units of the model, not measured.

    Raises:
        OptionError: a negative cost.

    Example:
        >>> import torch, zfun as zf
        >>> params = [torch.ones(64, 64) for _ in range(4)]
        >>> chain = lambda p, x: (x @ p[0] @ p[1] @ p[2] @ p[3]).sum()
        >>> trace = zf.planner.trace(chain, params, torch.ones(1, 64), 4, bucket_bytes=1)
        >>> def duration(prefetch):
        ...     made = zf.planner.schedule(trace, zf.ScheduleOptions(prefetch=prefetch))
        ...     return zf.planner.timeline(made).duration / 64**2
        >>> [duration(prefetch) for prefetch in (0, 1, 2)]
        [15.0, 12.5, 12.5]
    """
    for name, cost in (
        ("gather_cost", gather_cost),
        ("reduce_cost", reduce_cost),
        ("backward_cost", backward_cost),
    ):
        if cost < 0:
            raise OptionError(f"{name} is a time for one element; got {cost}; 0 takes no time")
    return _Clock(schedule, gather_cost, reduce_cost, backward_cost).run()


@dataclass(slots=True)
class _Clock:
    """Walks through a schedule with one clock for each lane."""

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
        reductions = reductions_of(self.schedule)
        for place, (step, held) in enumerate(
            zip(self.schedule.steps, self.schedule.live_bytes(), strict=True)
        ):
            numel = trace.buckets[step.bucket].numel
            if step.kind == "gather":
                there[step.bucket] = self._span(
                    free,
                    "gather",
                    step.phase,
                    step.bucket,
                    free["compute"],
                    numel * self.gather_cost,
                )
                live.append((free["compute"], held))
            elif step.kind == "use":
                cost = numel * (self.backward_cost if step.phase == "backward" else 1.0)
                self._span(
                    free, "compute", step.phase, step.bucket, there.get(step.bucket, 0.0), cost
                )
                used.add((step.phase, step.bucket))
            elif (
                step.kind == "reduce"
                and ("forward", step.bucket) in used
                and ("backward", step.bucket) not in used
            ):
                # Backward computes the gradients of the leaves without the values of the bucket,
                # and no gradient of the inputs.
                self._span(
                    free, "compute", step.phase, step.bucket, 0.0, numel * self.backward_cost / 2
                )
            elif step.kind == "release":
                live.append((free["compute"], held))
            for bucket, _ in reductions.get(place, ()):
                cost = trace.buckets[bucket].numel * self.reduce_cost
                self._span(free, "reduce", "backward", bucket, free["compute"], cost)
        return Timeline(
            tuple(self.spans), tuple(live), "unit", tuple(bucket.label for bucket in trace.buckets)
        )

    def _span(
        self,
        free: dict[str, float],
        lane: str,
        phase: str,
        bucket: int,
        earliest: float,
        cost: float,
    ) -> float:
        start = max(free[lane], earliest)
        free[lane] = start + cost
        self.spans.append(Span(lane, f"{phase} {bucket}", bucket, start, free[lane]))
        return free[lane]
