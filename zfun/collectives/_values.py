"""Exchange small host values between ranks, on the control stream."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from zfun.collectives._group import Group
from zfun.collectives._ops import AllGather, AllToAll, Collective, Op, Stream
from zfun.options import GROUP, TENSOR, TEXT, takes


@takes(x=TENSOR, group=GROUP, name=TEXT)
def gather_values(x: Tensor, group: Group, name: str) -> Tensor:
    """Gather a small tensor of any shape from every rank.

    Args:
        x: of the same shape, dtype and type of device on all ranks.
        group: the ranks.
        name: a name, for messages and logs.

    Returns:
        A tensor of shape ``[size, *x.shape]``.

    Example:
        >>> from zfun.collectives import simulate
        >>> rank_of = lambda group: torch.tensor(group.rank)
        >>> simulate(2, lambda group: gather_values(rank_of(group), group, "rank").tolist())
        [[0, 1], [0, 1]]
    """
    return _sent(x, group, name, AllGather()).view(group.size, *x.shape)


@takes(x=TENSOR, group=GROUP, name=TEXT)
def exchange_values(x: Tensor, group: Group, name: str) -> Tensor:
    """Exchange rows: row j of rank i becomes row i of rank j.

    Args:
        x: ``[size, n]``, of the same shape and dtype on all ranks.
        group: the ranks.
        name: a name, for messages and logs.

    Returns:
        ``[size, n]``.

    Example:
        >>> from zfun.collectives import simulate
        >>> rows = torch.tensor([[1], [2]])
        >>> simulate(2, lambda group: exchange_values(rows, group, "rows").tolist())
        [[[1], [1]], [[2], [2]]]
    """
    return _sent(x, group, name, AllToAll()).view(group.size, -1)


def gather_json(value: Any, group: Group, name: str) -> list[Any]:
    """Return the JSON value of every rank, in rank order."""
    if group.size == 1:
        return [value]
    text = json.dumps(value, separators=(",", ":")).encode()
    lengths = gather_values(torch.tensor(len(text)), group, f"{name} lengths")
    padded = torch.frombuffer(bytearray(text.ljust(int(lengths.max()))), dtype=torch.uint8)
    return [json.loads(row.numpy().tobytes()) for row in gather_values(padded, group, name)]


@takes(group=GROUP)
def barrier(group: Group) -> None:
    """Return when every rank has called this function.

    Args:
        group: the ranks.

    Example:
        >>> from zfun.collectives import single_group
        >>> barrier(single_group())
    """
    gather_values(torch.zeros(1, dtype=torch.uint8), group, "barrier")


def _sent(x: Tensor, group: Group, name: str, op: Op) -> Tensor:
    call = Collective(op, name, stream=Stream.CONTROL)
    return group.start(call, x.detach().contiguous().view(-1)).wait()
