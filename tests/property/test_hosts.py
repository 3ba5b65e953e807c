"""Hierarchical collectives: the same bits as on one host, and the promised bytes between hosts."""

from __future__ import annotations

import queue
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
)
from zfun.collectives.gloo._hierarchical import Place, goes_over_hosts, num_messages, over_hosts
from zfun.testing import assert_same_bits


@dataclass
class Wires:
    """Messages between hosts, with a count of bytes for each pair."""

    queues: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = field(default_factory=dict)
    nbytes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def between(self, source: int, target: int, number: int) -> queue.SimpleQueue[Tensor]:
        return self.queues.setdefault((source, target, number), queue.SimpleQueue())


@dataclass
class Arrival:
    into: Tensor
    source: queue.SimpleQueue[Tensor]

    def wait(self) -> None:
        self.into.copy_(self.source.get(timeout=20.0))


class Sent:
    def wait(self) -> None:
        return


@dataclass
class WiredColumn:
    """The column of a simulated rank."""

    wires: Wires
    place: Place
    numbers: set[tuple[int, int]] = field(default_factory=set)

    def rank(self, host: int) -> int:
        return host * self.place.size + self.place.rank

    def send(self, host: int, tensor: Tensor, number: int) -> Sent:
        assert host != self.place.host
        assert number < num_messages(self.place)
        assert (host, number) not in self.numbers
        self.numbers.add((host, number))
        self.wires.nbytes[self.rank(self.place.host), self.rank(host)] += tensor.nbytes
        self.wires.between(self.rank(self.place.host), self.rank(host), number).put(tensor.clone())
        return Sent()

    def receive(self, host: int, tensor: Tensor, number: int) -> Arrival:
        return Arrival(
            tensor, self.wires.between(self.rank(host), self.rank(self.place.host), number)
        )


def over_wires(
    group: zf.Group,
    wires: Wires,
    num_hosts: int,
    op: Op,
    numel: int,
    dtype: torch.dtype,
    in_place: bool,
) -> Any:
    """Return the results of a collective over hosts and on one host."""
    size = group.size // num_hosts
    place = Place(group.rank // size, num_hosts, group.rank % size, size)
    row = group.subgroup([range(first, first + size) for first in range(0, group.size, size)])
    x = (torch.randn(numel, generator=torch.Generator().manual_seed(group.rank)) * 100).to(dtype)
    expected = group.start(Collective(op), x.clone()).wait()
    out = torch.empty_like(expected)
    if in_place and isinstance(op, (AllReduce, Broadcast)):
        out = x
    elif in_place and isinstance(op, AllGather):
        out.view(group.size, -1)[group.rank].copy_(x)
        x = out.view(group.size, -1)[group.rank]
    over_hosts(
        op,
        x,
        out,
        place,
        lambda o, a, b: row.start(Collective(o), a, b).wait(),
        WiredColumn(wires, place),
    )
    return out, expected


@given(
    num_hosts=st.integers(2, 4),
    size=st.integers(1, 3),
    kind=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32]),
    in_place=st.booleans(),
    extra=st.integers(0, 5),
    root=st.integers(0, 11),
)
@settings(max_examples=examples(30))
def test_bits(
    num_hosts: int, size: int, kind: int, dtype: torch.dtype, in_place: bool, extra: int, root: int
) -> None:
    count = num_hosts * size
    op: Op = [AllGather(), ReduceScatter(), AllReduce(), Broadcast(root % count)][kind]
    numel = 7 * count + (0 if op.splits_input else extra)
    for rank, (found, expected) in enumerate(
        zf.simulate(count, over_wires, Wires(), num_hosts, op, numel, dtype, in_place)
    ):
        assert_same_bits(found, expected, f"{op} over hosts and without on rank {rank}")


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_between_hosts(num_hosts: int, size: int, dtype: torch.dtype) -> None:
    """Compare the bytes of each rank with the formulae of the module."""
    count, others = num_hosts * size, num_hosts - 1
    numel = 30 * count
    whole = numel * dtype.itemsize
    # Partial sums of half types travel in float32 until the last host.
    wider = max(dtype.itemsize, 4) // dtype.itemsize
    to_the_next, from_the_last = wider * whole // size, whole // size * others // num_hosts
    scattered = [to_the_next if rank < others * size else from_the_last for rank in range(count)]
    gathered = whole // count * others
    for op, expected in (
        (AllGather(), [whole * others] * count),
        (ReduceScatter(), scattered),
        (AllReduce(), [sent + gathered for sent in scattered]),
        (Broadcast(1), [whole * others if rank == 1 else 0 for rank in range(count)]),
    ):
        wires = Wires()
        zf.simulate(count, over_wires, wires, num_hosts, op, numel, dtype, False)
        sent = [
            sum(nbytes for (source, _), nbytes in wires.nbytes.items() if source == rank)
            for rank in range(count)
        ]
        assert sent == expected, op


def test_what_goes_directly() -> None:
    long, short = torch.zeros(1025), torch.zeros(1024)
    for op in (AllGather(), ReduceScatter(), AllReduce(), Broadcast(0)):
        assert goes_over_hosts(op, long)
        assert not goes_over_hosts(op, short)
    for op in (AllToAll(), Reduce(0), Permute((1, 0))):
        assert not goes_over_hosts(op, long)
