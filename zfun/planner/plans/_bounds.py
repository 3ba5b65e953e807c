"""Bounds of a plan, from below, for much less than a plan costs.

[Note: bounds]
A step holds at least its state, and at each moment of the loss the activations and their gradients,
which no composition changes: one plan of the bare loss finds these for all compositions that
recompute alike and split the batch alike ([Note: least peaks]). Traffic follows from the layout and
the schedule by the closed forms of ``_price``. So a bound costs microseconds where a plan costs
seconds. :func:`advise` trusts no bound blindly: every plan that it makes is compared with the bound
of the same composition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, Mesh, abstract_group, axes_of, axis_of, sum_group
from zfun.compression import Codec, int8
from zfun.flat import flats
from zfun.layout import Layout, layout_of
from zfun.planner._meter import SMALL
from zfun.planner._price import PricedHop, price_of_gather, price_of_sum
from zfun.planner.plans._bare import Bare, Still
from zfun.planner.plans._hardware import Forecast, Hardware, StepWork, forecast, missing
from zfun.planner.plans._kept import StateBytes, state_bytes
from zfun.planner.plans._peaks import (
    NO_BYTES,
    BucketBytes,
    LossPlan,
    counted,
    peak_of_pass,
    plan_of_loss,
    trace_of_pass,
)
from zfun.planner.plans._plan import plan
from zfun.planner.plans._space import Candidate, Model
from zfun.recipes import policy_of
from zfun.transforms import Schedule, ScheduleOptions, Trace, TracedBucket, schedule


class Bound(NamedTuple):
    """The least that a composition needs.

    Attributes:
        composition: the choices: a :class:`Candidate` or a :class:`MeshCandidate`.
        work: of the parts of the machine.
        forecast: the time of the work.
        device: bytes on the device.
        host: bytes in host memory.
        disk: bytes on the disk.
    """

    composition: Any
    work: StepWork
    forecast: Forecast
    device: int
    host: int
    disk: int

    def excess(self, hardware: Hardware) -> dict[str, float]:
        """Return the bytes that are missing at the least, by memory."""
        return missing((self.device, self.host, self.disk), hardware)


class _Traffic(NamedTuple):
    """The hops of a gather of all parameters, of a sum, and of a gather at the end of a step.

    ``again`` has the hops of each bucket's gather for backward, and ``numels`` its elements. The
    most bytes of a bucket's gradients and the message that these are packed into are beside, and
    the bytes of each bucket. ``num_small`` counts the buckets whose shards may be too small for a
    meter.
    """

    gather: _Hops
    sum: _Hops
    whole: _Hops
    again: tuple[list[PricedHop], ...]
    numels: tuple[int, ...]
    num_small: int
    packed: int
    bucket_of_leaf: tuple[int, ...]
    buckets: tuple[BucketBytes, ...]


class _Hops(NamedTuple):
    """Bytes sent by axis, and the messages."""

    sent: Counter[str]
    count: int


class _BucketHops(NamedTuple):
    """The hops of a bucket, as in :class:`_Traffic`, its bytes, and two itemsizes of gradients."""

    gather: list[PricedHop]
    again: list[PricedHop]
    sum: list[PricedHop]
    whole: list[PricedHop]
    held: BucketBytes
    grad: int
    reduced: int


class Bounds:
    """Bounds of all compositions of a model; remembers what they share.

    Args:
        model: the model.
        group: the ranks, as in :func:`plan`.

    Attributes:
        model: as given.
    """

    def __init__(self, model: Model, group: Group) -> None:
        self.model, self._group = model, abstract_group(group.size, group.rank)
        key = "bounds", group.size, group.rank
        self._known: dict[Any, Any] = model.known.setdefault(key, {})

    def __call__(self, choice: Candidate, hardware: Hardware) -> Bound:
        """Return the bound of a composition."""
        known = self._known.get(choice)
        if known is None:
            known = self._known[choice] = self._bound(choice)
        work, device, host, disk = known
        return Bound(choice, work, forecast(work, hardware), device, host, disk)

    def _bound(self, choice: Candidate) -> tuple[StepWork, int, int, int]:
        k, is_third = choice.num_micro_batches, choice.stage == 3
        loss = self._once(
            self._loss_of, choice.recomputed, choice.num_micro_batches, choice.precision
        )
        whole = self._once(self._state_of, choice.precision)
        traffic = self._traffic(choice)
        numel = sum(traffic.numels)
        sizes = self._once(self._itemsizes, choice.precision)
        shards = self._once(self._num_shards, choice.inner, choice.hybrid)
        state = whole._replace(masters=whole.masters // shards, moments=whole.moments // shards)
        kept = {
            "params": state.params // shards if is_third else state.params,
            "optimizer": state.masters + state.moments,
        }
        # A meter leaves small storages out: shards of the state, and of the sums of gradients.
        unseen = SMALL * traffic.num_small * (state.vectors + 1)
        seen = {part: max(0, num_bytes - unseen) for part, num_bytes in kept.items()}
        stored = sum(seen[part] for part in choice.offloaded)
        device = sum(seen.values()) - stored
        grads = numel * sizes.grad if k > 1 else 0
        held = max(0, (grads if choice.stage == 1 else grads // shards) - unseen)
        ends, buckets = traffic.bucket_of_leaf, traffic.buckets
        if choice.stage == 1:
            # Gradients wait for the end.
            ends, buckets = (0,) * len(ends), (NO_BYTES,)
        elif not is_third or shards == 1:
            buckets = (NO_BYTES,) * len(buckets)
        else:
            # Sums of several micro-batches are counted above, and a disk is read into host memory.
            is_read = "params" in choice.offloaded and not choice.on_disk
            buckets = self._once(_counted_at_once, buckets, k == 1, is_read)
        model = choice.recomputed, k, choice.precision
        gathers, again = None, frozenset[int]()
        if is_third:
            kind = any(bucket.read for bucket in buckets), choice.prefetch, choice.secondary
            gathers = *model, ends, len(buckets), *kind
            again = self._once(self._again_of, *gathers)
        is_held = is_third and shards > 1
        peak = self._once(self._peak_of, model, ends, buckets, gathers if is_held else None)
        held += max(peak, traffic.packed)
        num_gathers, num_sums, num_wholes = _passes(choice)
        hops = [
            (num_gathers, traffic.gather),
            (num_gathers, _hops(hop for bucket in again for hop in traffic.again[bucket])),
            (num_sums, traffic.sum),
            (num_wholes, traffic.whole),
        ]
        gathered = numel // shards, sum(traffic.numels[bucket] for bucket in again) // shards
        work = StepWork(
            self._group.size,
            k * loss.flops,
            _sent(hops),
            _num_messages(choice, hops, self._group.size),
            *_moved(choice, *gathered, sizes, state),
            0 if "optimizer" in choice.offloaded else kept["optimizer"],
            kept["optimizer"] if "optimizer" in choice.offloaded else 0,
            k * loss.touched,
            k * loss.num_ops,
            len(self._once(self._layout_of, 1, 1, choice.precision).leaves),
        )
        on_disk = stored if choice.on_disk else 0
        return work, device + held, stored - on_disk, on_disk

    def state(self, precision: Any) -> StateBytes:
        """Return the bytes of the state of one rank."""
        return self._once(self._state_of, precision)

    def order(self, choice: Candidate) -> Trace | None:
        """Return the order in which a composition uses its buckets, if it gathers any."""
        if choice.stage != 3:
            return None
        loss = self._loss_of, choice.recomputed, choice.num_micro_batches, choice.precision
        traffic = self._traffic(choice)
        buckets = (_ANY_BUCKET,) * len(traffic.buckets)
        return trace_of_pass(self._once(*loss), traffic.bucket_of_leaf, buckets, 2)

    def _traffic(self, choice: Candidate) -> _Traffic:
        same = {"stage": 3, "recomputed": False, "num_micro_batches": 1}
        return self._once(self._traffic_of, choice._replace(**same, offloaded=(), on_disk=False))

    def _once(self, make: Any, *args: Any) -> Any:
        key = make.__name__, *args
        if key not in self._known:
            self._known[key] = make(*args)
        return self._known[key]

    def _loss_of(self, recomputed: bool, num_micro_batches: int, precision: Any) -> LossPlan:
        model = self.model
        loss = model.recomputed if recomputed and model.recomputed else model.loss
        bare = Bare(loss, num_micro_batches, policy_of(precision).compute)
        return plan_of_loss(bare, model.params, model.batch, self._group)

    def _peak_of(
        self,
        model: tuple[bool, int, Any],
        bucket_of_leaf: tuple[int, ...],
        buckets: tuple[BucketBytes, ...],
        gathers: tuple[Any, ...] | None,
    ) -> int:
        dtype = policy_of(model[-1]).compute
        leaves = [leaf for leaf in tree.leaves(self.model.params) if isinstance(leaf, Tensor)]
        sizes = [counted(leaf.numel() * (dtype or leaf.dtype).itemsize) for leaf in leaves]
        steps = None if gathers is None else self._once(self._schedule_of, *gathers)
        loss = self._once(self._loss_of, *model)
        return peak_of_pass(loss, sizes, bucket_of_leaf, buckets, steps)

    def _again_of(self, *gathers: Any) -> frozenset[int]:
        """Return the buckets that are gathered for backward; the others stay at the turn."""
        steps = self._once(self._schedule_of, *gathers).steps
        return frozenset(s.bucket for s in steps if (s.kind, s.phase) == ("gather", "backward"))

    def _schedule_of(
        self,
        recomputed: bool,
        num_micro_batches: int,
        precision: Any,
        bucket_of_leaf: tuple[int, ...],
        num_buckets: int,
        is_stored: bool,
        prefetch: int,
        secondary: bool,
    ) -> Schedule:
        options = ScheduleOptions(prefetch=prefetch, secondary=secondary)
        loss = self._once(self._loss_of, recomputed, num_micro_batches, precision)
        bucket = dataclasses.replace(_ANY_BUCKET, stored_itemsize=int(is_stored))
        trace = trace_of_pass(loss, bucket_of_leaf, (bucket,) * num_buckets, 2)
        return schedule(trace, options)

    def _state_of(self, precision: Any) -> StateBytes:
        model, one = self.model, abstract_group(1)
        # One rank has no padding between the shards; that of its buckets is left out.
        choice = Candidate(1, precision=precision, bucket_bytes=2**60)
        vectors: list[Any] = []

        def init(params: Any) -> Any:
            state = choice.of(model, one).init(params)
            vectors[:] = flats(state)
            return state

        found = plan(
            lambda group: Still(init), model.params, model.batch, one, steps=1, device="meta"
        )
        return state_bytes(found.by_path, len(vectors))

    def _num_shards(self, inner: int, hybrid: bool) -> int:
        return Candidate(3, inner=inner, hybrid=hybrid).placed(self._group).size

    def _itemsizes(self, precision: Any) -> _Itemsizes:
        """Return the least itemsizes of the parameters and of reduced gradients."""
        policy = policy_of(precision)
        leaves = [leaf for leaf in tree.leaves(self.model.params) if isinstance(leaf, Tensor)]
        kept = [policy.param or leaf.dtype for leaf in leaves]
        return _Itemsizes(
            min(dtype.itemsize for dtype in kept),
            min(_reduced(dtype, policy.reduce) for dtype in kept),
        )

    def _layout_of(self, size: int, closes_at: int, precision: Any) -> Layout:
        dtype = policy_of(precision).param
        return layout_of(self.model.params, size, closes_at, dtype=dtype)

    def _traffic_of(self, choice: Candidate) -> _Traffic:
        precision, secondary, compressed = choice.precision, choice.secondary, choice.compressed
        group, policy = choice.placed(self._group), policy_of(precision)
        size = sum_group(group).size
        layout = self._once(self._layout_of, size, choice.closes_at, precision)
        codec = int8()
        of_params = codec if "params" in compressed else None
        of_grads = codec if "grads" in compressed else None

        # Most buckets are equal.
        @functools.cache
        def hops_of(numel: int, dtype: torch.dtype) -> _BucketHops:
            sent, kept = (policy.compute or dtype).itemsize, dtype.itemsize
            gather = again = price_of_gather(numel // group.size, sent, group, of_params)
            if secondary and isinstance(group, Mesh):
                itemsize = sent if of_params is None else kept
                again = price_of_gather(numel // group.inner.size, itemsize, group.inner, None)
            reduced = _reduced(dtype, policy.reduce)
            summing = price_of_sum(numel, reduced, group, of_grads)
            whole = price_of_gather(numel // group.size, kept, group, None)
            summed = counted(numel // group.size * reduced)
            # A codec makes one message from the packed gradients, and receives another.
            own, ranks = _own(summing[0], group)
            sending = summed if of_grads is None else 2 * counted(own * ranks)
            row = group.inner.size if isinstance(group, Mesh) else 1
            part = numel // row * sent if secondary else 0
            # A row keeps decoded parts, and sends them as they are.
            encoded = None if secondary else of_params
            arriving = _arriving(gather, group, of_params), _arriving(again, group, encoded)
            # A codec has encoded the gradients before they are sent.
            flying = sending + (counted(numel * reduced) if of_grads is None else 0)
            read = numel // group.size * kept
            held = numel * sent, numel * reduced, sending, flying, summed, part, *arriving, read
            bucket = BucketBytes(*map(counted, held))
            return _BucketHops(gather, again, summing, whole, bucket, sent, reduced)

        packed = 0
        each = [hops_of(bucket.padded_numel, bucket.dtype) for bucket in layout.buckets]
        for found, bucket in zip(each, layout.buckets, strict=True):
            is_packed = len(bucket.leaves) > 1 or found.grad != found.reduced
            grads = sum(counted(layout.leaves[leaf].numel * found.grad) for leaf in bucket.leaves)
            message = counted(bucket.padded_numel * found.reduced)
            packed = max(packed, message + grads * is_packed)
        return _Traffic(
            gather=_hops(hop for found in each for hop in found.gather),
            sum=_hops(hop for found in each for hop in found.sum),
            whole=_hops(hop for found in each for hop in found.whole),
            again=tuple(found.again for found in each),
            numels=tuple(bucket.padded_numel for bucket in layout.buckets),
            # An element has a byte at the least.
            num_small=sum(one.padded_numel < SMALL * group.size for one in layout.buckets),
            packed=packed,
            bucket_of_leaf=tuple(layout.leaves[slot].bucket for slot in layout.positions),
            buckets=tuple(found.held for found in each),
        )


# Sizes do not matter where the room has no limit.
_ANY_BUCKET = TracedBucket("", (), 1, 1, 1, 1)


class _Itemsizes(NamedTuple):
    param: int
    grad: int


def _reduced(dtype: torch.dtype, reduce: torch.dtype | None) -> int:
    is_half = dtype in (torch.bfloat16, torch.float16)
    return (reduce or (torch.float32 if is_half else dtype)).itemsize


def _counted_at_once(
    buckets: tuple[BucketBytes, ...], sums_once: bool, is_read: bool
) -> tuple[BucketBytes, ...]:
    """Leave out what a bucket does not hold."""
    absent = ({} if sums_once else {"summed": 0}) | ({} if is_read else {"read": 0})
    of = functools.cache(lambda bucket: bucket._replace(**absent))
    return tuple(map(of, buckets))


def _arriving(hops: list[PricedHop], group: Group, codec: Codec | None) -> int:
    """Return the least bytes that a gather in flight holds: the result of the first hop."""
    own, ranks = _own(hops[0], group)
    # The message that a codec has made lives as long.
    return counted(own * ranks) + (0 if codec is None else counted(own))


def _own(hop: PricedHop, group: Group) -> tuple[int, int]:
    """Return the bytes that a rank has for one other in a hop, and the number of ranks."""
    ranks = next(axis.size for axis in axes_of(group) if axis_of(axis) == hop.axis)
    return hop.sent_bytes // max(1, ranks - 1), ranks


def _hops(hops: Iterable[PricedHop]) -> _Hops:
    sent: Counter[str] = Counter()
    count = 0
    for count, hop in enumerate(hops, 1):  # noqa: B007, the last count
        sent[hop.axis] += hop.sent_bytes
    return _Hops(sent, count)


def _passes(choice: Candidate) -> tuple[int, int, int]:
    """Return how often all parameters are gathered, gradients summed, and parameters whole."""
    k = choice.num_micro_batches
    if choice.stage == 3:
        return k, k, 0
    return 0, k if choice.stage == 2 else 1, 1


def _sent(hops: list[tuple[int, _Hops]]) -> dict[str, int]:
    found = dict.fromkeys(("", "inner", "outer"), 0)
    for times, (sent, _) in hops:
        for axis, num_bytes in sent.items():
            found[axis] += times * num_bytes
    return found


def _num_messages(choice: Candidate, hops: list[tuple[int, _Hops]], num_ranks: int) -> int:
    if num_ranks == 1:
        return 0
    of_buckets = sum(times * count for times, (_, count) in hops)
    # The loss of each micro-batch, the question whether to gather again, and the norm.
    k = choice.num_micro_batches
    axes = 1 if choice.inner == 1 else 2
    small = axes * (k * (2 if choice.stage == 3 else 1) + 1)
    return of_buckets + small + (choice.on_disk and bool(choice.offloaded))


def _moved(
    choice: Candidate, numel: int, gathered: int, sizes: _Itemsizes, state: StateBytes
) -> tuple[int, int]:
    """Return the bytes between device and host of the busier direction, and those of the disk."""
    params, grads = numel * sizes.param, numel * sizes.grad
    again = 0 if choice.secondary else gathered * sizes.param
    reads = choice.num_micro_batches * (params + again)
    # Without master weights, an update reads the parameters.
    read = 0 if state.masters else params
    of_optimizer = state.masters + state.moments
    match choice.offloaded, choice.on_disk:
        case ("optimizer",), on_disk:
            return max(grads + read, params), 2 * of_optimizer * on_disk
        case ("params",), False:
            return max(params, reads + read), 0
        case ("params",), True:
            return 0, params + reads + read
        case ("params", "optimizer"), False:
            return max(grads, reads), 0
        case ("params", "optimizer"), True:
            return grads, params + 2 * of_optimizer + reads + read
        case _:
            return 0, 0
