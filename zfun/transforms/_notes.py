"""Notes of a rank's actions while :func:`zfun.planner.profile` runs.

Other calls pay for one look at the context variable ``watching``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from zfun.collectives import Work
from zfun.layout import Layout
from zfun.transforms.call._hooks import Handle
from zfun.transforms.call._trace import Step

EventKind: TypeAlias = Literal[
    "gather",
    "gathered",
    "use",
    "release",
    "reduce",
    "sum",
    "summed",
    "end",
    "pass",
    "update",
    "read",
    "wait",
    "compute",
    "write",
    "commit",
]
When: TypeAlias = Literal["start", "forward", "backward", "update"]

watching: ContextVar[Notes | None] = ContextVar("watching", default=None)


class Noted(NamedTuple):
    """One thing that a rank did in a step.

    Attributes:
        kind: those of :class:`zfun.planner.Step`, where ``"read"`` and ``"gather"`` are the start
            of a read or a gather and ``"reduce"`` the moment at which a bucket's gradients are
            complete; ``"wait"``, ``"gathered"`` and ``"summed"``, the time for which this rank
            waited for the read, the gather or the sum; ``"sum"``,
            the start of a sum of gradients; ``"end"`` of the forward or the backward pass;
            ``"pass"``, a whole pass over whole parameters; ``"update"``, the optimizer with the
            gathers and sums of the update. An update over stores has the steps of
            :class:`zfun.planner.UpdateStep`, where a ``"write"`` lasts until the store has taken
            the new values.
        bucket: index of the bucket; -1 for a pass and for the optimizer.
        phase: ``"start"``, ``"forward"``, ``"backward"``, or ``"update"`` for all that comes after.
        start: the begin of the action, in seconds since the profile began.
        end: the end of the action, likewise.
        live_bytes: bytes of gathered buckets after the action, started gathers included.
    """

    kind: str
    bucket: int
    phase: When
    start: float
    end: float
    live_bytes: int


@dataclass(slots=True)
class Notes:
    """The actions of a rank so far.

    Attributes:
        events: in the order in which the actions ended.
        labels: names of the buckets.
    """

    events: list[Noted] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter, init=False)
    _known: list[tuple[int, tuple[str, ...]]] = field(default_factory=list, init=False)
    _live: int = field(default=0, init=False)

    def steps(self) -> tuple[Step, ...]:
        """Return the actions as steps, for a comparison with :func:`zfun.planner.schedule`."""
        kinds = ("read", "gather", "use", "release", "reduce")
        return tuple(
            Step(e.kind, e.bucket, e.phase)
            for e in self.events
            if e.kind in kinds and e.phase != "update"
        )

    def now(self) -> float:
        """Return the seconds since the profile began."""
        return time.perf_counter() - self._began

    def note(
        self, kind: EventKind, bucket: int, phase: When, start: float, change: int = 0
    ) -> None:
        """Write down an action that has just ended."""
        self._live += change
        self.events.append(Noted(kind, bucket, phase, start, self.now(), self._live))

    def change(self, num_bytes: int) -> None:
        """Count bytes that have come or gone without a step of their own."""
        self._live += num_bytes

    def first_of(self, labels: tuple[str, ...]) -> int:
        """Return the index of the first of some buckets; known buckets keep their indices."""
        for place, (first, known) in enumerate(self._known):
            if labels == known[: len(labels)]:
                return first
            if known == labels[: len(known)] and place == len(self._known) - 1:
                self._known[place] = first, labels
                self.labels[first:] = labels
                return first
        self._known.append((len(self.labels), labels))
        self.labels += labels
        return self._known[-1][0]


def timed(handle: Handle, notes: Notes, note: Callable[[float], None]) -> Work:
    """Return a handle that notes the time at which the wait began."""

    def finish() -> Any:
        began = notes.now()
        result = handle.wait()
        note(began)
        return result

    return Work(finish)


def noted(
    pending: Work, name: str, kind: Literal["gather", "sum"], layout: Layout, bucket: int
) -> Work:
    """Note the start of a gather or a sum outside of a loss; return a handle that notes the end."""
    notes = watching.get()
    if notes is None or name not in ("params", "grads"):
        return pending
    index = bucket + notes.first_of(tuple(layout.label(i) for i in range(len(layout.buckets))))
    notes.note(kind, index, "update", notes.now())
    return timed(
        pending,
        notes,
        lambda began: notes.note(
            "gathered" if kind == "gather" else "summed", index, "update", began
        ),
    )


@contextlib.contextmanager
def noting(phase: Literal["forward", "backward", "update"]) -> Iterator[None]:
    """Note the optimizer, or a pass whose buckets are not watched one by one."""
    notes = watching.get()
    if notes is None:
        yield
        return
    began, before = notes.now(), len(notes.events)
    yield
    if phase == "update" or not any(event.kind == "use" for event in notes.events[before:]):
        notes.note("update" if phase == "update" else "pass", -1, phase, began)


@contextlib.contextmanager
def noting_steps(
    labels: tuple[str, ...],
) -> Iterator[Callable[[EventKind, int], contextlib.AbstractContextManager[None]]]:
    """Note the steps of an update that goes bucket by bucket, instead of its collectives."""
    notes = watching.get()
    if notes is None:
        yield lambda kind, bucket: contextlib.nullcontext()
        return
    known, first = notes, notes.first_of(labels)

    @contextlib.contextmanager
    def note(kind: EventKind, bucket: int) -> Iterator[None]:
        began = known.now()
        yield
        index = bucket if bucket < 0 else first + bucket
        if kind == "gather":
            known.note("gather", index, "update", began)
        known.note("gathered" if kind == "gather" else kind, index, "update", began)

    token = watching.set(None)
    try:
        yield note
    finally:
        watching.reset(token)
