"""Laws of collectives, for any number of ranks, length and values."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    UnequalAllToAll,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    record,
    reduce_scatter,
    simulate,
)
from zfun.collectives.backends._world import evaluate
from zfun.collectives.gloo import _algorithms
from zfun.collectives.gloo._algorithms import num_transfers, start_exchange
from zfun.collectives.gloo._buffer_pool import BufferPool
from zfun.testing import same_bits

pytestmark = pytest.mark.timeout(120)
few = settings(max_examples=40, deadline=None)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, Op]:
    size = draw(st.integers(1, 6))
    rank = st.integers(0, size - 1)
    ops = [
        st.just(AllGather()),
        st.just(ReduceScatter()),
        st.just(AllReduce()),
        st.builds(Broadcast, rank),
        st.builds(Reduce, rank),
        st.just(AllToAll()),
        st.builds(Permute, st.permutations(range(size)).map(tuple)),
    ]
    return size, draw(st.one_of(ops))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


def _inputs(size: int, op: Op, numel: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = numel * size if op.splits_input else numel
    return [
        (torch.randn(length, generator=generator, dtype=torch.float64).abs() * 50).to(dtype)
        for _ in range(size)
    ]


class _Mailboxes:
    """The exchange primitive between threads: a queue for each pair of ranks.

    Counts the bytes that each rank sends.
    """

    def __init__(self, size: int) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }
        self.sent = [0] * size
        self.transfers = [0] * size

    def exchange(self, rank: int) -> Callable[..., _Received]:
        def start(sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None]) -> _Received:
            self.transfers[rank] += 1
            for other, tensor in enumerate(sends):
                if other != rank and tensor is not None:
                    self.boxes[rank, other].put(tensor.clone())
                    self.sent[rank] += tensor.numel() * tensor.dtype.itemsize
            return _Received(self, rank, recvs)

        return start


class _Received:
    def __init__(self, boxes: _Mailboxes, rank: int, recvs: Sequence[Tensor | None]) -> None:
        self.boxes, self.rank, self.recvs = boxes, rank, recvs

    def wait(self) -> None:
        for other, tensor in enumerate(self.recvs):
            if other != self.rank and tensor is not None:
                tensor.copy_(self.boxes.boxes[other, self.rank].get(timeout=10))


def _on_all_ranks(size: int, program: Callable[[int], None]) -> None:
    """Run every rank in a separate thread."""
    threads = [threading.Thread(target=program, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@few
@given(
    worlds(),
    st.integers(0, 9),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(1, 24),
    st.integers(0, 99),
)
@example((2, AllReduce()), 5, torch.float64, False, 5, 77)
def test_direct_exchange_has_the_results_and_sent_bytes_of_the_definition(
    world: tuple[int, Op],
    numel: int,
    dtype: torch.dtype,
    in_place: bool,
    piece_bytes: int,
    seed: int,
) -> None:
    size, op = world
    inputs = _inputs(size, op, numel, dtype, seed)
    expected = evaluate(op, inputs, [None] * size)
    boxes = _Mailboxes(size)
    outs = [torch.empty_like(x) for x in expected]
    xs = [x.clone() for x in inputs]
    if in_place and isinstance(op, AllReduce | Broadcast):
        outs = xs
    if in_place and isinstance(op, AllGather):
        xs = [out.view(size, numel)[rank].copy_(xs[rank]) for rank, out in enumerate(outs)]

    def program(rank: int) -> None:
        start_exchange(
            Collective(op), xs[rank], outs[rank], rank, size, boxes.exchange(rank), BufferPool()
        ).finish()

    itemsize = dtype.itemsize
    nbytes = inputs[0].numel() * itemsize
    with mock.patch.multiple(_algorithms, _PIECE_BYTES=piece_bytes, _SHORT_BYTES=piece_bytes):
        _on_all_ranks(size, program)
        assert boxes.transfers == [num_transfers(op, inputs[0].numel(), itemsize, size)] * size
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert boxes.sent == [op.sent_bytes(nbytes, rank, size, itemsize) for rank in range(size)]


@few
@given(st.data(), st.integers(1, 5), st.sampled_from(DTYPES))
def test_direct_exchange_moves_unequal_parts(
    data: st.DataObject, size: int, dtype: torch.dtype
) -> None:
    row = st.tuples(*[st.integers(0, 5)] * size)
    counts = data.draw(st.tuples(*[row] * size))
    ops = [UnequalAllToAll(counts, rank) for rank in range(size)]
    inputs = [(torch.arange(sum(op.sent)) + 30 * op.rank).to(dtype) for op in ops]
    expected = evaluate(ops[0], inputs, [None] * size)
    outs = [x.new_empty(op.output_numel(len(x), size)) for op, x in zip(ops, inputs, strict=True)]
    boxes = _Mailboxes(size)

    def program(rank: int) -> None:
        call, exchange = Collective(ops[rank]), boxes.exchange(rank)
        start_exchange(call, inputs[rank], outs[rank], rank, size, exchange, BufferPool()).finish()

    _on_all_ranks(size, program)
    back = evaluate(ops[0].dual, outs, [None] * size)
    assert same_bits([outs, back], [expected, inputs])
    assert boxes.sent == [op.sent_bytes(0, op.rank, size, dtype.itemsize) for op in ops]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 300),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 4),
    st.sampled_from([ReduceScatter(), AllReduce()]),
)
def test_a_sum_in_pieces_has_the_bits_of_the_whole(
    size: int, units: int, dtype: torch.dtype, most_pieces: int, op: Op
) -> None:
    numel, whole = 32 * units, isinstance(op, AllReduce)
    inputs = _inputs(size, ReduceScatter(), numel, dtype, units)
    boxes = _Mailboxes(size)
    outs = [torch.empty(numel * size if whole else numel, dtype=dtype) for _ in range(size)]
    expected = evaluate(op, inputs, [None] * size)

    def program(rank: int) -> None:
        start_exchange(
            Collective(op), inputs[rank], outs[rank], rank, size, boxes.exchange(rank), BufferPool()
        ).finish()

    with mock.patch.multiple(
        _algorithms, _PIECE_BYTES=256, _MOST_PIECES=most_pieces, _SHORT_BYTES=-1
    ):
        _on_all_ranks(size, program)
    assert all(torch.equal(out, value) for out, value in zip(outs, expected, strict=True))
    assert all(1 <= transfers <= 2 * most_pieces for transfers in boxes.transfers)
    assert units < 5 or most_pieces == 1 or boxes.transfers[0] > 1


@few
@given(worlds(), st.integers(0, 9), st.integers(0, 99))
def test_every_op_and_the_dual_op_are_adjoint(world: tuple[int, Op], numel: int, seed: int) -> None:
    """<A x, y> = <x, A* y>, exactly: the values are small integers."""
    size, op = world
    xs = [x.round() for x in _inputs(size, op, numel, torch.float64, seed)]
    images = evaluate(op, xs, [None] * size)
    ys = [y.round() for y in _inputs(size, op.dual, numel, torch.float64, seed + 1)]
    duals = evaluate(op.dual, ys, [None] * size)
    assert sum(float(a @ y) for a, y in zip(images, ys, strict=True)) == sum(
        float(x @ d) for x, d in zip(xs, duals, strict=True)
    )


PRIMITIVES: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": lambda x, g: all_gather(x, g, 1),
    "reduce_scatter": lambda x, g: reduce_scatter(x, g, 1),
    "broadcast": lambda x, g: broadcast(x, g, g.size - 1),
    "all_to_all": lambda x, g: all_to_all(x, g, 1, 0),
    "permute": lambda x, g: permute(x, g, [(r + 1) % g.size for r in range(g.size)]),
}


@few
@given(
    st.sampled_from(sorted(PRIMITIVES)),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_backward_is_the_adjoint(kind: str, size: int, rows: int, columns: int, seed: int) -> None:
    primitive = PRIMITIVES[kind]
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns * size)
    xs = [torch.randint(-9, 9, shape, generator=generator).double() for _ in range(size)]

    def program(group: Group) -> tuple[float, float]:
        x = xs[group.rank].clone().requires_grad_()
        image = primitive(x, group)
        y = torch.randint(
            -9, 9, image.shape, generator=torch.Generator().manual_seed(seed + group.rank)
        ).double()
        (gradient,) = torch.autograd.grad(image, x, y)
        return float((image.detach() * y).sum()), float((xs[group.rank] * gradient).sum())

    left, right = zip(*simulate(size, program), strict=True)
    assert sum(left) == sum(right)


@few
@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 99))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    size: int, numel: int, seed: int
) -> None:
    xs = _inputs(size, ReduceScatter(), numel, torch.float32, seed)

    def program(group: Group) -> tuple[Tensor, Tensor]:
        piece = group.start(Collective(ReduceScatter()), xs[group.rank]).wait()
        return group.start(Collective(AllGather()), piece).wait(), group.start(
            Collective(AllReduce()), xs[group.rank]
        ).wait()

    for composed, direct in simulate(size, program):
        assert torch.equal(composed, direct)


@few
@given(worlds(), st.integers(0, 9))
def test_the_recorder_logs_the_sent_bytes_of_the_op(world: tuple[int, Op], numel: int) -> None:
    size, op = world
    xs = _inputs(size, op, numel, torch.bfloat16, 0)

    def program(group: Group) -> int:
        recorder = record(group)
        recorder.start(Collective(op, "x"), xs[group.rank]).wait()
        return recorder.bytes_sent("x")

    assert simulate(size, program) == [
        op.sent_bytes(2 * xs[0].numel(), rank, size, 2) for rank in range(size)
    ]
