"""Collectives over several hosts: shared memory within a host, messages between hosts.

[Note: collectives over hosts]

Ranks are numbered host by host, and every host has the same number of ranks. The ranks of a host
are a *row* and use shared memory. The ranks with the same position on each host are a *column* and
send messages. Each byte crosses once to each host that needs the byte, and the ranks of a host
share the work: each rank handles the elements of one column.

Sums keep the order of the ranks, and so the bits of every other group: the sum of a chunk travels
from host to host, each host adds the terms of its ranks in order, and the last host sends the sum
to the owner of the chunk. Chunks are pipelined, one for each host. Half-precision chunks travel in
float32, the dtype of the addition, and the last host rounds.

For H hosts with I ranks each and an input of n elements, a rank sends to other hosts:

* all-gather: its shard to H - 1 hosts, n (H - 1), where a direct exchange sends it to (H - 1) I
  ranks;
* reduce-scatter: n/I, and on the last host n/I (H - 1)/H, where a direct exchange sends n (H -
  1)/H;
* all-reduce: a reduce-scatter and an all-gather of the result;
* broadcast: the root sends to H - 1 ranks.

Short inputs, and collectives in which every byte has one receiver, use the direct exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from zfun.collectives._ops import AllGather, AllReduce, AllToAll, Broadcast, Op, ReduceScatter
from zfun.collectives.gloo._algorithms import Transfer
from zfun.ops import wide
from zfun.ops._sums import sum_in_rank_order

_SHORT_BYTES = 4096

# Runs a collective among the ranks of this host, from one tensor into another, and returns when the
# result is complete.
Row: TypeAlias = Callable[[Op, Tensor, Tensor], object]


class HostPlace(NamedTuple):
    """The position of a rank: rank ``host * size + rank`` of all.

    Attributes:
        host: the number of the host, from 0.
        num_hosts: the number of hosts.
        rank: the position on the host, from 0.
        size: the number of ranks on each host.
    """

    host: int
    num_hosts: int
    rank: int
    size: int


class Column(Protocol):
    """The ranks with the same position on each host."""

    def send(self, host: int, tensor: Tensor, number: int) -> Transfer:
        """Start to send; the number identifies the message between two hosts on both sides."""
        ...

    def receive(self, host: int, tensor: Tensor, number: int) -> Transfer:
        """Start to receive."""
        ...


def goes_over_hosts(op: Op, x: Tensor) -> bool:
    """Say whether a collective gains from going host by host."""
    return (
        isinstance(op, (AllGather, ReduceScatter, AllReduce, Broadcast))
        and x.numel() * x.dtype.itemsize > _SHORT_BYTES
    )


def num_messages(place: HostPlace) -> int:
    """Return how many message numbers a collective may use."""
    return place.num_hosts + 2


def over_hosts(op: Op, x: Tensor, out: Tensor, place: HostPlace, row: Row, column: Column) -> None:
    """Do a collective that :func:`goes_over_hosts`, and return when it is done.

    ``row`` are the ranks of the same host, ``column`` those with the same position on other hosts.
    """
    match op:
        case AllGather():
            _all_gather(x, out, place, row, column)
        case ReduceScatter():
            _reduce_scatter(x, out, place, row, column)
        case AllReduce():
            size = place.num_hosts * place.size
            padding = -x.numel() % size
            whole = torch.nn.functional.pad(x, (0, padding)) if padding else x
            # Not into the slice of ``out``, which may be the input that peers still read.
            piece = x.new_empty(whole.numel() // size)
            _reduce_scatter(whole, piece, place, row, column)
            total = torch.empty_like(whole) if padding else out
            _all_gather(piece, total, place, row, column)
            if padding:
                out.copy_(total[: x.numel()])
        case Broadcast(root):
            _broadcast(x, out, root, place, row, column)
        case _:
            raise AssertionError(op)


def _all_gather(x: Tensor, out: Tensor, place: HostPlace, row: Row, column: Column) -> None:
    number = num_messages(place) - 1
    by_host = out.view(place.num_hosts, -1)
    mine = out.view(place.num_hosts, place.size, -1)[:, place.rank]
    others = [host for host in range(place.num_hosts) if host != place.host]
    received = {host: column.receive(host, mine[host], number) for host in others}
    sent = [column.send(host, x, number) for host in others]
    row(AllGather(), x, by_host[place.host])
    for host in others:
        received[host].wait()
        row(AllGather(), mine[host], by_host[host])
    for transfer in sent:
        transfer.wait()


def _reduce_scatter(x: Tensor, out: Tensor, place: HostPlace, row: Row, column: Column) -> None:
    last = place.num_hosts - 1
    dtype = wide(x.dtype)
    sums: list[tuple[Tensor, Transfer]] = []
    if place.host > 0:
        for host in range(place.num_hosts):
            room = torch.empty_like(out, dtype=dtype)
            sums.append((room, column.receive(place.host - 1, room, host)))
    under_way = [column.receive(last, out, place.num_hosts)] if place.host < last else []
    terms = x.new_empty(x.numel() // place.num_hosts)
    # One host's chunk after the other, so that this rank adds one chunk while another is sent.
    for host, chunk in enumerate(x.view(place.num_hosts, -1)):
        row(AllToAll(), chunk, terms)
        before: list[Tensor] = []
        if sums:
            room, transfer = sums[host]
            transfer.wait()
            before = [room]
        total = sum_in_rank_order(
            [*before, *(term.to(dtype) for term in terms.view(place.size, -1))]
        )
        if place.host < last:
            under_way.append(column.send(place.host + 1, total, host))
        elif host < last:
            under_way.append(column.send(host, total.to(x.dtype), place.num_hosts))
        else:
            out.copy_(total)
    for transfer in under_way:
        transfer.wait()


def _broadcast(
    x: Tensor, out: Tensor, root: int, place: HostPlace, row: Row, column: Column
) -> None:
    host, rank = divmod(root, place.size)
    sent: list[Transfer] = []
    if place.rank == rank and place.host == host:
        sent = [column.send(other, x, 0) for other in range(place.num_hosts) if other != host]
    elif place.rank == rank:
        column.receive(host, out, 0).wait()
        x = out
    row(Broadcast(rank), x, out)
    for transfer in sent:
        transfer.wait()
