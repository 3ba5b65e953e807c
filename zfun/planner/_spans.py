"""One bar of a timeline."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """One bar of a timeline.

    Attributes:
        lane: ``"compute"``, ``"gather"`` or ``"reduce"``; with a store also ``"read"`` and
            ``"write"``; of a pipeline ``"rank 0"`` and so on.
        name: phase, and the bucket where there is one, or the stage.
        bucket: index of the bucket, or the micro-batch of a pipeline; -1 where the bar belongs to
            no single bucket.
        start: time of the beginning.
        end: time of the end.
    """

    lane: str
    name: str
    bucket: int
    start: float
    end: float
