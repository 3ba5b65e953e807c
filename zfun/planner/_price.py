"""Bytes that each rank sends for a gather or a sum, hop by hop: closed forms.

The formulae follow from the definitions of a mesh and a codec ([Note: several axes], [Note:
messages]),
and a test compares the results with the messages of real steps. Both functions take the
number of elements, the bytes of an exact element, a group (possibly a mesh or the inner axis of a
mesh) and a codec, and return the hops in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    Op,
    ReduceScatter,
    axes_of,
    axis_of,
    replica_group,
)
from zfun.compression import Codec


class PricedHop(NamedTuple):
    """A collective over one axis, or over a group without axes.

    Attributes:
        kind: kind of the collective.
        axis: name of an axis of a mesh, such as ``"inner"``, else ``""``.
        sent_bytes: bytes that each rank sends.
    """

    kind: str
    axis: str
    sent_bytes: int


def price_of_gather(
    numel: int, itemsize: int, group: Group, codec: Codec | None
) -> list[PricedHop]:
    """Price a gather (``S -> R``) of shards of so many elements.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> hops = price_of_gather(64, 4, split(abstract_group(6), inner=3), None)
        >>> [(hop.axis, hop.sent_bytes) for hop in hops]
        [('outer', 256), ('inner', 1024)]
    """
    nbytes = numel * itemsize if codec is None else codec.message_bytes(numel)
    hops = []
    for axis in reversed(axes_of(group)):
        hops.append(_hop(AllGather(), axis, nbytes, itemsize))
        nbytes *= axis.size
    return _sent(hops)


def price_of_sum(numel: int, itemsize: int, group: Group, codec: Codec | None) -> list[PricedHop]:
    """Price a sum of so many elements over the mesh of a group, cut over the group (``P -> S``).

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> hops = price_of_sum(192, 4, split(abstract_group(6), inner=3).inner, None)
        >>> [(hop.kind, hop.sent_bytes) for hop in hops]
        [('reduce_scatter', 512), ('all_reduce', 256)]
    """
    hops: list[PricedHop] = []
    for axis in axes_of(group):
        hops.append(_scatter(numel, itemsize, axis, codec))
        numel //= axis.size
    replicas = replica_group(group)
    if replicas is None:
        return _sent(hops)
    *parts, last = axes_of(replicas)
    if codec is not None:
        # Each replica sums one piece, and all gather the sums, which are encoded again.
        piece = -(-numel // replicas.size)
        hops += price_of_sum(piece * replicas.size, itemsize, replicas, codec)
        return _sent([*hops, *price_of_gather(piece, itemsize, replicas, codec)])
    numel += -numel % math.prod(axis.size for axis in parts)
    for axis in parts:
        hops.append(_scatter(numel, itemsize, axis, None))
        numel //= axis.size
    hops.append(_hop(AllReduce(), last, numel * itemsize, itemsize))
    for axis in reversed(parts):
        hops.append(_hop(AllGather(), axis, numel * itemsize, itemsize))
        numel *= axis.size
    return _sent(hops)


def _scatter(numel: int, itemsize: int, group: Group, codec: Codec | None) -> PricedHop:
    if codec is None:
        return _hop(ReduceScatter(), group, numel * itemsize, itemsize)
    return _hop(AllToAll(), group, codec.message_bytes(numel // group.size) * group.size, itemsize)


def _hop(op: Op, group: Group, nbytes: int, itemsize: int) -> PricedHop:
    return PricedHop(op.kind, axis_of(group), op.sent_bytes(nbytes, 0, group.size, itemsize))


def _sent(hops: list[PricedHop]) -> list[PricedHop]:
    """Leave out axes of one rank, which send nothing."""
    return [hop for hop in hops if hop.sent_bytes] or hops[:1]
