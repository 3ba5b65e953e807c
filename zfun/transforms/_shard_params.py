"""Stage 3 as a transform of the loss: gather where used, free, gather again in backward.

[Note: the life of a parameter]
*shard* (the caller's ``Flat`` with placement S, 1/N of each bucket) → *lazy leaf* (what the loss receives: metadata only) → *gathered
bucket* (one fresh buffer, all-gathered ahead of the first use of one of its leaves) → *views* (what operations see, outputs of the bucket
node) → freed. Nothing keeps a gathered bucket alive past its release: what autograd saves of it is packed as (bucket, offset, size, stride)
by a saved-tensor hook, and unpacking gathers the bucket again. Buffers are known by the identity of their storage, not by address, which
fake tensors do not have.

When. The first call of a layout notes what is used, in which order, forward and backward; from the second on a schedule made of rank 0's
notes is run ([Note: the schedule]). The first call itself gathers in the order of the layout and keeps the two buckets used last, and a
trained one in backward until its gradients are complete.

Order. Gathers are started in one order on every rank: that of the schedule; frozen leaves take part in it. A rank that needs a bucket out
of turn starts those before it too, and at the end of each pass every rank starts what is left. So a rank that skips a leaf, or takes
another branch, leaves nobody waiting, and every step sends the same bytes. A rank that leaves the schedule frees nothing more in its pass.
What has been freed and is used again in forward, unplanned, is gathered again when all ranks have come to the end of their pass, or ask for
something themselves: a round of one small all-gather, which ends each forward pass. In backward nobody may have to ask. So the ranks vote,
with the loss, on whether all of them have used, and kept for backward, what the schedule says. If not, each bucket is gathered once in
backward, in one order, and kept until nothing can need it any more. A bucket that backward needs no value of is gathered all the same, at
the end: a step sends what the closed form says.

Bits. A bucket that is freed and gathered again in forward comes back behind the same outputs of its node: they get the new buffer as
their data. A second node would add gradients in another order.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); gathering whole units and freeing
them is also what FSDP does (Zhao et al., 2023).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
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
from zfun.transforms._schedule import Event, Knobs, Schedule, Step, Trace, TracedBucket
from zfun.transforms._tape import Tape, check_unwritten
from zfun.typing import Loss
from zfun.wire import Wire, check_wire, start

__all__ = ["ShardedLoss", "shard_params"]

# How many buckets stay gathered behind the one in use while the order of use is not known.
_WINDOW = 2


@checked_options
def shard_params(
    loss: Loss,
    group: Group,
    *,
    frozen: Flat | None = None,
    prefetch: int = 1,
    max_live: int | None = None,
    reuse_distance: int | None = None,
    persistence: int = 0,
    max_persistent: int | None = None,
    secondary: Group | None = None,
    wire: Wire | None = None,
) -> Loss:
    """Let a loss run on sharded parameters: ZeRO-3 (``S -> R`` where used, gradients ``P``).

    The loss itself is not changed and needs no marks: it receives a tree of lazy leaves, and each bucket is gathered ahead of the first use
    of its leaves, and freed after the last. Under ``torch.func`` transforms, and where a buffer requires a gradient, all parameters are
    gathered at once by differentiable collectives instead, so that ``grad``, ``vmap``, ``jvp`` and their compositions hold.

    The first call notes what is used, in which order; from the second on the knobs below make a :func:`zfun.schedule` of it. None of them
    changes a bit of the result.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters.
        group: the ranks that share the parameters: a group, a mesh, or the inner axis of one.
        frozen: sharded leaves that are not trained (the other part of :func:`zfun.partition`). The loss gets both parts combined; no
            gradient and no optimizer state is ever made for these.
        prefetch: how many buckets are gathered ahead of use, forward and backward. Each costs the memory of a bucket.
        max_live: the largest number of elements gathered at once, padding included; by default there is no bound.
        reuse_distance: a bucket stays gathered after a use if fewer than so many elements are used before it is used again. By default one
            that is used again in the same pass stays, and nothing stays from forward to backward.
        persistence: a bucket of which no leaf has more elements than this stays gathered until the parameters change. Give
            :func:`zfun.shard` the same number, so that small leaves lie in buckets of their own.
        max_persistent: the largest number of elements of which that is true.
        secondary: the inner axis of the mesh ``group``. Of what forward gathers every rank keeps the part that is its own on that axis,
            until backward gathers it there, so that no parameter crosses between rows twice. It changes no bit, and costs the memory of
            ``1/secondary.size`` of the parameters during a step (hpZ; Wang et al., "ZeRO++", 2023).
        wire: in which format floating parameters are gathered: :func:`zfun.wire.int8`, say. By default exactly. The loss sees what comes
            back, the same on every rank; the shards themselves stay exact, and so do the gradients that are added to them.

    Returns:
        The same function of a ``Flat`` with placement ``S``, as :func:`zfun.shard` makes it.

    Raises:
        OptionError: a knob is negative; or, from the returned function, ``max_live`` is smaller than the largest bucket.
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
    check_shardable(group, "shard_params()")
    if secondary is not None and (secondary.mesh is not group or secondary.axis != "inner"):
        raise OptionError(
            f"secondary is the inner axis of the mesh that shares the parameters; got {secondary!r} for {group!r}; write "
            "shard_params(loss, mesh, secondary=mesh.inner)"
        )
    warn_of_whole_loss(loss)
    check_wire(wire, "shard_params()")
    knobs = Knobs(prefetch, max_live, reuse_distance, persistence, max_persistent)
    if isinstance(loss, CastLoss):
        # [Note: where the cast is]
        return dataclasses.replace(loss, loss=ShardedLoss(loss.loss, group, frozen, knobs, secondary, wire))
    return ShardedLoss(loss, group, frozen, knobs, secondary, wire)


class ShardedLoss:
    """What :func:`shard_params` returns: a loss of sharded parameters that remembers what is used, in which order.

    Attributes:
        loss: what is called, with lazy leaves.
        group: the ranks that share the parameters.
        frozen: the leaves that are not trained.
        knobs: what schedules are made with.
        secondary: the group over which backward gathers, where it is another one.
        wire: the format in which parameters are gathered.
    """

    def __init__(
        self, loss: Loss, group: Group, frozen: Flat | None, knobs: Knobs, secondary: Group | None = None, wire: Wire | None = None
    ) -> None:
        self.loss = loss
        self.group = group
        self.frozen = None if frozen is None else _check(frozen, group)
        self.knobs = knobs
        self.secondary = secondary
        self.wire = wire
        self._plans: dict[tuple[Layout, ...], _Plan] = {}

    @property
    def schedules(self) -> list[Schedule]:
        """What has been learnt, one schedule for each layout of the parameters; complete once a gradient was taken."""
        return [plan.schedule for plan in self._plans.values()]

    def __call__(self, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of sharded parameters."""
        flat = _sent_as(_check(params, self.group), self.wire)
        flats = (flat,) if self.frozen is None else (flat, _like(self.frozen, flat))
        if flat.tape is None and needs_autograd(flat.buffers):
            return self.loss(tree.combine(*(gather(part) for part in flats)), batch)
        layouts = tuple(part.layout for part in flats)
        learn = functools.partial(self._plans.__setitem__, layouts)
        session = _Session(flats, flat.tape, self.knobs, self._plans.get(layouts), learn, self.secondary)
        with session.hooks():
            out = self.loss(session.leaves, batch)
        session.check_graph(out)
        session.end_forward()
        return out


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


@dataclass(frozen=True)
class _Plan:
    """What has been learnt: a schedule, and what was kept for backward in the pass that it was learnt in (once there was a backward)."""

    schedule: Schedule
    packed: tuple[int, ...] | None = None

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """The buckets that stay gathered from forward to backward."""
        held: set[int] = set()
        for step in self.schedule.steps:
            if step.phase == "forward" and step.kind == "gather":
                held.add(step.bucket)
            elif step.phase == "forward" and step.kind == "release":
                held.discard(step.bucket)
        return frozenset(held)


def _of_rank_0(value: Any, group: Group, what: str) -> Any:
    """Return what rank 0 has noted, on every rank."""
    if group.size == 1:
        return value
    text = json.dumps(value).encode() if group.rank == 0 else b""
    length = torch.tensor([len(text)], dtype=torch.int64)
    length = group.start(Call(Broadcast(0), "schedule", f"length of {what}", Lane.CONTROL), length).wait()
    data = torch.zeros(int(length), dtype=torch.uint8)
    if group.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    data = group.start(Call(Broadcast(0), "schedule", what, Lane.CONTROL), data).wait()
    return json.loads(bytes(data.tolist()))


class _Course:
    """The steps of one pass, and how far this rank has come with them."""

    __slots__ = ("followed", "place", "steps")

    def __init__(self, steps: Iterable[Step], *, followed: bool) -> None:
        self.steps = tuple(steps)
        self.place = 0
        self.followed = followed

    def come_to(self, kind: str, bucket: int) -> Sequence[Step]:
        """Return the steps up to a use or a reduction, if that is the next one; else this rank leaves the course here."""
        if not self.followed:
            return ()
        here = self.place
        for place in range(here, len(self.steps)):
            step = self.steps[place]
            if step.kind in ("use", "reduce"):
                if step.kind != kind or step.bucket != bucket:
                    break
                self.place = place + 1
                if kind == "reduce" and self.steps[self.place : self.place + 1] == (Step("release", bucket, step.phase),):
                    self.place += 1
                return self.steps[here : self.place]
        self.followed = False
        return ()

    def come_to_gather(self, bucket: int, ahead: int, *, again: bool) -> Sequence[Step]:
        """Return what is left of the gathers up to one of a bucket, and of some more; that one may have been started, unless ``again``."""
        gathers = [place for place, step in enumerate(self.steps) if step.kind == "gather"]
        mine = [turn for turn, place in enumerate(gathers) if self.steps[place].bucket == bucket and (place >= self.place) is again]
        if not mine:
            return ()
        chosen = [place for place in gathers[: (mine[0] if again else mine[-1]) + 1 + ahead] if place >= self.place]
        self.place = max([self.place, *(place + 1 for place in chosen)])
        return [self.steps[place] for place in chosen]

    def rest(self) -> Sequence[Step]:
        """Return the steps that are left; off the course, the gathers among them."""
        here, self.place = self.place, len(self.steps)
        return [step for step in self.steps[here:] if self.followed or step.kind == "gather"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Packed:
    """A view of a gathered bucket, as autograd's graph keeps it."""

    bucket: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Shard:
    """One bucket of a session: where its shard is, and how it is sent and used."""

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


class _Session:
    """The gathered buckets of one call of the loss, forward and backward; those of the trained leaves come first."""

    def __init__(
        self,
        flats: Sequence[Flat],
        tape: Tape | None,
        knobs: Knobs,
        plan: _Plan | None,
        learn: Callable[[_Plan], None],
        secondary: Group | None,
    ) -> None:
        self._group = flats[0].group
        self._secondary = secondary
        self._parts: dict[int, Tensor] = {}
        self._makes_graph = torch.is_grad_enabled()
        self._device = flats[0].layout.device
        self._tape = tape
        self._knobs = knobs
        self._plan = plan
        self._learn = learn
        self._shards: list[_Shard] = []
        trees = []
        for number, flat in enumerate(flats):
            first = len(self._shards)
            trained = number == 0 and tape is not None
            self._shards += [_Shard(flat, i, trained=trained) for i in range(len(flat.layout.buckets))]
            trees.append(self._lazy_tree(flat, first, trained=trained))
        self.leaves = tree.combine(*trees) if len(trees) > 1 else trees[0]
        self._traced = tuple(shard.traced(tape) for shard in self._shards)
        # Of fake tensors nothing can be asked, and there is nobody to agree with.
        self._alone = self._group.size == 1 or any(isinstance(buffer, Tensor) and ops.is_abstract(buffer) for buffer in flats[0].buffers)
        self._thread = threading.get_ident()
        self._phase = "forward"
        self._events: list[Event] = []
        self._packed: list[int] = []
        self._packs: list[weakref.ref[_Packed]] = []
        self._pending: dict[int, Pending] = {}
        self._spare: list[Pending] = []
        self._buffers: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}
        self._emptied: dict[int, list[Tensor]] = {}
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._persistent = plan.schedule.persistent if plan else knobs.persistent(self._traced)
        for bucket in self._persistent:
            # It stays gathered beside shards that are written.
            self._shards[bucket].is_borrowed = False
        self._kept: frozenset[int] = frozenset()
        self._overdue: set[int] = set()
        self._last_use = {} if plan is None else {b: place for place, b in enumerate(plan.schedule.trace.forward)}
        self._course = _Course(self._forward_steps(self._restore()), followed=plan is not None)
        if tape is not None:
            tape.on_complete.append(self._complete)
            tape.on_finish.append(self._finish_backward)
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

    def _restore(self) -> set[int]:
        """Take over what is still gathered since an earlier call with the same parameters, and say which buckets that is."""
        kept = {b: gathered for b in self._persistent if (gathered := self._shards[b].kept()) is not None}
        for bucket, gathered in kept.items():
            self._hold(bucket, gathered)
        return set(kept)

    def _forward_steps(self, there: set[int]) -> Iterable[Step]:
        if self._plan is None:
            return [Step("gather", b, "forward") for b in range(len(self._shards)) if b not in there]
        steps = self._plan.schedule.steps
        return [step for step in steps if step.phase == "forward" or (step.phase == "start" and step.bucket not in there)]

    def hooks(self) -> Any:
        """The context in which the loss runs forward: what autograd saves of a gathered bucket is not kept."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def check_graph(self, out: Any) -> None:
        """Refuse a graph with a lazy leaf in it: an ``autograd.Function`` took it as it is, and its gradient would be lost."""
        if self._course.followed:
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

    def end_forward(self) -> None:
        """Take part in the gathers that this rank did not need, and free what backward does not begin with."""
        self._run(self._course.rest())
        while not self._alone and self._round(None):
            pass
        used = [event.bucket for event in self._events]
        for bucket in self._persistent:
            self._shards[bucket].keep(self._take(bucket))
        if self._plan is not None and self._tape is not None:
            self._kept = self._plan.kept
        self._drop(self._persistent | self._kept)
        self.leaves = None  # The leaves know what made them: a cycle that would keep the shards alive.
        if self._plan is None:
            self._plan = _Plan(self._knobs.schedule(Trace(self._traced, self._group.size, tuple(self._agreed(used, "order of use")))))
            self._learn(self._plan)
            self._course.followed = tuple(used) == self._plan.schedule.trace.forward
        if self._tape is not None:
            self._tape.gathers = True
            has_strayed = not self._course.followed or self._plan.packed not in (None, tuple(self._packed))
            self._tape.strayed = self._tape.strayed or has_strayed
        # Without a tape somebody may still differentiate with respect to the batch.
        self._phase = "turn" if torch.is_grad_enabled() else "closed"

    def _agreed(self, value: Any, what: str) -> Any:
        return value if self._alone else _of_rank_0(value, self._group, what)

    def _begin_backward(self) -> None:
        """Choose what to do in backward, once the ranks have voted."""
        if self._phase != "turn":
            return
        self._phase = "backward"
        plan = self._plan
        assert plan is not None
        self._events = []
        if plan.packed is not None and self._has_anybody_strayed() is False:
            self._course = _Course((step for step in plan.schedule.steps if step.phase == "backward"), followed=True)
            return
        held = self._persistent | self._kept
        order = [*dict.fromkeys([*plan.schedule.trace.forward, *range(len(self._shards))])][::-1]
        self._course = _Course((Step("gather", b, "backward") for b in order if b not in held), followed=False)

    def _finish_backward(self) -> None:
        self._begin_backward()
        self._run(self._course.rest())

    def _end_backward(self) -> None:
        self._drop(set())
        self._parts.clear()
        plan = self._plan
        if self._phase == "backward" and plan is not None and plan.packed is None:
            events, packed = self._agreed([self._events, self._packed], "order of use in backward")
            trace = dataclasses.replace(
                plan.schedule.trace, buckets=self._traced, backward=tuple(Event(kind, bucket) for kind, bucket in events)
            )
            self._learn(_Plan(self._knobs.schedule(trace), tuple(packed)))
        self._phase = "closed"

    def _drop(self, kept: set[int] | frozenset[int]) -> None:
        """Wait for what has been started, and free what is not to be kept."""
        for bucket in [b for b in self._pending if b not in kept]:
            self._keep_part(bucket, self._pending.pop(bucket).wait())
        while self._spare:
            self._spare.pop().wait()
        for bucket in [b for b in self._buffers if b not in kept]:
            del self._buffers[bucket]
        for bucket, views in self._views.items():
            check_unwritten(views, self._shards[bucket].slots)
        self._views.clear()
        self._emptied.clear()

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
        self._touch(bucket)
        views = self._views.get(bucket)
        if views is None:
            views = shard.views(self._take(bucket))
            if shard.trained:
                views = self._with_gradient(bucket, views)
            self._views[bucket] = views
        return views[place]

    def _with_gradient(self, bucket: int, views: list[Tensor]) -> list[Tensor]:
        if self._phase == "forward" and self._tape is not None:
            outputs = self._emptied.pop(bucket, None)
            if outputs is not None:
                for output, view in zip(outputs, views, strict=True):
                    output.data = view
                return outputs
            # The first use of a bucket may be one without a gradient; later ones need the node all the same.
            with torch.enable_grad():
                return self._tape.open(bucket, views)
        # In backward only recomputation (activation checkpointing) comes here. It needs views that require a gradient, so that it saves
        # what the first run saved, but nobody runs backward through them.
        return [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]

    def _touch(self, bucket: int) -> None:
        """Note the use of a bucket, and do what the schedule has before it."""
        self._begin_backward()
        last = next((event.bucket for event in reversed(self._events) if event.kind == "use"), None)
        if bucket == last:
            return
        self._events.append(Event("use", bucket))
        overdue, self._overdue = self._overdue - {bucket}, set()
        self._run(self._course.come_to("use", bucket))
        for late in overdue:
            self._release(late)
        if self._course.followed:
            return
        if self._phase == "forward" and self._plan is not None:
            # A rank that leaves the schedule frees nothing more in this pass: to gather a bucket twice is something all ranks must do
            # together.
            return
        self._release_old(bucket)

    def _release_old(self, bucket: int) -> None:
        """Free what was not used lately, where there is no schedule to say so."""
        if self._phase == "forward":
            uses = reversed([event.bucket for event in self._events])
            recent = list(dict.fromkeys(uses))[:_WINDOW]
            old = [b for b in self._buffers if b not in recent]
        elif self._has_anybody_strayed():
            old = list[int]()
        else:
            # No node fires for what is not trained: keep as many as forward does before it knows better.
            old = [b for b in self._buffers if b != bucket and not self._shards[b].trained][: 1 - _WINDOW]
        for b in old:
            if b not in self._persistent:
                self._release(b)

    def _has_anybody_strayed(self) -> bool | None:
        """Whether a rank used, or kept for backward, what the schedule does not say; None where the ranks have not voted."""
        if self._tape is None:
            return None
        return self._tape.strayed if self._alone else self._tape.any_strayed

    def _complete(self, bucket: int) -> None:
        """Note that all gradients of a bucket are there."""
        self._begin_backward()
        self._events.append(Event("reduce", bucket))
        self._run(self._course.come_to("reduce", bucket))
        if self._course.followed or bucket in self._persistent:
            return
        # Something that needs no gradient of it (a detached use) may still need it. Where ranks differ, it could not be gathered again.
        if self._has_anybody_strayed() and any((packed := ref()) is not None and packed.bucket == bucket for ref in self._packs):
            return
        self._release(bucket)

    def _run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.kind == "gather":
                self._start(step.bucket)
            elif step.kind == "release":
                self._release(step.bucket)

    def _start_gather(self, bucket: int) -> Pending:
        part = self._parts.get(bucket) if self._phase == "backward" else None
        if part is None or self._secondary is None:
            return self._shards[bucket].start()
        return self._shards[bucket].start_again(part, self._secondary)

    def _keep_part(self, bucket: int, gathered: Tensor) -> None:
        """Keep this rank's part of a gathered bucket for backward, if there will be one."""
        group = self._secondary
        if group is None or self._phase != "forward" or not self._makes_graph or bucket in self._parts:
            return
        numel = gathered.numel() // group.size
        self._parts[bucket] = gathered.narrow(0, group.rank * numel, numel).clone()

    def _start(self, bucket: int) -> None:
        pending = self._start_gather(bucket)
        if bucket in self._buffers or bucket in self._pending:
            # All ranks take part in every gather, those too that have kept the bucket.
            self._spare.append(pending)
        else:
            self._pending[bucket] = pending

    def _release(self, bucket: int) -> None:
        views = self._views.get(bucket)
        if views is not None:
            check_unwritten(views, self._shards[bucket].slots)
        if views is not None and self._phase == "forward" and self._shards[bucket].trained and self._may_come_back(bucket):
            if _is_held(views):
                # By the operation that is about to run, or by the loss, which keeps what gather() or to() returned.
                self._overdue.add(bucket)
                return
            for view in views:
                view.data = view.new_empty(0)
            self._emptied[bucket] = views
            del views
        if bucket in self._pending:
            self._keep_part(bucket, self._pending.pop(bucket).wait())
        self._buffers.pop(bucket, None)
        self._views.pop(bucket, None)

    def _may_come_back(self, bucket: int) -> bool:
        """Whether a bucket may be used again in this forward pass."""
        # Not counting the use that begins, which is noted already.
        return not self._course.followed or self._last_use.get(bucket, -1) >= len(self._events) - 1

    def _take(self, bucket: int) -> Tensor:
        """Return a gathered bucket, gathering it unless it is there."""
        buffer = self._buffers.get(bucket)
        if buffer is not None:
            return buffer
        if not (self._course.followed and bucket in self._pending):
            # Off the schedule memory is not bounded; what can be done is not to gather ahead.
            ahead = self._knobs.prefetch if self._knobs.max_live is None else 0
            self._course.followed = False
            self._run(self._course.come_to_gather(bucket, ahead, again=bucket not in self._pending))
        pending = self._pending.pop(bucket, None)
        gathered = self._gather_again(bucket) if pending is None else pending.wait()
        self._keep_part(bucket, gathered)
        return self._hold(bucket, gathered.to(self._shards[bucket].dtype))

    def _hold(self, bucket: int, buffer: Tensor) -> Tensor:
        self._buffers[bucket] = buffer
        storage = buffer.untyped_storage()
        # The weak reference keeps the address from being given to another storage while the entry lives.
        self._storages[storage._cdata] = (bucket, StorageWeakRef(storage))
        return buffer

    def _gather_again(self, bucket: int) -> Tensor:
        """Gather what has been freed in this pass."""
        if self._phase == "backward" or self._alone:
            return self._start_gather(bucket).wait()
        # It may be this rank alone that needs it, so it asks. The others answer when they ask themselves, or at the end of their pass; they
        # must not have to wait for this rank before that.
        self._course.followed = False
        self._run(self._course.rest())
        return self._round(bucket)[bucket]

    def _round(self, bucket: int | None) -> dict[int, Tensor]:
        """Gather what any rank asks for now."""
        mine = torch.tensor([-1 if bucket is None else bucket], device=self._device)
        wanted = self._group.all_gather(mine, "gather again").view(-1).tolist()
        return {again: self._shards[again].start().wait() for again in sorted(set(wanted)) if again >= 0}

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        if tensor.is_sparse:
            return tensor
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is None or tensor.is_conj() or tensor.is_neg():
            return tensor
        if not self._packed or self._packed[-1] != found[0]:
            self._packed.append(found[0])
        packed = _Packed(found[0], tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        self._packs.append(weakref.ref(packed))
        return packed

    def _unpack(self, saved: Tensor | _Packed) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._touch(saved.bucket)
        buffer = self._take(saved.bucket)
        whole = buffer if buffer.dtype == saved.dtype else buffer.view(saved.dtype)
        return whole.as_strided(saved.size, saved.stride, saved.offset)


def _is_held(tensors: list[Tensor]) -> bool:
    """Whether somebody else has one of these very tensors, in Python or in C++."""
    alone = [object()]
    (usual,) = [sys.getrefcount(x) for x in alone]
    return any(sys.getrefcount(x) > usual or x._use_count() > 1 for x in tensors)  # pyrefly: ignore[missing-attribute]
