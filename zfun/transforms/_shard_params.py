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
is sent once), backward in reverse; frozen leaves take part in it. A rank that needs a bucket out of turn starts those before it too, and at
the end of each pass every rank starts what is left. So a rank that skips a leaf, or takes another branch, leaves nobody waiting, and every
step sends the same bytes. What has been freed and is used again in forward, unplanned, is gathered again when all ranks have come to
the end of their pass, or ask for something themselves: a round of one small all-gather, which ends each forward pass.
Not optimal yet: a bucket that backward needs no value of is gathered all the same.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); gathering whole units and freeing
them is also what FSDP does (Zhao et al., 2023).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zfun import ops, stores, tree
from zfun.collectives import AllGather, Broadcast, Call, Group, Lane, Pending, check_shardable
from zfun.errors import OptionError, PlacementError, ZfunError, checked_options
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.placement import S
from zfun.transforms._cast import CastLoss, cast_leaves
from zfun.transforms._lazy import LazyLeaf
from zfun.transforms._redistribute import gather, needs_autograd
from zfun.transforms._remat import warn_of_whole_loss
from zfun.transforms._tape import Tape
from zfun.typing import Loss
from zfun.wire import Wire, check_wire, start

__all__ = ["shard_params"]

# How many buckets stay gathered behind the one in use while the order of use is not known.
_WINDOW = 2


