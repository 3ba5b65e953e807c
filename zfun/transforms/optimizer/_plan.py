"""The steps of an update that goes bucket by bucket, as data.

[Note: the streamed update]
An update over stores reads, computes and writes one bucket after the other, so that a few buckets
are in memory, whatever the number of buckets. The order of the steps is made by a pure function of
a few numbers, :func:`plan_update`; ``_stream`` runs the steps, and ``zfun.planner.timeline`` draws
the plan.

Where the optimizer needs no look at all gradients, and the store may fail, the update runs in
backward (``in_backward.py``): the reads begin before forward, and each bucket is stepped when the
gradients of the bucket are complete, from the last bucket on. No old value is overwritten, in
memory or in a store, so a step that is skipped or fails drops the new values.

Old parameters in memory stay until the stores keep the new state. On a CPU, the new parameters of a
bucket go to the memory of the gradients of the bucket before, which are spent by then; in backward
the squares of spent gradients are kept for the norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from zfun.layout import LAYOUT, Layout
from zfun.options import each, instance, integer, takes
from zfun.stores import READ_AHEAD
from zfun.tables import html_table

UpdateKind: TypeAlias = Literal["read", "wait", "compute", "write", "gather", "commit"]


class UpdateStep(NamedTuple):
    """One step of an update that goes bucket by bucket.

    Attributes:
        kind: ``"read"`` (the start: gradients, state and parameters that are in stores),
            ``"wait"`` (for the reads), ``"compute"``, ``"write"`` (the start), ``"gather"`` (new
            parameters go to the placement of the old), or ``"commit"`` (wait until the stores of
            all ranks keep the new values).
        bucket: index of the bucket; -1 for ``"commit"``.
    """

    kind: UpdateKind
    bucket: int


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """When each bucket of an update is read, computed, written and gathered: data.

    Attributes:
        labels: names of the buckets.
        numels: elements of each bucket.
        steps: in order.
    """

    labels: tuple[str, ...]
    numels: tuple[int, ...]
    steps: tuple[UpdateStep, ...]

    def __repr__(self) -> str:
        reads = sum(step.kind == "read" for step in self.steps)
        most = max(self.live(), default=0)
        return f"UpdatePlan({len(self.labels)} buckets: {reads} reads, at most {most} in memory)"

    def _repr_html_(self) -> str:
        rows = [
            (step.kind, self.labels[step.bucket] if step.bucket >= 0 else "", live)
            for step, live in zip(self.steps, self.live(), strict=True)
        ]
        return html_table(repr(self), ("step", "bucket", "buckets in memory after"), rows)

    def live(self) -> list[int]:
        """Return how many buckets are read and not yet computed after each step.

        A bucket that is being written is in memory too, until the store keeps the bucket.
        """
        changes = ({"read": 1, "compute": -1}.get(step.kind, 0) for step in self.steps)
        return list(itertools.accumulate(changes))


UPDATE = instance(UpdatePlan, "a plan of an update", "zf.planner.plan_update(layout)")


@takes(
    layout=LAYOUT,
    stored=each(integer(0), "a sequence of indices", "[0, 1]") | None,
    ahead=integer(0),
)
def plan_update(
    layout: Layout,
    *,
    stored: Sequence[int] | None = None,
    late: bool = False,
    ahead: int = READ_AHEAD,
    reads_first: bool = False,
    in_backward: bool = False,
) -> UpdatePlan:
    """Decide when each bucket of an update over stores is read, computed, written and gathered.

    Args:
        layout: of the parameters.
        stored: the buckets whose state or parameters are in a store; by default all.
        late: whether values in memory are overwritten only after the stores keep the new ones,
            because a store may fail. Then buckets that are not in a store come last.
        ahead: how many buckets are read ahead of the computation.
        reads_first: whether the gradients of these last buckets are read before the stores keep
            the new values, because the store of the gradients may fail.
        in_backward: whether stored buckets are stepped in backward, from the last one on, as the
            gradients become complete. Then both options above hold.

    Returns:
        The plan. Equal arguments give equal plans.

    Example:
        >>> import torch, zfun as zf
        >>> layout = zf.layout.layout_of([torch.ones(64) for _ in range(3)], bucket_bytes=1)
        >>> plan = plan_update(layout, ahead=1)
        >>> [f"{step.kind} {step.bucket}" for step in plan.steps][:7]
        ['read 0', 'read 1', 'wait 0', 'compute 0', 'write 0', 'gather 0', 'read 2']
    """
    count = len(layout.buckets)
    chosen = set(range(count) if stored is None else stored)
    far = [bucket for bucket in range(count) if bucket in chosen]
    near = [bucket for bucket in range(count) if bucket not in chosen]
    if in_backward:
        far, late, reads_first = far[::-1], True, True
    steps = [
        *_pipeline(far if late else near + far, chosen, ahead, gathers=not late),
        *(UpdateStep("read", bucket) for bucket in near if late and reads_first),
        UpdateStep("commit", -1),
        *(UpdateStep("gather", bucket) for bucket in far if late),
        *_pipeline(near if late else [], chosen, ahead, reads=not reads_first),
    ]
    return UpdatePlan(
        tuple(layout.label(bucket) for bucket in range(count)),
        tuple(bucket.padded_numel for bucket in layout.buckets),
        tuple(steps),
    )


def _pipeline(
    buckets: Sequence[int],
    stored: set[int],
    ahead: int,
    *,
    gathers: bool = True,
    reads: bool = True,
) -> Iterator[UpdateStep]:
    num_read = 0
    for place, bucket in enumerate(buckets):
        while reads and num_read < min(place + ahead + 1, len(buckets)):
            yield UpdateStep("read", buckets[num_read])
            num_read += 1
        yield UpdateStep("wait", bucket)
        yield UpdateStep("compute", bucket)
        if bucket in stored:
            yield UpdateStep("write", bucket)
        if gathers:
            yield UpdateStep("gather", bucket)
