"""The messages and reads of a schedule, their bytes, and the computation beside each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zfun.collectives import Group, abstract_group, sum_group
from zfun.compression import Codec, Compression
from zfun.errors import OptionError
from zfun.options import GROUP, instance, integer, takes
from zfun.planner._price import PricedHop, price_of_gather, price_of_sum
from zfun.transforms import MAX_IN_FLIGHT, SCHEDULE, Phase, Schedule, TracedBucket, secondary_of


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a step, on one axis of a mesh or over a whole group.

    Attributes:
        kind: ``"all_gather"`` or ``"reduce_scatter"``; on a mesh also ``"all_reduce"``, with a
            codec ``"all_to_all"``.
        name: ``"params"`` or ``"grads"``, as in the records of :func:`zfun.record`.
        bucket: index of the bucket.
        label: name of the bucket.
        phase: ``"start"`` (once after each change of the parameters), ``"forward"`` or
            ``"backward"``.
        sent_bytes: bytes that each rank sends.
        overlaps: the buckets whose use runs beside the collective; empty where the rank waits at
            once, as for the second axis of a mesh.
        axis: of a mesh: ``"inner"`` or ``"outer"``; else ``""``.
    """

    kind: str
    name: str
    bucket: int
    label: str
    phase: Phase
    sent_bytes: int
    overlaps: tuple[int, ...]
    axis: str = ""


class Read(NamedTuple):
    """One read of this rank's shard from a store.

    Attributes:
        bucket: index of the bucket.
        label: name of the bucket.
        phase: as in :class:`Message`.
        num_bytes: bytes of the shard in the store.
        overlaps: the buckets whose use runs beside the read.
        num_before: how many of the messages are started before the read.
    """

    bucket: int
    label: str
    phase: Phase
    num_bytes: int
    overlaps: tuple[int, ...]
    num_before: int


