"""What a real step does, and when: gathers, uses, releases, sums and the optimizer, with their times.

[Note: who watches]
A watched call of a loss has gathered parameters that note each step, and its gradients go through hooks that do; :func:`profile` asks for
both, in the thread in which the rank runs. Nobody else pays for it: the usual parameters and hooks know nothing of being watched.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfun.collectives import Pending
from zfun.layout import Layout
from zfun.transforms._notes import Noted, Notes, What, When, timed, watching
from zfun.transforms._timeline import Span, Timeline
from zfun.transforms.grads._hooks import CommHook, Handle
from zfun.transforms.params._gathered import GatheredParams
from zfun.transforms.params._lazy import LazyLeaf
from zfun.transforms.params._schedule import Step

__all__ = ["Noted", "Profile", "new_gathered", "profile", "watched"]


@dataclass(slots=True)
class Profile(Notes):
    """What a rank did while :func:`profile` watched.

    Attributes:
        events: in the order in which they ended.
        labels: names of the buckets.
    """

    def timeline(self) -> Timeline:
        """Return the times as bars.

        A gather or a sum lasts from its start until this rank has waited for it: it may have been there before. Between two uses the time
        belongs to the first of them, less that for which the rank waited or started collectives.
        """
        spans = [*_computed(self.events), *_transfers(self.events, "gather", "gathered"), *_transfers(self.events, "sum", "summed")]
        live = [(0.0, 0), *((event.end, event.live_bytes) for event in self.events)]
        changes = [entry for before, entry in zip([(0.0, -1), *live], live, strict=False) if entry[1] != before[1]]
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)), tuple(changes), "s", tuple(self.labels))


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Note what this rank gathers, uses, releases and sums in a step, and when; as a context.

    A step is a loss and its gradient, the optimizer, and the gathers of new parameters at stages 1 and 2.
    It is the counterpart of :func:`zfun.timeline`, which lays a planned step out: the picture, and the trace for Perfetto, are the same. A
    step that is not watched costs nothing more; one that is looks at every parameter, which one rank alone else
    gives the loss as views. Times are the host's: on a CUDA device nothing waits for what has been launched.

    Returns:
        A context whose value is the :class:`zfun.transforms.Profile`.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     zero = zf.zero(3, lambda p, x: (x @ p["a"] @ p["b"]).sum(), zf.optim.sgd(0.1), group, bucket_bytes=1)
        ...     state = zero.init({"a": torch.ones(8, 8), "b": torch.ones(8, 8)})
        ...     state, _ = zero.step(state, torch.ones(8))  # the first step learns the order
        ...     with zf.profile() as found:
        ...         zero.step(state, torch.ones(8))
        ...     return [f"{e.kind} {e.bucket}" for e in found.events if e.phase == "forward" and e.kind != "end"]
        >>> zf.simulate(2, main)[0]
        ['gather 0', 'gather 1', 'gathered 0', 'use 0', 'release 0', 'gathered 1', 'use 1', 'release 1']
    """
    found = Profile()
    token = watching.set(found)
    try:
        yield found
    finally:
        watching.reset(token)


def new_gathered(*args: Any) -> GatheredParams:
    """Make the parameters of a call of a loss; see [Note: who watches]."""
    notes = watching.get()
    return _WatchedParams(notes, *args) if isinstance(notes, Profile) else GatheredParams(*args)


def watched(hooks: tuple[CommHook, ...], layout: Layout) -> tuple[CommHook, ...]:
    """Return hooks, the first of which notes when a bucket is sent and when it is there, if that is wanted."""
    notes = watching.get()
    if notes is None or not hooks:
        return hooks
    first = notes.first_of(tuple(layout.label(bucket) for bucket in range(len(layout.buckets))))
    return _WatchedHook(hooks[0], notes, first), *hooks[1:]


