"""The norm of a whole value over the ranks, from exact sums of squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zfun import collectives, ops, stores, tree
from zfun.errors import LeafError, PlacementError
from zfun.flat import FLAT, Flat, own_piece, unravel
from zfun.layout import aligned
from zfun.options import integer, takes
from zfun.placement import P, S, is_first
from zfun.reductions._values import all_ranks, gather_values


@takes()
@dataclass(frozen=True, slots=True)
class Spent:
    """The place of a bucket of finite gradients whose memory holds other values by now.

    A step that begins in backward gives the memory of gradients to new parameters. Such a bucket
    has a norm, and no values to read.

    Attributes:
        squares: the sums of squares of this rank's part, from ``zfun.ops.squares_in_bins``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     grads = zf.shard({"w": torch.tensor([3.0, 4.0])}, group)
        ...     spent = Spent(zf.ops.squares_in_bins(grads.buffers[0]))
        ...     return global_norm(grads.with_buffers([spent])).item()
        >>> zf.simulate(2, main)
        [5.0, 5.0]
    """

    squares: Tensor


def global_norm(value: tree.Tree) -> Tensor:
    """Return the L2 norm of a whole tree over all ranks.

    Padding is never counted, a replicated or a tied element once. Every rank sums the squares of
    the local pieces in exact integers, so the result has the same bits for a replicated value, a
    sharded value and a plain tree, and for all sizes of buckets and group.

    Args:
        value: a tree of tensors, or of flats with placement ``R`` or ``S``. Of buffers in a
            store, a few at a time are in memory.

    Returns:
        A 0-dim float64 tensor on the CPU, equal on all ranks. The host waits for the device once.

    Raises:
        PlacementError: a flat is partial.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return global_norm(zf.shard({"w": torch.tensor([3.0, 4.0])}, group)).item()
        >>> zf.simulate(2, main)
        [5.0, 5.0]
    """
    if isinstance(value, Flat):
        versions, norm = value.life.cached.get(global_norm, (None, None))
        if versions is not None and versions == _versions(value):
            return norm
    rows = []
    leaves = tree.leaves(value, is_leaf=lambda x: isinstance(x, Flat))
    # The gradient of tied leaves is one tensor, and counts once.
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        if isinstance(leaf, Flat):
            rows.append(_squares(leaf))
        elif not isinstance(leaf, Tensor):
            raise LeafError(
                f"a norm is that of tensors; got a leaf of class {type(leaf).__name__}; leave the "
                "leaf out with zf.partition()"
            )
        else:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            rows.append(ops.squares_in_bins(real.reshape(-1))[None])
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    return ops.total_of_bins(torch.cat(rows)).sqrt()


def _versions(flat: Flat) -> list[int] | None:
    """Return numbers that change when a buffer is written; ``None`` if torch does not tell."""
    # Other buffers are not written.
    tensors = [x for x in flat.buffers if isinstance(x, Tensor)]
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _squares(flat: Flat) -> Tensor:
    if flat.placement is P:
        raise PlacementError(
            "a norm needs the sum over the ranks; got a Flat with placement P; redistribute() it "
            "to R or S first"
        )
    return _over_model_axes(gather_values(flat, _own_squares(flat), "norm"), flat.group)[0]


def _over_model_axes(rows: Tensor, group: collectives.Group) -> tuple[Tensor, int]:
    """Return the rows of the ranks along all model axes, and the place of the first given one."""
    start = 0
    for axis in collectives.model_groups(group):
        start += axis.rank * len(rows)
        rows = collectives.gather_values(rows, axis, "norm").flatten(0, 1)
    return rows, start


def _own_squares(flat: Flat) -> Tensor:
    row = flat.life.cached.get(_squares)
    if row is None:
        row = _local_squares(flat)
        if any(isinstance(buffer, stores.Stored) for buffer in flat.buffers):
            # Stored tensors do not change, and to read the tensors once more costs time.
            flat.life.cached[_squares] = row
    return row


@takes(grads=FLAT, count=integer(0))
def norm_and_counts(grads: Flat, count: int) -> tuple[Tensor, list[int]]:
    """Return the norm of gradients, and an integer of each rank, in one message and one read.

    Args:
        grads: with any placement. The norm of terms (``P``) is the sum of the norms of the ranks'
            terms, which is an upper bound.
        count: of this rank.

    Returns:
        The norm, as :func:`global_norm` returns it; the integers of all ranks, on a mesh of all
        ranks of the mesh.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     grads = zf.shard({"w": torch.tensor([3.0, 4.0])}, group)
        ...     return norm_and_counts(grads, 10 + group.rank)
        >>> zf.simulate(2, main)[0]
        (tensor(5., dtype=torch.float64), [10, 11])
    """
    mesh = all_ranks(grads)
    is_term = grads.placement is P
    row = global_norm(unravel(grads)).view(1) if is_term else _own_squares(grads)
    rows = collectives.gather_values(torch.cat([row, row.new_full((1,), count)]), mesh, "norm")
    rows, start = _over_model_axes(rows, mesh)
    is_abstract = ops.is_abstract(rows)
    rows = rows if is_abstract else rows.cpu()
    own = rows[start : start + mesh.size, -1]
    counts = [count] * mesh.size if is_abstract else [int(x) for x in own.tolist()]
    if is_term:
        return rows[:, 0].sum(), counts
    # The rows of a mesh hold equal shards, so one row is counted.
    norm = ops.total_of_bins(rows[:: mesh.size // grads.group.size, :-1]).sqrt()
    # An optimizer that clips asks for the norm once more.
    grads.life.cached[global_norm] = _versions(grads), norm
    return norm, counts


@takes(grads=FLAT)
def norm_on_device(grads: Flat) -> Tensor:
    """Return the norm of gradients, with the bits of :func:`global_norm`, where they lie.

    The host does not wait. :func:`global_norm` of these gradients returns this tensor.

    Args:
        grads: with placement ``R`` or ``S``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return norm_on_device(zf.shard({"w": torch.tensor([3.0, 4.0])}, group)).item()
        >>> zf.simulate(2, main)
        [5.0, 5.0]
    """
    mesh = all_ranks(grads)
    gathered = collectives.gather_values(_own_squares(grads), mesh, "norm")
    rows, _ = _over_model_axes(gathered, mesh)
    norm = ops.total_on_device(rows[:: mesh.size // grads.group.size]).sqrt()
    grads.life.cached[global_norm] = _versions(grads), norm
    return norm


def _local_squares(flat: Flat) -> Tensor:
    """Return the sums of bins, and a last element for infinities and NaNs, of this rank's part."""
    device = flat.layout.device
    spent = [buffer.squares for buffer in flat.buffers if isinstance(buffer, Spent)]
    left = [i for i, buffer in enumerate(flat.buffers) if not isinstance(buffer, Spent)]
    kept = flat.select(left) if spent else flat
    pieces = [squares.to(device) for squares in spent]
    counted = _counted(kept)
    for index, buffer in enumerate(stores.reading(kept)):
        slot = kept.layout.buckets[index]
        piece = buffer if flat.placement is S else own_piece(buffer, slot, flat.group)
        for start, stop in [(0, len(piece))] if counted is None else counted[index]:
            pieces.append(ops.squares_in_bins(piece[start:stop]).to(device))
    mine = torch.stack(pieces or [ops.squares_in_bins(torch.zeros(0, device=device))])
    return torch.cat(
        [
            mine[:, :-1].sum(0),
            mine[:, -1].contiguous().view(torch.float64).sum().view(1).view(torch.int64),
        ]
    )


def _counted(flat: Flat) -> list[list[tuple[int, int]]] | None:
    """Return the spans of each bucket of this rank's part that this rank counts; ``None`` for all.

    A leaf that several ranks of a model axis hold counts on the first of them.
    """
    axes = collectives.model_groups(flat.group)
    if not axes:
        return None

    ranks = [axis.rank for axis in axes]
    spans: list[list[tuple[int, int]]] = [[] for _ in flat.layout.buckets]
    for slot in sorted(flat.layout.leaves, key=lambda slot: slot.offset):
        begin, end = flat.layout.buckets[slot.bucket].span(flat.group.rank, flat.group.size)
        start = max(slot.offset, begin)
        stop = min(slot.offset + slot.numel, end)
        if start < stop and is_first(slot.spread, ranks):
            found = spans[slot.bucket]
            # Between neighbours there are zeros alone.
            joins = bool(found) and aligned(found[-1][1]) == start - begin
            first = found.pop()[0] if joins else start - begin
            found.append((first, stop - begin))
    return spans
