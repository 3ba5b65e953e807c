"""Schedules in time: bars of computation, collectives and reads, and the gathered bytes."""

from __future__ import annotations

import base64
import html
import importlib.util
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zfun.errors import OptionError
from zfun.options import number, takes
from zfun.parallel.schedules import ACTIONS, BACKWARD, FORWARD, INPUTS, WEIGHTS, spans_of
from zfun.parallel.schedules import Schedule as PipelineSchedule
from zfun.planner._explain import reductions_of
from zfun.planner._spans import Span
from zfun.tables import html_table, in_bytes
from zfun.transforms import SCHEDULE, UPDATE, Schedule, UpdatePlan


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars of computation, collectives and reads, and the bytes that are gathered meanwhile.

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

    @property
    def _is_pipeline(self) -> bool:
        return any(span.lane.startswith("rank") for span in self.spans)

    def __repr__(self) -> str:
        peak = in_bytes(max((nbytes for _, nbytes in self.live), default=0))
        is_pipeline = self._is_pipeline
        return (
            f"Timeline({len(self.spans)} bars of {len(self.labels)} "
            f"{'micro-batches' if is_pipeline else 'buckets'}, {self.duration:.4g} {self.unit}"
            f"{'' if is_pipeline else f', at most {peak} gathered'})"
        )

    def _repr_html_(self) -> str:
        if importlib.util.find_spec("matplotlib") is None:
            rows = [(s.lane, s.name, f"{s.start:.4g}", f"{s.end:.4g}") for s in self.spans]
            return html_table(repr(self), ("lane", "bar", "start", "end"), rows)
        picture = base64.b64encode(self.draw()._repr_png_()).decode()
        return f'<img alt="{html.escape(repr(self))}" src="data:image/png;base64,{picture}">'

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

    def draw(self, title: str | None = None) -> Any:
        """Draw the bars with matplotlib (``pip install "zfun[demo]"``).

        Args:
            title: stands above the bars.

        Returns:
            A ``matplotlib`` figure, which a notebook shows as a picture; ``savefig`` writes a file.

        Raises:
            OptionError: matplotlib is not installed.
        """
        if importlib.util.find_spec("matplotlib") is None:
            raise OptionError(
                "a picture needs matplotlib; matplotlib cannot be imported; install zfun[demo], or "
                "write the bars for a viewer with save()"
            )
        from zfun.planner._picture import draw

        kind, count = "measured" if self.unit == "s" else "planned", len(self.labels)
        what = "micro-batch" if self._is_pipeline else "bucket"
        buckets = f"{count} {what}{'' if count == 1 else 'es' if self._is_pipeline else 's'}"
        rows = list(zip(self.spans, _rows(self.spans), strict=True))
        return draw(rows, self.live, self.unit, title or f"One step of {buckets}, {kind}")


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


@takes(
    schedule=SCHEDULE | UPDATE | ACTIONS,
    gather_cost=number(0),
    reduce_cost=number(0),
    backward_cost=number(0),
    read_cost=number(0),
    write_cost=number(0),
)
def timeline(
    schedule: Schedule | UpdatePlan | PipelineSchedule,
    *,
    gather_cost: float = 0.5,
    reduce_cost: float = 0.5,
    backward_cost: float = 2.0,
    read_cost: float = 1.0,
    write_cost: float = 1.0,
) -> Timeline:
    """Lay a schedule or the plan of an update out in time, under a model of the durations.

    Reads, gathers, reductions and computation are four queues that run beside each other. A read or
    a gather starts at the end of the computation that precedes the read or the gather in the
    schedule; a gather waits for the read of the bucket, and computation for a gather that cannot
    start. A use waits for the gather of the bucket. The forward computation of a bucket takes one
    unit for each element.

    Args:
        schedule: made by :func:`zfun.planner.schedule` or :func:`zfun.planner.plan_update`. Of an
            update, reads, writes, gathers and computation are the queues, and the computation of a
            bucket takes one unit for each element. Or the schedule of a pipeline, such as
            ``zf.pipeline(...).schedule``: each rank is a lane, forward of a stage takes one unit,
            and messages no time.
        gather_cost: time to gather an element, in units of the forward time of an element.
        reduce_cost: time to reduce an element.
        backward_cost: time of backward for an element, or for a stage of a pipeline.
        read_cost: time to read an element of a bucket, where all ranks read their parts from one
            store at the same time; of an update, to read the gradient, the state and the parameter.
        write_cost: time to write the state and the parameter of an element.

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
        [14.5, 12.0, 12.0]
        >>> from zfun.parallel.schedules import one_forward_one_backward
        >>> zf.planner.timeline(one_forward_one_backward(4, 8)).duration
        33.0
    """
    if isinstance(schedule, Sequence):
        return _of_pipeline(schedule, backward_cost)
    if isinstance(schedule, UpdatePlan):
        costs = {"read": read_cost, "compute": 1.0, "write": write_cost, "gather": gather_cost}
        return _of_update(schedule, costs)
    costs = {"read": read_cost, "gather": gather_cost, "reduce": reduce_cost}
    return _of_schedule(schedule, costs, backward_cost)


