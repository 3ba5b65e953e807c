"""A function of whole leaves, such as an orthogonalisation, on the leaves of a sharded value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zfun.collectives import exchange_values
from zfun.flat import FLAT, Flat, leaf_spans
from zfun.options import takes
from zfun.placement import S


@takes(flat=FLAT)
def map_leaves(
    flat: Flat, fn: Callable[[Tensor], Tensor], cost: Callable[[tuple[int, ...]], float]
) -> Flat:
    """Apply a function that needs whole leaves, and gives one of the same shape, to every leaf.

    A leaf that lies whole on one rank stays there, and nothing is sent. Each cut leaf goes to one
    rank, which applies the function and sends the parts of the result back: two all-to-alls of the
    shards, padded to the largest message. Cut leaves are assigned so that costs are about even.

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
    spans = [leaf_spans(flat, holder) for holder in range(group.size)]
    leaves: list[int] = []
    loads = [0.0] * group.size
    for leaf in [leaf for bucket in buckets for leaf in layout.buckets[bucket].leaves]:
        slot, here = layout.leaves[leaf], spans[rank][leaf]
        numels = [held[leaf].stop - held[leaf].start for held in spans]
        if slot.numel not in numels:
            leaves.append(leaf)
            continue
        loads[numels.index(slot.numel)] += cost(slot.shape)
        if here.start < here.stop:
            whole = flat.buffers[slot.bucket][here.start : here.stop].clone().view(slot.shape)
            out.buffers[slot.bucket][here.start : here.stop] = fn(whole).reshape(-1)
    owners = _shared_out([cost(layout.leaves[leaf].shape) for leaf in leaves], loads)

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
        # The pieces of a leaf need not lie in the order of the ranks.
        holders = sorted(range(group.size), key=lambda holder: spans[holder][leaf].first)
        result = fn(torch.cat([parts[holder] for holder in holders]).view(slot.shape)).reshape(-1)
        split = result.split([lengths[holder] for holder in holders])
        for holder, part in zip(holders, split, strict=True):
            answers[holder, ends[holder] : ends[holder] + part.numel()] = part
            ends[holder] += part.numel()
    returned = exchange_values(answers, group, "leaves")
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        start, stop = piece(leaf, rank)
        out.buffers[layout.leaves[leaf].bucket][start:stop] = returned[
            owner, ends[owner] : ends[owner] + stop - start
        ]
        ends[owner] += stop - start


def _shared_out(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Give each task to the rank with the least load, the dearest task first."""
    owners, loads = [0] * len(costs), list(loads)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners
