"""Stage 3 as a transform of the loss: gather where used, free, gather again in backward.

[Note: the life of a parameter]
*shard* (the caller's ``Flat`` with placement S, 1/N of each bucket) → *lazy leaf* (what the loss receives: metadata only) → *gathered
bucket* (one fresh buffer, all-gathered when the first of its leaves is used) → *views* (what operations see, outputs of the bucket node) →
freed. Nothing keeps a gathered bucket alive past its release: what autograd saves of it is packed as (bucket, offset, size, stride) by a
saved-tensor hook, and unpacking gathers the bucket again. Buffers are known by the identity of their storage, not by address, which fake
tensors do not have.

Release. In the first call of a layout the two buckets used last are kept and older ones freed; the order of use is noted. From the second
call on a bucket is freed after its last use, so that one which is used early and late (tied embeddings) is gathered once. In backward it is
freed when its node fires, for then every operation that used it has run.

Order. Gathers are started in one order on every rank: forward by first use (in the first call: by layout; then rank 0's order of use, which
is sent once), backward in reverse. A rank that needs a bucket out of turn starts those before it too, and at the end of each pass every
rank starts what is left. So a rank that skips a leaf, or takes another branch, leaves nobody waiting, and every step sends the same bytes.
Not optimal yet: no gather starts before it is needed, and a bucket that backward needs no value of is gathered all the same.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); gathering whole units and freeing
them is also what FSDP does (Zhao et al., 2023).
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zfun import ops, stores, tree
from zfun.collectives import AllGather, Broadcast, Call, Group, Lane, Pending
from zfun.errors import PlacementError, ZfunError, checked_options
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.placement import S
from zfun.transforms._lazy import LazyLeaf
from zfun.transforms._redistribute import gather, needs_autograd
from zfun.transforms._tape import Tape
from zfun.typing import Loss

__all__ = ["shard_params"]

# How many buckets stay gathered behind the one in use while the order of use is not known.
_WINDOW = 2


@checked_options
def shard_params(loss: Loss, group: Group, *, frozen: Flat | None = None) -> Loss:
    """Let a loss run on sharded parameters: ZeRO-3 (``S -> R`` where used, gradients ``P``).

    The loss itself is not changed and needs no marks: it receives a tree of lazy leaves, and each bucket is gathered when one of its leaves
    is first used, and freed after. Under ``torch.func`` transforms, and where a buffer requires a gradient, all parameters are gathered at
    once by differentiable collectives instead, so that ``grad``, ``vmap``, ``jvp`` and their compositions hold.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters.
        group: the ranks that share the parameters.
        frozen: sharded leaves that are not trained (the other part of :func:`zfun.partition`). The loss gets both parts combined; no
            gradient and no optimizer state is ever made for these.

    Returns:
        The same function of a ``Flat`` with placement ``S``, as :func:`zfun.shard` makes it.

    Raises:
        PlacementError: from the returned function, for parameters that are not sharded over ``group``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = zf.shard_params(lambda params, batch: (params["w"] * batch).sum(), group)
        ...     params = zf.shard({"w": torch.tensor([1.0, 2.0, 3.0])}, group)
        ...     return loss(params, torch.tensor(2.0)).item()
        >>> zf.simulate(2, main)
        [12.0, 12.0]
    """
    plans: dict[Layout, _Plan] = {}
    frozen = None if frozen is None else _check(frozen, group)

    def sharded(params: tree.Tree, batch: Any) -> Any:
        flat = _check(params, group)
        if flat.tape is None and needs_autograd(flat.buffers):
            return loss(gather(flat) if frozen is None else tree.combine(gather(flat), gather(frozen)), batch)
        session = _Session(flat, flat.tape, plans.get(flat.layout))
        if frozen is None:
            with session.hooks():
                out = loss(session.leaves, batch)
            session.end_forward(plans)
            return out
        rest = _Session(frozen, flat.tape, plans.get(frozen.layout), trained=False)
        with session.hooks(), rest.hooks():
            out = loss(tree.combine(session.leaves, rest.leaves), batch)
        session.end_forward(plans)
        rest.end_forward(plans)
        return out

    return sharded


def _check(params: tree.Tree, group: Group) -> Flat:
    if not isinstance(params, Flat):
        raise PlacementError(
            f"shard_params() takes parameters with placement S; got {type(params).__name__} of whole leaves; call zf.shard(params, "
            "group) first"
        )
    if params.placement is not S:
        raise PlacementError(
            f"shard_params() takes parameters with placement S; got a Flat with placement {params.placement!r}; call "
            "zf.redistribute(params, zf.S, group) first"
        )
    if params.group is not group:
        raise PlacementError(
            "shard_params() must be given the group over which its parameters are sharded; got another one; pass the same group to "
            "zf.shard() and zf.shard_params()"
        )
    return params


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the first call taught: the buckets in order of first use, and in order of every use."""

    order: tuple[int, ...]
    touched: tuple[int, ...]
    last_use: dict[int, int]


