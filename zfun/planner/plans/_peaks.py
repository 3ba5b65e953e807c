"""The least peak of a pass of a loss, from a plan of the bare loss.

[Note: least peaks]
A composition adds some bytes to the moments of the bare loss, which follow from the order in
which leaves are used and gradients are complete. Gradients wait until those of their bucket are
complete. At stage 3 a bucket is gathered from its use to the next mark, because nothing else
releases it. A complete bucket is packed beside its gradients, and sent once all buckets behind it
have been; shards of the sums add up, except those in flight, and so do secondary shards in forward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from zfun.planner._meter import SMALL
from zfun.planner.plans._bare import MARK_BYTES, Bare
from zfun.planner.plans._plan import planned
from zfun.transforms import MAX_IN_FLIGHT


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
        summed: the shard of the sum.
        secondary: the part that a row keeps from forward to backward.
    """

    gathered: int
    packed: int
    sending: int
    summed: int
    secondary: int


NO_BYTES = BucketBytes(0, 0, 0, 0, 0)


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
) -> int:
    """Return the most bytes of a pass beside the parameters; see [Note: least peaks].

    Args:
        loss: the plan of the bare loss.
        sizes: bytes of the gradient of each leaf.
        bucket_of_leaf: the bucket of each leaf.
        buckets: the bytes of each bucket.
    """
    left = Counter(bucket_of_leaf[one.leaf] for one in loss.segments if one.kind == "complete")
    todo, packed, in_flight = sorted(left), set[int](), list[int]()
    grads, used = Counter[int](), set[int]()
    is_forward = True
    most = held = 0
    for one in loss.segments:
        bucket, gathered = bucket_of_leaf[one.leaf], 0
        if one.kind == "end":
            is_forward = False
        elif one.kind == "use":
            gathered = buckets[bucket].gathered
            if is_forward and bucket not in used:
                used.add(bucket)
                held += buckets[bucket].secondary
        elif one.kind == "complete":
            held += sizes[one.leaf]
            grads[bucket] += sizes[one.leaf]
            left[bucket] -= 1
            if left[bucket] == 0:
                packed.add(bucket)
                held += buckets[bucket].packed
                most = max(most, one.first + held)
                while todo and todo[-1] in packed:
                    sent = todo.pop()
                    most = max(most, one.first + held + buckets[sent].sending)
                    held -= buckets[sent].packed
                    in_flight.append(sent)
                    if len(in_flight) > MAX_IN_FLIGHT:
                        held += buckets[in_flight.pop(0)].summed
                held -= grads[bucket]
        most = max(most, one.most + gathered + held)
    return most
