"""Collectives as values, and groups that wrap or replace other groups."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    LeafRecord,
    Op,
    Permute,
    Record,
    Reduce,
    ReduceScatter,
    Stream,
    Work,
    abstract_group,
    allocate,
    await_readers,
    barrier,
    check_same,
    checked,
    exchange_values,
    gather_values,
    global_ranks,
    is_symmetric,
    process_group,
    record,
    simulate,
    single_group,
    split,
    start_reduce_scatter_over,
)
from zfun.collectives.backends._diagnosis import Status, diagnose
from zfun.collectives.gloo._buffer_pool import BufferPool
from zfun.collectives.gloo._group import _StreamThread
from zfun.collectives.gloo._tuning import batch_scheduling, short_send_buffers
from zfun.collectives.launch._init import _gloo
from zfun.errors import CollectiveMismatch, OptionError, SpecMismatch

pytestmark = pytest.mark.timeout(30)

OPS: list[Op] = [
    AllGather(),
    ReduceScatter(),
    AllReduce(),
    Broadcast(1),
    Reduce(1),
    AllToAll(),
    Permute((1, 2, 0)),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kind)
def test_the_dual_of_the_dual_is_the_op(op: Op) -> None:
    assert op.dual.dual == op
    assert op.dual.output_numel(op.output_numel(12, 3), 3) == 12


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (AllGather(), [80, 80, 80]),
        (AllReduce(), [64, 64, 64]),  # 10 elements are padded to 12: 2 * 2 * 4 elements of 4 bytes
        (Broadcast(1), [0, 80, 0]),
        (Reduce(1), [40, 0, 40]),
        (Permute((1, 0, 2)), [40, 40, 0]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_sent_bytes_follow_the_formula(op: Op, expected: list[int]) -> None:
    assert [op.sent_bytes(40, rank, 3, 4) for rank in range(3)] == expected


@pytest.mark.parametrize("op", [ReduceScatter(), AllToAll()], ids=lambda op: op.kind)
def test_sent_bytes_of_an_op_that_splits_the_input(op: Op) -> None:
    assert op.sent_bytes(48, 0, 3, 4) == 32


def test_one_rank_sends_nothing() -> None:
    for op in (
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(0),
        Reduce(0),
        AllToAll(),
        Permute((0,)),
    ):
        assert op.sent_bytes(40, 0, 1, 4) == 0


@pytest.mark.parametrize(
    ("op", "x", "out", "message"),
    [
        (AllReduce(), torch.ones(2, 2), None, "contiguous 1-D tensor; got shape"),
        (AllReduce(), torch.ones(4)[::2], None, "contiguous 1-D tensor; got shape"),
        (ReduceScatter(), torch.ones(4), None, "length that the 3 ranks divide; got 4; pad it"),
        (AllGather(), torch.ones(4), torch.ones(4), "needs a contiguous 1-D output of 12"),
        (
            AllReduce(),
            torch.ones(4),
            torch.ones(4, dtype=torch.float64),
            "needs a contiguous 1-D output of 4 torch.float32",
        ),
        (Broadcast(3), torch.ones(4), None, "has root 3; the ranks are 0 to 2"),
        (Permute((0, 0, 1)), torch.ones(4), None, "each rank of 0 to 2 once"),
    ],
)
def test_impossible_calls_are_refused(
    op: Op, x: torch.Tensor, out: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        abstract_group(3).start(Collective(op, "grads"), x, out)


def test_work_waits_once() -> None:
    calls: list[int] = []

    def finish() -> torch.Tensor:
        calls.append(1)
        return torch.ones(1)

    pending = Work(finish)
    assert pending.wait() is pending.wait()
    assert len(calls) == 1


def test_work_raises_the_same_error_again() -> None:
    def finish() -> torch.Tensor:
        raise ValueError("lost")

    pending = Work(finish)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            pending.wait()


@pytest.mark.parametrize(
    "op",
    [AllGather(), ReduceScatter(), AllReduce(), Broadcast(), Reduce(), AllToAll(), Permute((0,))],
)
def test_one_rank_copies(op: Op) -> None:
    x = torch.arange(4.0, requires_grad=True)
    group = single_group()
    result = group.start(Collective(op), x.detach()).wait()
    assert torch.equal(result, x.detach())
    assert result.data_ptr() != x.data_ptr()
    out = torch.empty(4)
    assert group.start(Collective(op), x.detach(), out).wait() is out
    own = torch.ones(4)
    assert group.start(Collective(op), own, own).wait() is own


def test_no_launcher_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group() as group:
        assert (group.rank, group.size) == (0, 1)
        barrier(group)


def test_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(OptionError, match="got only RANK"):
        process_group()


def test_an_incomplete_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "any"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=r"got '127\.0\.0\.1' and 'any'"):
        process_group()


@pytest.mark.parametrize(
    ("rank", "size", "match"),
    [
        ("x", "2", "sets RANK to a number; got 'x'"),
        ("0", "-1", "sets WORLD_SIZE to a number; got '-1'"),
        ("2", "2", "RANK must be less than WORLD_SIZE; got 2 and 2"),
    ],
)
def test_a_wrong_rank_of_a_launcher_is_refused(
    rank: str, size: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "any"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=match):
        process_group()


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="has no option 'timeout'; write timeout_s"):
        process_group(timeout=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="got no mesh"):
        process_group(axis="data")


def test_the_abstract_group_moves_nothing() -> None:
    with FakeTensorMode():
        x = torch.empty(6)
        assert abstract_group(3).start(Collective(AllGather()), x).wait().shape == (18,)
        assert abstract_group(3, 2).start(Collective(ReduceScatter()), x).wait().shape == (2,)
        assert single_group().start(Collective(AllReduce()), x, x).wait().shape == (6,)
    with pytest.raises(OptionError, match="rank < size"):
        abstract_group(3, 3)


def test_the_recorder_counts() -> None:
    group = record(abstract_group(4))
    group.start(
        Collective(AllGather(), "params", "bucket 0", Stream.PARAMS),
        torch.empty(10, dtype=torch.bfloat16),
    )
    group.start(Collective(ReduceScatter(), "grads", stream=Stream.GRADS), torch.empty(40)).wait()
    barrier(group)
    assert group.log[0] == Record(
        "all_gather", "params", "bucket 0", Stream.PARAMS, 60, 10, torch.bfloat16
    )
    assert (group.bytes_sent("params"), group.bytes_sent("grads"), group.bytes_sent()) == (
        60,
        120,
        183,
    )
    group.clear()
    assert group.bytes_sent() == 0


def test_debug_compares_labels() -> None:
    assert simulate(
        2,
        lambda group: (
            checked(group).start(Collective(AllReduce(), "a"), torch.ones(1)).wait().item()
        ),
    ) == [2.0, 2.0]


def test_an_axis_alone_is_not_checked() -> None:
    """The wrapper would not be an axis, so sums over rows would go over one row only."""

    def main(group: Group) -> None:
        with pytest.raises(OptionError, match=r"got its inner axis alone; call .*split\(checked"):
            checked(split(group, inner=2).inner)
        mesh = split(checked(group), inner=2)
        call, x = Collective(ReduceScatter(), "grads"), torch.tensor([1, 10])
        found.append(start_reduce_scatter_over(mesh.inner, call, x).wait().item())

    found: list[Any] = []
    simulate(4, main)
    assert sorted(found) == [4, 4, 40, 40]


class _Unchecked(Group):
    """A transport that cannot see a mismatch: the other rank always sends the same label, and
    accepts any data.
    """

    rank, size = 0, 2

    def __init__(self, other: str) -> None:
        self.other = other

    def start(self, call: Collective, x: torch.Tensor, out: torch.Tensor | None = None) -> Work:
        if call.name == "label":
            theirs = bytes(x.tolist()).replace(b"'grads'", self.other.encode())
            return Work.done(torch.cat([x, torch.tensor(list(theirs), dtype=torch.uint8)]))
        return Work.done(x)


def test_debug_names_both_sides() -> None:
    group = checked(_Unchecked("'paral'"))
    with pytest.raises(
        CollectiveMismatch,
        match=r"rank 0 started collective 0: all_reduce 'grads'.*; rank 1 started .*'paral'",
    ):
        group.start(Collective(AllReduce(), "grads"), torch.ones(1)).wait()
    checked(_Unchecked("'grads'")).start(Collective(AllReduce(), "grads"), torch.ones(1)).wait()


def test_agreement_costs_one_small_gather() -> None:
    def program(group: Group) -> int:
        recorder = record(group)
        check_same([LeafRecord("w", "(3,) float32", 5)], recorder, "params")
        return recorder.bytes_sent()

    assert simulate(3, program) == [64] * 3


W = LeafRecord("h.0.w", "(3,) float32", "aa")


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ([], "leaf h.0.w is .3,. float32 on ranks 0, 2 and missing on rank 1"),
        (
            [LeafRecord("h.0.w", "(4,) float32", "aa")],
            "leaf h.0.w is .3,. float32 on ranks 0, 2 and .4,. float32 on rank 1",
        ),
        (
            [LeafRecord("h.0.w", "(3,) float32", "bb")],
            "leaf h.0.w has other values: fingerprint aa on ranks 0, 2 and bb on rank 1",
        ),
        (
            [
                W,
                LeafRecord("x", "()"),
                LeafRecord("y", "()"),
                LeafRecord("z", "()"),
                LeafRecord("u", "()"),
            ],
            "and 1 more",
        ),
    ],
)
def test_disagreement_names_leaf_ranks_and_sides(odd: list[LeafRecord], message: str) -> None:
    errors: list[SpecMismatch] = []

    def program(group: Group) -> None:
        try:
            check_same(odd if group.rank == 1 else [W], group, "params")
        except SpecMismatch as error:
            errors.append(error)
            raise

    with pytest.raises(SpecMismatch, match=message):
        simulate(3, program)
    assert len(errors) == 3


def test_the_order_of_leaves_counts() -> None:
    entries = [LeafRecord("a", "()"), LeafRecord("b", "()")]
    with pytest.raises(SpecMismatch, match="another order: a, b on rank 0 and b, a on rank 1"):
        simulate(2, lambda group: check_same(entries[:: -1 if group.rank else 1], group, "params"))


def _status(
    text: str = "a", *, waiting: bool = True, stream: int = 0, left: bool = False
) -> Status:
    started = tuple(int(i == stream) for i in range(3))
    return Status(started, {str(stream): {"0": text}}, ((stream, 0),) if waiting else (), left)


@pytest.mark.parametrize(
    ("own", "peer", "message"),
    [
        (_status(), _status("b", waiting=False), "rank 0 started a, and rank 1 started b"),
        (_status(), Status(left=True), "rank 0 lost rank 1 in collective 0: it has left the group"),
        (
            _status(),
            _status("b", stream=1),
            "rank 0 in collective 0 .a., rank 1 in collective 0 .b.",
        ),
    ],
)
def test_diagnosis_compares_the_status_that_ranks_publish(
    own: Status, peer: Status, message: str
) -> None:
    verdict = diagnose(0, own, {1: peer})
    assert verdict is not None
    with pytest.raises(type(verdict.error(0, "collective 0")), match=message):
        raise verdict.error(0, "collective 0")


@pytest.mark.parametrize(
    "peer", [Status(), _status(), _status("b", stream=1, waiting=False), _status(left=True)]
)
def test_a_slow_peer_gets_no_diagnosis(peer: Status) -> None:
    assert diagnose(0, _status(), {1: peer}) is None


def test_a_circle_of_waits_is_an_error_only_when_certain() -> None:
    assert diagnose(0, _status(), {1: _status("b", stream=1)}, certain=False) is None


def test_buffer_pool_reuses_a_buffer_after_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(1 << 17, torch.float32)
    place, view = first.data_ptr(), first[5:10].fill_(3.0)
    del first
    other = pool.take(1 << 17, torch.float32)
    assert other.data_ptr() != place
    other.zero_()
    assert view.tolist() == [3.0] * 5
    del view
    assert pool.take(1 << 16, torch.float64).data_ptr() == place
    assert pool.nbytes == 2 << 19


def test_buffer_pool_keeps_a_large_buffer_beside_small_ones() -> None:
    pool = BufferPool()
    for numel in (1 << 22, 1 << 18, 1 << 22, 1 << 18):
        pool.take(numel, torch.uint8)
    assert pool.nbytes == (1 << 22) + (1 << 18)


def test_buffer_pool_keeps_no_more_than_was_in_use_at_once() -> None:
    pool = BufferPool()
    for numel in (1 << 20, 1 << 18, 1 << 22):
        assert pool.take(numel, torch.uint8).numel() == numel
        assert pool.nbytes <= numel * 9 // 8
    held = [pool.take(1 << 18, torch.uint8) for _ in range(3)]
    # The pool has dropped the largest buffer.
    assert pool.nbytes == 3 << 18
    del pool
    assert [x.fill_(7).sum().item() for x in held] == [7 << 18] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class of threads")
def test_stream_threads_and_gloo_threads_run_under_sched_batch() -> None:
    found: list[int] = []

    def note() -> Iterator[None]:
        found.append(os.sched_getscheduler(0))
        yield

    thread = _StreamThread(Stream.GRADS)
    thread.submit(note).result(timeout=10.0)
    thread.close()
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    group = _gloo(dist.HashStore(), 0, range(1), 10.0)
    own = [int(task.name) for task in set(tasks.iterdir()) - before]
    assert own
    assert {*map(os.sched_getscheduler, own), *found} == {os.SCHED_BATCH}
    del group
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class of threads")
def test_a_scheduling_class_that_the_user_chose_stays() -> None:
    found: list[int] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch_scheduling():
            found.append(os.sched_getscheduler(0))
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10.0)
    assert found == [os.SCHED_IDLE] * 2


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not say which connections there are"
)
def test_connections_within_a_host_get_short_buffers_and_other_connections_do_not() -> None:
    room = lambda connection: connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as older,
    ):
        usual = room(older)
        with short_send_buffers():
            made = [socket.create_connection(server.getsockname())]
            server.accept()[0].close()
            made.append(server.accept()[0])
            later_server = socket.create_server(("127.0.0.1", 0))
        assert [room(connection) < usual for connection in made] == [True, True]
        assert room(older) == usual
        with socket.create_connection(server.getsockname()) as newer:
            assert room(newer) == usual
        made[0].sendall(b"as before")
        assert made[1].recv(9) == b"as before"
        for connection in (*made, later_server):
            connection.close()


def test_a_group_has_six_members() -> None:
    members = {name for name in (*vars(Group), *Group.__annotations__) if not name.startswith("_")}
    assert members == {"rank", "size", "start", "subgroup", "close", "allocate"}


@pytest.mark.parametrize(
    "wrap", [lambda group: group, record, checked, lambda group: split(group, 1).outer]
)
def test_functions_over_a_group_take_any_group(wrap: Callable[[Group], Group]) -> None:
    def main(plain: Group) -> None:
        group = wrap(plain)
        assert allocate(group, 5, torch.float64).shape == (5,)
        await_readers(group, [torch.ones(1)])
        assert list(global_ranks(group)) == [0, 1, 2]
        assert not is_symmetric(group)
        assert gather_values(torch.tensor(group.rank), group, "x").tolist() == [0, 1, 2]
        rows = 10 * group.rank + torch.arange(3).view(3, 1)
        assert exchange_values(rows, group, "x").view(-1).tolist() == [
            group.rank,
            10 + group.rank,
            20 + group.rank,
        ]

    simulate(3, main)
