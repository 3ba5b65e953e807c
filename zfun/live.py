"""Live bytes: what each rank holds while a step runs, as a pure function of data.

[Note: what is counted]
The flat buffers that zfun makes: parameters, gathered buckets, buckets of gradients, reduced gradients, and the optimizer's state. What the
user's loss makes (activations, gradients of single leaves, casts of single leaves) is not in it; nor are scalars, the few numbers that
ranks tell each other, and the room of fixed size that a kernel of an optimizer may work in. A collective holds what it reads and what it
writes from its start until it is waited for. With ``donate``, the sum of whole gradients takes the place of this rank's term, and new
whole parameters that of the old. Where a group lends its ranks each other's memory (those of one host over shared memory), less is held
than is counted.

The step is played from data: the layout says how long buffers are, the schedule when gathers and gradients come, and the optimizer's
``init``, run on tensors without numbers, what its state is. Nothing is computed, and nothing here has seen a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group, Mesh, abstract_group
from zfun.errors import OptionError, checked_options
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.optim import MasterState, as_optimizer, with_master
from zfun.placement import R, S
from zfun.recipes import Precision, policy_of
from zfun.transforms import MAX_IN_FLIGHT, MAX_UNDER_WAY, Schedule, Step, first_steps

__all__ = ["Held", "Live", "Moment", "live_bytes"]


class Held(NamedTuple):
    """Bytes of one rank in one place, by what they are.

    Attributes:
        params: the parameters, frozen ones too; whole or this rank's part.
        gathered: gathered buckets, and what is made to send or to use them in another dtype.
        gradients: whole buckets of gradients, not summed over the ranks yet.
        reduced: gradients that are summed, or on their way to be.
        optimizer: the optimizer's state, master weights included.
    """

    params: int = 0
    gathered: int = 0
    gradients: int = 0
    reduced: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Moment(NamedTuple):
    """What is held at one moment of a step.

    Attributes:
        what: what has just been made.
        device: bytes on the device.
        store: bytes in stores. On a CPU both are host memory.
    """

    what: str
    device: Held
    store: Held


class Live(NamedTuple):
    """What a step holds; ``print`` it. Made by :func:`live_bytes`.

    Attributes:
        kept: between steps.
        moments: each time a buffer is made, in order, and at the end of the step, while the old state is still there.
    """

    kept: Moment
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment at which most is on the device."""
        return max(self.moments, key=lambda moment: moment.device.total)

    @property
    def largest(self) -> Held:
        """The most of each on the device, each at its own worst moment."""
        return Held(*map(max, zip(*(moment.device for moment in self.moments), strict=True)))

    def __str__(self) -> str:
        header = ("", *Held._fields, "on the device", "in a store")
        named = [("between steps", self.kept), (f"peak: {self.peak.what}", self.peak)]
        rows = [header, *((name, *(f"{n:,}" for n in (*m.device, m.device.total, m.store.total))) for name, m in named)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in rows
        )


