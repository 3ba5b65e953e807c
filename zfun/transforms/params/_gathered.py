"""The gathered parameters of one call of a loss: when each bucket is gathered, viewed and released.

[Note: the life of a parameter]
*shard* (the caller's ``Flat`` with placement S, 1/N of each bucket, in memory or in a store)
→ *lazy leaf* (the loss receives metadata only) → *gathered bucket* (one fresh buffer,
all-gathered ahead of the first use of a leaf) → *views* (the operations' inputs, outputs
of the bucket node) → released. No reference keeps a gathered bucket alive past the release:
a saved-tensor hook of autograd packs a view as (bucket, dtype, size, stride, offset), and unpacking
regathers the bucket. Buffers are known by the identity of the storage, because fake tensors have
no address.

When. The first call of a layout notes which buckets are used, in which order, forward and backward;
later calls run a schedule made of rank 0's notes ([Note: the schedule]). The first call gathers in
the order of the layout and keeps the two buckets used last; in backward a trained bucket stays
until the gradients are complete.

Order. All ranks start the same gathers in the same order: the order of the schedule, which covers
frozen leaves too. So a rank that skips a layer, or takes another branch, blocks no other
rank, and every step sends the same bytes; see [Note: divergence]. A bucket whose value backward
does not need is gathered at the end, unless the bucket stayed.

Bits. See [Note: bits of a released bucket].
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, Work
from zfun.errors import ZfunError
from zfun.flat import Flat
from zfun.transforms.call._buckets import BucketShard, view_of
from zfun.transforms.call._call import LossCall
from zfun.transforms.call._lazy import LazyLeaf, LazyLeaves, check_graph, nodes_of
from zfun.transforms.call._saved import Packed, SavedViews
from zfun.transforms.call._trace import Step
from zfun.transforms.params._course import Course
from zfun.transforms.params._cursor import WINDOW, SchedulePlan
from zfun.transforms.params._schedule_options import ScheduleOptions
from zfun.transforms.params._torch_func import saved_views_hooks
from zfun.transforms.params._views import BucketViews

# No bucket is in use.
_NO_BUCKET = -1


class GatheredParams:
    """The gathered buckets of one call of the loss; those of trained leaves come first.

    The phases, in order: the loss runs inside :meth:`hooks` on :meth:`leaves`; ``end_forward``;
    ``begin_backward``; ``complete`` for each trained bucket; ``finish_backward``; ``end``.

    Args:
        flats: the trained parameters, then the frozen ones.
        shards: the buckets.
        call: which executor takes part, and how the loss sees the parameters.
        options: of the schedule.
        plan: the plan of earlier calls, if any.
        learn: called with a new plan.
        secondary: the group over which backward gathers, if another one.

    Attributes:
        diverged: whether any rank left the schedule in this call; ``None`` where no rank waits for
            another.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        shards: Sequence[BucketShard],
        call: LossCall,
        options: ScheduleOptions,
        plan: SchedulePlan | None,
        learn: Callable[[SchedulePlan], None],
        secondary: Group | None,
    ) -> None:
        executor = call.executor
        self._group = flats[0].group
        self._secondary = secondary
        self._executor = executor
        self._lazy = tuple(
            LazyLeaves(
                flat.layout, call.compute_dtype, trained=number == 0 and executor is not None
            )
            for number, flat in enumerate(flats)
        )
        self._shards = shards
        self._sources = tuple(source for leaves in self._lazy for source in leaves.sources)
        for bucket, source in enumerate(self._sources):
            source.load = functools.partial(self._load, bucket)
        self._alone = self._group.size == 1
        self._course = Course(
            self._group, shards, executor, options, plan, learn, reads_again=secondary is None
        )
        self._thread = threading.get_ident()
        self._makes_graph = torch.is_grad_enabled()
        # The progress of the call.
        self._phase = "forward"
        self._in_loss = True
        self._now = _NO_BUCKET
        # The views that autograd saves.
        self._saved = SavedViews(len(self._shards))
        # For each bucket: the gather under way, and the gathered buffer. A release is deferred
        # while the loss or autograd holds a view.
        self._pending: dict[int, Work] = {}
        self._buffers: dict[int, Tensor] = {}
        self._deferred: set[int] = set()
        # Frozen leaves are compared once, in the first call, because that takes time.
        self._views = BucketViews(shards, executor, compares_frozen=plan is None)
        # Matched gathers: this rank has kept the bucket, but other ranks need the gather.
        self._matched: list[Work] = []
        # This rank's parts of buckets that backward gathers over the secondary group.
        self._parts: dict[int, Tensor] = {}
        for bucket in self._course.persistent:
            # The update writes the shard while the bucket stays gathered.
            self._shards[bucket].keep_apart()
        self._course.begin_forward(self._restore())
        if executor is not None:
            executor.attach(self)

    @property
    def diverged(self) -> bool | None:
        return None if self._alone else self._course.diverged

    def _restore(self) -> set[int]:
        """Take over buckets that an earlier call with these parameters left gathered."""
        kept = {
            b: gathered
            for b in self._course.persistent
            if (gathered := self._shards[b].kept()) is not None
        }
        for bucket, gathered in kept.items():
            self._hold(bucket, gathered)
        return set(kept)

    def leaves(self) -> list[tree.Tree]:
        """Return the arguments of the loss: a tree of lazy leaves for each value."""
        return [leaves.tree() for leaves in self._lazy]

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """The context of the loss: autograd saves the places of views, not the views."""
        with self._saved.current(self._set_aside), saved_views_hooks(self._saved, self._unpack):
            yield

    def _uses_of_backward(self, out: Any) -> tuple[int, ...]:
        """List the buckets that backward will use, to compare across ranks."""
        if self._executor is None or self._alone:
            return ()
        return tuple(self._saved.backward(nodes_of(out), self._views.nodes()))

    def check_graph(self, out: Any) -> None:
        """Refuse a graph in which an ``autograd.Function`` lost the gradient of a lazy leaf."""
        # To search every graph would take long.
        if any(leaves.are_in_use() for leaves in self._lazy):
            check_graph(out)

    def end_forward(self, out: Any = None) -> None:
        """Start skipped gathers, check divergence, and free the buckets that backward regathers.

        Args:
            out: the result of the loss.
        """
        self._in_loss = False
        course = self._course
        ahead = self._uses_of_backward(out)
        # Deferred releases happen below; backward regathers these buckets.
        self._deferred.clear()
        self._set_aside()
        self._run(course.cursor.rest())
        course.end_forward(ahead)
        for bucket in course.persistent:
            self._shards[bucket].keep(self._take(bucket))
        self._drop(course.persistent | course.kept)
        course.learn_forward()
        if not torch.is_grad_enabled():
            self._close()
            return
        self._phase, self._now = "turn", _NO_BUCKET
        if self._executor is None:
            # The caller may still differentiate with respect to the batch, at an unknown time. The
            # leaves refer to this object: a cycle that would keep the shards alive.
            self._lazy, self._sources = (), ()

    def _close(self) -> None:
        self._phase = "closed"
        for shard in self._shards:
            shard.drop_read()
        for leaves in self._lazy:
            leaves.close()
        self._lazy, self._sources = (), ()

    def abandon(self) -> None:
        """Wait for all started gathers, because an error ends this call, and free everything.

        The other ranks take part in these gathers, and may still read this rank's shards.
        """
        if self._phase == "backward" and self._course.diverged:
            # Other ranks may need all gathers before they start a reduction that this rank is
            # about to wait for. They are told the error of this rank later.
            with contextlib.suppress(Exception):
                self._run(self._course.cursor.rest())
        pending = [*self._pending.values(), *self._matched]
        self._pending.clear()
        self._matched.clear()
        for handle in pending:
            with contextlib.suppress(ZfunError):
                handle.wait()
        for held in (self._buffers, self._views, self._parts):
            held.clear()
        self._close()

    def diverge(self) -> None:
        """Follow no schedule in backward, because a rank begins backward at other outputs."""
        self._course.diverged = True

    def outdate(self, paths: Collection[str]) -> None:
        """Refuse these leaves, which code has written, to backward."""
        self._saved.outdate(paths, self._shards)

    def leave_views(self) -> None:
        """The end of forward has forgotten the views."""

    def begin_backward(self) -> None:
        """Choose the steps of backward, at the latest at the first use of a leaf in backward."""
        if self._phase != "turn":
            return
        self._phase = "backward"
        self._now = _NO_BUCKET
        if self._course.begin_backward():
            return
        # On a mesh a gather has two phases: other ranks need this rank in the second, even for
        # buckets that this rank does not use.
        for pending in self._pending.values():
            pending.wait()

    def finish_backward(self) -> None:
        """Start the gathers that this rank did not need in backward."""
        self.begin_backward()
        self._run(self._course.cursor.rest())
        if self._course.diverged:
            # On a mesh other ranks need this rank in the second phase of these gathers, and this
            # rank is about to wait for gradients.
            for pending in [*self._pending.values(), *self._matched]:
                pending.wait()

    def end(self, *, again: bool = False) -> None:
        """Free everything, and make a plan of a first backward pass."""
        self._drop(set())
        self._parts.clear()
        if self._phase == "backward":
            self._course.learn_backward()
        if again:
            self._phase, self._now, self._course.is_again = "turn", _NO_BUCKET, True
        else:
            self._close()

    def _drop(self, kept: set[int] | frozenset[int]) -> None:
        """Wait for the gathers that have been started, and free all buckets but the kept ones."""
        for bucket in [b for b in self._pending if b not in kept]:
            self._keep_part(bucket, self._pending.pop(bucket).wait())
        while self._matched:
            self._matched.pop().wait()
        for bucket in [b for b in self._buffers if b not in kept]:
            del self._buffers[bucket]
        self._views.forget()

    def _load(self, bucket: int, leaf: LazyLeaf) -> Tensor:
        thread = threading.get_ident()
        if self._phase == "forward" and thread != self._thread:
            raise ZfunError(
                f"a lazy leaf belongs to the thread in which its loss runs; leaf {leaf.path!r} "
                "was used in another; simulated ranks must not share a module: give each its "
                "own, made inside the rank's function",
                leaf=leaf.path,
            )
        if bucket in self._saved.old:
            self._saved.check_leaf(bucket, leaf.path)
        self._touch(bucket)
        if self._phase == "forward":
            self._saved.use(bucket)
        if self._course.plan is None:
            self._course.first_uses.setdefault(leaf.path)
        views = self._views.of(bucket)
        if views is None:
            buffer = self._take(bucket)
            views = self._views.make(bucket, buffer, in_forward=self._phase == "forward")
        if self._sources and self._course.plan is not None and bucket not in self._saved.old:
            # Further uses of this bucket need no note until another bucket is used.
            source = self._sources[bucket]
            source.ready, source.thread = views, thread
        return views[leaf.place]

    def _set_aside(self) -> None:
        """Let the next use of a leaf of this bucket be noted."""
        if self._now >= 0 and self._sources:
            self._sources[self._now].ready = None

    def _touch(self, bucket: int) -> None:
        """Note the use of a bucket, and run the steps of the schedule before the use."""
        if self._phase == "turn":
            self.begin_backward()
        if bucket == self._now:
            return
        self._set_aside()
        self._now = bucket
        steps = self._course.use(bucket)
        deferred, self._deferred = self._deferred - {bucket}, set()
        for late in deferred:
            self._release(late)
        self._run(steps)
        if self._course.followed:
            return
        if self._phase == "forward" and self._course.plan is not None:
            # A rank that has left the schedule releases nothing more in this pass, because all
            # ranks must gather a bucket a second time together.
            return
        self._release_old(bucket)

    def _release_old(self, bucket: int) -> None:
        """Release buckets that were not used lately, while there is no schedule."""
        if self._phase == "forward":
            recent = self._course.recent(WINDOW)
            old = [b for b in self._buffers if b not in recent]
        elif self._course.diverged:
            old = list[int]()
        else:
            # No node fires for a frozen bucket: keep as many as the first forward does.
            old = [b for b in self._buffers if b != bucket and not self._shards[b].trained][
                : 1 - WINDOW
            ]
        for b in old:
            if b not in self._course.persistent:
                self._release(b)

    def complete(self, bucket: int) -> None:
        """All gradients of a bucket have been copied out: release the bucket if not needed."""
        self.begin_backward()
        self._run(self._course.reduce(bucket))
        if self._course.followed or bucket in self._course.persistent:
            return
        # A detached use may still need the bucket. Diverged ranks could not gather the bucket
        # again.
        if self._course.diverged and self._saved.is_kept(bucket):
            return
        self._release(bucket)

    def _run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.kind == "read":
                self._start_read(step)
            elif step.kind == "gather":
                pending = self._start_gather(step)
                if step.bucket in self._buffers or step.bucket in self._pending:
                    # All ranks take part in every gather, also those that have kept the bucket.
                    self._matched.append(pending)
                    self._deferred.discard(step.bucket)
                else:
                    self._pending[step.bucket] = pending
            elif step.kind == "release":
                self._release(step.bucket)

    def _start_read(self, step: Step) -> None:
        self._shards[step.bucket].read()

    def _start_gather(self, step: Step) -> Work:
        bucket = step.bucket
        if self._secondary is not None and step.phase == "backward":
            if bucket not in self._parts and bucket in self._pending:
                self._keep_part(bucket, self._pending[bucket].wait())
            if (part := self._parts.get(bucket)) is not None:
                return self._shards[bucket].regather(part, self._secondary)
        return self._shards[bucket].start()

    def _keep_part(self, bucket: int, gathered: Tensor) -> None:
        """Keep this rank's part of a gathered bucket for backward, if there will be one."""
        group = self._secondary
        if (
            group is None
            or self._phase != "forward"
            or not self._makes_graph
            or bucket in self._parts
        ):
            return
        numel = gathered.numel() // group.size
        self._parts[bucket] = gathered.narrow(0, group.rank * numel, numel).clone()

    def _release(self, bucket: int) -> None:
        if bucket == self._now:
            self._set_aside()
        if not self._views.release(bucket, in_loss=self._in_loss):
            self._deferred.add(bucket)
            return
        if bucket in self._pending:
            self._keep_part(bucket, self._pending.pop(bucket).wait())
        self._buffers.pop(bucket, None)

    def _take(self, bucket: int) -> Tensor:
        """Return a gathered bucket; gather first if necessary."""
        buffer = self._buffers.get(bucket)
        if buffer is not None:
            return buffer
        if not (self._course.followed and bucket in self._pending):
            self._run(self._course.leave(bucket, again=bucket not in self._pending))
        pending = self._pending.pop(bucket, None)
        gathered = self._regather(bucket) if pending is None else pending.wait()
        self._keep_part(bucket, gathered)
        dtype = self._shards[bucket].dtype
        return self._hold(bucket, gathered if gathered.dtype == dtype else gathered.to(dtype))

    def _hold(self, bucket: int, buffer: Tensor) -> Tensor:
        self._buffers[bucket] = buffer
        self._saved.know(buffer, bucket)
        return buffer

    def _regather(self, bucket: int) -> Tensor:
        """Gather a bucket that was released in this pass."""
        if self._phase == "backward" or self._alone:
            return self._start_gather(
                Step("gather", bucket, "forward" if self._phase == "forward" else "backward")
            ).wait()
        # Start all skipped gathers first, because other ranks may wait for these gathers.
        self._course.cursor.followed = False
        self._run(self._course.cursor.rest())
        return self._course.regather(bucket)

    def _unpack(self, saved: Tensor | Packed) -> Tensor:
        if not isinstance(saved, tuple):
            return saved
        (bucket,), dtype, size, stride, offset = saved
        if bucket in self._saved.old:
            self._saved.check_place(bucket, offset * dtype.itemsize)
        if bucket != self._now:
            self._touch(bucket)
        buffer = self._buffers.get(bucket)
        if buffer is None:
            buffer = self._take(bucket)
        return view_of(
            buffer if buffer.dtype == dtype else buffer.view(dtype), size, stride, offset
        )