class _WatchedParams(GatheredParams):
    """Gathered parameters that write down what is done with them."""

    def __init__(self, profile: Profile, *args: Any) -> None:
        self._profile = profile
        self._first: int | None = None
        self._there: set[int] = set()
        self._asked: float | None = None
        super().__init__(*args)

    def _note(self, kind: What, bucket: int, start: float, change: int = 0, phase: When | None = None) -> None:
        if self._first is None:
            self._first = self._profile.first_of(tuple(traced.label for traced in self._traced))
        if bucket in self._persistent and kind == "gather":
            phase = "start"
        now: When = "forward" if self._phase == "forward" else "backward"
        self._profile.note(kind, bucket + self._first if bucket >= 0 else bucket, phase or now, start, change)

    def _start_gather(self, step: Step) -> Pending:
        bucket, start = step.bucket, self._profile.now()
        pending = super()._start_gather(step)
        change = 0 if bucket in self._there else self._traced[bucket].nbytes
        self._there.add(bucket)
        self._note("gather", bucket, start, change, step.phase)
        return timed(pending, self._profile, lambda began: self._note("gathered", bucket, began))

    def _hold(self, bucket: int, buffer: Tensor) -> Tensor:
        if bucket not in self._there:
            # An earlier call has gathered it, or another rank has asked for it at the same time.
            self._there.add(bucket)
            self._profile.change(self._traced[bucket].nbytes)
        return super()._hold(bucket, buffer)

    def _touch(self, bucket: int) -> None:
        if self._phase == "turn" or bucket != self._now:
            self._asked = self._profile.now()
        super()._touch(bucket)

    def _use(self, bucket: int) -> None:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._note("use", bucket, asked)

    def _load(self, bucket: int, leaf: LazyLeaf) -> Tensor:
        loaded = super()._load(bucket, leaf)
        self._use(bucket)
        return loaded

    def _unpack(self, saved: Any) -> Tensor:
        unpacked = super()._unpack(saved)
        self._use(self._now)
        return unpacked

    def _release(self, bucket: int) -> None:
        super()._release(bucket)
        self._note_released()

    def _drop(self, kept: set[int] | frozenset[int]) -> None:
        super()._drop(kept)
        self._note_released()

    def _note_released(self) -> None:
        for bucket in sorted(self._there - self._buffers.keys() - self._pending.keys()):
            self._there.remove(bucket)
            nbytes = self._traced[bucket].nbytes
            if bucket in self._persistent:
                # It stays with the parameters, for the next call.
                self._profile.change(-nbytes)
            else:
                self._note("release", bucket, self._profile.now(), -nbytes)

    def complete(self, bucket: int) -> None:
        self._note("reduce", bucket, self._profile.now())
        super().complete(bucket)

    def end_forward(self) -> None:
        start = self._profile.now()
        super().end_forward()
        self._profile.note("end", -1, "forward", start)

    def finish_backward(self) -> None:
        start = self._profile.now()
        super().finish_backward()
        self._profile.note("end", -1, "backward", start)


@dataclass(frozen=True, slots=True)
class _WatchedHook:
    """A hook that writes down when a bucket goes into it and comes out of it."""

    hook: CommHook
    profile: Notes
    first: int

    def start(self, buffer: Any, layout: Layout, bucket: int) -> Handle:
        """Take a bucket over; see :class:`zfun.transforms.grads._hooks.CommHook`."""
        start = self.profile.now()
        handle = self.hook.start(buffer, layout, bucket)
        self.profile.note("sum", bucket + self.first, "backward", start)
        return timed(handle, self.profile, lambda began: self.profile.note("summed", bucket + self.first, "backward", began))


def _computed(events: Sequence[Noted]) -> Iterator[Span]:
    """The time between uses, and that of passes and of the optimizer, less that of what this rank did for other ranks in it."""
    turns = [event for event in events if event.kind in ("use", "end")]
    busy = sorted((event.start, event.end) for event in events if event.kind in ("gather", "gathered", "sum", "summed"))
    for event, following in itertools.pairwise(turns):
        if event.kind == "use":
            yield from _pieces(f"{event.phase} {event.bucket}", event.bucket, event.end, following.start, busy)
    for event in events:
        if event.kind in ("pass", "update"):
            yield from _pieces(event.phase, -1, event.start, event.end, busy)


def _pieces(name: str, bucket: int, here: float, end: float, busy: Sequence[tuple[float, float]]) -> Iterator[Span]:
    for start, stop in busy[bisect.bisect_left(busy, (here,)) :]:
        if start >= end:
            break
        if start > here:
            yield Span("compute", name, bucket, here, start)
        here = max(here, stop)
    if end > here:
        yield Span("compute", name, bucket, here, end)


def _transfers(events: Sequence[Noted], begun: What, done: What) -> Iterator[Span]:
    """From each start to the end of the wait for it."""
    started: dict[int, list[Noted]] = {}
    for event in events:
        if event.kind == begun:
            started.setdefault(event.bucket, []).append(event)
        elif event.kind == done and started.get(event.bucket):
            first = started[event.bucket].pop(0)
            lane = "gather" if begun == "gather" else "reduce"
            yield Span(lane, f"{first.phase} {event.bucket}", event.bucket, first.start, event.end)
