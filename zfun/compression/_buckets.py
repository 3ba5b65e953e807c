"""Gather and sum one bucket, exactly or with a codec, in equal or unequal pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.collectives import (
    Collective,
    Group,
    Work,
    replica_group,
    start_gather,
    start_reduce_scatter_over,
    start_scatter,
)
from zfun.compression._codecs import Codec
from zfun.compression._collectives import start, start_over
from zfun.layout import BucketSlot


def gather_bucket(
    call: Collective,
    piece: Tensor,
    group: Group,
    slot: BucketSlot,
    codec: Codec | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Work:
    """``S -> R``: start to gather a bucket from this rank's piece.

    Args:
        call: an all-gather.
        piece: of this rank.
        group: the ranks that share the bucket.
        slot: the bucket.
        codec: how floating numbers are sent; ``None`` for exactly.
        dtype: of the result with a codec.
        out: where an exact result of equal pieces may go.
    """
    send = None
    if codec is not None and piece.is_floating_point():
        send = lambda x: start(call, x, group, codec, dtype=dtype)
    if slot.pieces:
        return start_gather(group, call, piece, slot.pieces, send)
    return group.start(call, piece, out) if send is None else send(piece)


def sum_bucket(
    call: Collective, x: Tensor, group: Group, slot: BucketSlot, codec: Codec | None = None
) -> Work:
    """``P -> S``: start to sum a bucket over the mesh of a group, in pieces over the group.

    Args:
        call: a reduce-scatter.
        x: this rank's term.
        group: over which the sum is cut.
        slot: the bucket.
        codec: how floating numbers are sent; ``None`` for exactly.
    """
    send = None
    if codec is not None and x.is_floating_point():
        send = lambda x: start_over(call, x, group, codec)
    if slot.pieces:
        return start_scatter(group, call, x, slot.pieces, send)
    if send is not None:
        return send(x)
    if replica_group(group) is not None:
        # Their sum takes the place of the first one.
        return start_reduce_scatter_over(group, call, x)
    make, numel = group.allocate, x.numel() // group.size
    return group.start(call, x, None if make is None else make(numel, x.dtype, x.device))
