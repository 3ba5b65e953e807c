"""Change the placement of a value: the one place that chooses a collective."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zfun import collectives, ops, stores
from zfun.collectives import AllGather, AllReduce, Group, ReduceScatter, data_axes, sum_group
from zfun.errors import PlacementError
from zfun.flat import FLAT, Flat, call_site, own_pieces
from zfun.options import ANY, instance, takes
from zfun.placement import P, Placement, R, S
from zfun.transforms.values._communicate import communicate


@ops.uncompiled
@takes(value=ANY, placement=instance(Placement, "a placement", "zf.R"), into=FLAT | None)
def redistribute(
    value: Flat,
    placement: Placement,
    group: Group,
    *,
    name: str = "value",
    donate: bool = False,
    zero_copy: bool = False,
    into: Flat | None = None,
) -> Flat:
    """Change the placement of a value; the meaning stays.

    ====== ==================== ======================
    from   to ``R``             to ``S``
    ====== ==================== ======================
    ``R``  –                    slice (nothing sent)
    ``P``  all-reduce           reduce-scatter
    ``S``  all-gather           –
    ====== ==================== ======================

    To ``P``: rank 0 keeps a replicated value and the others zero; a sharded one is padded with
    zeros. Nothing is sent.

    On a mesh a value may go from one group to another. A value that is sharded over the inner axis
    is replicated over the outer one, and a partial value has one term for every rank of the mesh:

    ================ ========================================== ==================
    from             to ``S`` over the inner axis               to ``S`` over all
    ================ ========================================== ==================
    ``R``            slice                                      slice
    ``P``            reduce-scatter inner, all-reduce outer     reduce-scatter
    ``S`` (inner)    –                                          slice
    ``S`` over all   all-gather outer                           –
    ================ ========================================== ==================

    Args:
        value: a ``Flat``.
        placement: the placement to reach.
        group: the group of ``value``, or on a mesh another group of the same mesh.
        name: of the value, in records and errors.
        donate: overwrite ``value`` with the sum, or free ``value`` early; ``value`` is dead
            afterwards.
        zero_copy: let the gathered buffers show the memory of the shards; call
            ``collectives.await_readers`` before you write to a shard.
        into: a dead value of the target placement, layout and dtype, whose buffers the gather may
            overwrite. ``value`` may be slices of these buffers.

    Returns:
        A ``Flat`` with that placement over ``group``; the same one where nothing changes.

    Raises:
        PlacementError: ``value`` is not a ``Flat`` over ``group`` or the mesh of ``group``, or the
            target is sharded over an outer axis, or partial over an axis.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     whole = zf.replicate({"w": torch.ones(64)}, group)
        ...     return zf.redistribute(whole, zf.S, group).buffers[0].numel()
        >>> zf.simulate(2, main)
        [32, 32]
    """
    _check_target(value, placement, group)
    group = value.group if data_axes(value.group) is data_axes(group) else group
    given, value = value, stores.resident(value)
    if donate and value is not given:
        # Free the buffers in the store, because the fetched copies replace the stored buffers.
        given.life.discard(f"redistribute({name!r}, donate=True) at {call_site()}")
    here, before = value.group, value.placement
    if before is placement and (here is group or before is not S):
        return value if here is group else value.with_buffers(value.buffers, group=group)
    if before is R and placement is S:
        return value.with_buffers(own_pieces(value, group), S, group)
    if before is R:
        kept = (x if group.rank == 0 else torch.zeros_like(x) for x in value.buffers)
        return value.with_buffers(kept, P, group)
    if before is P and placement is R:
        sums = communicate(value, AllReduce(), here, name, donate=donate)
        return value.with_buffers(sums, R, group)
    if before is P:
        sums = communicate(value, ReduceScatter(), group, name, donate=donate)
        return value.with_buffers(sums, S, group)
    if placement is P:
        # Of replicas only the first contributes to the sum.
        replicas = collectives.replica_group(here)
        is_first = replicas is None or replicas.rank == 0
        return value.with_buffers(_embedded(value, is_first), P, group)
    if placement is R:
        zero_copy = zero_copy and here is group
        whole = communicate(
            value, AllGather(), here, name, donate=donate, zero_copy=zero_copy, into=into
        )
        return value.with_buffers(whole, R, group)
    if (across := collectives.replica_group(group)) is not None:
        joined = communicate(value, AllGather(), across, name, donate=donate)
        return value.with_buffers(joined, S, group)
    across = collectives.replica_group(here)
    assert across is not None
    pieces = (x.view(across.size, -1)[across.rank] for x in value.buffers)
    return value.with_buffers(pieces, S, group)


def _check_target(value: Flat, placement: Placement, group: Group) -> None:
    if not isinstance(value, Flat):
        raise PlacementError(
            f"redistribute() takes a Flat; got {type(value).__name__}; make one with shard() or "
            "replicate()"
        )
    if data_axes(sum_group(value.group)) is not data_axes(sum_group(group)):
        raise PlacementError(
            "redistribute() must be given the group of the value; got another one; unshard() the "
            "value and shard it over the other group"
        )
    if placement is S:
        collectives.check_shardable(group, "redistribute()")
        for slot in value.layout.buckets:
            slot.span(group.rank, group.size)
    elif placement is P and sum_group(group) is not group:
        axis = collectives.axis_of(group)
        raise PlacementError(
            f"a value is partial over a whole mesh; got its {axis} axis; pass the mesh"
        )


def _embedded(value: Flat, is_kept: bool) -> Iterator[Tensor]:
    """Yield whole buffers of zeros around this rank's pieces."""
    for index, (piece, slot) in enumerate(zip(value.buffers, value.layout.buckets, strict=True)):
        start, stop = value.span(index)
        kept = piece if is_kept else torch.zeros_like(piece)
        yield torch.nn.functional.pad(kept, (start, slot.padded_numel - stop))
