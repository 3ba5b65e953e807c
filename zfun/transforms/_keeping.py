"""A call of a loss in which freeing what is gathered would free nothing.

[Note: where freeing frees nothing]
Of a group of one rank the gathered bucket is the shard, and ranks of one host that lend each other memory look at each other's shards where
they lie. From the second step on the loss then gets the views themselves, as it does of whole parameters, and autograd keeps them: to be
asked for one at every use costs a call of Python in the midst of products of matrices. A pass begins with all of its gathers, for ranks
take part in every one, and one that is watched frees what it gathers: to start one is to say where this rank's shard lies, and to wait for
it is to wait until the others have begun their pass. To release a bucket is to let the group know that it is not looked at for a while
(``Group.rest``): pages of another rank that this one looks at count as its own memory. In backward that is when the gradients of the bucket
are complete. In forward it is what the schedule says, and how far forward has come is known from one leaf of each bucket, the one that is
used first, which stays lazy. All are given back at the end of the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from zfun import tree
from zfun.transforms._buckets import BucketShard, tree_of
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
    """A session that gives the loss views, which autograd keeps."""

    def leaves(self) -> list[tree.Tree]:
        """Return what the loss gets, one tree for each value: views, and of what others lend the leaf of each bucket that is used first."""
        buckets = [self._viewed(bucket) for bucket in range(len(self._shards))]
        if self._group.lends and self._plan is not None:
            lazy = [(leaves, bucket) for leaves in self._lazy for bucket in range(len(leaves.sources))]
            for bucket, place in self._plan.first_leaves.items():
                leaves, index = lazy[bucket]
                buckets[bucket] = [*buckets[bucket]]
                buckets[bucket][place] = leaves.leaf(index, place)
        rest = iter(buckets)
        return [tree_of(layout, itertools.islice(rest, len(layout.buckets))) for layout in self._layouts]

    def hooks(self) -> Any:
        """The context in which the loss runs forward: none."""
        return contextlib.nullcontext()

    def _set_out(self, steps: Iterable[Step], *, followed: bool) -> None:
        steps = tuple(steps)
        self._course = Course((step for step in steps if step.kind != "gather"), followed=True)
        self._run(step for step in steps if step.kind == "gather")

    def _has_strayed(self) -> bool:
        return False

    def _hold(self, bucket: int, buffer: Tensor) -> Tensor:
        self._buffers[bucket] = buffer
        return buffer

    def _leave_forward(self) -> None:
        self._forget_views()

    def _touch(self, bucket: int) -> None:
        if bucket != self._now:
            self._set_aside()
            self._now = bucket
            self._run(self._course.come_past(bucket))

    def _complete(self, bucket: int) -> None:
        self._begin_backward()
        self._release(bucket)

    def _release(self, bucket: int) -> None:
        buffer = self._buffers.get(bucket)
        if buffer is not None and bucket not in self._persistent:
            self._group.rest(buffer)