def _agree_on_plan(touched: list[int], layout: Layout, group: Group) -> _Plan:
    """Take rank 0's order of use on every rank, so that gathers are started in one order."""
    if group.size > 1:
        text = json.dumps(touched).encode() if group.rank == 0 else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        length = group.start(Call(Broadcast(0), "schedule", "length", Lane.CONTROL), length).wait()
        data = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        data = group.start(Call(Broadcast(0), "schedule", "order of use", Lane.CONTROL), data).wait()
        touched = json.loads(bytes(data.tolist()))
    rest = [b for b in range(len(layout.buckets)) if b not in touched]
    return _Plan(tuple(dict.fromkeys(touched + rest)), tuple(touched), {bucket: i for i, bucket in enumerate(touched)})


@dataclass(frozen=True, slots=True)
class _Packed:
    """A view of a gathered bucket, as autograd's graph keeps it."""

    bucket: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Session:
    """The gathered buckets of one call of the loss, forward and backward."""

    def __init__(self, flat: Flat, tape: Tape | None, plan: _Plan | None, *, trained: bool = True) -> None:
        self.flat = flat
        self.layout = flat.layout
        self.tape = tape
        self.trained = trained and tape is not None
        self.plan = plan
        # Frozen leaves have gathers of their own, in an order of their own.
        self.lane = Lane.PARAMS if trained else Lane.FROZEN
        count = len(self.layout.buckets)
        self.order = plan.order if plan else tuple(range(count))
        self.touched: list[int] = []
        self._on_plan = plan is not None
        self._thread = threading.get_ident()
        self._phase = "forward"
        self._num_started = 0
        self._pending: dict[int, Pending] = {}
        self._buffers: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._place = {leaf: (b, i) for b, bucket in enumerate(self.layout.buckets) for i, leaf in enumerate(bucket.leaves)}
        lazy = [self._lazy(i) for i in range(len(self.layout.leaves))]
        self.leaves = tree.unflatten(self.layout.spec, [lazy[position] for position in self.layout.positions])
        if self.tape is not None:
            self.tape.on_finish.append(self._end_backward)
            if self.trained:
                self.tape.on_complete.append(self._release)

    def hooks(self) -> Any:
        """The context in which the loss runs forward: what autograd saves of a gathered bucket is not kept."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def end_forward(self, plans: dict[Layout, _Plan]) -> None:
        """Take part in the gathers that this rank did not need, free everything, and note the order of use."""
        self._start_up_to(self.order[-1] if self.order else None)
        self._drop_all()
        self.leaves = None  # They know this session: a cycle that would keep the shards alive.
        # Without a tape somebody may still differentiate with respect to the batch.
        self._phase = "backward" if torch.is_grad_enabled() else "closed"
        self._num_started = 0
        if self.plan is None:
            plans[self.layout] = _agree_on_plan(self.touched, self.layout, self.flat.group)

    def _end_backward(self) -> None:
        self._start_up_to(self.order[0] if self.order else None)
        self._drop_all()
        self._phase = "closed"

    def _drop_all(self) -> None:
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        self._buffers.clear()
        self._views.clear()

    def _lazy(self, leaf: int) -> LazyLeaf:
        slot = self.layout.leaves[leaf]
        differentiable = self.trained and (slot.dtype.is_floating_point or slot.dtype.is_complex)
        return LazyLeaf(slot.shape, slot.dtype, self.layout.device, differentiable, slot.path, lambda: self._load(leaf))

    def _load(self, leaf: int) -> Tensor:
        bucket, index = self._place[leaf]
        if self._phase == "closed":
            path = self.layout.leaves[leaf].path
            raise ZfunError(
                f"a lazy leaf may be used only while its loss and the gradient of it run; leaf {path!r} was used later; return a "
                "clone() of it as aux instead",
                leaf=path,
            )
        if self._phase == "forward" and threading.get_ident() != self._thread:
            path = self.layout.leaves[leaf].path
            raise ZfunError(
                f"a lazy leaf belongs to the thread in which its loss runs; leaf {path!r} was used in another; simulated ranks must not share "
                "a module: give each its own, made inside the rank's function",
                leaf=path,
            )
        views = self._views.get(bucket)
        if views is None:
            buffer = self._take(bucket)
            slots = [self.layout.leaves[i] for i in self.layout.buckets[bucket].leaves]
            views = [ops.unravel(buffer, slot.offset, slot.shape, slot.dtype) for slot in slots]
            if self.trained:
                views = self._with_gradient(bucket, views)
            self._views[bucket] = views
        if self._phase == "forward" and (not self.touched or self.touched[-1] != bucket):
            self._touch(bucket)
        return views[index]

    def _with_gradient(self, bucket: int, views: list[Tensor]) -> list[Tensor]:
        if self._phase == "forward" and self.tape is not None:
            return self.tape.open(bucket, views)
        # In backward only recomputation (activation checkpointing) comes here. It needs views that require a gradient, so that it saves
        # what the first run saved, but nobody runs backward through them.
        return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]

    def _touch(self, bucket: int) -> None:
        """Note the use of a bucket, and free those whose last use has passed."""
        now = len(self.touched)
        self.touched.append(bucket)
        if self.plan is not None:
            self._on_plan = self._on_plan and now < len(self.plan.touched) and self.plan.touched[now] == bucket
            # A rank that leaves the plan frees nothing more in this pass: to gather a bucket twice is something all ranks must do together.
            done = [b for b in self._buffers if self.plan.last_use.get(b, -1) < now] if self._on_plan else []
        else:
            recent = list(dict.fromkeys(reversed(self.touched)))[:_WINDOW]
            done = [b for b in self._buffers if b not in recent]
        for b in done:
            self._release(b)

    def _release(self, bucket: int) -> None:
        self._buffers.pop(bucket, None)
        self._views.pop(bucket, None)

    def _take(self, bucket: int) -> Tensor:
        """Return a gathered bucket, gathering it unless it is there."""
        buffer = self._buffers.get(bucket)
        if buffer is None:
            self._start_up_to(bucket)
            pending = self._pending.pop(bucket, None) or self._start(bucket)
            buffer = self._buffers[bucket] = pending.wait()
            storage = buffer.untyped_storage()
            # The weak reference keeps the address from being given to another storage while the entry lives.
            self._storages[storage._cdata] = (bucket, StorageWeakRef(storage))
            if self._phase == "backward" and not self.trained:
                # No node fires for what is not trained: keep as many as forward does before it knows better.
                for old in list(self._buffers)[:-_WINDOW]:
                    self._release(old)
        return buffer

    def _start_up_to(self, bucket: int | None) -> None:
        """Start the gathers of this pass up to and including a bucket's, in the common order."""
        if bucket is None:
            return
        order = self.order if self._phase == "forward" else self.order[::-1]
        while self._num_started <= order.index(bucket):
            turn = order[self._num_started]
            self._num_started += 1
            self._pending[turn] = self._start(turn)

    def _start(self, bucket: int) -> Pending:
        shard = stores.fetch(self.flat.buffers[bucket], self.layout.device)
        if self.flat.group.size == 1:
            return Pending.done(shard)
        return self.flat.group.start(Call(AllGather(), "params", self.layout.label(bucket), self.lane), shard)

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        if tensor.is_sparse or tensor.is_conj() or tensor.is_neg():
            return tensor
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return _Packed(found[0], tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def _unpack(self, saved: Tensor | _Packed) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._take(saved.bucket).detach().view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
