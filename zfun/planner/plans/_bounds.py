"""Bounds of a plan, from below, for much less than a plan costs.

[Note: bounds]
A step holds at least its state, and at each moment of the loss the activations and their gradients,
which no composition changes: one plan of the bare loss finds these for all compositions that
recompute alike and split the batch alike ([Note: least peaks]). Traffic follows from the layout by
the closed forms of ``_price``. So a bound costs microseconds where a plan costs seconds.
:func:`advise` trusts no bound blindly: every plan that it makes is compared with the bound of the
same composition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
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
    """Bytes and hops of a gather of all parameters, of one from secondary shards, and of a sum.

    The most bytes of a bucket's gradients and the message that these are packed into are beside,
    and the bytes of each bucket. ``again`` and ``stays`` leave out the buckets that may stay from
    forward to backward, and count their elements. ``num_small`` counts the buckets whose shards may
    be too small for a meter.
    """

    gather: Counter[str]
    again: Counter[str]
    sum: Counter[str]
    whole: Counter[str]
    num_gathers: tuple[int, int]
    num_sums: int
    num_wholes: int
    numel: int
    stays: int
    num_small: int
    packed: int
    bucket_of_leaf: tuple[int, ...]
    buckets: tuple[BucketBytes, ...]


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
        grads = traffic.numel * sizes.grad if k > 1 else 0
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
        options = ScheduleOptions(prefetch=choice.prefetch, secondary=choice.secondary)
        peak = self._once(
            self._peak_of,
            choice.recomputed,
            k,
            choice.precision,
            ends,
            buckets,
            options if is_third and shards > 1 else None,
        )
        held += max(peak, traffic.packed)
        work = StepWork(
            self._group.size,
            k * loss.flops,
            _sent(choice, traffic),
            _num_messages(choice, traffic, self._group.size),
            *_moved(choice, traffic.numel // shards, traffic.stays // shards, sizes, state),
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
        recomputed: bool,
        num_micro_batches: int,
        precision: Any,
        bucket_of_leaf: tuple[int, ...],
        buckets: tuple[BucketBytes, ...],
        options: ScheduleOptions | None,
    ) -> int:
        model = recomputed, num_micro_batches, precision
        loss = self._once(self._loss_of, *model)
        dtype = policy_of(precision).compute
        leaves = [leaf for leaf in tree.leaves(self.model.params) if isinstance(leaf, Tensor)]
        sizes = [counted(leaf.numel() * (dtype or leaf.dtype).itemsize) for leaf in leaves]
        gathers = None
        if options is not None:
            kind = len(buckets), any(bucket.read for bucket in buckets), options
            gathers = self._once(self._schedule_of, *model, bucket_of_leaf, *kind)
        return peak_of_pass(loss, sizes, bucket_of_leaf, buckets, gathers)

    def _schedule_of(
        self,
        recomputed: bool,
        num_micro_batches: int,
        precision: Any,
        bucket_of_leaf: tuple[int, ...],
        num_buckets: int,
        is_stored: bool,
        options: ScheduleOptions,
    ) -> Schedule:
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

        hops: dict[str, list[PricedHop]] = {"gather": [], "again": [], "sum": [], "whole": []}
        # The largest buckets, because those in use at the turn are not known here.
        ranked = sorted(range(len(layout.buckets)), key=lambda b: layout.buckets[b].padded_numel)
        stays = frozenset(ranked[-1 - choice.prefetch :])
        packed = 0
        buckets: list[BucketBytes] = []
        for index, bucket in enumerate(layout.buckets):
            found = hops_of(bucket.padded_numel, bucket.dtype)
            hops["gather"] += found.gather
            hops["again"] += [] if index in stays else found.again
            hops["sum"] += found.sum
            hops["whole"] += found.whole
            buckets.append(found.held)
            is_packed = len(bucket.leaves) > 1 or found.grad != found.reduced
            grads = sum(counted(layout.leaves[leaf].numel * found.grad) for leaf in bucket.leaves)
            message = counted(bucket.padded_numel * found.reduced)
            packed = max(packed, message + grads * is_packed)
        return _Traffic(
            _by_axis(hops["gather"]),
            _by_axis(hops["again"]),
            _by_axis(hops["sum"]),
            _by_axis(hops["whole"]),
            (len(hops["gather"]), len(hops["again"])),
            len(hops["sum"]),
            len(hops["whole"]),
            sum(bucket.padded_numel for bucket in layout.buckets),
            sum(layout.buckets[b].padded_numel for b in stays),
            # An element has a byte at the least.
            sum(bucket.padded_numel < SMALL * group.size for bucket in layout.buckets),
            packed,
            tuple(layout.leaves[slot].bucket for slot in layout.positions),
            tuple(buckets),
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


def _by_axis(hops: list[PricedHop]) -> Counter[str]:
    found: Counter[str] = Counter()
    for hop in hops:
        found[hop.axis] += hop.sent_bytes
    return found


def _passes(choice: Candidate) -> tuple[int, int, int, int]:
    """Return how often all parameters are gathered, again and whole, and gradients are summed."""
    k = choice.num_micro_batches
    if choice.stage == 3:
        return k, k, k, 0
    return 0, 0, k if choice.stage == 2 else 1, 1


def _sent(choice: Candidate, traffic: _Traffic) -> dict[str, int]:
    kinds = traffic.gather, traffic.again, traffic.sum, traffic.whole
    found = dict.fromkeys(("", "inner", "outer"), 0)
    for times, kind in zip(_passes(choice), kinds, strict=True):
        for axis, num_bytes in kind.items():
            found[axis] += times * num_bytes
    return found


def _num_messages(choice: Candidate, traffic: _Traffic, num_ranks: int) -> int:
    if num_ranks == 1:
        return 0
    counts = *traffic.num_gathers, traffic.num_sums, traffic.num_wholes
    of_buckets = sum(times * count for times, count in zip(_passes(choice), counts, strict=True))
    # The loss of each micro-batch, the question whether to gather again, and the norm.
    k = choice.num_micro_batches
    axes = 1 if choice.inner == 1 else 2
    small = axes * (k * (2 if choice.stage == 3 else 1) + 1)
    return of_buckets + small + (choice.on_disk and bool(choice.offloaded))


def _moved(
    choice: Candidate, numel: int, stays: int, sizes: _Itemsizes, state: StateBytes
) -> tuple[int, int]:
    """Return the bytes between device and host of the busier direction, and those of the disk."""
    params, grads = numel * sizes.param, numel * sizes.grad
    again = 0 if choice.secondary else (numel - stays) * sizes.param
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