@checked_options
def shard_params(
    loss: Loss,
    group: Group,
    *,
    frozen: Flat | None = None,
    prefetch: int = 1,
    secondary: Group | None = None,
    wire: Wire | None = None,
) -> Loss:
    """Let a loss run on sharded parameters: ZeRO-3 (``S -> R`` where used, gradients ``P``).

    The loss itself is not changed and needs no marks: it receives a tree of lazy leaves, and each bucket is gathered when one of its leaves
    is first used, and freed after. Under ``torch.func`` transforms, and where a buffer requires a gradient, all parameters are gathered at
    once by differentiable collectives instead, so that ``grad``, ``vmap``, ``jvp`` and their compositions hold.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters.
        group: the ranks that share the parameters: a group, a mesh, or the inner axis of one.
        frozen: sharded leaves that are not trained (the other part of :func:`zfun.partition`). The loss gets both parts combined; no
            gradient and no optimizer state is ever made for these.
        prefetch: how many buckets are gathered ahead of use, forward and backward. It changes no bit; each costs the memory of a bucket.
        secondary: the inner axis of the mesh ``group``. Of what forward gathers every rank keeps the part that is its own on that axis,
            until backward gathers it there, so that no parameter crosses between rows twice. It changes no bit, and costs the memory of
            ``1/secondary.size`` of the parameters during a step (hpZ; Wang et al., "ZeRO++", 2023).
        wire: in which format floating parameters are gathered: :func:`zfun.wire.int8`, say. By default exactly. The loss sees what comes
            back, the same on every rank; the shards themselves stay exact, and so do the gradients that are added to them.

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
    if isinstance(loss, CastLoss):
        # [Note: where the cast is]
        inner = shard_params(loss.loss, group, frozen=frozen, prefetch=prefetch, secondary=secondary, wire=wire)
        return dataclasses.replace(loss, loss=inner)
    check_shardable(group, "shard_params()")
    if secondary is not None and (secondary.mesh is not group or secondary.axis != "inner"):
        raise OptionError(
            f"secondary is the inner axis of the mesh that shares the parameters; got {secondary!r} for {group!r}; write "
            "shard_params(loss, mesh, secondary=mesh.inner)"
        )
    warn_of_whole_loss(loss)
    if prefetch < 0:
        raise OptionError(f"prefetch is a number of buckets; got {prefetch}; 0 gathers each when it is used")
    check_wire(wire, "shard_params()")
    plans: dict[tuple[Layout, ...], _Plan] = {}
    frozen = None if frozen is None else _check(frozen, group)

    def sharded(params: tree.Tree, batch: Any) -> Any:
        flat = _sent_as(_check(params, group), wire)
        flats = (flat,) if frozen is None else (flat, _like(frozen, flat))
        if flat.tape is None and needs_autograd(flat.buffers):
            return loss(tree.combine(*(gather(part) for part in flats)), batch)
        layouts = tuple(part.layout for part in flats)
        session = _Session(flats, flat.tape, plans.get(layouts), prefetch, secondary)
        with session.hooks():
            out = loss(session.leaves, batch)
        session.check_graph(out)
        plans[layouts] = session.end_forward()
        return out

    return sharded


def _like(frozen: Flat, flat: Flat) -> Flat:
    """Return frozen leaves that are computed with in the dtype of the trained ones."""
    noted = frozen.with_buffers(frozen.buffers)
    noted.compute_dtype, noted.wire = flat.compute_dtype, flat.wire
    return noted


def _sent_as(flat: Flat, wire: Wire | None) -> Flat:
    """Return parameters that know in which format they are gathered."""
    if wire is None:
        return flat
    noted = flat.with_buffers(flat.buffers)
    noted.tape, noted.compute_dtype, noted.wire = flat.tape, flat.compute_dtype, wire
    return noted


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


def _agree_on_plan(touched: list[int], num_buckets: int, group: Group) -> _Plan:
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
    rest = [b for b in range(num_buckets) if b not in touched]
    return _Plan(tuple(dict.fromkeys(touched + rest)), tuple(touched), {bucket: i for i, bucket in enumerate(touched)})


@dataclass(frozen=True, slots=True)
class _Packed:
    """A view of a gathered bucket, as autograd's graph keeps it."""

    bucket: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Shard:
    """One bucket of a session: where its shard is, and how it is sent and used."""

    __slots__ = ("dtype", "flat", "index", "sent", "slots", "trained")

    def __init__(self, flat: Flat, index: int, *, trained: bool) -> None:
        self.flat = flat
        self.index = index
        self.trained = trained
        bucket = flat.layout.buckets[index]
        self.slots = [flat.layout.leaves[i] for i in bucket.leaves]
        self.dtype = bucket.dtype
        compute = flat.compute_dtype
        # There are no complex numbers in few bits: floating leaves beside complex ones are cast one by one.
        if compute is not None and bucket.dtype.is_floating_point and not any(slot.dtype.is_complex for slot in self.slots):
            self.dtype = compute
        # Of the dtypes that it is kept and used in, the one that sends fewer bytes.
        self.sent = bucket.dtype if bucket.dtype.itemsize < self.dtype.itemsize else self.dtype

    def start_again(self, kept: Tensor, group: Group) -> Pending:
        """Start to gather it from what the ranks of a smaller group have kept of it."""
        if group.size == 1:
            return Pending.done(kept)
        return group.start(Call(AllGather(), "params", self.flat.layout.label(self.index), Lane.PARAMS), kept)

    def start(self) -> Pending:
        """Start to gather it."""
        flat, group = self.flat, self.flat.group
        shard = stores.fetch(flat.buffers[self.index], flat.layout.device)
        call = Call(AllGather(), "params", flat.layout.label(self.index), Lane.PARAMS)
        if group.size > 1 and flat.wire is not None and shard.is_floating_point():
            return start(call, shard, group, flat.wire, dtype=self.dtype)
        shard = shard.to(self.sent)
        return Pending.done(shard) if group.size == 1 else group.start(call, shard)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """View the gathered bucket as its leaves."""
        views = [ops.unravel(buffer, slot.offset, slot.shape, slot.dtype) for slot in self.slots]
        return views if self.flat.compute_dtype is None else cast_leaves(views, self.flat.compute_dtype)


