"""Change the placement of a value: the one place that chooses a collective."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, compression, ops, stores, tree
from zfun.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Group,
    LeafRecord,
    Mesh,
    Op,
    ReduceScatter,
    Stream,
    Work,
    allocate,
    axis_of,
    check_same,
    check_shardable,
    is_symmetric,
    mesh_of,
    start_reduce_scatter_over,
)
from zfun.errors import OptionError, PlacementError, ZfunError, checked_options
from zfun.flat import Flat, call_site, ravel_buckets, unravel_buffers
from zfun.layout import DEFAULT_BUCKET_BYTES, LabelFn, Layout, layout_of, split_by_label
from zfun.placement import P, Placement, R, S
from zfun.transforms._cast import cast_leaves
from zfun.transforms._notes import noted
from zfun.transforms.params._lazy import materialise

__all__ = [
    "MAX_UNDER_WAY",
    "check_agreement",
    "gather",
    "gather_for",
    "needs_autograd",
    "redistribute",
    "replicate",
    "shard",
    "unshard",
]


@checked_options
def shard(
    params: tree.Tree,
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    init: str = "check",
    labels: LabelFn | None = None,
    order: Sequence[str] | None = None,
) -> Flat:
    """Keep this rank's part of a tree (``R -> S``).

    Args:
        params: a tree of tensors that every rank holds whole, or a ``Flat`` with placement ``R``.
        group: the ranks that share the value: a group, a mesh, or the inner axis of a mesh, whose
            rows then hold the same.
        bucket_bytes: where a bucket closes, in bytes; see :func:`zfun.layout.layout_of`.
        persistence: leaves of at most this many elements lie in separate buckets; give
            :func:`zfun.shard_params` the same number.
        init: ``"check"`` compares tree, shapes, dtypes and values across ranks before any other
            collective; ``"broadcast"`` compares all but the values and takes the values of rank 0.
        labels: ``label(path, leaf)``: leaves of different labels go into different buckets, for
            :func:`zfun.optim.by_label`.
        order: paths of the leaves in the order of the buckets, such as the result of
            :func:`zfun.planner.order_of_use`; by default the order of the tree. Ranks must agree on
            the order; no bit of the result depends on the order.

    Returns:
        A ``Flat`` with placement ``S`` that shares no memory with ``params``.

    Raises:
        SpecMismatch: ranks hold different trees, shapes, dtypes or values.
        LeafError: a leaf cannot be laid out.
        PlacementError: the outer axis of a mesh.

    Example:
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
        return flat.with_buffers((_own(buffer, group) for buffer in flat.buffers), S)
    layout, whole = _lay_out(params, group, bucket_bytes, persistence, init, labels, order)
    # Bucket by bucket, so that one whole bucket at a time exists beside the shards.
    return Flat((_own(buffer, group) for buffer in whole), S, layout, group)


@checked_options
def replicate(
    params: tree.Tree,
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    init: str = "check",
    labels: LabelFn | None = None,
    order: Sequence[str] | None = None,
) -> Flat:
    """Lay a tree out in flat buffers that every rank holds whole (``R -> R``).

    Args:
        params: a tree of tensors that every rank holds whole.
        group: the ranks that hold the value.
        bucket_bytes: where a bucket closes, in bytes.
        init: ``"check"`` or ``"broadcast"``, as in :func:`shard`.
        labels: as in :func:`shard`.
        order: as in :func:`shard`.

    Returns:
        A ``Flat`` with placement ``R`` that shares no memory with ``params``.

    Raises:
        SpecMismatch: ranks hold different trees, shapes, dtypes or values.

    Example:
        >>> import zfun as zf
        >>> zf.simulate(2, lambda group: zf.replicate({"w": torch.ones(2)}, group).placement)
        [R, R]
    """
    if isinstance(params, Flat):
        if mesh_of(params.group) is not mesh_of(group):
            raise PlacementError(
                "a Flat belongs to the group that it was made over; got another one; unshard() "
                "it first"
            )
        return redistribute(params, R, group)
    layout, whole = _lay_out(params, group, bucket_bytes, 0, init, labels, order)
    return Flat(whole, R, layout, group)