def _of_pipeline(schedule: PipelineSchedule, backward_cost: float) -> Timeline:
    """Return a lane for each rank, where the numbers of the bars are micro-batches."""
    half = backward_cost / 2
    times = {FORWARD: 1.0, BACKWARD: backward_cost, INPUTS: half, WEIGHTS: half}
    names = {FORWARD: "forward", WEIGHTS: "weights"}
    spans = tuple(
        Span(
            f"rank {rank}",
            f"{names.get(action.kind, 'backward')} of stage {action.stage}",
            action.micro_batch,
            begin,
            end,
        )
        for rank, action, begin, end in spans_of(schedule, times)
    )
    count = 1 + max((span.bucket for span in spans), default=-1)
    return Timeline(spans, (), "unit", tuple(f"micro-batch {k}" for k in range(count)))


def _of_update(plan: UpdatePlan, costs: dict[str, float]) -> Timeline:
    """Walk through an update: reads and writes run beside the computation, gathers do not."""
    spans: list[Span] = []
    free = dict.fromkeys(costs, 0.0)
    now = 0.0
    read: dict[int, float] = {}
    for kind, bucket in plan.steps:
        if kind == "wait":
            now = max(now, read.get(bucket, 0.0))
        elif kind == "commit":
            now = max(now, free["write"])
        else:
            start = max(now, free[kind])
            free[kind] = start + plan.numels[bucket] * costs[kind]
            if free[kind] > start:
                spans.append(Span(kind, f"update {bucket}", bucket, start, free[kind]))
            if kind == "read":
                read[bucket] = free[kind]
            elif kind != "write":
                now = free[kind]
    return Timeline(tuple(spans), (), "unit", plan.labels)


def _of_schedule(schedule: Schedule, costs: dict[str, float], backward_cost: float) -> Timeline:
    """Walk through a schedule with one clock for each lane."""
    buckets = schedule.trace.buckets
    spans: list[Span] = []
    free = dict.fromkeys(("compute", "gather", "reduce", "read"), 0.0)
    read: dict[int, float] = {}
    there: dict[int, float] = {}
    live: list[tuple[float, int]] = []
    used: set[tuple[str, int]] = set()
    reductions = reductions_of(schedule)

    def add(lane: str, phase: str, bucket: int, cost: float, earliest: float = 0.0) -> float:
        start = max(free[lane], earliest)
        free[lane] = start + buckets[bucket].numel * cost
        spans.append(Span(lane, f"{phase} {bucket}", bucket, start, free[lane]))
        return free[lane]

    for place, (step, held) in enumerate(zip(schedule.steps, schedule.live_bytes(), strict=True)):
        kind, bucket, phase = step
        if kind == "read":
            read[bucket] = add("read", phase, bucket, costs["read"], free["compute"])
        elif kind == "gather":
            # The host starts the gather when the shard is there, and computes nothing before.
            free["compute"] = max(free["compute"], read.pop(bucket, 0.0))
            there[bucket] = add("gather", phase, bucket, costs["gather"], free["compute"])
            live.append((free["compute"], held))
        elif kind == "use":
            cost = backward_cost if phase == "backward" else 1.0
            add("compute", phase, bucket, cost, there.get(bucket, 0.0))
            used.add((phase, bucket))
        elif kind == "release":
            live.append((free["compute"], held))
        elif ("forward", bucket) in used and ("backward", bucket) not in used:
            # Backward computes the gradients of the leaves without the values of the bucket, and no
            # gradient of the inputs.
            add("compute", phase, bucket, backward_cost / 2)
        for reduced, _ in reductions.get(place, ()):
            add("reduce", "backward", reduced, costs["reduce"], free["compute"])
    return Timeline(tuple(spans), tuple(live), "unit", tuple(bucket.label for bucket in buckets))