class _Session:
    """The gathered buckets of one call of the loss, forward and backward; those of the trained leaves come first."""

    def __init__(self, flats: Sequence[Flat], tape: Tape | None, plan: _Plan | None, prefetch: int, secondary: Group | None = None) -> None:
        self._group = flats[0].group
        self._secondary = secondary
        self._kept: dict[int, Tensor] = {}
        self._device = flats[0].layout.device
        self._tape = tape
        self._plan = plan
        self._prefetch = prefetch
        self._shards: list[_Shard] = []
        trees = []
        for number, flat in enumerate(flats):
            first = len(self._shards)
            trained = number == 0 and tape is not None
            self._shards += [_Shard(flat, i, trained=trained) for i in range(len(flat.layout.buckets))]
            trees.append(self._lazy_tree(flat, first, trained=trained))
        self.leaves = tree.combine(*trees) if len(trees) > 1 else trees[0]
        self._order = plan.order if plan else tuple(range(len(self._shards)))
        self._touched: list[int] = []
        self._on_plan = plan is not None
        self._thread = threading.get_ident()
        self._phase = "forward"
        self._num_started = 0
        self._pending: dict[int, Pending] = {}
        self._buffers: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        if tape is not None:
            tape.on_complete.append(self._release)
            tape.on_finish.append(self._start_rest)
            tape.on_end.append(self._end_backward)

    def _lazy_tree(self, flat: Flat, first: int, *, trained: bool) -> tree.Tree:
        """Make the leaves that the loss gets; each knows its bucket and its place in it."""
        lazy: dict[int, LazyLeaf] = {}
        for number, bucket in enumerate(flat.layout.buckets):
            for place, leaf in enumerate(bucket.leaves):
                slot = flat.layout.leaves[leaf]
                dtype = flat.compute_dtype if flat.compute_dtype and slot.dtype.is_floating_point else slot.dtype
                differentiable = trained and (dtype.is_floating_point or dtype.is_complex)
                load = functools.partial(self._load, first + number, place)
                lazy[leaf] = LazyLeaf(slot.shape, dtype, flat.layout.device, differentiable, slot.path, load)
        return tree.unflatten(flat.layout.spec, [lazy[position] for position in flat.layout.positions])

    def hooks(self) -> Any:
        """The context in which the loss runs forward: what autograd saves of a gathered bucket is not kept."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def check_graph(self, out: Any) -> None:
        """Refuse a graph with a lazy leaf in it: an ``autograd.Function`` took it as it is, and its gradient would be lost."""
        if self._on_plan:
            return
        todo = [leaf.grad_fn for leaf in tree.leaves(out) if type(leaf) is Tensor and leaf.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, LazyLeaf):
                raise PlacementError(
                    f"an autograd.Function takes whole tensors; got the lazy leaf {variable._path!r}; call zf.gather() on it first",
                    leaf=variable._path,
                )
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)

    def end_forward(self) -> _Plan:
        """Take part in the gathers that this rank did not need, free everything, and return the order of use."""
        self._start_rest()
        while self._group.size > 1 and self._round(None):
            pass
        self._drop_all()
        self.leaves = None  # The leaves know what made them: a cycle that would keep the shards alive.
        # Without a tape somebody may still differentiate with respect to the batch.
        self._phase = "backward" if torch.is_grad_enabled() else "closed"
        self._num_started = 0
        plan = self._plan or _agree_on_plan(self._touched, len(self._shards), self._group)
        if self._tape is not None:
            self._tape.gathers = True
            self._tape.strayed = self._tape.strayed or tuple(self._touched) != plan.touched
        return plan

    def _start_rest(self) -> None:
        if self._order:
            self._start_up_to(self._order[-1] if self._phase == "forward" else self._order[0])

    def _end_backward(self) -> None:
        self._drop_all()
        self._kept.clear()
        self._phase = "closed"

    def _drop_all(self) -> None:
        for bucket, pending in self._pending.items():
            self._keep(bucket, pending.wait())
        self._pending.clear()
        self._buffers.clear()
        self._views.clear()

    def _load(self, bucket: int, place: int) -> Tensor:
        shard = self._shards[bucket]
        if self._phase == "closed":
            path = shard.slots[place].path
            raise ZfunError(
                f"a lazy leaf may be used only while its loss and the gradient of it run; leaf {path!r} was used later; return a "
                "clone() of it as aux instead",
                leaf=path,
            )
        if self._phase == "forward" and threading.get_ident() != self._thread:
            path = shard.slots[place].path
            raise ZfunError(
                f"a lazy leaf belongs to the thread in which its loss runs; leaf {path!r} was used in another; simulated ranks must not "
                "share "
                "a module: give each its own, made inside the rank's function",
                leaf=path,
            )
        views = self._views.get(bucket)
        if views is None:
            views = shard.views(self._take(bucket))
            if shard.trained:
                views = self._with_gradient(bucket, views)
            self._views[bucket] = views
        if self._phase == "forward" and (not self._touched or self._touched[-1] != bucket):
            self._touch(bucket)
        return views[place]

    def _with_gradient(self, bucket: int, views: list[Tensor]) -> list[Tensor]:
        if self._phase == "forward" and self._tape is not None:
            # The first use of a bucket may be one without a gradient; later ones need the node all the same.
            with torch.enable_grad():
                return self._tape.open(bucket, views)
        # In backward only recomputation (activation checkpointing) comes here. It needs views that require a gradient, so that it saves
        # what the first run saved, but nobody runs backward through them.
        return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]

    def _touch(self, bucket: int) -> None:
        """Note the use of a bucket, and free those whose last use has passed."""
        now = len(self._touched)
        self._touched.append(bucket)
        if self._plan is not None:
            self._on_plan = self._on_plan and now < len(self._plan.touched) and self._plan.touched[now] == bucket
            # A rank that leaves the plan frees nothing more in this pass: to gather a bucket twice is something all ranks must do together.
            done = [b for b in self._buffers if self._plan.last_use.get(b, -1) < now] if self._on_plan else []
        else:
            recent = list(dict.fromkeys(reversed(self._touched)))[:_WINDOW]
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
            self._start_up_to(bucket, self._prefetch)
            shard = self._shards[bucket]
            pending = self._pending.pop(bucket, None)
            gathered = self._gather_again(bucket) if pending is None else pending.wait()
            self._keep(bucket, gathered)
            buffer = self._buffers[bucket] = gathered.to(shard.dtype)
            storage = buffer.untyped_storage()
            # The weak reference keeps the address from being given to another storage while the entry lives.
            self._storages[storage._cdata] = (bucket, StorageWeakRef(storage))
            if self._phase == "backward" and not shard.trained:
                # No node fires for what is not trained: keep as many as forward does before it knows better.
                for old in [b for b in self._buffers if not self._shards[b].trained][:-_WINDOW]:
                    self._release(old)
        return buffer

    def _gather_again(self, bucket: int) -> Tensor:
        """Gather what has been freed in this pass."""
        if self._phase == "backward" or self._group.size == 1:
            return self._start(bucket).wait()
        # It may be this rank alone that needs it, so it asks. The others answer when they ask themselves, or at the end of their pass; they
        # must not have to wait for this rank before that.
        self._start_rest()
        return self._round(bucket)[bucket]

    def _round(self, bucket: int | None) -> dict[int, Tensor]:
        """Gather what any rank asks for now."""
        mine = torch.tensor([-1 if bucket is None else bucket], device=self._device)
        wanted = self._group.all_gather(mine, "gather again").view(-1).tolist()
        return {again: self._shards[again].start().wait() for again in sorted(set(wanted)) if again >= 0}

    def _start_up_to(self, bucket: int, ahead: int = 0) -> None:
        """Start the gathers of this pass up to and including a bucket's, in the common order, and some ahead of it."""
        order = self._order if self._phase == "forward" else self._order[::-1]
        last = min(order.index(bucket) + ahead, len(order) - 1)
        while self._num_started <= last:
            turn = order[self._num_started]
            self._num_started += 1
            self._pending[turn] = self._start(turn)

    def _start(self, bucket: int) -> Pending:
        kept = self._kept.get(bucket) if self._phase == "backward" else None
        if kept is None or self._secondary is None:
            return self._shards[bucket].start()
        return self._shards[bucket].start_again(kept, self._secondary)

    def _keep(self, bucket: int, gathered: Tensor) -> None:
        """Keep this rank's part of a gathered bucket for backward, if there will be one."""
        group = self._secondary
        if group is None or self._phase != "forward" or not torch.is_grad_enabled() or bucket in self._kept:
            return
        numel = gathered.numel() // group.size
        self._kept[bucket] = gathered.narrow(0, group.rank * numel, numel).clone()

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
