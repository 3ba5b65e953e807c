"""Stage 3 as a transform of the loss: gather where used, free, regather in backward.

The loss receives lazy leaves; see [Note: the life of a parameter].

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020); FSDP also gathers whole units and frees each after use (Zhao et al., 2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zfun import ops, tree
from zfun.collectives import Group, check_shardable, data_axes
from zfun.compression import CODEC, Codec, check_repeatable
from zfun.errors import PlacementError, ZfunError
from zfun.flat import FLAT, Flat
from zfun.layout import Layout
from zfun.options import FUNCTION, GROUP, takes
from zfun.placement import S
from zfun.transforms._cast import CastLoss
from zfun.transforms._notes import watching
from zfun.transforms._watched import new_gathered
from zfun.transforms.call._buckets import BucketShard, shards_of, tree_of
from zfun.transforms.call._call import call_of
from zfun.transforms.call._executor import Executor, WholeParams
from zfun.transforms.call._lazy import outside_inference_mode
from zfun.transforms.grads._value import ZfunLoss, check_loss
from zfun.transforms.params._cursor import SchedulePlan, told_order, told_plan
from zfun.transforms.params._schedule import Schedule
from zfun.transforms.params._schedule_options import OPTIONS, ScheduleOptions, secondary_of
from zfun.transforms.remat import warn_of_whole_loss
from zfun.transforms.values._communicate import needs_autograd
from zfun.transforms.values._unshard import gather_for
from zfun.typing import Loss


@takes(
    loss=FUNCTION,
    group=GROUP,
    frozen=FLAT | None,
    schedule=OPTIONS | None,
    compression=CODEC | None,
)
def shard_params(
    loss: Loss,
    group: Group,
    *,
    frozen: Flat | None = None,
    schedule: ScheduleOptions | None = None,
    compression: Codec | None = None,
) -> Loss:
    """Let a loss run on sharded parameters: ZeRO-3 (``S -> R`` where used, gradients ``P``).

    The loss needs no changes. The loss receives a tree of lazy leaves; each bucket is gathered
    ahead of the first use of a leaf, and freed after the last use. On one rank alone, where
    parameters are whole, the loss receives plain tensors from the second call on. Under
    ``torch.func`` transforms, and where a buffer requires a gradient, all parameters are gathered
    at once by differentiable collectives instead, so that ``grad``, ``vmap``, ``jvp`` and their
    compositions hold.

    The first call notes which buckets are used, in which order; from the second call on the
    gathers follow a :func:`zfun.planner.schedule` made of these notes and the options.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters.
        group: the ranks that share the parameters: a group, a mesh, or the inner axis of one.
        frozen: sharded leaves that are not trained (the other part of :func:`zfun.partition`). The
            loss gets both parts combined; no gradient and no optimizer state is ever made for
            these.
        schedule: when buckets are gathered and released; by default ``ScheduleOptions()``.
        compression: the codec with which floating parameters are gathered, such as
            :func:`zfun.compression.int8`; by default gathers send exact values. The loss sees
            the decoded values, the same on every rank, in backward as in forward, and so without
            error feedback. The shards and the gradients stay exact.

    Returns:
        The same function of a ``Flat`` with placement ``S``, made by :func:`zfun.shard`.

    Raises:
        OptionError: ``secondary`` over a group that is no mesh; or, from the returned function,
            ``max_live`` is smaller than the largest bucket.
        PlacementError: from the returned function, for parameters that are not sharded over
            ``group``.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = zf.shard_params(lambda params, batch: (params["w"] * batch).sum(), group)
        ...     params = zf.shard({"w": torch.tensor([1.0, 2.0, 3.0])}, group)
        ...     return loss(params, torch.tensor(2.0)).item()
        >>> zf.simulate(2, main)
        [12.0, 12.0]
    """
    check_shardable(group, "shard_params()")
    check_loss(loss, "shard_params()")
    warn_of_whole_loss(loss)
    check_repeatable(compression, "shard_params()")
    options = schedule or ScheduleOptions()
    secondary_of(group, options)
    if isinstance(loss, CastLoss):
        # [Note: where the cast is]
        return dataclasses.replace(
            loss, loss=ShardedLoss(loss.loss, group, frozen, options, compression)
        )
    return ShardedLoss(loss, group, frozen, options, compression)


class ShardedLoss(ZfunLoss):
    """A loss of sharded parameters that remembers the order in which buckets are used.

    Attributes:
        loss: the loss of lazy leaves or plain tensors.
        group: the ranks that share the parameters.
        frozen: the leaves that are not trained.
        options: of the schedules.
        secondary: the group over which backward gathers, if not ``group``.
        codec: of the gathers; ``None`` sends exact values.
        learns: whether a call may teach the order of use.
    """

    learns = True

    def __init__(
        self,
        loss: Loss,
        group: Group,
        frozen: Flat | None,
        options: ScheduleOptions,
        codec: Codec | None = None,
    ) -> None:
        self.loss = loss
        self.group = group
        self.frozen = None if frozen is None else _check(frozen, group)
        self.options = options
        self.secondary = secondary_of(group, options)
        self.codec = codec
        self._plans: dict[tuple[tuple[Layout, ...], tuple[bool, ...]], SchedulePlan] = {}

    @property
    def schedules(self) -> list[Schedule]:
        """One schedule for each layout of the parameters, in memory or in a store.

        A schedule is complete after the first gradient.
        """
        return [plan.schedule for plan in self._plans.values()]

    @ops.uncompiled
    def __call__(self, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of sharded parameters."""
        if ops.is_capturing():
            raise ZfunError(
                "the loss of shard_params() chooses gathers in Python and compares ranks on the "
                "host; got a call inside of the capture of a CUDA graph, which would repeat "
                "neither; use stage 0, 1 or 2, or capture the blocks of the loss"
            )
        loss, around = self.loss, contextlib.nullcontext()
        if torch.is_inference_mode_enabled():
            loss, around = torch.inference_mode()(loss), outside_inference_mode()
        flat = _check(params, self.group)
        call = dataclasses.replace(call_of(flat), codec=self.codec)
        flats = (flat,) if self.frozen is None else (flat, self.frozen)
        with around:
            if call.executor is None and needs_autograd(flat.buffers):
                parts = [gather_for(part, call.compute_dtype, call.codec) for part in flats]
                return loss(tree.combine(*parts), batch)
            shards = shards_of(flats, call)
            key = tuple(part.layout for part in flats), tuple(shard.is_stored for shard in shards)
            plan = self._plans.get(key)
            if plan is None and call.executor is not None and (order := told_order.get()):
                buckets = tuple(shard.traced(call.executor) for shard in shards)
                plan = told_plan(order, buckets, self.group.size, self.options)
            learnt = plan is not None and plan.ahead is not None
            if learnt and watching.get() is None and all(shard.is_whole for shard in shards):
                # One rank alone: there is nothing to gather or release.
                return loss(tree.combine(*_views(flats, shards, call.executor)), batch)
            learn = functools.partial(self._learn, key)
            gathered = new_gathered(flats, shards, call, self.options, plan, learn, self.secondary)
            try:
                with gathered.hooks():
                    out = loss(tree.combine(*gathered.leaves()), batch)
                gathered.check_graph(out)
                gathered.end_forward(out)
            except Exception:
                gathered.abandon()
                raise
            return out

    def _learn(self, key: Any, plan: SchedulePlan) -> None:
        if self.learns:
            self._plans[key] = plan


