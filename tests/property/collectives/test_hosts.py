"""Hierarchical collectives: the bits of one host, and the documented bytes between hosts."""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import examples
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
)
from zfun.collectives.backends._world import evaluate
from zfun.collectives.gloo._hierarchical import HostPlace, goes_over_hosts, num_messages, over_hosts
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
    """The column of a rank on a mesh of hosts."""

    wires: Wires
    place: HostPlace
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


class Row:
    """The ranks of one host, which are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20.0)
        self.given: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.results: list[Tensor] = []

    def run(self, rank: int, op: Op, x: Tensor, out: Tensor | None) -> Tensor:
        self.given[rank] = x, out
        if self.barrier.wait() == 0:
            inputs, outs = zip(*(self.given[r] for r in sorted(self.given)), strict=True)
            self.results = evaluate(op, inputs, outs)
        self.barrier.wait()
        found = self.results[rank]
        self.barrier.wait()
        return found


def over_wires(
    wires: Wires, num_hosts: int, size: int, op: Op, numel: int, dtype: torch.dtype, in_place: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return the results of a collective over hosts and on one host, by rank."""
    count = num_hosts * size
    generators = [torch.Generator().manual_seed(rank) for rank in range(count)]
    inputs = [(torch.randn(numel, generator=g) * 100).to(dtype) for g in generators]
    expected = evaluate(op, inputs, [None] * count)
    rows = [Row(size) for _ in range(num_hosts)]

    def run(rank: int) -> Tensor:
        place = HostPlace(rank // size, num_hosts, rank % size, size)
        x, row = inputs[rank].clone(), rows[place.host]
        out = torch.empty_like(expected[rank])
        if in_place and isinstance(op, (AllReduce, Broadcast)):
            out = x
        elif in_place and isinstance(op, AllGather):
            out.view(count, -1)[rank].copy_(x)
            x = out.view(count, -1)[rank]
        in_row = functools.partial(row.run, place.rank)
        over_hosts(op, x, out, place, in_row, WiredColumn(wires, place))
        return out

    with ThreadPoolExecutor(count) as threads:
        return list(zip(threads.map(run, range(count)), expected, strict=True))


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
def test_hierarchical_collectives_have_the_bits_of_direct_ones(
    num_hosts: int, size: int, kind: int, dtype: torch.dtype, in_place: bool, extra: int, root: int
) -> None:
    count = num_hosts * size
    op: Op = [AllGather(), ReduceScatter(), AllReduce(), Broadcast(root % count)][kind]
    numel = 7 * count + (0 if op.splits_input else extra)
    for rank, (found, expected) in enumerate(
        over_wires(Wires(), num_hosts, size, op, numel, dtype, in_place)
    ):
        assert_same_bits(found, expected, f"{op} over hosts and without on rank {rank}")


@pytest.mark.parametrize(("num_hosts", "size"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_between_hosts_follow_the_formulas(
    num_hosts: int, size: int, dtype: torch.dtype
) -> None:
    """Compare the bytes of each rank with the formulas of the module."""
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
        over_wires(wires, num_hosts, size, op, numel, dtype, False)
        sent = [
            sum(nbytes for (source, _), nbytes in wires.nbytes.items() if source == rank)
            for rank in range(count)
        ]
        assert sent == expected, op


def test_four_ops_use_the_hierarchical_form_for_large_tensors() -> None:
    long, short = torch.zeros(1025), torch.zeros(1024)
    for op in (AllGather(), ReduceScatter(), AllReduce(), Broadcast(0)):
        assert goes_over_hosts(op, long)
        assert not goes_over_hosts(op, short)
    for op in (AllToAll(), Reduce(0), Permute((1, 0))):
        assert not goes_over_hosts(op, long)
