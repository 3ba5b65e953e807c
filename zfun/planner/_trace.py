"""The order in which a loss uses parameters, without any data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import (
    Group,
    abstract_group,
    axes_of,
    axis_of,
    check_shardable,
    mesh,
    replica_group,
    sum_group,
)
from zfun.errors import ZfunError
from zfun.flat import Flat, empty_like
from zfun.layout import DEFAULT_BUCKET_BYTES, LabelFn, layout_of, split_by_label
from zfun.options import ANY, FLOATING, FUNCTION, GROUP, NAMES, OF_LEAVES, instance, integer, takes
from zfun.placement import S
from zfun.planner._abstract import abstract
from zfun.sources import Deferred
from zfun.stores import Offload
from zfun.transforms import (
    CastLoss,
    ShardedLoss,
    Trace,
    data_parallel,
    shard_params,
    value_and_grad,
)
from zfun.typing import Loss


@takes(
    loss=FUNCTION,
    params=ANY,
    batch=ANY,
    size=integer(1) | GROUP,
    trainable=OF_LEAVES | None,
    bucket_bytes=integer(1),
    persistence=integer(0),
    order=NAMES | None,
    labels=OF_LEAVES | None,
    reduce_dtype=FLOATING | None,
    offload=instance(Offload, "a zf.stores.Offload", "zf.stores.Offload(params=zf.stores.host())")
    | None,
)
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
    offload: Offload | None = None,
) -> Trace:
    """Run a loss and the gradient on fake tensors, and return the buckets that they use, in order.

    The ranks compute nothing and send nothing, so parameters may be on the ``meta`` device, and the
    number of ranks is free.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters;
            may be wrapped in :func:`zfun.cast`.
        params: a tree of tensors, of which only shapes, dtypes and ties count.
        batch: the batch of a rank, of which only shapes and dtypes count.
        size: the number of ranks that share the parameters, or a group of that size, such as a mesh
            or the inner axis of a mesh. The group sends nothing.
        trainable: which leaves are trained, by path and leaf; by default all.
        bucket_bytes: the most bytes of a bucket.
        persistence: leaves of at most this many elements lie in separate, persistent buckets.
        order: of the leaves in the buckets, as in :func:`zfun.layout.layout_of`.
        labels: labels of trained leaves; leaves with different labels lie in different buckets, as
            in :func:`zfun.shard`.
        reduce_dtype: of the gradients, as in :func:`zfun.data_parallel`; by default the dtype of
            the parameters, float32 for half types.
        offload: the stores of :func:`zfun.zero`; of parameters in a store every gather has a read.

    Returns:
        The trace, which :func:`zfun.planner.schedule` takes.

    Example:
        >>> import zfun as zf
        >>> empty = lambda *shape: torch.empty(shape, device="meta")
        >>> params = {"in": empty(8, 64), "out": empty(64)}
        >>> loss = lambda p, x: (torch.tanh(x @ p["in"]) @ p["out"]).sum()
        >>> found = zf.planner.trace(loss, params, empty(2, 8), 1024, bucket_bytes=1)
        >>> found.forward, [f"{event.kind} {event.bucket}" for event in found.backward]
        ((0, 1), ['use 1', 'reduce 1', 'reduce 0'])
    """
    with abstract() as fake:
        group = _abstract_like(size) if isinstance(size, Group) else abstract_group(size)
        chosen, rest = (params, None) if trainable is None else tree.partition(params, trainable)

        def placed(part: tree.Tree, labels: LabelFn | None) -> Flat:
            layout = layout_of(fake(part), sum_group(group).size, bucket_bytes, persistence, order)
            layout = layout if labels is None else split_by_label(layout, labels)
            dtypes = [bucket.dtype for bucket in layout.buckets]
            return empty_like(Flat((), S, layout, group), dtypes, None)

        frozen = placed(rest, None) if rest is not None and tree.leaves(rest) else None
        wrapped = shard_params(loss, group, frozen=frozen)
        vg = data_parallel(value_and_grad(wrapped), sum_group(group), reduce_dtype=reduce_dtype)
        trained = placed(chosen, labels)
        vg(trained, fake(batch))
    inner = wrapped.loss if isinstance(wrapped, CastLoss) else wrapped
    if not isinstance(inner, ShardedLoss) or not inner.schedules:
        raise ZfunError(
            f"a loss of whole parameters can be traced; got {type(loss).__name__}, which was "
            "never called on them"
        )
    found = inner.schedules[0].trace
    if offload is None or offload.params is None:
        return found
    shards = [*trained.buffers, *(() if frozen is None else frozen.buffers)]
    return dataclasses.replace(
        found,
        buckets=tuple(
            dataclasses.replace(bucket, stored_itemsize=shard.dtype.itemsize)
            for bucket, shard in zip(found.buckets, shards, strict=True)
        ),
    )


def _abstract_like(group: Group) -> Group:
    """Return an abstract group with the axes of another group."""
    check_shardable(group, "trace()")
    replicas = replica_group(group)
    across = axes_of(replicas) if replicas is not None else list[Group]()
    axes = {axis_of(axis): axis.size for axis in reversed([*axes_of(group), *across])}
    if len(axes) == 1:
        return abstract_group(group.size)
    made = mesh(abstract_group(math.prod(axes.values())), **axes)
    names = [axis_of(axis) for axis in axes_of(group)]
    return made.group(*names, replicate=[axis_of(axis) for axis in across])


@takes(loss=FUNCTION, params=ANY, batch=ANY)
def order_of_use(loss: Loss, params: tree.Tree, batch: Any) -> tuple[str, ...]:
    """Run a loss on fake tensors, and return the paths of the leaves in the order of first use.

    Buckets that hold leaves in this order are gathered one after the other, each for a short while,
    and the gradients are complete one bucket after the other, from the last bucket on. A tree with
    another order (a head before the body, all norms before all weights) needs more buckets at once.
    No bit of the result depends on the order.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters;
            may be wrapped in :func:`zfun.cast`.
        params: a tree of tensors, of which only shapes, dtypes and ties count.
        batch: the batch of a rank, of which only shapes and dtypes count.

    Returns:
        The paths, for ``order=`` of :func:`zfun.shard`, :func:`zfun.replicate`, :func:`zfun.zero`
        and :func:`zfun.layout.layout_of`. Unused leaves are missing. A real step records the
        same order in ``ShardedLoss.schedules[0].trace.leaves``.

    Example:
        >>> import zfun as zf
        >>> weights = [torch.empty(64, 64), torch.empty(64, 64)]
        >>> params = {"head": torch.empty(64, 9), "norm": [torch.empty(64)] * 2, "w": weights}
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
        trainable=lambda path, leaf: (
            not isinstance(leaf, (Tensor, Deferred))
            or leaf.dtype.is_floating_point
            or leaf.dtype.is_complex
        ),
    ).leaves