def _views(
    flats: Sequence[Flat], shards: Sequence[BucketShard], executor: Executor | None
) -> Iterator[tree.Tree]:
    """View the parameters of a single rank as trees, with bucket nodes behind trained ones."""
    views = [shard.views(shard.fetch()) for shard in shards]
    outputs = iter(views)
    if executor is not None:
        executor.attach(WholeParams(views, [shard.slots for shard in shards]))
        outputs = iter(
            [
                executor.open(shard.index, x) if shard.trained else x
                for shard, x in zip(shards, views, strict=True)
            ]
        )
    for flat in flats:
        yield tree_of(flat.layout, itertools.islice(outputs, len(flat.layout.buckets)))


def _check(params: tree.Tree, group: Group) -> Flat:
    if not isinstance(params, Flat):
        raise PlacementError(
            f"shard_params() takes parameters with placement S; got {type(params).__name__} of "
            "whole leaves; call zf.shard(params, group) first"
        )
    if params.placement is not S:
        raise PlacementError(
            "shard_params() takes parameters with placement S; got a Flat with placement "
            f"{params.placement!r}; call zf.redistribute(params, zf.S, group) first"
        )
    if data_axes(params.group) is not data_axes(group):
        raise PlacementError(
            "shard_params() must be given the group over which its parameters are sharded; got "
            "another one; pass the same group to zf.shard() and zf.shard_params()"
        )
    return params
