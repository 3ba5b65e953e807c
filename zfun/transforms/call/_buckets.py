"""One bucket of sharded parameters: how a call sends, keeps and views the bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import AllGather, Collective, Group, Stream, Work
from zfun.compression import gather_bucket
from zfun.errors import ZfunError
from zfun.flat import Flat
from zfun.layout import Layout, LeafSlot
from zfun.transforms._cast import cast_leaves
from zfun.transforms.call._call import LossCall
from zfun.transforms.call._executor import Executor
from zfun.transforms.call._trace import TracedBucket

try:
    # Most time of as_strided() goes into dispatch and view tracking; this call does neither.
    from torch._C._dynamo.guards import _reinterpret_tensor as _view  # pyrefly: ignore[missing-module-attribute]

    # torch does not promise this private function, so check the signature.
    _view(torch.empty(2, device="cpu"), (1,), (1,), 1)
except (ImportError, TypeError, RuntimeError):
    _view = None


@dataclass(frozen=True, slots=True, eq=False)
class BucketForm:
    """The metadata of a bucket.

    Attributes:
        gather: the collective that gathers the bucket; ``part`` is its name in messages.
        slots: the positions of the leaves.
        dtype: of the bucket in the loss.
        sent: the narrower of the dtypes of the shard and of the bucket in the loss.
        numel: elements, padding included.
        cut: the placement of unequal pieces, in words; empty for equal pieces.
    """

    gather: Collective
    slots: tuple[LeafSlot, ...]
    dtype: torch.dtype
    sent: torch.dtype
    numel: int
    cut: str

    def traced(self, grad_itemsize: int, stored_itemsize: int) -> TracedBucket:
        """Return the bucket in the form that a schedule takes."""
        return _traced(self, grad_itemsize, stored_itemsize)


@functools.lru_cache(maxsize=4096)
def _form(layout: Layout, index: int, compute_dtype: torch.dtype | None) -> BucketForm:
    bucket = layout.buckets[index]
    slots = tuple(layout.leaves[i] for i in bucket.leaves)
    dtype = bucket.dtype
    # Half types have no complex form, so floating leaves beside complex ones are cast singly.
    if (
        compute_dtype is not None
        and dtype.is_floating_point
        and not any(slot.dtype.is_complex for slot in slots)
    ):
        dtype = compute_dtype
    sent = bucket.dtype if bucket.dtype.itemsize < dtype.itemsize else dtype
    cut = repr(bucket.placement) if bucket.pieces else ""
    gather = Collective(AllGather(), "params", layout.label(index), Stream.PARAMS, zero_copy=True)
    return BucketForm(gather, slots, dtype, sent, bucket.padded_numel, cut)


@functools.lru_cache(maxsize=4096)
def _traced(form: BucketForm, grad_itemsize: int, stored_itemsize: int) -> TracedBucket:
    leaves = tuple((slot.path, slot.numel) for slot in form.slots)
    itemsizes = form.dtype.itemsize, form.sent.itemsize, grad_itemsize
    is_floating = form.dtype.is_floating_point
    kinds = is_floating, stored_itemsize, form.cut
    return TracedBucket(form.gather.part, leaves, form.numel, *itemsizes, *kinds)


class BucketShard:
    """This rank's shard of a bucket, with the rules for the read and the gather.

    Attributes:
        is_stored: whether the shard is in a store.
        reading: the read under way, of a shard in a store.
    """

    __slots__ = (
        "call",
        "dtype",
        "flat",
        "form",
        "gather",
        "index",
        "is_stored",
        "reading",
        "slots",
        "trained",
    )

    def __init__(
        self, flat: Flat, index: int, call: LossCall, *, trained: bool, is_stored: bool
    ) -> None:
        self.flat = flat
        self.call = call
        self.index = index
        self.trained = trained
        self.is_stored = is_stored
        self.reading: Work | None = None
        self.form = _form(flat.layout, index, call.compute_dtype)
        self.gather = self.form.gather
        self.slots = self.form.slots
        self.dtype = self.form.dtype

    def keep_apart(self) -> None:
        """Copy in the gather, because the shard will be written while the bucket is in use."""
        self.gather = dataclasses.replace(self.gather, zero_copy=False)

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole bucket in the dtype of the loss: one rank, in memory."""
        shard = self.flat.buffers[self.index]
        return (
            self.flat.group.size == 1
            and (isinstance(shard, Tensor) or shard.device == self.flat.layout.device)
            and shard.dtype == self.dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered bucket."""
        return self.form.numel * self.dtype.itemsize

    def traced(self, executor: Executor | None) -> TracedBucket:
        """Return the bucket in the form that a schedule takes."""
        return self.form.traced(
            executor.reducer.dtypes[self.index].itemsize
            if executor is not None and self.trained
            else 0,
            self.flat.layout.buckets[self.index].dtype.itemsize if self.is_stored else 0,
        )

    def keep(self, gathered: Tensor) -> None:
        """Leave the gathered bucket with the parameters until the shard changes."""
        self.flat.life.cached[self.index, self.dtype, self.call.codec] = self._version(), gathered

    def kept(self) -> Tensor | None:
        """Return the gathered bucket of an earlier call, unless the shard was written since."""
        version, gathered = self.flat.life.cached.get(
            (self.index, self.dtype, self.call.codec), (None, None)
        )
        return gathered if version == self._version() else None

    def _version(self) -> int:
        buffer = self.flat.buffers[self.index]
        return buffer._version if isinstance(buffer, Tensor) else 0

    def regather(self, part: Tensor, group: Group) -> Work:
        """Start a gather of the parts that the ranks of a smaller group have kept."""
        if group.size == 1:
            return Work.done(part)
        return group.start(dataclasses.replace(self.gather, zero_copy=False), part)

    def read(self) -> None:
        """Start to read the shard from the store, unless a read is under way."""
        if self.reading is None and self.is_stored:
            with stores.locating(leaf=self.gather.part):
                self.reading = self.flat.buffers[self.index].get(self.flat.layout.device)

    def drop_read(self) -> None:
        """Wait for a read whose gather never came, and drop the shard."""
        reading, self.reading = self.reading, None
        if reading is not None:
            with contextlib.suppress(ZfunError):
                reading.wait()

    def fetch(self) -> Tensor:
        """Return the shard in memory; nobody but the gather holds a shard from a store."""
        shard = self.flat.buffers[self.index]
        if isinstance(shard, Tensor):
            return shard
        reading, self.reading = self.reading, None
        with stores.locating(leaf=self.gather.part):
            if reading is not None:
                return reading.wait()
            return stores.fetch(shard, self.flat.layout.device)

    def start(self) -> Work:
        """Start the gather, when the shard has been read."""
        group, shard = self.flat.group, self.fetch()
        codec = self.call.codec if group.size > 1 and shard.is_floating_point() else None
        if codec is None and shard.dtype != self.form.sent:
            shard = shard.to(self.form.sent)
        if group.size == 1:
            return Work.done(shard)
        slot = self.flat.layout.buckets[self.index]
        return gather_bucket(self.gather, shard, group, slot, codec, dtype=self.dtype)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """View the leaves in the gathered bucket."""
        views = views_of(buffer, self.slots)
        return (
            views
            if self.call.compute_dtype is None
            else cast_leaves(views, self.call.compute_dtype)
        )


def shards_of(flats: Iterable[Flat], call: LossCall) -> list[BucketShard]:
    """Return the shards of all buckets; a gradient function trains those of the first value."""
    return [
        BucketShard(flat, i, call, trained=trained, is_stored=isinstance(buffer, stores.Stored))
        for flat, trained in zip(flats, (call.executor is not None, False), strict=False)
        for i, buffer in enumerate(flat.buffers)
    ]


def tree_of(layout: Layout, buckets: Iterable[Sequence[Tensor]]) -> tree.Tree:
    """Make the tree of the leaves of all buckets."""
    leaves: list[Tensor | None] = [None] * len(layout.leaves)
    for slot, views in zip(layout.buckets, buckets, strict=True):
        for leaf, view in zip(slot.leaves, views, strict=True):
            leaves[leaf] = view
    return tree.unflatten(layout.spec, [leaves[position] for position in layout.positions])


def views_of(buffer: Tensor, slots: Iterable[LeafSlot]) -> list[Tensor]:
    """View the leaves in a bucket, each with a version counter that reveals writes by the loss."""
    # One torch call for each leaf instead of the two or three of unravel().
    return [
        ops.unravel(buffer, slot.offset, slot.shape, slot.dtype).data
        if slot.dtype.is_complex
        else view_of(buffer, slot.shape, _strides(slot.shape), slot.offset)
        for slot in slots
    ]


def view_of(buffer: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """View a piece of a buffer with offset 0 as a tensor with a version counter."""
    if _view is not None and type(buffer) is Tensor:
        return _view(buffer, size, stride, offset)
    return buffer.as_strided(size, stride, offset).data


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
