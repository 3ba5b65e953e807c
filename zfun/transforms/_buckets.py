"""One bucket of sharded parameters, as a loss uses it: how it is sent, kept and viewed."""

from __future__ import annotations

from torch import Tensor

from zfun import ops, stores
from zfun.collectives import AllGather, Call, Group, Lane, Pending
from zfun.flat import Flat
from zfun.transforms._cast import cast_leaves
from zfun.transforms._schedule import TracedBucket
from zfun.transforms._tape import Tape
from zfun.wire import start

__all__ = ["BucketShard"]


class BucketShard:
    """This rank's shard of a bucket, and what becomes of it when it is gathered."""

    __slots__ = ("dtype", "flat", "index", "is_borrowed", "sent", "slots", "trained")

    def __init__(self, flat: Flat, index: int, *, trained: bool) -> None:
        self.flat = flat
        self.index = index
        self.trained = trained
        self.is_borrowed = True
        bucket = flat.layout.buckets[index]
        self.slots = [flat.layout.leaves[i] for i in bucket.leaves]
        self.dtype = bucket.dtype
        compute = flat.compute_dtype
        # There are no complex numbers in few bits: floating leaves beside complex ones are cast one by one.
        if compute is not None and bucket.dtype.is_floating_point and not any(slot.dtype.is_complex for slot in self.slots):
            self.dtype = compute
        # Of the dtypes that it is kept and used in, the one that sends fewer bytes.
        self.sent = bucket.dtype if bucket.dtype.itemsize < self.dtype.itemsize else self.dtype

    def traced(self, tape: Tape | None) -> TracedBucket:
        """Say what a schedule needs to know of it."""
        bucket, layout = self.flat.layout.buckets[self.index], self.flat.layout
        leaves = tuple((slot.path, slot.numel) for slot in self.slots)
        grad_itemsize = tape.dtypes[self.index].itemsize if tape is not None and self.trained else 0
        return TracedBucket(layout.label(self.index), leaves, bucket.padded_numel, self.dtype.itemsize, self.sent.itemsize, grad_itemsize)

    def keep(self, gathered: Tensor) -> None:
        """Leave the gathered bucket with the parameters, for as long as these are what they are."""
        self.flat.gathered[self.index, self.dtype, self.flat.wire] = self._version(), gathered

    def kept(self) -> Tensor | None:
        """Return the gathered bucket that an earlier call has left, unless the shard was written to since."""
        version, gathered = self.flat.gathered.get((self.index, self.dtype, self.flat.wire), (None, None))
        return gathered if version == self._version() else None

    def _version(self) -> int:
        buffer = self.flat.buffers[self.index]
        return buffer._version if isinstance(buffer, Tensor) else 0

    def start_again(self, part: Tensor, group: Group) -> Pending:
        """Start to gather it from what the ranks of a smaller group have kept of it."""
        if group.size == 1:
            return Pending.done(part)
        return group.start(Call(AllGather(), "params", self.flat.layout.label(self.index), Lane.PARAMS), part)

    def start(self) -> Pending:
        """Start to gather it."""
        flat, group = self.flat, self.flat.group
        shard = stores.fetch(flat.buffers[self.index], flat.layout.device)
        call = Call(AllGather(), "params", flat.layout.label(self.index), Lane.PARAMS, borrow=self.is_borrowed)
        if group.size > 1 and flat.wire is not None and shard.is_floating_point():
            return start(call, shard, group, flat.wire, dtype=self.dtype)
        shard = shard.to(self.sent)
        return Pending.done(shard) if group.size == 1 else group.start(call, shard)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """View the gathered bucket as its leaves."""
        # Each with a version of its own, which tells whether the loss has written to it.
        views = [ops.unravel(buffer, slot.offset, slot.shape, slot.dtype).data for slot in self.slots]
        return views if self.flat.compute_dtype is None else cast_leaves(views, self.flat.compute_dtype)
