"""Bytes that each rank sends for a gather or a sum, hop by hop: closed forms.

The formulae follow from the definitions of a mesh and a codec ([Note: two axes], [Note: messages]),
and a test compares the results with the messages of real steps. Both functions take the
number of elements, the bytes of an exact element, a group (possibly a mesh or the inner axis of a
mesh) and a codec, and return the hops in order.
"""

from __future__ import annotations

from typing import NamedTuple

from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    Mesh,
    Op,
    ReduceScatter,
    axis_of,
    mesh_of,
)
from zfun.compression import Codec


class Hop(NamedTuple):
    """A collective over one axis, or over a group without axes.

    Attributes:
        kind: kind of the collective.
        axis: ``"inner"`` or ``"outer"`` of a mesh, else ``""``.
        sent_bytes: bytes that each rank sends.
    """

    kind: str
    axis: str
    sent_bytes: int


def price_of_gather(numel: int, itemsize: int, group: Group, codec: Codec | None) -> list[Hop]:
    """Price a gather (``S -> R``) of shards of so many elements.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> hops = price_of_gather(64, 4, split(abstract_group(6), inner=3), None)
        >>> [(hop.axis, hop.sent_bytes) for hop in hops]
        [('outer', 256), ('inner', 1024)]
    """
    nbytes = numel * itemsize if codec is None else codec.message_bytes(numel)
    if not isinstance(group, Mesh):
        return [_hop(AllGather(), group, nbytes, itemsize)]
    outer = _hop(AllGather(), group.outer, nbytes, itemsize)
    return _sent([outer, _hop(AllGather(), group.inner, nbytes * group.outer.size, itemsize)])


def price_of_sum(numel: int, itemsize: int, group: Group, codec: Codec | None) -> list[Hop]:
    """Price a sum of so many elements over the mesh of a group, cut over the group (``P -> S``).

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> hops = price_of_sum(192, 4, split(abstract_group(6), inner=3).inner, None)
        >>> [(hop.kind, hop.sent_bytes) for hop in hops]
        [('reduce_scatter', 512), ('all_reduce', 256)]
    """
    mesh = mesh_of(group)
    if not isinstance(mesh, Mesh):
        return [_scatter(numel, itemsize, group, codec)]
    row = numel // mesh.inner.size
    first = _scatter(numel, itemsize, mesh.inner, codec)
    if group is mesh:
        return _sent([first, _scatter(row, itemsize, mesh.outer, codec)])
    if codec is None:
        return _sent([first, _hop(AllReduce(), mesh.outer, row * itemsize, itemsize)])
    # A compressed all-reduce: each rank of the column sums one piece, and all ranks gather the
    # sums, which are encoded again.
    piece = -(-row // mesh.outer.size)
    return _sent(
        [
            first,
            _scatter(piece * mesh.outer.size, itemsize, mesh.outer, codec),
            *price_of_gather(piece, itemsize, mesh.outer, codec),
        ]
    )


def _scatter(numel: int, itemsize: int, group: Group, codec: Codec | None) -> Hop:
    if codec is None:
        return _hop(ReduceScatter(), group, numel * itemsize, itemsize)
    return _hop(AllToAll(), group, codec.message_bytes(numel // group.size) * group.size, itemsize)


def _hop(op: Op, group: Group, nbytes: int, itemsize: int) -> Hop:
    return Hop(op.kind, axis_of(group), op.sent_bytes(nbytes, 0, group.size, itemsize))


def _sent(hops: list[Hop]) -> list[Hop]:
    """Leave out axes of one rank, which send nothing."""
    return [hop for hop in hops if hop.sent_bytes] or hops[:1]