@checked_options
def live_bytes(
    stage: int,
    layout: Layout,
    schedule: Schedule,
    optimizer: Any,
    *,
    group: Group | None = None,
    secondary: Group | None = None,
    frozen: Layout | None = None,
    precision: torch.dtype | Precision | None = None,
    num_micro_batches: int = 1,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    offload_grads: bool = False,
    donate: bool = True,
    first_step: bool = False,
) -> Live:
    """Say how many bytes each rank holds at every moment of a step of :func:`zfun.zero`, without running it.

    It is exact to the byte for optimizers that work element by element, where no operation of the loss, and no block that
    :func:`zfun.remat` computes again, uses leaves of two buckets: it would keep the first until it is through.

    Args:
        stage: 0, 1, 2 or 3.
        layout: of the trained parameters, in the dtypes in which they are kept.
        schedule: of their use, as :func:`zfun.schedule` makes it of a :func:`zfun.trace` of the same leaves; at stages 0 to 2 only the
            order of gradients counts.
        optimizer: what :func:`zfun.zero` is given.
        group: a mesh or the inner axis of one, where :func:`zfun.zero` is given that; an abstract one will do.
        secondary: the inner axis of ``group``, where backward gathers over that.
        frozen: the layout of the leaves that are not trained.
        precision: as :func:`zfun.zero` takes it. It says what master weights there are; the other dtypes are in the layout and the trace.
        num_micro_batches: how many micro-batches a batch is split in.
        offload_optimizer: whether the optimizer's state is in a store.
        offload_params: whether the parameters are.
        offload_grads: whether the gradients are.
        donate: whether the step takes over the state that it is given.
        first_step: whether it is the first one, which is still learning the order of use.

    Returns:
        The bytes, by what they are and where.

    Raises:
        OptionError: a stage that does not exist, a schedule of other leaves; or what is not covered: an optimizer that is not element-wise,
            a loss scale, a mesh with an axis of one rank.

    Example:
        >>> import zfun as zf
        >>> params = {"a": torch.empty(64, 64, device="meta"), "b": torch.empty(64, 64, device="meta")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> found = zf.schedule(zf.trace(loss, params, torch.empty(1, 64, device="meta"), 8, bucket_bytes=1))
        >>> print(zf.live_bytes(3, zf.layout_of(params, 8, 1), found, zf.optim.adamw(1e-3)))
                                 params  gathered  gradients  reduced  optimizer  on the device  in a store
        between steps             4,096         0          0        0      8,192         12,288           0
        peak: gathered bucket 0   4,096    16,384     32,768    4,096      8,192         65,536           0

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
    """
    if stage not in (0, 1, 2, 3):
        raise OptionError(f"stage must be 0, 1, 2 or 3; got {stage!r}")
    if num_micro_batches < 1:
        raise OptionError(f"num_micro_batches must be at least 1; got {num_micro_batches}")
    if offload_params and stage < 3:
        raise OptionError(f"offload_params keeps shards, which only stage 3 has; got stage {stage}; use stage=3, or leave it out")
    parts = [layout] if frozen is None else [layout, frozen]
    kept = [(bucket.padded_numel, bucket.dtype.itemsize) for part in parts for bucket in part.buckets]
    traced = schedule.trace.buckets
    group = _checked_group(stage, abstract_group(layout.size) if group is None else group, secondary)
    if [numel for numel, _ in kept] != [b.numel for b in traced] or (schedule.trace.size, layout.size) != (group.size, group.mesh.size):
        raise OptionError(
            f"the schedule must be of the buckets of the layout; got {len(traced)} buckets on {schedule.trace.size} ranks for {len(kept)} "
            f"on {layout.size}; trace the same parameters with the same size, bucket_bytes and persistence"
        )
    play = _Play(stage, len(layout.buckets), group, secondary, schedule, [itemsize for _, itemsize in kept], offload_params, offload_grads)
    wide, moments = _state(optimizer, precision, layout, group.size if stage > 0 else 1)
    where = "store" if offload_optimizer else "device"
    play.hold("params", play.shards_of(range(len(traced))), "", play.param_place)
    play.hold("optimizer", sum(moments) + sum(n for n in wide if n), "", where)
    for bucket in schedule.persistent if stage == 3 and not first_step else ():
        if not traced[bucket].grad_itemsize:
            play.hold("gathered", play.gathered(bucket), "")
    before = play.moments[-1]._replace(what="between steps")
    play.moments.clear()
    for micro in range(num_micro_batches):
        play.gradient(first=micro == 0, learning=first_step and micro == 0)
        if micro:
            play.add()
    play.redistribute()
    play.update(wide, moments, where, donate=donate)
    play.moments.append(play.now("the end"))
    return Live(before, tuple(play.moments))


def _checked_group(stage: int, group: Group, secondary: Group | None) -> Group:
    mesh = group.mesh
    if group.axis == "outer":
        raise OptionError(f"the live bytes of a step are known over a group, a mesh or its inner axis; got {group!r}; pass the mesh")
    if isinstance(mesh, Mesh) and 1 in (mesh.inner.size, mesh.outer.size):
        raise OptionError(
            f"the live bytes of a step are known for meshes of several rows and columns; got {mesh!r}; pass a group without axes"
        )
    if secondary is not None and (stage < 3 or secondary.mesh is not group or secondary.axis != "inner"):
        raise OptionError(
            f"secondary is the inner axis of the mesh group, at stage 3; got {secondary!r} for {group!r} at stage {stage}; leave it out, "
            "or pass group=mesh, secondary=mesh.inner"
        )
    return group


