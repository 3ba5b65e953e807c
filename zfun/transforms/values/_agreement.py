"""Compare a replicated tree across ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group, LeafRecord, agreement_group, check_same, sum_group
from zfun.errors import ZfunError
from zfun.layout import DEFAULT_BUCKET_BYTES, PLACEMENT, Layout, labels_of, layout_of
from zfun.options import FLOATING, NAMES, integer, one_of, takes
from zfun.placement import PlacementRule, Sharded
from zfun.sources import Deferred
from zfun.transforms.values.building import is_on_meta


@takes(
    bucket_bytes=integer(1),
    persistence=integer(0),
    order=NAMES | None,
    dtype=FLOATING | None,
    compare=one_of("values", "unrounded", "forms"),
    placement=PLACEMENT | None,
)
def check_agreement(
    params: tree.Tree,
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    order: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    compare: str = "values",
    placement: Sharded | PlacementRule | None = None,
) -> Layout:
    """Compare a replicated tree across ranks with one all-gather, before any other collective.

    Args:
        params: a tree of tensors and deferred leaves. The values of deferred leaves are not
            compared here, but while they are made.
        group: the ranks that hold the tree; for an axis of a mesh, all ranks of the mesh.
        bucket_bytes: the most bytes of a bucket; compared too.
        persistence: the largest leaves of separate buckets; compared too.
        order: of the leaves in the buckets; compared too.
        dtype: the dtype of floating leaves in the layout; by default that of each leaf.
        compare: ``"values"``, which are rounded to ``dtype`` first; ``"unrounded"`` values; or
            ``"forms"``, the shapes and dtypes alone.
        placement: how the ranks cut the buckets; compared too.

    Returns:
        The layout of the tree for this group, in equal pieces.

    Raises:
        SpecMismatch: names the leaves that differ, the ranks and both sides.
    """
    found, values = tree.leaves(params), compare != "forms"
    rounded = dtype if compare == "values" else None
    try:
        layout: Layout | ZfunError = layout_of(
            params, sum_group(group).size, bucket_bytes, persistence, order, dtype
        )
    except ZfunError as error:
        # Tell the other ranks before this rank raises, so that no rank waits.
        layout = error
    if agreement_group(group).size > 1:
        entries = [
            LeafRecord("(bucket_bytes)", str(bucket_bytes), ""),
            LeafRecord("(persistence)", str(persistence), ""),
        ]
        entries.append(LeafRecord("(order)", _order_in_words(order), ""))
        for path, leaf in zip(tree.paths(params), found, strict=True):
            if isinstance(leaf, Tensor):
                is_dense = leaf.layout == torch.strided and not leaf.is_quantized
                entries.append(
                    LeafRecord(
                        path,
                        f"{leaf.dtype} {tuple(leaf.shape)}{' on meta' * is_on_meta(leaf)}",
                        str(ops.fingerprint(leaf, rounded)) if values and is_dense else "",
                    )
                )
            elif isinstance(leaf, Deferred):
                # In a broadcast rank 0 may have tensors, and the others deferred leaves.
                note = " (deferred)" if values else ""
                entries.append(LeafRecord(path, f"{leaf.dtype} {tuple(leaf.shape)}{note}"))
            else:
                entries.append(LeafRecord(path, type(leaf).__name__, ""))
        if isinstance(layout, Layout):
            entries.append(LeafRecord("(ties)", str(layout.positions), ""))
            if isinstance(placement, Sharded):
                entries.append(LeafRecord("(placement)", repr(placement), ""))
            elif placement is not None:
                for slot, cut in zip(layout.leaves, labels_of(layout, placement), strict=True):
                    entries.append(LeafRecord(f"(placement of {slot.path})", repr(cut), ""))
        check_same(entries, agreement_group(group), "parameters")
    if isinstance(layout, ZfunError):
        raise layout
    return layout


def _order_in_words(order: Sequence[str] | None) -> str:
    """Name the first leaves, and add a checksum of all."""
    return (
        "that of the tree"
        if order is None
        else f"{', '.join(map(str, order[:4]))}, ... "
        f"({zlib.crc32(repr(tuple(order)).encode()):08x})"
    )
