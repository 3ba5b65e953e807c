"""Gathered parameters and hooks that note their actions.

[Note: watching]
While notes are taken in the thread of a rank (``watching``), a call of a loss
has gathered parameters and hooks that note each step. Other calls cost nothing more, because the
usual parameters and hooks take no notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfun.collectives import Work
from zfun.layout import Layout
from zfun.transforms._notes import EventKind, Notes, When, timed, watching
from zfun.transforms.call._hooks import CommHook, Handle
from zfun.transforms.call._lazy import LazyLeaf
from zfun.transforms.call._trace import Step
from zfun.transforms.params._gathered import GatheredParams


def new_gathered(*args: Any) -> GatheredParams:
    """Make the parameters of a call of a loss; see [Note: watching]."""
    notes = watching.get()
    return _WatchedParams(notes, *args) if notes is not None else GatheredParams(*args)


def watched(hooks: tuple[CommHook, ...], layout: Layout) -> tuple[CommHook, ...]:
    """Return hooks, of which the first notes the start and the end of a reduction, if watched."""
    notes = watching.get()
    if notes is None or not hooks:
        return hooks
    first = notes.first_of(tuple(layout.label(bucket) for bucket in range(len(layout.buckets))))
    return _WatchedHook(hooks[0], notes, first), *hooks[1:]


class _WatchedParams(GatheredParams):
    """Gathered parameters that note each read, gather, use and release."""

    def __init__(self, profile: Notes, *args: Any) -> None:
        self._profile = profile
        self._first: int | None = None
        self._there: set[int] = set()
        self._asked: float | None = None
        super().__init__(*args)

    def _note(
        self, kind: EventKind, bucket: int, start: float, change: int = 0, phase: When | None = None
    ) -> None:
        if self._first is None:
            self._first = self._profile.first_of(
                tuple(traced.label for traced in self._course.traced)
            )
        if bucket in self._course.persistent and kind in ("read", "gather"):
            phase = "start"
        now: When = "forward" if self._phase == "forward" else "backward"
        self._profile.note(
            kind, bucket + self._first if bucket >= 0 else bucket, phase or now, start, change
        )

    def _start_read(self, step: Step) -> None:
        shard, start = self._shards[step.bucket], self._profile.now()
        before = shard.reading
        super()._start_read(step)
        if shard.reading is not None and shard.reading is not before:
            bucket, phase = step.bucket, step.phase
            self._note("read", bucket, start, phase=phase)
            shard.reading = timed(
                shard.reading, self._profile, lambda began: self._note("wait", bucket, began)
            )

    def _start_gather(self, step: Step) -> Work:
        bucket, start = step.bucket, self._profile.now()
        pending = super()._start_gather(step)
        change = 0 if bucket in self._there else self._course.traced[bucket].nbytes
        self._there.add(bucket)
        self._note("gather", bucket, start, change, step.phase)
        return timed(pending, self._profile, lambda began: self._note("gathered", bucket, began))

    def _hold(self, bucket: int, buffer: Tensor) -> Tensor:
        if bucket not in self._there:
            # An earlier call has gathered the bucket, or another rank has asked for the bucket too.
            self._there.add(bucket)
            self._profile.change(self._course.traced[bucket].nbytes)
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
            nbytes = self._course.traced[bucket].nbytes
            if bucket in self._course.persistent:
                # The bucket stays with the parameters, for the next call.
                self._profile.change(-nbytes)
            else:
                self._note("release", bucket, self._profile.now(), -nbytes)

    def complete(self, bucket: int) -> None:
        self._note("reduce", bucket, self._profile.now())
        super().complete(bucket)

    def end_forward(self, out: Any = None) -> None:
        start = self._profile.now()
        super().end_forward(out)
        self._profile.note("end", -1, "forward", start)

    def finish_backward(self) -> None:
        start = self._profile.now()
        super().finish_backward()
        self._profile.note("end", -1, "backward", start)


@dataclass(frozen=True, slots=True)
class _WatchedHook:
    """A hook that notes the start and the end of a reduction."""

    hook: CommHook
    profile: Notes
    first: int

    def start(self, buffer: Any, layout: Layout, bucket: int) -> Handle:
        """Take a bucket over; see :class:`zfun.transforms.call._hooks.CommHook`."""
        start = self.profile.now()
        handle = self.hook.start(buffer, layout, bucket)
        self.profile.note("sum", bucket + self.first, "backward", start)
        return timed(
            handle,
            self.profile,
            lambda began: self.profile.note("summed", bucket + self.first, "backward", began),
        )
