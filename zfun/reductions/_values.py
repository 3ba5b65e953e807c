"""Small values of every rank, and whole buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun import collectives
from zfun.flat import FLAT, Flat
from zfun.options import takes


@takes(flat=FLAT)
def all_ranks(flat: Flat) -> collectives.Group:
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
    return collectives.sum_group(flat.group)


@takes(flat=FLAT)
def gather_values(flat: Flat, x: Tensor, name: str = "values") -> Tensor:
    """Return a small tensor of every rank, stacked in rank order, for by-leaf rules.

    Args:
        flat: the value whose group gathers.
        x: of one shape, dtype and type of device on all ranks.
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


def whole_buffers(flat: Flat, name: str) -> list[Tensor]:
    """Gather the buffers of a sharded value (``S -> R``), for rules that need whole buckets.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return whole_buffers(zf.shard({"w": torch.ones(96)}, group), "w")[0].sum().item()
        >>> zf.simulate(2, main)
        [96.0, 96.0]
    """
    found = []
    for buffer, slot in zip(flat.buffers, flat.layout.buckets, strict=True):
        call = collectives.Collective(collectives.AllGather(), name)
        pending = (
            collectives.start_gather(flat.group, call, buffer, slot.pieces)
            if slot.pieces
            else flat.group.start(call, buffer)
        )
        found.append(pending.wait())
    return found


@takes()
def any_rank(flag: bool, group: collectives.Group) -> bool:
    """Return whether the flag is set on any rank: the same answer on all, so that all stop alike.

    Args:
        flag: a decision of this rank, such as "the time is over".
        group: the ranks; all must call.

    Example:
        >>> import zfun as zf
        >>> zf.simulate(3, lambda group: any_rank(group.rank == 1, group))
        [True, True, True]
    """
    mine = torch.tensor([flag], dtype=torch.uint8)
    return bool(collectives.gather_values(mine, collectives.agreement_group(group), "flag").any())
