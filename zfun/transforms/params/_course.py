"""The course of one call of a loss: the steps to run, and the plan that the call teaches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import Group
from zfun.transforms.call._buckets import BucketShard
from zfun.transforms.call._executor import Executor
from zfun.transforms.call._trace import Event, Phase, Step, Trace, TracedBucket
from zfun.transforms.params._cursor import ScheduleCursor, SchedulePlan, UntoldUse, of_rank_0
from zfun.transforms.params._divergence import Divergence
from zfun.transforms.params._schedule import schedule
from zfun.transforms.params._schedule_options import ScheduleOptions
from zfun.transforms.params._scheduler import with_reads


class Course:
    """The steps of one call, and the uses that this rank has noted.

    Args:
        group: the ranks that share the parameters.
        shards: the buckets.
        executor: of the call; ``None`` without a gradient.
        options: of the schedule.
        plan: the plan of earlier calls, if any.
        learn: called with a new plan.
        reads_again: whether backward reads stored shards again; not over a secondary group.

    Attributes:
        plan: the plan of earlier calls, or of this one.
        cursor: this rank's place among the steps.
        events: the uses of buckets in this pass.
        first_uses: the leaves by their first uses, while there is no plan.
        persistent: the buckets that stay gathered between calls.
        kept: the buckets that stay gathered from forward to backward.
        diverged: whether any rank left the schedule; ``None`` until the ranks know.
        is_again: whether backward runs again over a graph that was kept, and follows no schedule.
    """

    def __init__(
        self,
        group: Group,
        shards: Sequence[BucketShard],
        executor: Executor | None,
        options: ScheduleOptions,
        plan: SchedulePlan | None,
        learn: Callable[[SchedulePlan], None],
        *,
        reads_again: bool,
    ) -> None:
        self._group = group
        self._shards = shards
        self._trains = executor is not None
        self._options = options
        self._learn = learn
        self._reads_again = reads_again
        self.plan = plan
        self._executor = executor
        self.persistent = plan.schedule.persistent if plan else options.persistent(self.traced)
        self.kept: frozenset[int] = frozenset()
        # Fake tensors have no values to read, and abstract ranks agree.
        device = shards[0].flat.layout.device if shards else torch.device("cpu")
        self._abstract = ops.is_abstract(torch.empty(0, device=device))
        callers = None if executor is None else executor.reducer.group
        self._divergence = Divergence(group, callers or group, shards, abstract=self._abstract)
        self.diverged: bool | None = None
        self.is_again = False
        self.events: list[Event] = []
        self.first_uses: dict[str, None] = {}
        # The buckets that backward will use, of rank 0 in the first pass.
        self._ahead: tuple[int, ...] = ()
        self.cursor = ScheduleCursor((), followed=False)

    @functools.cached_property
    def traced(self) -> tuple[TracedBucket, ...]:
        """The buckets in the form that a schedule takes."""
        return tuple(shard.traced(self._executor) for shard in self._shards)

    @property
    def followed(self) -> bool:
        """Whether this rank is where the schedule says."""
        return self.cursor.followed

    def begin_forward(self, there: Set[int]) -> None:
        """Choose the steps of forward; some buckets are there already."""
        plan = self.plan
        if plan is None:
            steps = self._read_and_gather("forward", range(len(self._shards)), there)
        else:
            steps = plan.forward(trains=self._trains)
            if there:
                steps = [x for x in steps if x.phase != "start" or x.bucket not in there]
        self.cursor = ScheduleCursor(steps, followed=plan is not None)

    def _read_and_gather(
        self, phase: Phase, buckets: Iterable[int], there: Set[int]
    ) -> Iterable[Step]:
        """Return steps for buckets without a schedule."""
        gathers = [Step("gather", b, phase) for b in buckets if b not in there]
        if phase == "backward" and not self._reads_again:
            return gathers
        stored = {b for b, shard in enumerate(self._shards) if shard.is_stored}
        return with_reads(gathers, stored, self._options.read_ahead)

    def use(self, bucket: int) -> Sequence[Step]:
        """Note a use, and return the steps before it."""
        self.events.append(Event("use", bucket))
        return self.cursor.advance_to("use", bucket)

    def reduce(self, bucket: int) -> Sequence[Step]:
        """Note that a bucket's gradients are complete, and return the steps before."""
        self.events.append(Event("reduce", bucket))
        return self.cursor.advance_to("reduce", bucket)

    def recent(self, number: int) -> list[int]:
        """Return the buckets used last."""
        uses = reversed([event.bucket for event in self.events])
        return list(dict.fromkeys(uses))[:number]

    def leave(self, bucket: int, *, again: bool) -> Sequence[Step]:
        """Leave the schedule for a bucket; return the gathers that all ranks start up to it."""
        # A diverged rank keeps all buckets, so with max_live gathers nothing ahead.
        ahead = self._options.prefetch if self._options.max_live is None else 0
        self.cursor.followed = False
        return self.cursor.advance_to_gather(bucket, ahead, again=again)

    def regather(self, bucket: int) -> Tensor:
        """Ask all ranks to gather a bucket that was released in forward."""
        return self._divergence.regather(bucket)

    def end_forward(self, ahead: tuple[int, ...]) -> None:
        """Compare this rank's uses with the plan, across ranks; see [Note: divergence].

        Args:
            ahead: the buckets that backward will use.
        """
        self._ahead = ahead
        # The first pass follows no schedule, until the ranks have agreed on one.
        plan = self.plan
        has_diverged = plan is not None and self._has_diverged(plan)
        if plan is not None and plan.is_told and has_diverged:
            raise UntoldUse("forward uses other buckets")
        self.diverged = self._divergence.end_forward(has_diverged=has_diverged)
        if plan is not None and self._trains:
            self.kept = plan.kept

    def learn_forward(self) -> None:
        """Make a plan of the uses of rank 0, where there was none."""
        diverged = self.diverged or False
        if self.plan is None:
            used = [event.bucket for event in self.events]
            forward, leaves = self._agreed([used, list(self.first_uses)], "order of use")
            trace = Trace(self.traced, self._group.size, tuple(forward), leaves=tuple(leaves))
            self.plan = SchedulePlan(schedule(trace, self._options))
            self._learn(self.plan)
            diverged = tuple(used) != self.plan.schedule.trace.forward
        if not self._trains:
            self.diverged = None
            return
        if self.plan.ahead is None:
            # The first pass with a gradient.
            agreed = tuple(self._agreed(self._ahead, "order of use in backward"))
            diverged = self._divergence.end_forward(has_diverged=diverged or agreed != self._ahead)
            self._ahead = agreed
        self.diverged = diverged

    def _has_diverged(self, plan: SchedulePlan) -> bool:
        """Whether this rank used, kept for backward, or will recompute with other buckets."""
        # A rank that follows the schedule and then skips the rest has fewer uses.
        return (
            not self.followed
            or len(self.events) != len(plan.schedule.trace.forward)
            or not (plan.is_told or plan.ahead in (None, self._ahead))
        )

    def begin_backward(self) -> bool:
        """Choose the steps of backward; return whether they follow the schedule."""
        plan = self.plan
        assert plan is not None
        self.events = []
        if plan.ahead is not None and self.diverged is False and not self.is_again:
            self.cursor = ScheduleCursor(plan.backward, followed=True)
            return True
        held = frozenset[int]() if self.is_again else self.persistent | self.kept
        order = [*dict.fromkeys([*plan.schedule.trace.forward, *range(len(self._shards))])][::-1]
        steps = self._read_and_gather("backward", order, held)
        self.cursor = ScheduleCursor(steps, followed=False)
        return False

    def learn_backward(self) -> None:
        """Complete the plan after a first backward pass."""
        plan = self.plan
        if plan is not None and plan.is_told and tuple(self.events) != plan.schedule.trace.backward:
            raise UntoldUse("backward uses other buckets")
        if plan is None or plan.ahead is not None:
            return
        events = self._agreed(self.events, "order of use in backward")
        trace = dataclasses.replace(
            plan.schedule.trace,
            buckets=self.traced,
            backward=tuple(Event(kind, bucket) for kind, bucket in events),
        )
        self._learn(SchedulePlan(schedule(trace, self._options), self._ahead))

    def _agreed(self, value: Any, what: str) -> Any:
        return of_rank_0(value, self._group, what, abstract=self._abstract)
