"""The ranks that a function over a group asks for.

[Note: ranks that take part]

A function over a group asks one of three questions about ranks:

* Who has a batch? :func:`sum_group`: sums of gradients, losses and metrics go over these ranks.
  They are more than the ranks of the group where values are cut over some axes of a mesh and
  repeated along others.
* Who must agree? :func:`agreement_group`: on parameters, on skipped steps, on the order of buckets.
* Who starts collectives in one order? The ranks of each axis, see [Note: several axes]. Ranks
  along other axes are independent.

Ranks along a model axis have the same batch and other leaves, so they neither sum gradients nor
hold equal parameters. They share the norm and the decision to skip a step: :func:`model_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from zfun.collectives._axes import Axis
from zfun.collectives._group import Group, Wrapper
from zfun.collectives._mesh import Hybrid, Mesh
from zfun.collectives._ops import CALL, Collective, Reduce, ReduceScatter
from zfun.collectives._work import Work
from zfun.errors import OptionError, PlacementError
from zfun.options import takes


@final
class DataAxes(Wrapper):
    """The data axes, with the groups of the model axes along which a norm adds up too."""

    def __init__(self, group: Group, model: Sequence[Group]) -> None:
        super().__init__(group)
        self.model = tuple(model)
        sums = sum_group(group)
        self.sums = self if sums is group else DataAxes(sums, model)

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        return self.wrapped.start(call, x, out)

    def __repr__(self) -> str:
        return repr(self.wrapped)


def model_groups(group: Group) -> tuple[Group, ...]:
    """Return the groups of the model axes beside the data axes; none for most groups."""
    return group.model if isinstance(group, DataAxes) else ()


def whole_group(group: Group) -> Group | None:
    """Return all ranks of a run, along data axes and model axes; ``None`` without a mesh."""
    if not isinstance(group, DataAxes):
        return agreement_group(group)
    axes = [axis for each in (group.sums, *group.model) for axis in axes_of(each)]
    homes = [axis.home if isinstance(axis, Axis) else None for axis in axes]
    if homes[0] is None or any(home is not homes[0] for home in homes):
        return None
    names = {axis.axis for axis in axes if isinstance(axis, Axis)}
    found: Group = homes[0].along(tuple(name for name in homes[0].names if name in names))
    return found


def data_axes(group: Group) -> Group:
    """Return the data axes alone."""
    return group.wrapped if isinstance(group, DataAxes) else group


@takes()
def sum_group(group: Group) -> Group:
    """Return the ranks that have batches: sums of gradients, losses and metrics go over them.

    Args:
        group: any group, over which values are cut.

    Returns:
        The group itself, or all axes where values over ``group`` are repeated along others.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> mesh = split(abstract_group(6), inner=3)
        >>> sum_group(mesh.inner) is mesh, sum_group(mesh) is mesh
        (True, True)
    """
    return group.sums if isinstance(group, Hybrid | DataAxes) else group


@takes()
def agreement_group(group: Group) -> Group:
    """Return the ranks that must agree: on parameters, on skipped steps, on the order of buckets.

    These are the ranks that sum.

    Args:
        group: any group, over which values are cut.

    Returns:
        The group itself, or all axes where values over ``group`` are repeated along others.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> mesh = split(abstract_group(6), inner=3)
        >>> agreement_group(mesh.inner) is mesh
        True
    """
    return sum_group(group)


def replica_group(group: Group) -> Group | None:
    """Return the axes along which values over a group are repeated, if sums go over them.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> mesh = split(abstract_group(6), inner=3)
        >>> replica_group(mesh.inner), replica_group(mesh)
        (<outer axis: rank 0 of 2>, None)
    """
    group = data_axes(group)
    return group.replicas if isinstance(group, Hybrid) else None


def axes_of(group: Group) -> list[Group]:
    """Return the groups that a collective goes over, innermost first: of one axis, the group."""
    group = data_axes(group)
    return [*group.axes] if isinstance(group, Axis | Hybrid | Mesh) else [group]


@takes()
def axis_of(group: Group) -> str:
    """Return the name of an axis of a mesh, such as ``"inner"``, or ``""`` for other groups.

    Args:
        group: any group.

    Returns:
        The name.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> axis_of(split(abstract_group(6), inner=3).inner)
        'inner'
    """
    group = data_axes(group)
    if isinstance(group, Axis | Hybrid):
        return " x ".join(axis.axis for axis in reversed(group.axes))
    return ""


@takes()
def check_shardable(group: Group, what: str) -> None:
    """Refuse an axis over which values are repeated: its shards are not pieces of the mesh's.

    Args:
        group: the ranks to shard over.
        what: the function that shards, for the message.

    Raises:
        PlacementError: ``group`` is such an axis.

    Example:
        >>> from zfun.collectives import abstract_group, split
        >>> check_shardable(split(abstract_group(6), inner=3).inner, "shard()")
    """
    group = data_axes(group)
    if isinstance(group, Hybrid) and group.replicas is None:
        raise PlacementError(
            f"{what} shards over a mesh or its inner axis; got its outer axis, which replicates; "
            "pass mesh.inner"
        )


@takes(call=CALL)
def start_reduce_scatter_over(group: Group, call: Collective, x: Tensor) -> Work:
    """``P -> S``: start a sum over the mesh of a group, sharded over the group.

    Args:
        group: a group, a mesh, or axes of one.
        call: a reduce-scatter.
        x: 1-D; the size of ``group`` divides its length.

    Returns:
        The pending piece of this rank.

    Raises:
        OptionError: another collective.
        PlacementError: values are repeated over ``group``, as over the outer axis of a mesh.

    Example:
        >>> import torch
        >>> from zfun.collectives import simulate, split
        >>> def main(group):
        ...     mesh = split(group, inner=2)
        ...     call, x = Collective(ReduceScatter(), "grads"), torch.tensor([1, 10])
        ...     return start_reduce_scatter_over(mesh.inner, call, x).wait().item()
        >>> simulate(4, main)
        [4, 40, 4, 40]
    """
    check_shardable(group, "start_reduce_scatter_over()")
    if not isinstance(call.op, ReduceScatter):
        raise OptionError(
            f"start_reduce_scatter_over() is for reduce_scatter; got {call.op.kind}; pass another "
            "collective to group.start()"
        )
    group = data_axes(group)
    return group.start_sum(call, x) if isinstance(group, Hybrid) else group.start(call, x)


def start_reduce_to(group: Group, call: Collective, x: Tensor, rank: int) -> Work:
    """``P -> S``: start a sum over the mesh of a group, whose whole goes to one rank of the group.

    ``call`` gives name, part and stream. The result is of use on ``rank`` alone.

    Example:
        >>> import torch
        >>> from zfun.collectives import simulate, split
        >>> def main(group):
        ...     mesh, call = split(group, inner=2), Collective(Reduce())
        ...     return start_reduce_to(mesh.inner, call, torch.tensor([1, 10]), 1).wait().tolist()
        >>> simulate(4, main)[1]
        [4, 40]
    """
    call = Collective(Reduce(rank), call.name, call.part, call.stream)
    group = data_axes(group)
    return group.start_sum(call, x) if isinstance(group, Hybrid) else group.start(call, x)
