"""Find out what a loss uses, in which order, without any data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zfun import tree
from zfun.collectives import Group, Mesh, abstract_group, check_shardable, mesh_of, split
from zfun.errors import ZfunError, checked_options
from zfun.flat import Flat
from zfun.layout import DEFAULT_BUCKET_BYTES, LabelFn, layout_of, split_by_label
from zfun.placement import S
from zfun.planner._abstract import abstract
from zfun.transforms import (
    CastLoss,
    ShardedLoss,
    Trace,
    data_parallel,
    shard_params,
    value_and_grad,
)
from zfun.typing import Loss

__all__ = ["order_of_use", "trace"]


@checked_options
def trace(
    loss: Loss,
    params: tree.Tree,
    batch: Any,
    size: int | Group,
    *,
    trainable: Callable[[str, Any], bool] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    order: Sequence[str] | None = None,
    labels: LabelFn | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Trace:
    """Run a loss and its gradient on fake tensors, and return what it uses, in which order, forward and backward.

    Nothing is computed and nothing is sent: parameters may be on the ``meta`` device, and there may
    be any number of ranks.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters;
            :func:`zfun.cast` may stand around it.
        params: a tree of tensors; only their shapes and dtypes count, and which are tied.
        batch: a batch of a rank; of its tensors, too, only shapes and dtypes count.
        size: the number of ranks that share the parameters, or a group of as many: a mesh, or the
            inner axis of one. Nothing is sent there.
        trainable: which leaves are trained, by path and leaf; by default all.
        bucket_bytes: where a bucket closes, in bytes.
        persistence: leaves of at most so many elements lie in buckets of their own.
        order: of the leaves in the buckets, as :func:`zfun.layout.layout_of` takes it.
        labels: of trained leaves, those of different labels in different buckets, as
            :func:`zfun.shard` takes it.
        reduce_dtype: of the gradients, as :func:`zfun.data_parallel` takes it; by default that of
            the parameters, float32 for half types.

    Returns:
        The trace, which :func:`zfun.planner.schedule` takes.

    Example:
        >>> import zfun as zf
        >>> params = {"in": torch.empty(8, 64, device="meta"), "out": torch.empty(64, device="meta")}
        >>> loss = lambda p, x: (torch.tanh(x @ p["in"]) @ p["out"]).sum()
        >>> found = zf.planner.trace(loss, params, torch.empty(2, 8, device="meta"), 1024, bucket_bytes=1)
        >>> found.forward, [f"{event.kind} {event.bucket}" for event in found.backward]
        ((0, 1), ['use 1', 'reduce 1', 'reduce 0'])
    """
    with abstract() as fake:
        group = _abstract_like(size) if isinstance(size, Group) else abstract_group(size)
        chosen, rest = (params, None) if trainable is None else tree.partition(params, trainable)

        def placed(part: tree.Tree, labels: LabelFn | None) -> Flat:
            layout = layout_of(fake(part), mesh_of(group).size, bucket_bytes, persistence, order)
            layout = layout if labels is None else split_by_label(layout, labels)
            shards = [
                torch.empty(bucket.padded_numel // group.size, dtype=bucket.dtype)
                for bucket in layout.buckets
            ]
            return Flat(shards, S, layout, group)

        frozen = placed(rest, None) if rest is not None and tree.leaves(rest) else None
        wrapped = shard_params(loss, group, frozen=frozen)
        vg = data_parallel(value_and_grad(wrapped), mesh_of(group), reduce_dtype=reduce_dtype)
        vg(placed(chosen, labels), fake(batch))
    inner = wrapped.loss if isinstance(wrapped, CastLoss) else wrapped
    if not isinstance(inner, ShardedLoss) or not inner.schedules:
        raise ZfunError(
            f"a loss of whole parameters can be traced; got {type(loss).__name__}, which was "
            "never called on them"
        )
    return inner.schedules[0].trace


def _abstract_like(group: Group) -> Group:
    """Return a group with the axes of another one, in which nothing moves."""
    mesh = mesh_of(group)
    if not isinstance(mesh, Mesh):
        return abstract_group(group.size)
    check_shardable(group, "trace()")
    made = split(abstract_group(mesh.size), mesh.inner.size)
    return made if group is mesh else made.inner


def order_of_use(loss: Loss, params: tree.Tree, batch: Any) -> tuple[str, ...]:
    """Run a loss on fake tensors, and return the paths of its leaves in the order in which it first uses them.

    Buckets that hold leaves in this order are gathered one after the other, each for a short while,
    and their gradients are complete one after the other, from the last one on. A tree whose own
    order is another one (a head before the body, all norms before all weights) needs more of them
    at once. No bit of the result depends on it.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters;
            :func:`zfun.cast` may stand around it.
        params: a tree of tensors; only their shapes and dtypes count, and which are tied.
        batch: a batch of a rank; of its tensors, too, only shapes and dtypes count.

    Returns:
        The paths, for ``order=`` of :func:`zfun.shard`, :func:`zfun.replicate`, :func:`zfun.zero`
        and :func:`zfun.layout.layout_of`. Leaves that are not used are not in it. What a step has
        recorded, ``ShardedLoss.schedules[0].trace.leaves``, is the same.

    Example:
        >>> import zfun as zf
        >>> params = {"head": torch.empty(64, 9), "norm": [torch.empty(64)] * 2, "w": [torch.empty(64, 64), torch.empty(64, 64)]}
        >>> def loss(p, x):
        ...     for norm, w in zip(p["norm"], p["w"]):
        ...         x = torch.tanh(x * norm @ w)
        ...     return (x @ p["head"]).sum()
        >>> zf.planner.order_of_use(loss, params, torch.empty(2, 64))
        ('norm.0', 'w.0', 'w.1', 'head')
    """
    return trace(
        loss,
        params,
        batch,
        1,
        trainable=lambda path, leaf: leaf.is_floating_point() or leaf.is_complex(),
    ).leaves
