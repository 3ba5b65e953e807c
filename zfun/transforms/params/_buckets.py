"""One bucket of sharded parameters, as a loss uses it: how it is sent, kept and viewed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import AllGather, Collective, Group, Stream, Work
from zfun.compression import start
from zfun.flat import Flat
from zfun.layout import Layout, LeafSlot
from zfun.transforms._cast import cast_leaves
from zfun.transforms.grads._executor import Executor
from zfun.transforms.params._call import LossCall
from zfun.transforms.params._schedule import TracedBucket

try:
    # One call that asks nobody: of what as_strided() takes, most is dispatch and notes on what the
    # view is a view of.
    from torch._C._dynamo.guards import _reinterpret_tensor as _view  # pyrefly: ignore[missing-module-attribute]

    # It is not torch's to promise: one that takes something else is done without.
    _view(torch.empty(2, device="cpu"), (1,), (1,), 1)
except (ImportError, TypeError, RuntimeError):
    _view = None

__all__ = ["BucketForm", "BucketShard", "shards_of", "tree_of", "view_of", "views_of"]


@dataclass(frozen=True, slots=True, eq=False)
class BucketForm:
    """What is known of a bucket without its data.

    Attributes:
        label: its name, for messages.
        slots: where each of its leaves lies.
        dtype: in which it is used.
        sent: of the dtypes that it is kept and used in, the one that sends fewer bytes.
        numel: elements, padding included.
    """

    label: str
    slots: tuple[LeafSlot, ...]
    dtype: torch.dtype
    sent: torch.dtype
    numel: int

    def traced(self, grad_itemsize: int) -> TracedBucket:
        """Say what a schedule needs to know of it."""
        return _traced(self, grad_itemsize)


@functools.lru_cache(maxsize=4096)
def _form(layout: Layout, index: int, compute_dtype: torch.dtype | None) -> BucketForm:
    bucket = layout.buckets[index]
    slots = tuple(layout.leaves[i] for i in bucket.leaves)
    dtype = bucket.dtype
    # There are no complex numbers in few bits: floating leaves beside complex ones are cast one by
    # one.
    if (
        compute_dtype is not None
        and dtype.is_floating_point
        and not any(slot.dtype.is_complex for slot in slots)
    ):
        dtype = compute_dtype
    sent = bucket.dtype if bucket.dtype.itemsize < dtype.itemsize else dtype
    return BucketForm(layout.label(index), slots, dtype, sent, bucket.padded_numel)


@functools.lru_cache(maxsize=4096)
def _traced(form: BucketForm, grad_itemsize: int) -> TracedBucket:
    leaves = tuple((slot.path, slot.numel) for slot in form.slots)
    itemsizes = form.dtype.itemsize, form.sent.itemsize, grad_itemsize
    return TracedBucket(form.label, leaves, form.numel, *itemsizes, form.dtype.is_floating_point)


class BucketShard:
    """This rank's shard of a bucket, and what becomes of it when it is gathered."""

    __slots__ = ("call", "dtype", "flat", "form", "index", "slots", "trained", "zero_copy")

    def __init__(self, flat: Flat, index: int, call: LossCall, *, trained: bool) -> None:
        self.flat = flat
        self.call = call
        self.index = index
        self.trained = trained
        self.zero_copy = True
        self.form = _form(flat.layout, index, call.compute_dtype)
        self.slots = self.form.slots
        self.dtype = self.form.dtype

    def keep_apart(self) -> None:
        """Share no memory with the shard, which is going to be written while the gathered bucket is looked at."""
        self.zero_copy = False

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the bucket as the loss uses it: that of one rank alone, in memory and in its dtype."""
        shard = self.flat.buffers[self.index]
        return self.flat.group.size == 1 and isinstance(shard, Tensor) and shard.dtype == self.dtype

    @property
    def nbytes(self) -> int:
        """Of the bucket when it is gathered."""
        return self.form.numel * self.dtype.itemsize

    def traced(self, executor: Executor | None) -> TracedBucket:
        """Say what a schedule needs to know of it."""
        return self.form.traced(
            executor.reducer.dtypes[self.index].itemsize
            if executor is not None and self.trained
            else 0
        )

    def keep(self, gathered: Tensor) -> None:
        """Leave the gathered bucket with the parameters, for as long as these are what they are."""
        self.flat.life.cached[self.index, self.dtype, self.call.codec] = self._version(), gathered

    def kept(self) -> Tensor | None:
        """Return the gathered bucket that an earlier call has left, unless the shard was written to since."""
        version, gathered = self.flat.life.cached.get(
            (self.index, self.dtype, self.call.codec), (None, None)
        )
        return gathered if version == self._version() else None

    def _version(self) -> int:
        buffer = self.flat.buffers[self.index]
        return buffer._version if isinstance(buffer, Tensor) else 0

    def regather(self, part: Tensor, group: Group) -> Work:
        """Start to gather it from the parts that the ranks of a smaller group have kept."""
        if group.size == 1:
            return Work.done(part)
        return group.start(Collective(AllGather(), "params", self.form.label, Stream.PARAMS), part)

    def start(self) -> Work:
        """Start to gather it."""
        flat, group = self.flat, self.flat.group
        shard = stores.fetch(flat.buffers[self.index], flat.layout.device)
        call = Collective(
            AllGather(), "params", self.form.label, Stream.PARAMS, zero_copy=self.zero_copy
        )
        if group.size > 1 and self.call.codec is not None and shard.is_floating_point():
            return start(call, shard, group, self.call.codec, dtype=self.dtype)
        if shard.dtype != self.form.sent:
            shard = shard.to(self.form.sent)
        return Work.done(shard) if group.size == 1 else group.start(call, shard)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """View the gathered bucket as its leaves."""
        views = views_of(buffer, self.slots)
        return (
            views
            if self.call.compute_dtype is None
            else cast_leaves(views, self.call.compute_dtype)
        )


def shards_of(flats: Iterable[Flat], call: LossCall) -> list[BucketShard]:
    """Return the shards of all buckets; those of the first value are trained if a gradient is taken."""
    return [
        BucketShard(flat, i, call, trained=number == 0 and call.executor is not None)
        for number, flat in enumerate(flats)
        for i in range(len(flat.layout.buckets))
    ]


def tree_of(layout: Layout, buckets: Iterable[Sequence[Tensor]]) -> tree.Tree:
    """Put the leaves of all buckets together as the tree that they are of."""
    leaves: list[Tensor | None] = [None] * len(layout.leaves)
    for slot, views in zip(layout.buckets, buckets, strict=True):
        for leaf, view in zip(slot.leaves, views, strict=True):
            leaves[leaf] = view
    return tree.unflatten(layout.spec, [leaves[position] for position in layout.positions])


def views_of(buffer: Tensor, slots: Iterable[LeafSlot]) -> list[Tensor]:
    """View a whole bucket as its leaves, each with a version of its own, which tells whether the loss has written to it."""
    # In one call for each leaf, of which there may be very many, and not in the two or three of
    # unravel().
    return [
        ops.unravel(buffer, slot.offset, slot.shape, slot.dtype).data
        if slot.dtype.is_complex
        else view_of(buffer, slot.shape, _strides(slot.shape), slot.offset)
        for slot in slots
    ]


def view_of(buffer: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """View a piece of a buffer, which begins where its storage does, as a tensor with a version of its own."""
    if _view is not None and type(buffer) is Tensor:
        return _view(buffer, size, stride, offset)
    return buffer.as_strided(size, stride, offset).data


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    sizes = [max(size, 1) for size in shape]
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
