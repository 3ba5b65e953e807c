"""Functions of a whole sharded value: they need values of every rank, and so communicate.

An optimizer rule that looks at whole leaves or at a norm calls these, and needs no collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zfun import collectives, ops, tree
from zfun.collectives import Group, exchange_values, mesh_of
from zfun.errors import PlacementError
from zfun.flat import Flat, leaf_spans, local_shards
from zfun.placement import P, S

__all__ = ["all_ranks", "gather_values", "global_norm", "map_leaves"]


def all_ranks(flat: Flat) -> Group:
    """Return the group of all ranks: the whole mesh if the group of a value is an axis of a mesh.

    Args:
        flat: with any placement.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(4)}, zf.split(group, inner=2).inner)
        ...     return flat.group.size, all_ranks(flat).size
        >>> zf.simulate(4, main)[0]
        (2, 4)
    """
    return mesh_of(flat.group)


def gather_values(flat: Flat, x: Tensor, name: str = "values") -> Tensor:
    """Return a small tensor of every rank, stacked in rank order, for by-leaf rules.

    Args:
        flat: the value whose group gathers.
        x: of one shape and dtype on all ranks.
        name: the name of ``x`` in messages and logs.

    Returns:
        ``[size, *x.shape]``, over the group of ``flat``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(4)}, group)
        ...     return gather_values(flat, torch.tensor(group.rank)).tolist()
        >>> zf.simulate(2, main)
        [[0, 1], [0, 1]]
    """
    return collectives.gather_values(x, flat.group, name)


def map_leaves(
    flat: Flat, fn: Callable[[Tensor], Tensor], cost: Callable[[tuple[int, ...]], float]
) -> Flat:
    """Apply a function that needs whole leaves, and gives one of the same shape, to every leaf.

    Each cut leaf goes to one rank, which applies the function and sends the parts of the result
    back: two all-to-alls of the shards, padded to the largest message. Leaves are assigned so that
    costs are about even.

    Args:
        flat: with placement ``R`` or ``S``.
        fn: ``fn(leaf) -> result``, of fresh contiguous tensors.
        cost: the cost of the function for a leaf of a shape.

    Returns:
        A flat with the placement, layout and dtypes of ``flat``.
    """
    if flat.placement is not S:
        out = flat.with_buffers(torch.zeros_like(buffer) for buffer in flat.buffers)
        for slot in flat.layout.leaves:
            view = flat.buffers[slot.bucket][slot.offset : slot.offset + slot.numel]
            out.buffers[slot.bucket][slot.offset : slot.offset + slot.numel] = fn(
                view.clone().view(slot.shape)
            ).reshape(-1)
        return out
    out = flat.with_buffers(torch.zeros_like(buffer) for buffer in flat.buffers)
    for dtype in dict.fromkeys(buffer.dtype for buffer in flat.buffers):
        _map_shards(
            flat,
            out,
            fn,
            [i for i, buffer in enumerate(flat.buffers) if buffer.dtype == dtype],
            cost,
        )
    return out


def _map_shards(
    flat: Flat,
    out: Flat,
    fn: Callable[[Tensor], Tensor],
    buckets: Sequence[int],
    cost: Callable[..., float],
) -> None:
    group, layout, rank = flat.group, flat.layout, flat.group.rank
    leaves = [leaf for bucket in buckets for leaf in layout.buckets[bucket].leaves]
    owners = _shared_out([cost(layout.leaves[leaf].shape) for leaf in leaves], group.size)

    spans = [leaf_spans(flat, holder) for holder in range(group.size)]

    def piece(leaf: int, holder: int) -> tuple[int, int]:
        return spans[holder][leaf].start, spans[holder][leaf].stop

    def length(holder: int, owner: int) -> int:
        pieces = [
            piece(leaf, holder) for leaf, its in zip(leaves, owners, strict=True) if its == owner
        ]
        return sum(stop - start for start, stop in pieces)

    longest = max(
        (length(holder, owner) for holder in range(group.size) for owner in range(group.size)),
        default=0,
    )
    if not longest:
        return
    sent = flat.buffers[buckets[0]].new_zeros(group.size, longest)
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        start, stop = piece(leaf, rank)
        sent[owner, ends[owner] : ends[owner] + stop - start] = flat.buffers[
            layout.leaves[leaf].bucket
        ][start:stop]
        ends[owner] += stop - start
    received = exchange_values(sent, group, "leaves")
    answers = torch.zeros_like(received)
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        if owner != rank:
            continue
        slot = layout.leaves[leaf]
        lengths = [
            stop - start for start, stop in (piece(leaf, holder) for holder in range(group.size))
        ]
        parts = [
            received[holder, ends[holder] : ends[holder] + numel]
            for holder, numel in enumerate(lengths)
        ]
        result = fn(torch.cat(parts).view(slot.shape)).reshape(-1)
        for holder, (part, numel) in enumerate(zip(result.split(lengths), lengths, strict=True)):
            answers[holder, ends[holder] : ends[holder] + numel] = part
            ends[holder] += numel
    returned = exchange_values(answers, group, "leaves")
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        start, stop = piece(leaf, rank)
        out.buffers[layout.leaves[leaf].bucket][start:stop] = returned[
            owner, ends[owner] : ends[owner] + stop - start
        ]
        ends[owner] += stop - start


def _shared_out(costs: Sequence[float], size: int) -> list[int]:
    """Give each task to the rank with the least load, the dearest task first."""
    owners, loads = [0] * len(costs), [0.0] * size
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners


def global_norm(value: tree.Tree) -> Tensor:
    """Return the L2 norm of a whole tree over all ranks.

    Padding is never counted, a replicated or a tied element once. Every rank sums the squares of
    the local pieces in exact integers, so the result has the same bits for a replicated value, a
    sharded value and a plain tree, and for all sizes of buckets and group.

    Args:
        value: a tree of tensors, or of flats with placement ``R`` or ``S``.

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
    rows = []
    leaves = tree.leaves(value, is_leaf=lambda x: isinstance(x, Flat))
    # The gradient of tied leaves is one tensor, and counts once.
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        if isinstance(leaf, Flat):
            rows.append(_squares(leaf))
        else:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            rows.append(ops.squares_in_bins(real.reshape(-1))[None])
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    return ops.total_of_bins(torch.cat(rows)).sqrt()


def _squares(flat: Flat) -> Tensor:
    if flat.placement is P:
        raise PlacementError(
            "a norm needs the sum over the ranks; got a Flat with placement P; redistribute() it "
            "to R or S first"
        )
    pieces = [ops.squares_in_bins(piece) for piece in local_shards(flat)]
    pieces = pieces or [ops.squares_in_bins(torch.zeros(0, device=flat.layout.device))]
    mine = torch.stack(pieces)
    # One row for each rank: sums of bins, and a last column for infinities and NaNs.
    row = torch.cat(
        [
            mine[:, :-1].sum(0),
            mine[:, -1].contiguous().view(torch.float64).sum().view(1).view(torch.int64),
        ]
    )
    return gather_values(flat, row, "norm")
