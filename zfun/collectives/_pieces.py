"""Gather and scatter pieces of unequal lengths with collectives of equal ones.

[Note: unequal pieces]
Pieces that are nearly equal are padded to the longest and go in one all-gather or reduce-scatter;
the padding costs at most a half of the bytes. Else each piece goes by itself, in a broadcast from
the rank that holds it or a reduce to this rank, so that a bucket on one rank costs one message.
Both ways add in the same order as the collectives of equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from zfun.collectives._group import Group
from zfun.collectives._ops import Broadcast, Collective
from zfun.collectives._roles import start_reduce_scatter_over, start_reduce_to
from zfun.collectives._work import Work

Send: TypeAlias = Callable[[Tensor], Work]

_MOST_PADDING = 1.5


def is_padded(pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether pieces go in one message, padded to the longest."""
    lengths = [stop - start for start, stop in pieces]
    return max(lengths) * len(lengths) <= _MOST_PADDING * sum(lengths)


def to_rows(whole: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Return the pieces of a vector one after the other, each padded to the longest.

    Example:
        >>> to_rows(torch.arange(3), [(1, 3), (0, 1)])
        tensor([1, 2, 0, 0])
    """
    longest = max(stop - start for start, stop in pieces)
    return torch.cat([padded(whole[start:stop], longest) for start, stop in pieces])


def from_rows(rows: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Return the vector whose padded pieces are given; the inverse of :func:`to_rows`.

    Example:
        >>> from_rows(torch.tensor([1, 2, 0, 0]), [(1, 3), (0, 1)])
        tensor([0, 1, 2])
    """
    longest = rows.numel() // len(pieces)
    order = sorted(range(len(pieces)), key=lambda rank: pieces[rank])
    lengths = [stop - start for start, stop in pieces]
    return torch.cat([rows[rank * longest :][: lengths[rank]] for rank in order])


def padded(piece: Tensor, numel: int) -> Tensor:
    """Return a vector with zeros at the end."""
    return torch.nn.functional.pad(piece, (0, numel - piece.numel()))


def start_gather(
    group: Group,
    call: Collective,
    piece: Tensor,
    pieces: Sequence[tuple[int, int]],
    send: Send | None = None,
) -> Work:
    """``S -> R``: start a gather of unequal pieces; see [Note: unequal pieces].

    ``send`` starts an all-gather of equal pieces, by default that of ``call``. The result lies in
    fresh memory.

    Example:
        >>> from zfun.collectives import AllGather, simulate
        >>> def main(group):
        ...     mine = torch.arange(3 - 2 * group.rank)
        ...     return start_gather(group, Collective(AllGather()), mine, [(1, 4), (0, 1)]).wait()
        >>> simulate(2, main)[0]
        tensor([0, 0, 1, 2])
    """
    call = replace(call, zero_copy=False)
    if send is not None or is_padded(pieces):
        longest = max(stop - start for start, stop in pieces)
        pending = (send or (lambda x: group.start(call, x)))(padded(piece, longest))
        return Work(lambda: from_rows(pending.wait(), pieces))
    whole = piece.new_empty(sum(stop - start for start, stop in pieces))
    start, stop = pieces[group.rank]
    whole[start:stop] = piece
    sent = [
        group.start(replace(call, op=Broadcast(rank)), whole[start:stop], whole[start:stop])
        for rank, (start, stop) in enumerate(pieces)
        if start < stop
    ]

    def finish() -> Tensor:
        for work in sent:
            work.wait()
        return whole

    return Work(finish)


def start_scatter(
    group: Group,
    call: Collective,
    x: Tensor,
    pieces: Sequence[tuple[int, int]],
    send: Send | None = None,
) -> Work:
    """``P -> S``: start a sum over the mesh of a group, in unequal pieces over the group.

    ``send`` starts a reduce-scatter into equal pieces, by default that of ``call``.

    Example:
        >>> from zfun.collectives import ReduceScatter, simulate
        >>> def main(group):
        ...     call, pieces = Collective(ReduceScatter()), [(1, 4), (0, 1)]
        ...     return start_scatter(group, call, torch.arange(4), pieces).wait()
        >>> simulate(2, main)
        [tensor([2, 4, 6]), tensor([0])]
    """
    call = replace(call, zero_copy=False)
    first, last = pieces[group.rank]
    numel = last - first
    if send is not None or is_padded(pieces):
        rows = to_rows(x, pieces)
        pending = (send or (lambda x: start_reduce_scatter_over(group, call, x)))(rows)
        return Work(lambda: pending.wait().narrow(0, 0, numel).clone())
    sent = [
        start_reduce_to(group, call, x[start:stop], rank)
        for rank, (start, stop) in enumerate(pieces)
        if start < stop
    ]
    held = [rank for rank, (start, stop) in enumerate(pieces) if start < stop]

    def finish() -> Tensor:
        sums = dict(zip(held, (work.wait() for work in sent), strict=True))
        return sums[group.rank] if group.rank in sums else x.new_empty(0)

    return Work(finish)
