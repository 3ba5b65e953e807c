"""The profile of a real step: reads, gathers, uses, releases, sums and the optimizer."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zfun.planner._timeline import Span, Timeline
from zfun.transforms import EventKind, Noted, Notes, watching


@dataclass(slots=True)
class Profile(Notes):
    """The events of a rank inside :func:`profile`.

    Attributes:
        events: in the order of their ends.
        labels: names of the buckets.
    """

    def timeline(self) -> Timeline:
        """Return the times as bars.

        A read, a gather or a sum lasts from the start until the end of this rank's wait; the result
        may have been complete before. The time between two uses belongs to the first use, minus the
        time in which the rank waited for collectives or started collectives.
        """
        spans = [
            *_computed(self.events),
            *_transfers(self.events, "gather", "gathered"),
            *_transfers(self.events, "sum", "summed"),
            *_transfers(self.events, "read", "wait"),
            *(
                Span(event.kind, f"update {event.bucket}", event.bucket, event.start, event.end)
                for event in self.events
                if event.kind in ("compute", "write")
            ),
        ]
        live = [(0.0, 0), *((event.end, event.live_bytes) for event in self.events)]
        changes = [
            entry
            for before, entry in zip([(0.0, -1), *live], live, strict=False)
            if entry[1] != before[1]
        ]
        return Timeline(
            tuple(sorted(spans, key=lambda span: span.start)),
            tuple(changes),
            "s",
            tuple(self.labels),
        )


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Record the reads, gathers, uses, releases and sums of this rank with times; as a context.

    A step is a loss and its gradient, the optimizer, and the gathers of new parameters at stages 1
    and 2. :func:`zfun.planner.timeline` lays a planned step out in the same picture and the same
    trace for Perfetto. A step inside the context costs more, because the loss gets every parameter
    as a lazy leaf, even on one rank. Times are those of the host; on a CUDA device no event waits
    for running kernels.

    Returns:
        A context whose value is the :class:`zfun.planner.Profile`.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     loss = lambda p, x: (x @ p["a"] @ p["b"]).sum()
        ...     zero = zf.zero(3, loss, zf.optim.sgd(0.1), group, bucket_bytes=1)
        ...     state = zero.init({"a": torch.ones(8, 8), "b": torch.ones(8, 8)})
        ...     state, _ = zero.step(state, torch.ones(8))  # the first step learns the order
        ...     with zf.planner.profile() as found:
        ...         zero.step(state, torch.ones(8))
        ...     events = [e for e in found.events if e.phase == "forward" and e.kind != "end"]
        ...     return [f"{event.kind} {event.bucket}" for event in events]
        >>> events = zf.simulate(2, main)[0]
        >>> events[:4]
        ['gather 0', 'gather 1', 'gathered 0', 'use 0']
        >>> events[4:]
        ['release 0', 'gathered 1', 'use 1']
    """
    found = Profile()
    token = watching.set(found)
    try:
        yield found
    finally:
        watching.reset(token)


def _computed(events: Sequence[Noted]) -> Iterator[Span]:
    """Yield bars of uses, passes and the optimizer, without the bars that lie within these."""
    turns = [event for event in events if event.kind in ("use", "end")]
    busy = sorted(
        (event.start, event.end)
        for event in events
        if event.kind
        in ("gather", "gathered", "sum", "summed", "wait", "write", "commit", "compute")
    )
    for event, following in itertools.pairwise(turns):
        if event.kind == "use":
            yield from _pieces(
                f"{event.phase} {event.bucket}", event.bucket, event.end, following.start, busy
            )
    for event in events:
        if event.kind in ("pass", "update"):
            yield from _pieces(event.phase, -1, event.start, event.end, busy)


def _pieces(
    name: str, bucket: int, here: float, end: float, busy: Sequence[tuple[float, float]]
) -> Iterator[Span]:
    for start, stop in busy[bisect.bisect_left(busy, (here,)) :]:
        if start >= end:
            break
        if start > here:
            yield Span("compute", name, bucket, here, start)
        here = max(here, stop)
    if end > here:
        yield Span("compute", name, bucket, here, end)


def _transfers(events: Sequence[Noted], begun: EventKind, done: EventKind) -> Iterator[Span]:
    """Yield bars from the start of each collective or read to the end of the wait."""
    started: dict[int, list[Noted]] = {}
    for event in events:
        if event.kind == begun:
            started.setdefault(event.bucket, []).append(event)
        elif event.kind == done and started.get(event.bucket):
            first = started[event.bucket].pop(0)
            lane = "reduce" if begun == "sum" else begun
            yield Span(lane, f"{first.phase} {event.bucket}", event.bucket, first.start, event.end)
