"""Lay a tree out in flat buffers, whole or in shards."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group, allocate, check_shardable, sum_group
from zfun.errors import PlacementError
from zfun.flat import Flat, own_pieces
from zfun.layout import DEFAULT_BUCKET_BYTES, PLACEMENT, LabelFn, Layout, place, split_by_label
from zfun.options import ANY, NAMES, OF_LEAVES, integer, one_of, takes
from zfun.placement import Placement, PlacementRule, R, S, Sharded
from zfun.transforms.values._agreement import check_agreement
from zfun.transforms.values._redistribute import redistribute
from zfun.transforms.values.building import Leaves, build
from zfun.typing import Params

INIT = one_of("check", "broadcast")


@ops.uncompiled
@takes(
    params=ANY,
    bucket_bytes=integer(1),
    persistence=integer(0),
    init=INIT,
    labels=OF_LEAVES | None,
    order=NAMES | None,
    placement=PLACEMENT | None,
)
def shard(
    params: Params | Flat[Params],
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    init: str = "check",
    labels: LabelFn | None = None,
    order: Sequence[str] | None = None,
    placement: Sharded | PlacementRule | None = None,
) -> Flat[Params]:
    """Keep this rank's part of a tree (``R -> S``).

    Args:
        params: a tree of tensors that every rank holds whole, or a ``Flat`` with placement ``R``.
            Leaves may be deferred (:mod:`zfun.sources`): each is made, and dropped when this rank
            has its part.
        group: the ranks that share the value: a group, a mesh, or the inner axis of a mesh, whose
            rows then hold the same.
        bucket_bytes: the most bytes of a bucket; see :func:`zfun.layout.layout_of`.
        persistence: leaves of at most this many elements lie in separate buckets; give
            :func:`zfun.shard_params` the same number.
        init: ``"check"`` compares tree, shapes, dtypes and values across ranks before any other
            collective; ``"broadcast"`` compares all but the values and takes the values of rank 0.
            The values of deferred leaves are compared when all are made.
        labels: ``label(path, leaf)``: leaves of different labels go into different buckets, for
            :func:`zfun.optim.by_label`.
        order: paths of the leaves in the order of the buckets, such as the result of
            :func:`zfun.planner.order_of_use`; by default the order of the tree. Ranks must agree on
            the order; no bit of the result depends on the order.
        placement: how the ranks cut the buckets: one of :mod:`zfun.placement`, or a rule ``(path,
            leaf) -> placement``; by default in equal pieces. A ``Flat`` keeps its own.

    Returns:
        A ``Flat`` with placement ``S`` that shares no memory with ``params``.

    Raises:
        SpecMismatch: ranks hold different trees, shapes, dtypes or values.
        LeafError: a leaf cannot be laid out.
        PlacementError: the outer axis of a mesh.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     params = zf.shard({"w": torch.arange(3.0)}, group)
        ...     return params.placement, params.buffers[0].shape, zf.unshard(params)
        >>> zf.simulate(2, main)[0]
        (S, torch.Size([32]), {'w': tensor([0., 1., 2.])})
    """
    check_shardable(group, "shard()")
    if isinstance(params, Flat):
        flat = replicate(params, group)
        return flat.with_buffers((_own(piece, group) for piece in own_pieces(flat, group)), S)
    layout = check_agreement(
        params,
        group,
        bucket_bytes=bucket_bytes,
        persistence=persistence,
        order=order,
        compare="values" if init == "check" else "forms",
        placement=placement,
    )
    return _built(params, group, S, _cut(layout, labels, placement, group), init)


@ops.uncompiled
@takes(
    params=ANY,
    bucket_bytes=integer(1),
    init=INIT,
    labels=OF_LEAVES | None,
    order=NAMES | None,
    placement=PLACEMENT | None,
)
def replicate(
    params: Params | Flat[Params],
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    init: str = "check",
    labels: LabelFn | None = None,
    order: Sequence[str] | None = None,
    placement: Sharded | PlacementRule | None = None,
) -> Flat[Params]:
    """Lay a tree out in flat buffers that every rank holds whole (``R -> R``).

    Args:
        params: a tree of tensors that every rank holds whole, and of deferred leaves.
        group: the ranks that hold the value.
        bucket_bytes: the most bytes of a bucket.
        init: ``"check"`` or ``"broadcast"``, as in :func:`shard`.
        labels: as in :func:`shard`.
        order: as in :func:`shard`.
        placement: how ranks cut the buckets when the value is sharded; as in :func:`shard`.

    Returns:
        A ``Flat`` with placement ``R`` that shares no memory with ``params``.

    Raises:
        SpecMismatch: ranks hold different trees, shapes, dtypes or values.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> zf.simulate(2, lambda group: zf.replicate({"w": torch.ones(2)}, group).placement)
        [R, R]
    """
    if isinstance(params, Flat):
        if sum_group(params.group) is not sum_group(group):
            raise PlacementError(
                "a Flat belongs to the group that it was made over; got another one; unshard() "
                "it first"
            )
        return redistribute(params, R, group)
    layout = check_agreement(
        params,
        group,
        bucket_bytes=bucket_bytes,
        order=order,
        compare="values" if init == "check" else "forms",
        placement=placement,
    )
    return _built(params, group, R, _cut(layout, labels, placement, group), init)


def _cut(
    layout: Layout, labels: LabelFn | None, cut: Sharded | PlacementRule | None, group: Group
) -> Layout:
    if labels is not None:
        layout = split_by_label(layout, labels)
    return layout if cut is None else place(layout, cut, group.size)


def _built(
    params: tree.Tree, group: Group, placement: Placement, layout: Layout, init: str
) -> Flat:
    """Build the flat leaf by leaf."""
    leaves = Leaves(params, group, init)
    flat = build(leaves, layout, group, placement)
    leaves.check()
    return flat


def _own(piece: Tensor, group: Group) -> Tensor:
    """Copy this rank's piece of a whole buffer into a symmetric buffer."""
    return allocate(group, piece.numel(), piece.dtype, piece.device).copy_(piece)
