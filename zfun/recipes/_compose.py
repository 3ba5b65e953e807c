"""The transforms of each stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zfun import tree
from zfun.collectives import Group, sum_group
from zfun.compression import Codec
from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.optim import Optimizer
from zfun.recipes._precision import Precision
from zfun.stores import Offload, Store
from zfun.transforms import (
    ScheduleOptions,
    data_parallel,
    offload_grads,
    offload_loss,
    offload_optimizer,
    probe,
    replicate_grads,
    shard_grads,
    shard_optimizer,
    shard_params,
    value_and_grad,
)
from zfun.transforms.buffers import views_by_leaf
from zfun.transforms.grads._gradient import GradientFunction
from zfun.transforms.optimizer.in_backward import UpdateHook
from zfun.typing import Gradient, Loss


def optimizer_of(
    stage: int,
    rule: Optimizer,
    group: Group,
    bucket_bytes: int,
    offload: Offload,
) -> tuple[Optimizer, Optimizer]:
    """Return the optimizer of a stage before and after it is offloaded."""
    probe(rule)
    if stage == 3 and rule.partial is not None:
        raise OptionError(
            "an optimizer that sums the terms of gradients by itself, as onebit_adam() does, "
            "keeps whole values on every rank, which stage 3 is there to avoid; got stage 3; use "
            "stage 0, 1 or 2"
        )
    if stage >= 1:
        rule = shard_optimizer(rule, group, bucket_bytes=bucket_bytes)
    if offload.optimizer is None:
        return rule, rule
    return rule, offload_optimizer(rule, offload.optimizer, fraction=offload.fraction)


def whole_loss(
    stage: int,
    loss_fn: Loss,
    group: Group,
    frozen: Flat | None,
    store: Store | None,
    schedule: ScheduleOptions,
    codec: Codec | None,
) -> Loss:
    """Return a loss of the trained parameters alone, in the placement of the stage."""
    if stage == 3:
        loss = shard_params(loss_fn, group, frozen=frozen, schedule=schedule, compression=codec)
        return loss if store is None else offload_loss(loss, store)
    if frozen is None:
        return loss_fn
    rest = views_by_leaf(frozen.buffers, frozen.layout)
    return lambda params, batch: loss_fn(tree.combine(params, rest), batch)


def gradient(
    stage: int,
    loss: Loss,
    group: Group,
    policy: Precision,
    bucket_bytes: int,
    hook: UpdateHook,
    store: Store | None,
    codec: Codec | None,
    on_unused: Callable[[int], None],
    *,
    once: bool,
) -> Gradient:
    vg: Gradient = data_parallel(
        replace(value_and_grad(loss), on_unused=on_unused),
        sum_group(group),
        reduce_dtype=policy.reduce,
        bucket_bytes=bucket_bytes,
        compression=codec,
    )
    if stage >= 2:
        summed = shard_grads(vg, group)
        assert isinstance(summed, GradientFunction)
        vg = replace(summed, hooks=(*summed.hooks, hook), _agreed=summed._agreed)
    elif stage == 0 and once:
        # Whole gradients of several micro-batches are added before the sum over the ranks.
        vg = replicate_grads(vg, sum_group(group))
    return vg if store is None else offload_grads(vg, store)
