"""Sum gradients over the ranks inside backward: each rank keeps a part of the sum, or all."""

from __future__ import annotations

import dataclasses
from typing import Any

from zfun.collectives import Group, axis_of, check_shardable, sum_group
from zfun.errors import PlacementError
from zfun.flat import Flat
from zfun.options import FUNCTION, GROUP, takes
from zfun.placement import P, R, S
from zfun.transforms.call._hooks import SumHook
from zfun.transforms.grads._gradient_function import GradientFunction
from zfun.transforms.grads._value import changed_grads, check_gradient
from zfun.transforms.values._redistribute import redistribute
from zfun.typing import Gradient


@takes(vg=FUNCTION, group=GROUP)
def shard_grads(vg: Gradient, group: Group) -> Gradient:
    """Sum gradients over the ranks and keep this rank's part: ZeRO-2 (``P -> S``).

    The reduce-scatter of a bucket starts inside backward, as soon as the gradients are complete, so
    that whole gradients never exist at once. Around :func:`accumulate` the reduce-scatter runs
    once, after the last micro-batch.

    Args:
        vg: a gradient function whose gradients are partial.
        group: the ranks that share the sum: the group of the gradients, or the inner axis of the
            mesh. In the latter case the shards are summed over the outer axis too, and every row
            has the same.

    Returns:
        A gradient function whose gradients are a ``Flat`` with placement ``S``.

    Raises:
        PlacementError: the gradients are not partial, or of another group.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: (params["w"] * batch).sum()
        >>> def main(group):
        ...     vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
        ...     batch = torch.tensor(float(group.rank))
        ...     loss, grads = zf.shard_grads(vg, group)({"w": torch.ones(3)}, batch)
        ...     return grads.placement, zf.unshard(grads)["w"]
        >>> zf.simulate(2, main)[0]
        (S, tensor([0.5000, 0.5000, 0.5000]))
    """
    check_shardable(group, "shard_grads()")
    return _summed(vg, SumHook(group, S), "shard_grads()")


@takes(vg=FUNCTION, group=GROUP)
def replicate_grads(vg: Gradient, group: Group) -> Gradient:
    """Sum gradients over the ranks inside backward and keep the whole sum (``P -> R``).

    The all-reduce of a bucket starts inside backward, as soon as the gradients are complete.
    :func:`apply` would send the same bytes afterwards. Around :func:`accumulate` the all-reduce
    runs once, after the last micro-batch.

    Args:
        vg: a gradient function whose gradients are partial.
        group: the group of the gradients; on a mesh, the whole mesh.

    Returns:
        A gradient function whose gradients are a ``Flat`` with placement ``R``.

    Raises:
        PlacementError: the gradients are not partial, or of another group.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: (params["w"] * batch).sum()
        >>> def main(group):
        ...     vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
        ...     vg = zf.transforms.replicate_grads(vg, group)
        ...     loss, grads = vg({"w": torch.ones(3)}, torch.tensor(float(group.rank)))
        ...     return grads.placement, zf.unshard(grads)["w"]
        >>> zf.simulate(2, main)[0]
        (R, tensor([0.5000, 0.5000, 0.5000]))
    """
    if sum_group(group) is not group:
        raise PlacementError(
            f"replicate_grads() takes the group of its gradients; got the {axis_of(group)} axis "
            "of a mesh; pass the mesh itself"
        )
    return _summed(vg, SumHook(group, R), "replicate_grads()")


def _summed(vg: Gradient, hook: SumHook, name: str) -> Gradient:
    """Put a sum into backward; a function that zfun did not make is summed after each call."""
    check_gradient(vg, name)
    group, placement = hook.group, hook.placement
    if isinstance(vg, GradientFunction) and vg.placement in (None, P):
        if vg.group is None:
            raise PlacementError(
                f"{name} takes gradients with placement P; got ones that are this rank's own; "
                "wrap them in data_parallel() first"
            )
        if vg.group is not sum_group(group):
            raise PlacementError(
                f"{name} must be given the group of its gradients; got another one; pass the same "
                "group to data_parallel() and "
                f"{name}{', or the inner axis of that mesh' if placement is S else ''}"
            )
        # The sum comes before other hooks: a bucket moves to a store after the reduction.
        hooks = (dataclasses.replace(hook, codec=vg.codec), *vg.hooks)
        return dataclasses.replace(
            vg, placement=placement, over=group, hooks=hooks, _agreed=vg._agreed
        )

    def delivered(grads: Any) -> Flat:
        if not isinstance(grads, Flat):
            raise PlacementError(
                f"{name} takes gradients with placement P; got {type(grads).__name__} of whole "
                "leaves; wrap them in data_parallel() first"
            )
        if grads.placement is placement and grads.group is group:
            return grads
        return redistribute(grads, placement, group, name="grads")

    return changed_grads(vg, delivered)