def _lay_out(
    params: tree.Tree,
    group: Group,
    bucket_bytes: int,
    persistence: int,
    init: str,
    labels: LabelFn | None,
    order: Sequence[str] | None,
) -> tuple[Layout, Iterator[Tensor]]:
    """Return the layout of a replicated tree, and the whole buckets, one after the other."""
    if init not in ("check", "broadcast"):
        raise OptionError(f"init must be 'check' or 'broadcast'; got {init!r}")
    layout = check_agreement(
        params,
        group,
        bucket_bytes=bucket_bytes,
        persistence=persistence,
        order=order,
        values=init == "check",
    )
    if labels is not None:
        layout = split_by_label(layout, labels)
    buckets = ravel_buckets(params, layout)
    if init == "check" or mesh_of(group).size == 1:
        return layout, buckets
    calls = (
        Collective(Broadcast(0), "params", layout.label(i), Stream.PARAMS)
        for i in range(len(layout.buckets))
    )
    return layout, (
        mesh_of(group).start(call, buffer).wait()
        for call, buffer in zip(calls, buckets, strict=True)
    )


def check_agreement(
    params: tree.Tree,
    group: Group,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    persistence: int = 0,
    order: Sequence[str] | None = None,
    values: bool = True,
) -> Layout:
    """Compare a replicated tree across ranks with one all-gather, before any other collective.

    Args:
        params: a tree of tensors.
        group: the ranks that hold the tree; for an axis of a mesh, all ranks of the mesh.
        bucket_bytes: where a bucket closes; compared too.
        persistence: the largest leaves of separate buckets; compared too.
        order: of the leaves in the buckets; compared too.
        values: whether to compare the values as well.

    Returns:
        The layout of the tree for this group.

    Raises:
        SpecMismatch: names the leaves that differ, the ranks and both sides.
    """
    found = tree.leaves(params)
    try:
        layout: Layout | ZfunError = layout_of(
            params, mesh_of(group).size, bucket_bytes, persistence, order
        )
    except ZfunError as error:
        # Tell the other ranks before this rank raises, so that no rank waits.
        layout = error
    if mesh_of(group).size > 1:
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
                        f"{leaf.dtype} {tuple(leaf.shape)}",
                        str(ops.fingerprint(leaf)) if values and is_dense else "",
                    )
                )
            else:
                entries.append(LeafRecord(path, type(leaf).__name__, ""))
        if isinstance(layout, Layout):
            entries.append(LeafRecord("(ties)", str(layout.positions), ""))
        check_same(entries, mesh_of(group), "parameters")
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


def unshard(value: Flat) -> tree.Tree:
    """Return the whole tree on every rank (``S -> R``), as ordinary tensors.

    Args:
        value: a ``Flat`` of any placement; a partial one is summed.

    Returns:
        A tree of new tensors; tied leaves are one tensor. Every rank must call.

    Example:
        >>> import zfun as zf
        >>> zf.simulate(2, lambda group: zf.unshard(zf.shard({"w": torch.ones(2)}, group)))[1]
        {'w': tensor([1., 1.])}
    """
    if not isinstance(value, Flat):
        raise PlacementError(
            f"unshard() takes a Flat; got {type(value).__name__}; a tree of whole tensors needs "
            "no unshard()"
        )
    with torch.no_grad():
        whole = redistribute(value, R, value.group, name="unshard")
        buffers = [
            buffer.clone() if buffer is old else buffer
            for buffer, old in zip(whole.buffers, value.buffers, strict=True)
        ]
        return unravel_buffers(buffers, value.layout)


def gather(value: tree.Tree) -> tree.Tree:
    """Return whole parameters for use in a loss (``S -> R``), differentiably.

    On a ``Flat``, gather runs one all-gather for each bucket. The derivative is a reduce-scatter,
    so gather composes with autograd and ``torch.func``. On a subtree of the lazy leaves of
    :func:`zfun.shard_params`, gather loads the buckets at once, for a block under
    ``torch.compile`` or a ``torch.func`` transform inside the loss.

    Args:
        value: a ``Flat``, or a tree of lazy leaves and tensors.

    Returns:
        A tree of whole tensors. Tensors of lazy leaves may be memory of the parameters, so
        ``clone()`` before you keep one.

    Raises:
        PlacementError: the flat is partial.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     params = zf.shard({"w": torch.tensor([1.0, 2.0])}, group)
        ...     loss = lambda params: (zf.gather(params)["w"] ** 2).sum() / group.size
        ...     return zf.unshard(torch.func.grad(loss)(params))
        >>> zf.simulate(2, main)[0]
        {'w': tensor([2., 4.])}
    """
    if not isinstance(value, Flat):
        return materialise(value)
    if value.placement is P:
        raise PlacementError(
            "gather() returns whole values; got a Flat with placement P; redistribute() it to R "
            "or S first"
        )
    return unravel_buffers(redistribute(value, R, value.group).buffers, value.layout)


