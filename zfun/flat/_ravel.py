"""Trees and flat buffers: copies into buffers, views back, and another layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.flat._flat import FLAT, Flat
from zfun.layout import LAYOUT, Layout, unique_leaves
from zfun.options import DTYPE, each, number, one_of, takes
from zfun.placement import P, Placement, R, S
from zfun.sources import Deferred


@takes(
    layout=LAYOUT,
    placement=one_of(R, P),
    scale=number(),
    dtypes=each(DTYPE, "a sequence of dtypes", "[torch.float32]") | None,
)
def ravel(
    params: tree.Tree,
    layout: Layout,
    group: Group,
    placement: Placement = R,
    *,
    scale: float = 1.0,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Flat:
    """Copy a tree into new flat buffers; the inverse of :func:`unravel`.

    Args:
        params: a tree that fits the layout.
        layout: where each leaf goes.
        group: the ranks that share the flat.
        placement: of the leaves: ``R`` or ``P``.
        scale: factor applied to every element.
        dtypes: one dtype for each bucket, to which leaves of any dtype are cast; by default those
            of the layout, which the leaves must have.

    Returns:
        A flat that shares no memory with ``params``.

    Raises:
        SpecMismatch: the tree does not fit the layout.
        LeafError: a leaf is not a tensor.
        OptionError: ``dtypes`` has more or fewer dtypes than the layout has buckets.

    Example:
        >>> import zfun as zf
        >>> w = {"w": torch.ones(2)}
        >>> zf.simulate(1, lambda group: unravel(ravel(w, zf.layout.layout_of(w), group)))
        [{'w': tensor([1., 1.])}]
    """
    if dtypes is not None and len(dtypes) != len(layout.buckets):
        raise OptionError(
            f"ravel() takes one dtype for each bucket of the layout; got {len(dtypes)} dtypes for "
            f"{len(layout.buckets)} buckets; leave dtypes out for those of the layout"
        )
    return Flat(ravel_buckets(params, layout, scale=scale, dtypes=dtypes), placement, layout, group)


def ravel_buckets(
    params: tree.Tree,
    layout: Layout,
    *,
    scale: float = 1.0,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Iterator[Tensor]:
    """Copy a tree into new flat buffers, one after the other; see :func:`ravel`."""
    values = unique_leaves(params, layout, any_dtype=dtypes is not None)
    for bucket, dtype in zip(
        layout.buckets,
        [bucket.dtype for bucket in layout.buckets] if dtypes is None else dtypes,
        strict=True,
    ):
        yield ops.ravel(
            [
                leaf.load() if isinstance(leaf, Deferred) else leaf.detach()
                for leaf in map(values.__getitem__, bucket.leaves)
            ],
            [layout.leaves[i].offset for i in bucket.leaves],
            bucket.padded_numel,
            dtype=dtype,
            device=layout.device,
            scale=scale,
        )


@takes(flat=FLAT)
def unravel(flat: Flat) -> tree.Tree:
    """View the whole buffers of a flat as a tree: zero-copy.

    Args:
        flat: with placement ``R`` or ``P``.

    Returns:
        A tree of views; tied leaves are one tensor.

    Raises:
        PlacementError: the flat is sharded.
    """
    if flat.placement is S:
        raise PlacementError(
            "unravel() views whole buffers; got a Flat with placement S; unshard() it"
        )
    return unravel_buffers(flat.buffers, flat.layout)


def unravel_buffers(buffers: Iterable[Tensor], layout: Layout) -> tree.Tree:
    """View whole buffers as the tree of a layout: zero-copy, and differentiable."""
    whole = tuple(buffers)
    views = [
        ops.unravel(whole[slot.bucket], slot.offset, slot.shape, slot.dtype)
        for slot in layout.leaves
    ]
    return tree.unflatten(layout.spec, [views[position] for position in layout.positions])


@takes(flat=FLAT, layout=LAYOUT)
def change_layout(flat: Flat, layout: Layout) -> Flat:
    """Copy whole buffers into another layout of the same leaves.

    Args:
        flat: with placement ``R`` or ``P``.
        layout: made from the layout of ``flat`` by :func:`zfun.layout.split_by_label`, or the other
            way round.

    Returns:
        A flat with that layout; ``flat`` itself if the layout is equal.

    Raises:
        PlacementError: the flat is sharded, so every rank would need shards of other ranks.
        SpecMismatch: the layout has other leaves.
    """
    if flat.layout == layout:
        return flat
    if len(flat.layout.leaves) != len(layout.leaves):
        raise SpecMismatch(
            f"change_layout() keeps the leaves; got a layout of {len(layout.leaves)} leaves for a "
            f"Flat with {len(flat.layout.leaves)}; make the layout with split_by_label()"
        )
    if flat.placement is S:
        raise PlacementError(
            "an optimizer by label takes sharded values whose buckets have one label each; got a "
            "Flat with placement S that mixes them; shard the parameters with shard(params, "
            "group, labels=optimizer.labels)"
        )
    dtypes = [
        flat.buffers[flat.layout.leaves[bucket.leaves[0]].bucket].dtype for bucket in layout.buckets
    ]
    changed = ravel(unravel(flat), layout, flat.group, flat.placement, dtypes=dtypes)
    return changed.with_missed(flat.missed)