def _state(optimizer: Any, precision: Any, layout: Layout, size: int) -> tuple[list[int | None], list[int]]:
    """Return the bytes of each master weight (None where the parameter is its own), and those of the other buffers of the state."""
    rule, policy = as_optimizer(optimizer), policy_of(precision)
    master = policy.master
    if policy.loss_scale is not None:
        raise OptionError(
            "the live bytes of a step are known without a loss scale; got a precision with one; use torch.bfloat16, or a zf.Precision with "
            "loss_scale=None"
        )
    if rule.by_leaf or rule.labels is not None or rule.placement is not None:
        raise OptionError(
            "the live bytes of a step are known for optimizers that work element by element; got one that looks for leaves, or is sharded "
            "already; use one of sgd, adam, adamw, lion and adagrad"
        )
    rule = rule if master is None else with_master(rule, master)
    with ops.fake_mode():
        buffers = [torch.empty(bucket.padded_numel // size, dtype=bucket.dtype, device=layout.device) for bucket in layout.buckets]
        state = rule.init(Flat(buffers, S if size > 1 else R, layout, abstract_group(size)))
    sizes = lambda value: [leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.ndim]
    if not isinstance(state, MasterState):
        return [None] * len(buffers), sizes(state)
    masters = iter(sizes(state.master))
    assert master is not None
    return [next(masters) if b.dtype.itemsize < master.itemsize else None for b in layout.buckets], sizes(state.inner)


# In the place of a step that has been played ahead of its turn.
_NOTHING = Step("use", -1, "backward")


class _Play:
    """Plays a step, and notes what is held each time something is made."""

    def __init__(
        self,
        stage: int,
        count: int,
        group: Group,
        secondary: Group | None,
        schedule: Schedule,
        itemsizes: Sequence[int],
        offload_params: bool,
        offload_grads: bool,
    ) -> None:
        self._stage = stage
        self._schedule = schedule
        self._buckets = schedule.trace.buckets
        self._size = group.size
        self._group = group
        self._secondary = secondary
        self._itemsizes = itemsizes
        self._count = count
        self.param_place = "store" if offload_params else "device"
        self._grad_place = "store" if offload_grads else "device"
        self._bytes: dict[tuple[str, str], int] = {}
        self.moments: list[Moment] = []
        # What is on its way: the bytes of the shard in the dtype that is sent, and of the bucket in that dtype.
        self._arriving: dict[int, tuple[int, int]] = {}
        # What backward will gather over the inner axis of a mesh.
        self._parts: dict[int, int] = {}
        # Of one rank alone the gradients are the sum, as they are made.
        self._reduces = stage > 1 and group.mesh.size > 1
        self._made = "gradients" if group.mesh.size > 1 else "reduced"
        self._left = "reduced" if self._reduces else self._made

    def now(self, what: str) -> Moment:
        """Return what is held now."""
        held = (Held(*(self._bytes.get((place, name), 0) for name in Held._fields)) for place in ("device", "store"))
        return Moment(what, *held)

    def hold(self, name: str, nbytes: int, what: str, place: str = "device") -> None:
        """Note that a buffer is made."""
        self._bytes[place, name] = self._bytes.get((place, name), 0) + nbytes
        self.moments.append(self.now(what))

    def free(self, name: str, nbytes: int, place: str = "device") -> None:
        """Note that a buffer is freed."""
        self._bytes[place, name] = self._bytes.get((place, name), 0) - nbytes

    def gathered(self, bucket: int) -> int:
        """The bytes of a gathered bucket as the loss sees it; of one rank alone it is the shard."""
        of = self._buckets[bucket]
        return 0 if self._size == 1 and of.itemsize == self._itemsizes[bucket] else of.nbytes

    def shards_of(self, buckets: Sequence[int]) -> int:
        """The bytes of parameters that a rank keeps."""
        size = self._size if self._stage == 3 else 1
        return sum(self._buckets[b].numel // size * self._itemsizes[b] for b in buckets)

    def gradient(self, *, first: bool, learning: bool) -> None:
        """Play forward and backward of one micro-batch."""
        todo = [b for b in range(self._count) if self._buckets[b].grad_itemsize]
        filled: set[int] = set()
        in_flight: list[int] = []
        steps = list(first_steps(self._schedule) if learning and self._stage == 3 else self._steps(first=first))
        for place, step in enumerate(steps):
            if step.kind != "reduce":
                self._run(step)
                continue
            self._settle(in_flight, MAX_IN_FLIGHT - 1)
            self._fill(step.bucket)
            filled.add(step.bucket)
            # What the schedule frees when a bucket's gradients are complete is freed before they are sent.
            following = steps[place + 1 : place + 2]
            if following == [Step("release", step.bucket, "backward")]:
                self._run(following[0])
                steps[place + 1] = _NOTHING
            while todo and todo[-1] in filled:
                self._send(todo[-1])
                in_flight.append(todo.pop())
                self._settle(in_flight, MAX_IN_FLIGHT)
        self._settle(in_flight, 0)
        self.free("gathered", sum(self._parts.values()))
        self._parts.clear()

    def _steps(self, *, first: bool) -> Iterator[Step]:
        for step in self._schedule.steps:
            if self._stage < 3 and step.kind != "reduce":
                continue
            if step.phase == "start" and not (first and self._buckets[step.bucket].grad_itemsize):
                # Those that persist stay until the parameters change, frozen ones for good.
                continue
            if step.phase == "backward":
                # What nobody has used yet is there by the end of the forward pass.
                for bucket in sorted(self._arriving.keys() & self._schedule.persistent):
                    yield Step("use", bucket, "forward")
            yield step

    def _run(self, step: Step) -> None:
        bucket = step.bucket
        if step.kind == "gather":
            self._gather(bucket)
        elif step.kind == "use" and bucket in self._arriving:
            self._arrive(bucket, step.phase)
        elif step.kind == "release" and bucket in self._arriving:
            narrowed, whole = self._arriving.pop(bucket)
            self.free("gathered", narrowed)
            self._keep_part(bucket, step.phase)
            self.free("gathered", whole)
        elif step.kind == "release":
            self.free("gathered", self.gathered(bucket))

    def _gather(self, bucket: int) -> None:
        of, what = self._buckets[bucket], f"gathered bucket {bucket}"
        sent = of.numel * of.sent_itemsize
        narrowed = sent // self._size if of.sent_itemsize != self._itemsizes[bucket] and bucket not in self._parts else 0
        whole = sent if self._size > 1 else 0
        for nbytes in (narrowed, whole):
            if nbytes:
                self.hold("gathered", nbytes, what)
        self._arriving[bucket] = narrowed, whole

    def _keep_part(self, bucket: int, phase: str) -> None:
        if self._secondary is not None and phase != "backward" and bucket not in self._parts:
            of = self._buckets[bucket]
            self._parts[bucket] = of.numel * of.sent_itemsize // self._secondary.size
            self.hold("gathered", self._parts[bucket], f"secondary shard of bucket {bucket}")

    def _arrive(self, bucket: int, phase: str) -> None:
        """Wait for a bucket, and widen it where it is used in a wider dtype than it is sent in."""
        of = self._buckets[bucket]
        narrowed, whole = self._arriving.pop(bucket)
        if self._size > 1:
            self.free("gathered", narrowed)
        self._keep_part(bucket, phase)
        if of.sent_itemsize != of.itemsize:
            self.hold("gathered", of.nbytes, f"gathered bucket {bucket}")
            self.free("gathered", whole)

    def _fill(self, bucket: int) -> None:
        self.hold(self._made, self._grad_bytes(bucket), f"gradients of bucket {bucket}")

    def _send(self, bucket: int) -> None:
        if self._reduces:
            for nbytes in self._sums(bucket):
                self.hold("reduced", nbytes, f"reduced gradients of bucket {bucket}")
        elif self._stage < 2:
            self._move(self._left, self._grad_bytes(bucket), self._grad_place)

    def _settle(self, in_flight: list[int], num_left: int) -> None:
        while self._stage > 1 and len(in_flight) > num_left:
            bucket = in_flight.pop(0)
            nbytes = self._grad_bytes(bucket)
            if self._reduces:
                self.free("gradients", nbytes)
                nbytes, *rows = self._sums(bucket)
                self.free("reduced", sum(rows))
            self._move(self._left, nbytes, self._grad_place)

    def _move(self, name: str, nbytes: int, place: str) -> None:
        self._bytes["device", name] -= nbytes
        self._bytes[place, name] = self._bytes.get((place, name), 0) + nbytes

    def _sums(self, bucket: int) -> list[int]:
        """The bytes of a rank's part of the sum, and of what is made on the way to it: on a mesh the sum over a row."""
        nbytes, mesh = self._grad_bytes(bucket), self._group.mesh
        # Where gradients stay whole, the sum takes their place.
        parts = [nbytes // self._size] if self._stage else []
        if not isinstance(mesh, Mesh) or (self._stage and self._group is not mesh):
            return parts
        return [*parts, nbytes if not self._stage and mesh.sums_whole(nbytes) else nbytes // mesh.inner.size]

    def _grad_bytes(self, bucket: int) -> int:
        return self._buckets[bucket].numel * self._buckets[bucket].grad_itemsize

    def add(self) -> None:
        """Add the gradients of a micro-batch to those before it."""
        share = self._size if self._reduces else 1
        self.free(self._left, sum(self._grad_bytes(b) // share for b in range(self._count)), self._grad_place)

    def redistribute(self) -> None:
        """Sum whole gradients over the ranks, where that was not done in backward; where they stay whole, the sum takes their place."""
        if self._stage > 1 or self._group.mesh.size == 1:
            return
        in_flight: list[int] = []
        for bucket in range(self._count):
            for nbytes in self._sums(bucket):
                self.hold("reduced", nbytes, f"reduced gradients of bucket {bucket}")
            in_flight.append(bucket)
            if len(in_flight) > MAX_UNDER_WAY:
                self._summed(in_flight.pop(0))
        for bucket in in_flight:
            self._summed(bucket)

    def _summed(self, bucket: int) -> None:
        if self._stage:
            self.free("gradients", self._grad_bytes(bucket), self._grad_place)
        self.free("reduced", sum(self._sums(bucket)[1 if self._stage else 0 :]))

    def update(self, masters: Sequence[int | None], moments: Sequence[int], where: str, *, donate: bool) -> None:
        """Play the optimizer, and what comes after it."""
        share = self._size if self._stage else 1
        shards = [self._buckets[b].numel // share * self._itemsizes[b] for b in range(self._count)]
        gathers = self._stage in (1, 2) and self._size > 1
        if not donate:
            self._step_beside(shards, masters, moments, where)
        if gathers and not donate:
            for bucket, nbytes in enumerate(shards):
                self.hold("params", nbytes * share, f"new parameters of bucket {bucket}")
            self.free("params", sum(shards))
        elif not donate:
            self._move("params", sum(shards), self.param_place)
        if donate and self._stage == 3:
            persistent = [b for b in self._schedule.persistent if self._buckets[b].grad_itemsize]
            self.free("gathered", sum(self.gathered(bucket) for bucket in persistent))
        for place in ("device", "store"):
            self._bytes[place, "gradients"] = self._bytes[place, "reduced"] = 0

    def _step_beside(self, shards: Sequence[int], masters: Sequence[int | None], moments: Sequence[int], where: str) -> None:
        """Play an optimizer that leaves the old state as it is."""
        for nbytes in moments:
            self.hold("optimizer", nbytes, "the optimizer's new state", where)
        for bucket, (nbytes, master) in enumerate(zip(shards, masters, strict=True)):
            if master is None:
                self.hold("params", nbytes, f"new parameters of bucket {bucket}")
            else:
                self.hold("optimizer", master, f"new master weights of bucket {bucket}", where)
        for bucket, (nbytes, master) in enumerate(zip(shards, masters, strict=True)):
            if master is not None:
                self.hold("params", nbytes, f"new parameters of bucket {bucket}")