def gather_for(
    value: Flat, dtype: torch.dtype | None, codec: compression.Codec | None
) -> tree.Tree:
    """Gather parameters differentiably with a codec, in the dtype of a loss."""
    coded = Flat((), value.placement, value.layout, value.group, codec=codec, life=value.life)
    whole = gather(coded)
    # Cast after the gather, because the derivative of the gather must sum in the wider dtype.
    return whole if dtype is None else cast_leaves(whole, dtype)


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
    given, value = value, stores.resident(value)
    if donate and value is not given:
        # Free the buffers in the store, because the fetched copies replace the stored buffers.
        given.life.discard(f"redistribute({name!r}, donate=True) at {call_site()}")
    here, mesh = value.group, mesh_of(group)
    match value.placement, placement:
        case (before, after) if before is after and (here is group or before is not S):
            return value if here is group else value.with_buffers(value.buffers, group=group)
        case Placement.REPLICATED, Placement.SHARDED:
            return value.with_buffers((_slice(buffer, group) for buffer in value.buffers), S, group)
        case Placement.REPLICATED, Placement.PARTIAL:
            return value.with_buffers(
                (
                    buffer if group.rank == 0 else torch.zeros_like(buffer)
                    for buffer in value.buffers
                ),
                P,
                group,
            )
        case Placement.SHARDED, Placement.PARTIAL:
            # All rows hold the value, so only the first row contributes to the sum.
            kept = here is mesh or not isinstance(mesh, Mesh) or mesh.outer.rank == 0
            buffers = (
                _embed(buffer if kept else torch.zeros_like(buffer), here)
                for buffer in value.buffers
            )
            return value.with_buffers(buffers, P, group)
        case Placement.PARTIAL, Placement.REPLICATED:
            return _communicate(value, AllReduce(), here, R, group, name, donate=donate)
        case Placement.PARTIAL, Placement.SHARDED:
            return _communicate(value, ReduceScatter(), group, S, group, name, donate=donate)
        case Placement.SHARDED, Placement.SHARDED:
            assert isinstance(mesh, Mesh)
            if here is mesh:
                return _communicate(value, AllGather(), mesh.outer, S, group, name, donate=donate)
            return value.with_buffers(
                (_slice(buffer, mesh.outer) for buffer in value.buffers), S, group
            )
        case _:
            return _communicate(
                value,
                AllGather(),
                here,
                R,
                group,
                name,
                donate=donate,
                zero_copy=zero_copy,
                into=into,
            )


def _check_target(value: Flat, placement: Placement, group: Group) -> None:
    if not isinstance(value, Flat):
        raise PlacementError(
            f"redistribute() takes a Flat; got {type(value).__name__}; make one with shard() or "
            "replicate()"
        )
    if mesh_of(value.group) is not mesh_of(group):
        raise PlacementError(
            "redistribute() must be given the group of the value; got another one; unshard() the "
            "value and shard it over the other group"
        )
    if placement is S:
        check_shardable(group, "redistribute()")
    elif placement is P and axis_of(group):
        raise PlacementError(
            f"a value is partial over a whole mesh; got its {axis_of(group)} axis; pass the mesh"
        )


