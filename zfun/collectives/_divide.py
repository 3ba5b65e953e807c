"""Divide a group: name the axes along which its ranks lie."""

from __future__ import annotations

import math

import numpy as np

from zfun.collectives._axes import Axis
from zfun.collectives._group import Group
from zfun.collectives._mesh import Hybrid, Mesh, NamedMesh
from zfun.collectives._roles import data_axes
from zfun.errors import OptionError
from zfun.options import integer, shown, takes


@takes()
def mesh(group: Group, **sizes: int) -> NamedMesh:
    """Name the axes along which the ranks of a group lie.

    ``mesh["dp"]`` is a group, of the ranks that differ from this one along that axis only, and so
    is ``mesh["dp", "tp"]``. Each axis has its own connections, made here; a group of several axes
    uses theirs, so ranks may ask for groups in any order.

    Args:
        group: all the ranks. Every rank calls.
        sizes: the size of each axis, the slowest first: neighbours in ``group`` lie along the last
            axis. One size may be -1, for the rest.

    Returns:
        The axes, with ``names``, ``shape``, ``sizes`` and ``coordinates``. They end with ``group``.

    Raises:
        OptionError: the sizes do not multiply to the number of ranks, there is no axis, or
            this kind of group cannot be divided.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     mesh = zf.mesh(group, pp=2, dp=-1, tp=2)
        ...     return mesh.shape, [mesh[name].rank for name in mesh.names], mesh["dp", "tp"].size
        >>> zf.simulate(12, main)[9]
        ((2, 3, 2), [1, 1, 1], 6)
    """
    _check_plain(group, "mesh()")
    if not sizes:
        raise OptionError("mesh() names at least one axis; got none; write zf.mesh(group, dp=-1)")
    for name, size in sizes.items():
        if not integer(-1).accepts(size) or size == 0:
            raise OptionError(
                f"the size of axis {name!r} must be an integer of at least 1, or -1 for the rest; "
                f"got {shown(size)}; write {name}=2"
            )
    known = math.prod(size for size in sizes.values() if size != -1)
    free = list(sizes.values()).count(-1)
    if free == 1 and group.size % known == 0:
        sizes = {x: group.size // known if size == -1 else int(size) for x, size in sizes.items()}
    elif free or known != group.size:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise OptionError(
            f"the sizes of the axes multiply to the number of ranks, of which one may be -1; got "
            f"{text} for {group.size} ranks; change a size"
        )
    ranks = np.arange(group.size).reshape(tuple(sizes.values()))
    axes = dict.fromkeys(sizes, group)
    for dim, (name, size) in reversed([*enumerate(sizes.items())]):
        parts = np.moveaxis(ranks, dim, -1).reshape(-1, size).tolist()
        axes[name] = group.subgroup(parts, name)
    return NamedMesh(axes, group)


@takes(inner=integer(1))
def split(group: Group, inner: int) -> Mesh:
    """Put the ranks of a group in rows: ranks ``0 ... inner - 1`` in the first, and so on.

    The short form of a :func:`mesh` of two axes, ``outer`` and ``inner``, whose ranks all have
    batches of their own. A value sharded over ``split(...).inner`` is replicated over the outer
    axis: hybrid sharding, where only sums of gradients leave a row. A value sharded over the result
    itself is sharded over all ranks.

    Args:
        group: all the ranks. Every rank calls.
        inner: how many ranks make a row; the ranks of one host, if the launcher numbers the ranks
            host by host.

    Returns:
        A group of all the ranks with the groups ``inner`` and ``outer`` in it. The mesh ends with
        ``group``. Ranks of the mesh count along the columns: the rank of ``group`` that is the i-th
        in row o has rank ``i * outer.size + o``.

    Raises:
        OptionError: ``inner`` does not divide the number of ranks, or this kind of group cannot be
            divided.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     mesh = zf.split(group, inner=2)
        ...     params = zf.shard({"w": torch.ones(128)}, mesh.inner)
        ...     return mesh.inner.size, mesh.outer.size, params.buffers[0].numel()
        >>> zf.simulate(6, main)[0]
        (2, 3, 96)
    """
    if group.size % inner:
        raise OptionError(
            f"split() makes rows of equal length; got {group.size} ranks and inner={inner}; "
            "use a divisor"
        )
    _check_plain(group, "split()")
    return Mesh.over(mesh(group, outer=-1, inner=inner), ("outer", "inner"))


def _check_plain(group: Group, name: str) -> None:
    if isinstance(data_axes(group), Axis | Hybrid | Mesh):
        raise OptionError(
            f"{name} takes a group without axes; got {group!r}; split the group that the mesh was "
            "made of"
        )
