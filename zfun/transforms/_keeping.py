"""A call of a loss in which freeing what is gathered would free nothing.

[Note: where freeing frees nothing]
Of a group of one rank the gathered bucket is the shard, and ranks of one host that lend each other memory look at each other's shards where
they lie. From the second step on autograd then keeps the views themselves, and asks nobody in backward, which for every tensor that it
saves would cost a call of Python in the midst of products of matrices. The schedule is run all the same, for ranks take part in every
gather, and one that is watched frees what it gathers. But a pass begins with all of its gathers: for this rank to start one is to say where
its shard lies, and who comes to a bucket first need not wait for the others to come there. To release a bucket, once its gradients are
complete, is to let the group know that it is not looked at (``Group.rest``), and all are given back at the end of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from zfun.transforms._buckets import BucketShard
from zfun.transforms._course import Course, Plan
from zfun.transforms._schedule import Step
from zfun.transforms._session import Session

__all__ = ["KeepingSession", "may_keep"]

# The part of the parameters that is kept gathered rather than asking at every use in backward.
_MOST_COPIED = 1 / 64


def may_keep(plan: Plan, shards: Sequence[BucketShard]) -> bool:
    """Whether all that is gathered takes next to no memory: copies are made of small buckets alone."""
    if plan.packed is None or not shards or not (shards[0].flat.group.size == 1 or shards[0].flat.group.lends):
        return False
    others = [shard for bucket, shard in enumerate(shards) if bucket not in plan.schedule.persistent]
    copied = sum(shard.nbytes for shard in others if not shard.is_shown)
    return copied <= _MOST_COPIED * sum(shard.nbytes for shard in others)


class KeepingSession(Session):
    """A session of which autograd keeps the views."""

    def _set_out(self, steps: Iterable[Step], *, followed: bool) -> None:
        steps = tuple(steps)
        self._course = Course((), followed=followed)
        self._run(step for step in steps if step.kind == "gather")
        super()._set_out((step for step in steps if step.kind != "gather"), followed=followed)

    def hooks(self) -> Any:
        """The context in which the loss runs forward: none."""
        return contextlib.nullcontext()

    def _has_strayed(self) -> bool:
        return not self._course.followed

    def _leave_forward(self) -> None:
        self._forget_views()

    def _touch(self, bucket: int) -> None:
        if self._phase == "turn":
            self._begin_backward()
        if bucket == self._now:
            return
        self._set_aside()
        self._now = bucket
        # What is used in backward is used by recomputation; what the schedule has there is done when gradients are complete.
        if self._phase == "forward":
            self._run(self._course.come_to("use", bucket))

    def _complete(self, bucket: int) -> None:
        self._begin_backward()
        self._run(self._course.come_past(bucket))
        self._release(bucket)

    def _release(self, bucket: int) -> None:
        buffer = self._buffers.get(bucket)
        if buffer is not None and bucket not in self._persistent:
            self._group.rest(buffer)