def needs_autograd(buffers: tuple[Any, ...]) -> bool:
    """Whether autograd or a ``torch.func`` transform differentiates through these buffers."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(b, Tensor) and b.requires_grad for b in buffers
    )


# Collectives in flight: one that runs while the next starts.
MAX_UNDER_WAY = 2

_EXACT = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_reduce": collectives.all_reduce,
}
_COMPRESSED = {
    "all_gather": compression.all_gather,
    "reduce_scatter": compression.reduce_scatter,
    "all_reduce": compression.all_reduce,
}


def _communicate(
    value: Flat,
    op: Op,
    over: Group,
    placement: Placement,
    group: Group,
    name: str,
    *,
    donate: bool,
    zero_copy: bool = False,
    into: Flat | None = None,
) -> Flat:
    """Run a collective over one group, and return the value with a placement over another group."""
    layout = value.layout
    if (mesh_of(over) if isinstance(op, ReduceScatter) else over).size == 1:
        return value.with_buffers(value.buffers, placement, group)
    if needs_autograd(value.buffers):
        return value.with_buffers(
            (_differentiable(op, buffer, over, value.codec) for buffer in value.buffers),
            placement,
            group,
        )
    stream = Stream.PARAMS if isinstance(op, AllGather) else Stream.GRADS
    buffers = list(value.buffers)
    if donate:
        value.life.discard(f"redistribute({name!r}, donate=True) at {call_site()}")
    # In shared memory peers may still read inputs and old values after this rank has the sum.
    shares = is_symmetric(mesh_of(over))
    in_place = donate and isinstance(op, AllReduce) and not shares
    zero_copy = zero_copy and shares and over is group
    reused = (
        [None] * len(buffers)
        if into is None or shares or into.layout != layout
        else list(into.buffers)
    )
    out: list[Tensor] = []
    pending: list[Work] = []

    def settle(num_left: int) -> None:
        while len(pending) > num_left:
            out.append(pending.pop(0).wait())

    for index in range(len(buffers)):
        # Keep no reference, so that the input is freed as soon as the sum is there.
        buffer, buffers[index] = buffers[index], None
        call = Collective(op, name, layout.label(index), stream)
        if value.codec is not None and buffer.is_floating_point():
            pending.append(
                (compression.start_over if isinstance(op, ReduceScatter) else compression.start)(
                    call, buffer, over, value.codec
                )
            )
        elif isinstance(op, ReduceScatter):
            # Over an inner axis the buffer of the sum over the row receives the sum over the mesh.
            target = (
                None
                if axis_of(over)
                else allocate(over, buffer.numel() // over.size, buffer.dtype, buffer.device)
            )
            pending.append(start_reduce_scatter_over(over, call, buffer, target))
        elif zero_copy:
            pending.append(over.start(dataclasses.replace(call, zero_copy=True), buffer))
        else:
            target = buffer if in_place else reused[index]
            pending.append(
                over.start(
                    call,
                    buffer,
                    target if target is not None and target.dtype == buffer.dtype else None,
                )
            )
        del buffer
        pending[-1] = noted(
            pending[-1], name, "gather" if isinstance(op, AllGather) else "sum", layout, index
        )
        # A reduce-scatter in shared memory runs inside wait(); a second one would only hold memory.
        settle(0 if shares and isinstance(op, ReduceScatter) else MAX_UNDER_WAY)
    settle(0)
    return value.with_buffers(out, placement, group)


def _differentiable(op: Op, buffer: Tensor, over: Group, form: compression.Codec | None) -> Tensor:
    if form is None or not buffer.is_floating_point():
        send = lambda kind, x, group: _EXACT[kind](x, group)
    else:
        send = lambda kind, x, group: _COMPRESSED[kind](x, group, form)
    mesh = mesh_of(over)
    if over is mesh or not isinstance(mesh, Mesh):
        return send(op.kind, buffer, over)
    if isinstance(op, ReduceScatter):
        return send("all_reduce", send("reduce_scatter", buffer, over), mesh.outer)
    # The rows hold one value in common, so the gradient is the sum over the rows.
    return send(
        "all_gather",
        buffer if over is mesh.outer else collectives.replicated(buffer, mesh.outer),
        over,
    )


def _slice(buffer: Tensor, group: Group) -> Tensor:
    numel = buffer.numel() // group.size
    return buffer.narrow(0, group.rank * numel, numel)


def _own(buffer: Tensor, group: Group) -> Tensor:
    """Copy this rank's piece of a whole buffer into a symmetric buffer."""
    piece = _slice(buffer, group)
    return allocate(group, piece.numel(), piece.dtype, piece.device).copy_(piece)


def _embed(shard: Tensor, group: Group) -> Tensor:
    before, after = group.rank * shard.numel(), (group.size - group.rank - 1) * shard.numel()
    return torch.nn.functional.pad(shard, (before, after))