class Accumulation(NamedTuple):
    """Bytes of each rank in a step, for one order of accumulation and reduction.

    Attributes:
        order: the composition, as Python source.
        sent_bytes: parameters and gradients, all micro-batches together.
        held_bytes: the sum of the gradients that is kept between micro-batches.
    """

    order: str
    sent_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The messages and the memory of a step of a schedule; ``print`` shows a table.

    Attributes:
        messages: in the order in which they are started.
        peak_live: the largest number of elements that are gathered at once, padding included.
        peak_bytes: the largest number of bytes; the two maxima may be at different moments.
        accumulation: both orders of :func:`zfun.accumulate` and :func:`zfun.shard_grads`.
        num_micro_batches: the number that ``accumulation`` was computed for.
        reads: of shards in a store, in order.
    """

    messages: tuple[Message, ...]
    peak_live: int
    peak_bytes: int
    accumulation: tuple[Accumulation, ...]
    num_micro_batches: int
    reads: tuple[Read, ...] = ()

    @property
    def bytes_read(self) -> int:
        """The bytes that each rank reads from the store in a step of one batch."""
        return sum(read.num_bytes for read in self.reads)

    def bytes_sent(self, name: str | None = None, *, axis: str | None = None) -> int:
        """Return the bytes that each rank sends in a step of one batch.

        Args:
            name: ``"params"`` or ``"grads"``; by default both.
            axis: ``"inner"`` or ``"outer"`` of a mesh; by default both.
        """
        return sum(
            m.sent_bytes for m in self.messages if name in (None, m.name) and axis in (None, m.axis)
        )

    def __str__(self) -> str:
        rows = [("phase", "collective", "of", "bytes", "runs beside the use of")]
        for number, m in enumerate((*self.messages, None)):
            rows += [
                (r.phase, "read", r.label, f"{r.num_bytes:,}", _listed(r.overlaps))
                for r in self.reads
                if r.num_before == number
            ]
            if m is not None:
                kind = f"{m.kind} {m.axis}".strip()
                rows.append((m.phase, kind, m.label, f"{m.sent_bytes:,}", _listed(m.overlaps)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.append(
            f"at most {self.peak_live:,} elements gathered at once, {self.peak_bytes:,} bytes"
        )
        lines += [
            f"{self.num_micro_batches} micro-batches, {a.order}: {a.sent_bytes:,} bytes sent, "
            f"{a.held_bytes:,} bytes of gradients held"
            for a in self.accumulation
        ]
        return "\n".join(lines)


def _listed(buckets: tuple[int, ...]) -> str:
    return ", ".join(map(str, buckets)) or "nothing"


@takes(
    schedule=SCHEDULE,
    num_micro_batches=integer(1),
    group=GROUP | None,
    compression=instance(
        Compression,
        "a zf.compression.Compression",
        "zf.compression.Compression(grads=zf.compression.int8())",
    )
    | None,
)
def explain(
    schedule: Schedule,
    *,
    num_micro_batches: int = 1,
    group: Group | None = None,
    compression: Compression | None = None,
) -> Explanation:
    """List the messages of a step in order, with the computation that each overlaps with.

    Args:
        schedule: made by :func:`zfun.planner.schedule`.
        num_micro_batches: the number to price both orders of accumulation for.
        group: the mesh, or the inner axis of a mesh, that the parameters are sharded over; may be
            an abstract group. Trace with the same group.
        compression: codecs for gathers of parameters and sums of gradients, as :func:`zfun.zero`
            takes them.

    Returns:
        The messages of a step with one batch, the reads from a store (trace with the same
        ``offload``), and the bytes of both orders of accumulation. The loss, the norm and the
        divergence check are not counted. Frozen persistent buckets are not counted either, because
        they are gathered only once.

    Raises:
        OptionError: there is no micro-batch, or the schedule is of another group.

    Example:
        >>> import torch, zfun as zf
        >>> params = {"a": torch.ones(64), "b": torch.ones(64, 64)}
        >>> loss = lambda p, x: torch.tanh(x * p["a"]) @ p["b"].sum(1)
        >>> trace = zf.planner.trace(loss, params, torch.ones(64), 4, bucket_bytes=1)
        >>> found = zf.planner.explain(zf.planner.schedule(trace), num_micro_batches=2)
        >>> print(found)  # doctest: +ELLIPSIS
        phase     collective      of           bytes   runs beside the use of
        forward   all_gather      bucket 0: a  384     nothing
        forward   all_gather      bucket 1: b  12,288  0
        backward  reduce_scatter  bucket 1: b  12,288  nothing
        backward  reduce_scatter  bucket 0: a  384     nothing
        backward  all_gather      bucket 0: a  384     nothing
        backward  all_gather      bucket 1: b  12,288  nothing
        at most 4,224 elements gathered at once, 16,896 bytes
        2 micro-batches, accumulate(shard_grads(vg)): 76,032 bytes sent, 4,224 bytes of ...
        2 micro-batches, shard_grads(accumulate(vg)): 63,360 bytes sent, 16,896 bytes of ...
        >>> mesh = zf.split(zf.collectives.abstract_group(4), inner=2)
        >>> made = zf.planner.schedule(trace, zf.ScheduleOptions(secondary=True))
        >>> short = zf.compression.Compression(params=zf.compression.int8())
        >>> found = zf.planner.explain(made, group=mesh, compression=short)
        >>> found.bytes_sent("params", axis="outer"), found.bytes_sent("params", axis="inner")
        (1076, 10600)
    """
    trace = schedule.trace
    codecs = compression or Compression()
    group = abstract_group(trace.size) if group is None else group
    _check_group(schedule, group)
    prices = _Prices(group, secondary_of(group, schedule.options), codecs.params, codecs.grads)
    messages: list[Message] = []
    for bucket in schedule.trace.buckets:
        if bucket.cut:
            raise OptionError(
                f"a schedule is priced for equal pieces; got {bucket.label} cut by {bucket.cut}; "
                "count the bytes of a run with zf.record(group), or of a plan with zf.plan()"
            )
    reads: list[Read] = []
    for found in _transfers(schedule, prices):
        if isinstance(found, Message):
            messages.append(found)
        else:
            reads.append(found._replace(num_before=len(messages)))
    once = sum(m.sent_bytes for m in messages if m.phase == "start")
    each = sum(m.sent_bytes for m in messages if m.name == "params") - once
    grads = sum(m.sent_bytes for m in messages if m.name == "grads")
    whole = sum(bucket.numel * bucket.grad_itemsize for bucket in trace.buckets)
    n = num_micro_batches
    return Explanation(
        tuple(messages),
        max(schedule.live(), default=0),
        max(schedule.live_bytes(), default=0),
        (
            Accumulation(
                "accumulate(shard_grads(vg))", once + n * (each + grads), whole // trace.size
            ),
            Accumulation("shard_grads(accumulate(vg))", once + n * each + grads, whole),
        ),
        n,
        tuple(reads),
    )


def _check_group(schedule: Schedule, group: Group) -> None:
    size = schedule.trace.size
    if group.size != size or any(
        bucket.numel % sum_group(group).size for bucket in schedule.trace.buckets
    ):
        raise OptionError(
            f"a schedule is priced for the group that it was traced for; got one of {size} ranks "
            f"for {group!r}; trace with zf.planner.trace(loss, params, batch, group)"
        )


class _Prices(NamedTuple):
    """The groups and codecs of the messages."""

    group: Group
    secondary: Group | None
    codec_of_params: Codec | None
    codec_of_grads: Codec | None

    def gather(self, bucket: TracedBucket, phase: Phase) -> list[PricedHop]:
        codec = self.codec_of_params if bucket.is_floating else None
        if phase == "backward" and self.secondary is not None:
            # The secondary shard is a part of the bucket as the first gather delivered the bucket.
            itemsize = bucket.sent_itemsize if codec is None else bucket.itemsize
            return price_of_gather(
                bucket.numel // self.secondary.size, itemsize, self.secondary, None
            )
        return price_of_gather(
            bucket.numel // self.group.size, bucket.sent_itemsize, self.group, codec
        )

    def sum(self, bucket: TracedBucket) -> list[PricedHop]:
        return price_of_sum(bucket.numel, bucket.grad_itemsize, self.group, self.codec_of_grads)


def _transfers(schedule: Schedule, prices: _Prices) -> Iterator[Message | Read]:
    trace, steps = schedule.trace, schedule.steps
    ends = reductions_of(schedule)
    for place, step in enumerate(steps):
        bucket = trace.buckets[step.bucket]
        if step.kind == "read":
            end = next(
                i
                for i in range(place, len(steps))
                if (steps[i].kind, steps[i].bucket) == ("gather", step.bucket)
            )
            num_bytes = bucket.numel // trace.size * bucket.stored_itemsize
            beside = _uses(schedule, place, end)
            yield Read(step.bucket, bucket.label, step.phase, num_bytes, beside, 0)
        if step.kind == "gather" and not (step.phase == "start" and not bucket.grad_itemsize):
            ends_gather = (
                i
                for i in range(place, len(steps))
                if steps[i].bucket == step.bucket and steps[i].kind in ("use", "release")
            )
            # No step ends the gather of a persistent bucket that the loss does not use.
            end = next(ends_gather, len(steps))
            beside = _uses(schedule, place, end)
            yield from _hops(
                prices.gather(bucket, step.phase),
                "params",
                step.bucket,
                bucket.label,
                step.phase,
                beside,
            )
        for reduced, end in ends.get(place, ()):
            of = trace.buckets[reduced]
            yield from _hops(
                prices.sum(of), "grads", reduced, of.label, "backward", _uses(schedule, place, end)
            )


def _hops(
    hops: list[PricedHop], name: str, bucket: int, label: str, phase: Phase, beside: tuple[int, ...]
) -> Iterator[Message]:
    for number, hop in enumerate(hops):
        yield Message(
            hop.kind, name, bucket, label, phase, hop.sent_bytes, () if number else beside, hop.axis
        )


def _uses(schedule: Schedule, start: int, end: int) -> tuple[int, ...]:
    return tuple(
        dict.fromkeys(step.bucket for step in schedule.steps[start:end] if step.kind == "use")
    )


def reductions_of(schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Map the step at which a reduction starts to pairs of a bucket and the step that waits.

    The reducer starts reductions from the last bucket to the first.
    """
    todo = [b for b, bucket in enumerate(schedule.trace.buckets) if bucket.grad_itemsize]
    ready: set[int] = set()
    in_flight: list[tuple[int, int]] = []
    found: dict[int, list[tuple[int, int]]] = {}
    for place, step in enumerate(schedule.steps):
        if step.kind != "reduce":
            continue
        ready.add(step.bucket)
        while todo and todo[-1] in ready:
            in_flight.append((place, todo.pop()))
            if len(in_flight) > MAX_IN_FLIGHT:
                start, bucket = in_flight.pop(0)
                found.setdefault(start, []).append((bucket, place))
    for start, bucket in in_flight:
        found.setdefault(start, []).append((bucket, len(schedule.steps)))
    return found
