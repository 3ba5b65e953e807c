"""Which buckets a loss uses, in which order, and the steps of a schedule: data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from zfun.tables import html_table, in_bytes

Kind: TypeAlias = Literal["read", "gather", "use", "release", "reduce"]
Phase: TypeAlias = Literal["start", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class TracedBucket:
    """A bucket in the form that a schedule takes.

    Attributes:
        label: name of the bucket in messages.
        leaves: path and number of elements of each leaf.
        numel: elements of the gathered bucket, padding included.
        itemsize: bytes of an element in the gathered bucket.
        sent_itemsize: bytes of an element in the all-gather.
        grad_itemsize: bytes of an element of the gradients; 0 for frozen leaves.
        is_floating: whether the elements are floating numbers, which a codec can round.
        stored_itemsize: bytes of an element of the shard in a store; 0 for a shard in memory.
        cut: the placement of unequal pieces, in words; empty for equal pieces.
    """

    label: str
    leaves: tuple[tuple[str, int], ...]
    numel: int
    itemsize: int
    sent_itemsize: int
    grad_itemsize: int
    is_floating: bool = True
    stored_itemsize: int = 0
    cut: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered bucket."""
        return self.numel * self.itemsize


class Event(NamedTuple):
    """An event of backward: a use of a bucket, or the completion of the gradients.

    Attributes:
        kind: ``"use"`` or ``"reduce"``.
        bucket: index of the bucket.
    """

    kind: Literal["use", "reduce"]
    bucket: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The buckets that a loss uses, in order.

    The first step records a trace; so does :func:`zfun.planner.trace`, without a step.

    Attributes:
        buckets: of the trained leaves, then of the frozen ones.
        size: number of ranks that share each bucket.
        forward: indices of the buckets in the order of use; a bucket may appear several times.
        backward: the events of backward; by default the uses of forward in reverse.
        leaves: paths of the leaves in the order of the first use in forward, for ``order=`` of
            :func:`zfun.shard`; by default bucket by bucket.

    Example:
        >>> block = TracedBucket("h", (("h.w", 64),), 64, 4, 4, 4)
        >>> Trace((block, block), 2, (0, 1)).backward[:2]
        (Event(kind='use', bucket=1), Event(kind='reduce', bucket=1))
    """

    buckets: tuple[TracedBucket, ...]
    size: int
    forward: tuple[int, ...]
    backward: tuple[Event, ...] = ()
    leaves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.leaves:
            used = [
                path
                for bucket in dict.fromkeys(self.forward)
                for path, _ in self.buckets[bucket].leaves
            ]
            object.__setattr__(self, "leaves", tuple(used))
        if not self.backward:
            object.__setattr__(self, "backward", tuple(self._reversed()))

    def __repr__(self) -> str:
        return (
            f"Trace({len(self.buckets)} buckets over {self.size} ranks: {len(self.forward)} uses "
            f"forward, {len(self.backward)} events backward)"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                bucket.label,
                f"{bucket.numel:,}",
                in_bytes(bucket.nbytes),
                "yes" if bucket.grad_itemsize else "no",
                self.forward.count(index),
            )
            for index, bucket in enumerate(self.buckets)
        ]
        header = ("bucket", "elements", "gathered", "trained", "uses forward")
        return html_table(repr(self), header, rows)

    def _reversed(self) -> Iterator[Event]:
        for i in range(len(self.forward) - 1, -1, -1):
            bucket = self.forward[i]
            yield Event("use", bucket)
            if self.buckets[bucket].grad_itemsize and bucket not in self.forward[:i]:
                yield Event("reduce", bucket)


class Step(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: ``"read"`` (the start), ``"gather"`` (wait for the read, if any, and start),
            ``"use"`` (wait for the gather, and compute), ``"release"``, or ``"reduce"`` (the
            gradients are complete).
        bucket: index of the bucket.
        phase: the phase that needs the step: ``"start"`` (once after each change of the
            parameters), ``"forward"`` or ``"backward"``.
    """

    kind: Kind
    bucket: int
    phase: Phase
