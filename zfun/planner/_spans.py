"""The bars of a timeline."""

from __future__ import annotations

from typing import NamedTuple, Protocol


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


class Bars(Protocol):
    """The parts of a timeline that a picture shows."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The bars."""

    @property
    def live(self) -> tuple[tuple[float, int], ...]:
        """Pairs of a time and the bytes that are gathered from then on."""

    @property
    def unit(self) -> str:
        """The unit of the times."""

    @property
    def duration(self) -> float:
        """The time at which the last bar ends."""
