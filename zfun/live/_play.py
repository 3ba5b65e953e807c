"""A step, played from data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zfun.collectives import Group, Mesh, mesh_of
from zfun.live._coded import CodedSums
from zfun.live._held import Held, Moment
from zfun.live._rehearsal import Change
from zfun.transforms import MAX_IN_FLIGHT, MAX_UNDER_WAY, Schedule, Step, first_steps
from zfun.wire import Wire

__all__ = ["Play"]

# What an optimizer makes beside parameters.
_MADE = {"state": "the optimizer's new state", "work": "what the optimizer works with"}

# Bytes of a number that half types are widened to.
_WIDE = torch.float32.itemsize

# In the place of a step that has been played ahead of its turn.
_NOTHING = Step("use", -1, "backward")


class _Arriving(NamedTuple):
    """A bucket on its way: the bytes of what is made to be sent, and of what comes; and whether that is still to be read."""

    sent: int
    comes: int
    is_coded: bool = False


class Play:
    """Plays a step, and notes what is held each time something is made."""

    def __init__(
        self,
        stage: int,
        count: int,
        group: Group,
        secondary: Group | None,
        schedule: Schedule,
        itemsizes: Sequence[int],
        *,
        offload_params: bool,
        offload_grads: bool,
        wire_params: Wire | None,
        wire_grads: Wire | None,
        accumulates: bool,
    ) -> None:
        self._stage = stage
        self._schedule = schedule
        self._buckets = schedule.trace.buckets
        self._size = group.size
        self._group = group
        self._secondary = secondary
        self._itemsizes = itemsizes
        self._count = count
        self.param_place = "store" if offload_params else "device"
        self._grad_place = "store" if offload_grads else "device"
        self._bytes: dict[tuple[str, str], int] = {}
        self.moments: list[Moment] = []
        self._arriving: dict[int, _Arriving] = {}
        # The bytes of each gathered bucket.
        self._here: dict[int, int] = {}
        # What backward will gather over the inner axis of a mesh.
        self._parts: dict[int, int] = {}
        # Whether backward sums gradients over the ranks; of one rank alone they are the sum, as they are made.
        self._has_sink = stage > 1 or (stage == 0 and not accumulates)
        self._reduces = self._has_sink and mesh_of(group).size > 1
        self._made = "gradients" if mesh_of(group).size > 1 else "reduced"
        self._wire_params = wire_params if group.size > 1 else None
        self._coded: CodedSums | None = None
        if wire_grads is not None and mesh_of(group).size > 1:
            self._coded = CodedSums(wire_grads, group, self._hold_sum, functools.partial(self.free, "reduced"), scatters=stage > 0)
        self._summed_as = self._made if stage == 0 and self._coded is None else "reduced"
        self._left = self._summed_as if self._reduces else self._made

    def now(self, what: str) -> Moment:
        """Return what is held now."""
        held = (Held(*(self._bytes.get((place, name), 0) for name in Held._fields)) for place in ("device", "store"))
        return Moment(what, *held)

    def hold(self, name: str, nbytes: int, what: str, place: str = "device") -> None:
        """Note that a buffer is made."""
        self._bytes[place, name] = self._bytes.get((place, name), 0) + nbytes
        self.moments.append(self.now(what))

    def free(self, name: str, nbytes: int, place: str = "device") -> None:
        """Note that a buffer is freed."""
        self._bytes[place, name] = self._bytes.get((place, name), 0) - nbytes

    def gathered(self, bucket: int) -> int:
        """The bytes of a gathered bucket as the loss sees it; of one rank alone it is the shard."""
        of = self._buckets[bucket]
        return 0 if self._size == 1 and of.itemsize == self._itemsizes[bucket] else of.nbytes

    def begin(self) -> None:
        """Hold what there is between steps beside parameters and the optimizer's state: what error feedback has kept."""
        for bucket in range(self._count):
            kept = 0 if self._coded is None else self._coded.learn(bucket, *self._grad_form(bucket))
            if kept:
                self.hold("reduced", kept, "")

    def shards_of(self, buckets: Sequence[int]) -> int:
        """The bytes of parameters that a rank keeps."""
        size = self._size if self._stage == 3 else 1
        return sum(self._buckets[b].numel // size * self._itemsizes[b] for b in buckets)

    def gradient(self, *, first: bool, learning: bool) -> None:
        """Play forward and backward of one micro-batch."""
        todo = [b for b in range(self._count) if self._buckets[b].grad_itemsize]
        filled: set[int] = set()
        in_flight: list[int] = []
        steps = list(first_steps(self._schedule) if learning and self._stage == 3 else self._steps(first=first))
        for place, step in enumerate(steps):
            if step.kind != "reduce":
                self._run(step)
                continue
            self._settle(in_flight, MAX_IN_FLIGHT - 1)
            self._fill(step.bucket)
            filled.add(step.bucket)
            # What the schedule frees when a bucket's gradients are complete is freed before they are sent.
            following = steps[place + 1 : place + 2]
            if following == [Step("release", step.bucket, "backward")]:
                self._run(following[0])
                steps[place + 1] = _NOTHING
            while todo and todo[-1] in filled:
                self._send(todo[-1])
                in_flight.append(todo.pop())
                self._settle(in_flight, MAX_IN_FLIGHT)
        self._settle(in_flight, 0)
        for bucket in [*self._arriving]:
            self.free("gathered", self._wait(bucket, "backward"))
        for bucket in self._here.keys() - self._schedule.persistent:
            self.free("gathered", self._here.pop(bucket))
        self.free("gathered", sum(self._parts.values()))
        self._parts.clear()

    def _steps(self, *, first: bool) -> Iterator[Step]:
        turn = self._schedule.turn
        for place, step in enumerate(self._schedule.steps):
            if self._stage < 3 and step.kind != "reduce":
                continue
            if step.phase == "start" and not (first and self._buckets[step.bucket].grad_itemsize):
                # Those that persist stay until the parameters change, frozen ones for good.
                continue
            if place >= turn:
                # What nobody has used yet is there by the end of the forward pass.
                for bucket in sorted(self._arriving.keys() & self._schedule.persistent):
                    yield Step("use", bucket, "forward")
            yield step

    def _run(self, step: Step) -> None:
        bucket = step.bucket
        if step.kind == "gather":
            self._gather(bucket, step.phase)
        elif step.kind == "use" and bucket in self._arriving:
            self._arrive(bucket, step.phase)
        elif step.kind == "release":
            self.free("gathered", self._wait(bucket, step.phase) if bucket in self._arriving else self._here.pop(bucket))

    def _gather(self, bucket: int, phase: str) -> None:
        of, what = self._buckets[bucket], f"gathered bucket {bucket}"
        wire = self._wire_params if of.is_floating else None
        shard = of.numel // self._size
        if self._secondary is not None and phase == "backward" and bucket in self._parts:
            # A part of one rank is the whole, and is not sent.
            found = _Arriving(0, of.numel * self._sent_itemsize(bucket) if self._secondary.size > 1 else 0)
        elif wire is not None:
            message = wire.message_bytes(shard)
            found = _Arriving(message, self._size * message, is_coded=True)
        else:
            narrowed = shard * of.sent_itemsize if of.sent_itemsize != self._itemsizes[bucket] else 0
            found = _Arriving(narrowed, of.numel * of.sent_itemsize) if self._size > 1 else _Arriving(0, narrowed)
        for nbytes in found[:2]:
            if nbytes:
                self.hold("gathered", nbytes, what)
        self._arriving[bucket] = found

    def _sent_itemsize(self, bucket: int) -> int:
        """The bytes of an element as it comes, before it is widened; messages are read in the dtype in which the loss uses them."""
        of = self._buckets[bucket]
        return of.itemsize if self._wire_params is not None and of.is_floating else of.sent_itemsize

    def _keep_part(self, bucket: int, phase: str) -> None:
        if self._secondary is not None and phase != "backward" and bucket not in self._parts:
            self._parts[bucket] = self._buckets[bucket].numel * self._sent_itemsize(bucket) // self._secondary.size
            self.hold("gathered", self._parts[bucket], f"secondary shard of bucket {bucket}")

    def _wait(self, bucket: int, phase: str) -> int:
        """Wait for a bucket, and return the bytes of what has come."""
        sent, comes, is_coded = self._arriving.pop(bucket)
        self.free("gathered", sent)
        if is_coded:
            nbytes = self._buckets[bucket].nbytes
            self.hold("gathered", nbytes, f"gathered bucket {bucket}")
            self.free("gathered", comes)
            comes = nbytes
        self._keep_part(bucket, phase)
        return comes

    def _arrive(self, bucket: int, phase: str) -> None:
        """Wait for a bucket, and widen it where it is used in a wider dtype than it is sent in."""
        of = self._buckets[bucket]
        self._here[bucket] = self._wait(bucket, phase)
        if self._sent_itemsize(bucket) != of.itemsize:
            self.hold("gathered", of.nbytes, f"gathered bucket {bucket}")
            self.free("gathered", self._here[bucket])
            self._here[bucket] = of.nbytes

    def _fill(self, bucket: int) -> None:
        self.hold(self._made, self._grad_bytes(bucket), f"gradients of bucket {bucket}")

    def _send(self, bucket: int) -> None:
        if self._reduces:
            self._start_sum(bucket)
        elif not self._has_sink:
            # It stays as it is, until it is summed after all others.
            self._move(self._left, self._grad_bytes(bucket), self._grad_place)

    def _settle(self, in_flight: list[int], num_left: int) -> None:
        while self._has_sink and len(in_flight) > num_left:
            bucket = in_flight.pop(0)
            nbytes = self._grad_bytes(bucket)
            if self._reduces:
                self._finish_sum(bucket)
                nbytes //= self._size if self._stage else 1
            self._move(self._left, nbytes, self._grad_place)

    def _move(self, name: str, nbytes: int, place: str) -> None:
        self.free(name, nbytes)
        self._bytes[place, name] = self._bytes.get((place, name), 0) + nbytes

    def _start_sum(self, bucket: int) -> None:
        """Start to sum gradients over the ranks; where they stay whole, an exact sum takes their place."""
        if self._coded is not None:
            self._coded.start(bucket, *self._grad_form(bucket))
            self.free("gradients", self._grad_bytes(bucket), "device" if self._reduces else self._grad_place)
        elif not self._is_row_of_one:
            for nbytes in self._sums(bucket):
                self._hold_sum(nbytes, bucket)

    def _finish_sum(self, bucket: int) -> None:
        if self._coded is not None:
            self._coded.finish(bucket)
            return
        total, *rows = self._sums(bucket) if self._stage else (0, *self._sums(bucket))
        if self._is_row_of_one:
            # Nothing is sent before the sum over the columns, and that is made when it is waited for.
            self._hold_sum(total, bucket)
        if self._stage:
            self.free("gradients", self._grad_bytes(bucket), "device" if self._reduces else self._grad_place)
        self.free("reduced", sum(rows))

    def _hold_sum(self, nbytes: int, bucket: int) -> None:
        self.hold("reduced", nbytes, f"reduced gradients of bucket {bucket}")

    @property
    def _is_row_of_one(self) -> bool:
        """Whether gradients are cut over an inner axis with one rank."""
        return self._stage > 0 and self._size == 1

    def _sums(self, bucket: int) -> list[int]:
        """The bytes of a rank's part of the sum, and of what is made on the way to it: on a mesh the sum over a row."""
        nbytes, mesh = self._grad_bytes(bucket), mesh_of(self._group)
        parts = [nbytes // self._size] if self._stage else []
        if not isinstance(mesh, Mesh) or mesh.inner.size == 1 or (self._stage and self._group is not mesh):
            return parts
        return [*parts, nbytes if not self._stage and mesh.sums_whole(nbytes) else nbytes // mesh.inner.size]

    def _grad_form(self, bucket: int) -> tuple[int, int]:
        return self._buckets[bucket].numel, self._buckets[bucket].grad_itemsize

    def _grad_bytes(self, bucket: int) -> int:
        return self._buckets[bucket].numel * self._buckets[bucket].grad_itemsize

    def add(self) -> None:
        """Add the gradients of a micro-batch to those before it."""
        share = self._size if self._reduces else 1
        self.free(self._left, sum(self._grad_bytes(b) // share for b in range(self._count)), self._grad_place)

    def redistribute(self) -> None:
        """Sum whole gradients over the ranks, where that was not done in backward."""
        if self._stage > 1 or self._reduces or mesh_of(self._group).size == 1:
            return
        in_flight: list[int] = []
        for bucket in range(self._count):
            self._start_sum(bucket)
            in_flight.append(bucket)
            if len(in_flight) > MAX_UNDER_WAY:
                self._finish_sum(in_flight.pop(0))
        for bucket in in_flight:
            self._finish_sum(bucket)

    def unscale(self) -> None:
        """Divide by the loss scale: half types are widened for that, all others changed in place."""
        share = self._size if self._stage else 1
        place = self._grad_place if self._stage > 1 or self._left == self._summed_as else "device"
        narrow = [bucket for bucket in range(self._count) if self._buckets[bucket].grad_itemsize < _WIDE]
        for bucket in narrow:
            self.hold("reduced", self._buckets[bucket].numel // share * _WIDE, f"unscaled gradients of bucket {bucket}")
        self.free(self._summed_as, sum(self._grad_bytes(bucket) // share for bucket in narrow), place)

    def update(self, changes: Sequence[Change], where: str, *, donate: bool) -> None:
        """Play the optimizer, and what comes after it."""
        made = 0
        for kind, nbytes, bucket in changes:
            name, place = ("params", "device") if kind == "params" else ("optimizer", where)
            if nbytes < 0:
                self.free(name, -nbytes, place)
            else:
                self.hold(name, nbytes, f"new parameters of bucket {bucket}" if kind == "params" else _MADE[kind], place)
            made += nbytes if kind == "params" else 0
        if self._stage in (1, 2) and self._size > 1:
            # They are gathered, over the old ones where these are given up.
            for bucket in () if donate else range(self._count):
                nbytes = self._buckets[bucket].numel * self._itemsizes[bucket]
                self.hold("params", nbytes, f"new parameters of bucket {bucket}")
            self.free("params", made)
        else:
            self._move("params", made, self.param_place)
        if donate and self._stage == 3:
            persistent = [b for b in self._schedule.persistent if self._buckets[b].grad_itemsize]
            self.free("gathered", sum(self._here.pop(bucket) for bucket in persistent))
        for place in ("device", "store"):
            self._bytes[place, "gradients"] = self._bytes[place, "reduced"] = 0
        if self._coded is not None:
            self._bytes["device", "reduced"] = sum(self._coded.kept.values())
