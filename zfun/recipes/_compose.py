"""The transforms of each stage around a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zfun import transforms, tree
from zfun.collectives import sum_group
from zfun.flat import Flat
from zfun.parallel import StageFunction
from zfun.recipes._options import ZeroOptions
from zfun.transforms.buffers import buffered, unwritten, views_by_leaf
from zfun.transforms.grads._gradient import GradientFunction
from zfun.transforms.optimizer.in_backward import UpdateHook
from zfun.typing import Gradient, Loss


def gradient_of(
    recipe: ZeroOptions, fn: Callable[..., Any], frozen: Flat | None, summed: int, hook: UpdateHook
) -> Gradient:
    """Return the gradient of a loss of all leaves, for the trained ones.

    Args:
        recipe: the options.
        fn: the loss.
        frozen: the leaves that are not trained.
        summed: the stage whose sums backward takes.
        hook: steps each bucket of summed gradients.
    """
    group = recipe.group
    vg: Gradient = transforms.data_parallel(
        replace(
            transforms.value_and_grad(_loss_of_trained(recipe, fn, frozen)),
            on_unused=hook.left.add if recipe.leaves_out else lambda bucket: None,
            is_planned=isinstance(fn, StageFunction),
        ),
        sum_group(group),
        reduce_dtype=recipe.precision.reduce,
        bucket_bytes=recipe.bucket_bytes,
        compression=recipe.compression.grads,
    )
    if summed >= 2:
        vg = transforms.shard_grads(vg, group)
        assert isinstance(vg, GradientFunction)
        vg = replace(vg, hooks=(*vg.hooks, hook), _agreed=vg._agreed)
    elif summed == 0 and recipe.num_micro_batches == 1:
        # Whole gradients of several micro-batches are added before the sum over the ranks.
        vg = transforms.replicate_grads(vg, sum_group(group))
    store = recipe.offload.grads
    return vg if store is None else transforms.offload_grads(vg, store)


def _loss_of_trained(recipe: ZeroOptions, fn: Callable[..., Any], frozen: Flat | None) -> Loss:
    """Return a loss of the trained parameters alone, in the placement of the stage."""
    loss = fn if recipe.buffers is None else buffered(fn)
    loss = loss if frozen is None or recipe.stage == 3 else unwritten(loss)
    dtype = recipe.precision.compute
    loss = loss if dtype is None else transforms.cast(loss, dtype)
    if recipe.stage == 3:
        loss = transforms.shard_params(
            loss,
            recipe.group,
            frozen=frozen,
            schedule=recipe.schedule,
            compression=recipe.compression.params,
        )
        store = recipe.offload.params
        return loss if store is None else transforms.offload_loss(loss, store)
    if frozen is None:
        return loss
    rest = views_by_leaf(frozen.buffers, frozen.layout)
    return lambda params, batch: loss(tree.combine(params, rest), batch)
