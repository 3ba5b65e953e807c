"""The least peak of a pass of a loss, from a plan of the bare loss.

[Note: least peaks]
A composition adds some bytes to the moments of the bare loss, which follow from the order in
which leaves are used and gradients are complete. Gradients wait until those of their bucket are
complete. At stage 3 the uses make the schedule that a step follows from the second on, so the
buckets that are gathered at each mark are known: as a message before the first use, whole after. A
complete bucket is packed beside its gradients, and sent once all buckets behind it have been;
shards of the sums add up, except those in flight, and so do secondary shards in forward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from zfun.planner._meter import SMALL
from zfun.planner.plans._bare import MARK_BYTES, Bare
from zfun.planner.plans._plan import planned
from zfun.transforms import (
    MAX_IN_FLIGHT,
    Event,
    Schedule,
    Step,
    Trace,
    TracedBucket,
)


class PeakSegment(NamedTuple):
    """The moments of a bare loss from one mark to the next.

    Attributes:
        kind: of the mark.
        leaf: of the mark.
        first: bytes beside the parameters at the mark.
        most: the most bytes beside the parameters after the mark.
    """

    kind: str
    leaf: int
    first: int
    most: int


class LossPlan(NamedTuple):
    """A pass of the bare loss forward and back, and its work.

    Attributes:
        segments: in order.
        flops: floating-point operations.
        touched: bytes that the operations read and write.
        num_ops: the operations.
    """

    segments: tuple[PeakSegment, ...]
    flops: int
    touched: int
    num_ops: int


class BucketBytes(NamedTuple):
    """The bytes of a bucket on one rank at stage 3.

    Attributes:
        gathered: the gathered bucket.
        packed: its gradients as a message.
        sending: what the first collective of a sum makes beside the message.
        flying: what a sum in flight holds.
        summed: the shard of the sum.
        secondary: the part that a row keeps from forward to backward.
        arriving: what a gather in flight holds.
        again: the same of a gather for backward.
        read: the shard that is read from host memory, before a gather.
    """

    gathered: int
    packed: int
    sending: int
    flying: int
    summed: int
    secondary: int
    arriving: int
    again: int
    read: int


NO_BYTES = BucketBytes(*[0] * 9)


def plan_of_loss(bare: Bare, params: Any, batch: Any, group: Any) -> LossPlan:
    """Plan a bare loss."""
    found = planned(lambda _: bare, params, batch, group, 1, "meta", bare.watch)
    held = [one.device.total - one.device.params for one in found.instants]
    segments = [PeakSegment("start", -1, 0, max(held[: bare.marks[0].moment], default=0))]
    # An operation on a leaf follows views of the leaf.
    marks = [next(same) for _, same in itertools.groupby(bare.marks, lambda mark: mark[:2])]
    ends = [*(mark.moment for mark in marks[1:]), len(held)]
    for mark, end in zip(marks, ends, strict=True):
        # The first moment after a gradient is that of the mark itself.
        is_complete = mark.kind == "complete"
        first = held[mark.moment] - MARK_BYTES if is_complete else 0
        most = max(held[mark.moment + is_complete : end], default=0)
        segments.append(PeakSegment(mark.kind, mark.leaf, first, most))
    flops = found.flops.forward + found.flops.backward + found.flops.recomputed
    return LossPlan(tuple(segments), flops, found.touched.num_bytes, found.touched.num_ops)


def counted(num_bytes: int) -> int:
    """Return the bytes of a storage that a meter counts."""
    return num_bytes if num_bytes >= SMALL else 0


def peak_of_pass(
    loss: LossPlan,
    sizes: Sequence[int],
    bucket_of_leaf: Sequence[int],
    buckets: Sequence[BucketBytes],
    gathers: Schedule | None = None,
) -> int:
    """Return the most bytes of a pass beside the parameters; see [Note: least peaks].

    Args:
        loss: the plan of the bare loss.
        sizes: bytes of the gradient of each leaf.
        bucket_of_leaf: the bucket of each leaf.
        buckets: the bytes of each bucket.
        gathers: when buckets are gathered; ``None`` where none are.
    """
    left = Counter(bucket_of_leaf[one.leaf] for one in loss.segments if one.kind == "complete")
    todo, packed, in_flight = sorted(left), set[int](), list[int]()
    grads, used = Counter[int](), set[int]()
    is_forward = True
    cursor = None if gathers is None else _Gathers(gathers, buckets)
    most = held = 0
    for one in loss.segments:
        bucket = bucket_of_leaf[one.leaf]
        if one.kind == "end":
            is_forward = False
            if cursor is not None:
                cursor.turn()
        elif one.kind == "touch":
            if cursor is not None:
                cursor.use(bucket)
            if is_forward and bucket not in used:
                used.add(bucket)
                held += buckets[bucket].secondary
        gathered = 0 if cursor is None else cursor.bytes_with(bucket if one.kind == "use" else -1)
        if one.kind == "complete":
            held += sizes[one.leaf]
            grads[bucket] += sizes[one.leaf]
            left[bucket] -= 1
            if left[bucket] == 0:
                held += _settled(in_flight, MAX_IN_FLIGHT - 1, buckets)
                packed.add(bucket)
                held += buckets[bucket].packed
                most = max(most, one.first + held + gathered)
                if cursor is not None:
                    cursor.reduce(bucket)
                    gathered = cursor.bytes_with(-1)
                while todo and todo[-1] in packed:
                    sent = todo.pop()
                    most = max(most, one.first + held + buckets[sent].sending + gathered)
                    held += buckets[sent].flying - buckets[sent].packed
                    in_flight.append(sent)
                    held += _settled(in_flight, MAX_IN_FLIGHT, buckets)
                held -= grads[bucket]
        most = max(most, one.most + gathered + held)
    return most


def _settled(in_flight: list[int], num_left: int, buckets: Sequence[BucketBytes]) -> int:
    """Wait for the first sums in flight, and return by how much that changes the bytes."""
    change = 0
    while len(in_flight) > num_left:
        bucket = buckets[in_flight.pop(0)]
        change += bucket.summed - bucket.flying
    return change


def trace_of_pass(
    loss: LossPlan, bucket_of_leaf: Sequence[int], buckets: tuple[TracedBucket, ...], size: int
) -> Trace:
    """Return the trace that a step of stage 3 would learn from the same loss.

    A node behind a bucket runs as soon as the gradients of all its leaves are complete.
    """
    left = Counter(bucket_of_leaf[one.leaf] for one in loss.segments if one.kind == "complete")
    forward: list[int] = []
    backward: list[Event] = []
    is_forward, now = True, -1
    for one in loss.segments:
        bucket = bucket_of_leaf[one.leaf]
        if one.kind == "end":
            is_forward, now = False, -1
        elif one.kind == "touch" and bucket != now:
            now = bucket
            if is_forward:
                forward.append(bucket)
            else:
                backward.append(Event("use", bucket))
        elif one.kind == "complete":
            left[bucket] -= 1
            if left[bucket] == 0:
                backward.append(Event("reduce", bucket))
    return Trace(buckets, size, tuple(forward), tuple(backward))


class _Gathers:
    """The buckets that are gathered, as a step follows the schedule."""

    def __init__(self, gathers: Schedule, buckets: Sequence[BucketBytes]) -> None:
        self._buckets = buckets
        self._steps, self._turn, self._place = gathers.steps, gathers.turn, 0
        self._held: dict[int, int] = {}
        self._sum = 0
        self._now = -1

    def bytes_with(self, bucket: int) -> int:
        """Return the bytes of all gathers, where an operation uses a bucket, if any."""
        # A block that was recomputed holds what the schedule has released.
        used = 0 if bucket < 0 else self._buckets[bucket].gathered - self._held.get(bucket, 0)
        return self._sum + used

    def use(self, bucket: int) -> None:
        """Take the steps up to the use of a bucket."""
        if bucket != self._now:
            self._now = bucket
            self._run_to("use", bucket)

    def reduce(self, bucket: int) -> None:
        """Take the steps up to the end of a bucket's gradients."""
        self._run_to("reduce", bucket)
        self._run(self._place + (self._steps[self._place : self._place + 1] == _released(bucket)))

    def turn(self) -> None:
        """Take the steps that are left of forward."""
        self._run(self._turn)
        self._now = -1

    def _run_to(self, kind: str, bucket: int) -> None:
        end = self._place
        while self._steps[end][:2] != (kind, bucket):
            end += 1
        self._run(end + 1)

    def _run(self, end: int) -> None:
        held = self._held
        for step in self._steps[self._place : end]:
            sizes = self._buckets[step.bucket]
            if step.kind == "read":
                held[~step.bucket] = sizes.read
            elif step.kind == "gather":
                held.pop(~step.bucket, None)
                held[step.bucket] = sizes.again if step.phase == "backward" else sizes.arriving
            elif step.kind == "use":
                held[step.bucket] = sizes.gathered
            elif step.kind == "release":
                held.pop(step.bucket, None)
        if end > self._place:
            self._place, self._sum = end, sum(held.values())


def _released(bucket: int) -> tuple[Step, ...]:
    return (Step("release", bucket, "backward"),)
