"""Hops of a mesh on a group whose waits make a device wait: the host starts all of them at once.

The group of nccl runs over torch's fake backend, which moves nothing. Order is recorded, no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import zfun as zf
from tests import models
from zfun.collectives import AllGather, AllReduce, Collective, Stream, checked
from zfun.collectives.backends._nccl import NativeGroup

NUM_BLOCKS, WIDTH = 4, 64
BUCKET_BYTES = 4 * WIDTH * (WIDTH + 1)


class Hop(NamedTuple):
    """A collective of one axis, as the host started it."""

    name: str
    part: str
    axis: str


class Overlap(TorchDispatchMode):
    """The number of matmuls so far, and at the start and the wait of each hop.

    Attributes:
        hops: the hops in the order of their starts.
        num_matmuls: the matmuls so far.
        spans: for each hop the matmuls between its start and the wait of the queue that computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_matmuls = 0
        self.is_aside = False
        self.hops: list[Hop] = []
        self.spans: list[int | None] = []
        self._starts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_matmuls += func in (torch.ops.aten.mm.default, torch.ops.aten.mv.default)
        return func(*args, **(kwargs or {}))

    def started(self, hop: Hop) -> int:
        self.hops.append(hop)
        self.spans.append(None)
        self._starts.append(self.num_matmuls)
        return len(self.hops) - 1

    def waited(self, number: int) -> None:
        """Note a wait. The queue that computes waits for all hops of a value when for its last."""
        if self.is_aside:
            return
        mine = self.hops[number]
        for other in range(number, -1, -1):
            hop = self.hops[other]
            if (hop.name, hop.part) == (mine.name, mine.part) and self.spans[other] is None:
                self.spans[other] = self.num_matmuls - self._starts[other]

    def spans_of(self, name: str) -> list[dict[str, int]]:
        """Return the span of each hop of each collective, by axis."""
        found: list[dict[str, int]] = []
        last = ""
        for hop, span in zip(self.hops, self.spans, strict=True):
            if hop.name == name:
                assert span is not None
                if hop.part != last or hop.axis in found[-1]:
                    found.append({})
                found[-1][hop.axis] = span
                last = hop.part
        return found

    def axes(self) -> list[str]:
        return [hop.axis for hop in self.hops]

    def clear(self) -> None:
        for noted in (self.hops, self.spans, self._starts):
            noted.clear()


class _Pending:
    def __init__(self, overlap: Overlap, number: int, works: list[Any]) -> None:
        self._overlap, self._number, self._works = overlap, number, works

    def wait(self) -> None:
        self._overlap.waited(self._number)
        for work in self._works:
            work.wait()


@pytest.fixture
def group() -> Iterator[NativeGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        with NativeGroup(dist.group.WORLD, dist.HashStore(), 0, 6, 5.0, None) as made:
            yield made
    finally:
        dist.destroy_process_group()


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Overlap:
    made = Overlap()
    issue = NativeGroup._issue

    def recorded(self: Any, call: Any, x: Any, out: Any) -> list[Any]:
        number = made.started(Hop(call.name, call.part, {2: "outer", 3: "inner"}[self.size]))
        return [_Pending(made, number, issue(self, call, x, out))]

    @contextlib.contextmanager
    def aside() -> Iterator[None]:
        made.is_aside = True
        yield
        made.is_aside = False

    monkeypatch.setattr(NativeGroup, "_issue", recorded)
    monkeypatch.setattr(NativeGroup, "aside", lambda *_: aside(), raising=False)
    return made


def _step(group: NativeGroup, overlap: Overlap, stage: int, *, is_hybrid: bool) -> None:
    mesh = zf.mesh(group, outer=2, inner=3)
    z = zf.zero(
        stage,
        models.mlp_loss,
        zf.optim.sgd(0.1),
        mesh.group("inner", replicate="outer") if is_hybrid else mesh["outer", "inner"],
        bucket_bytes=BUCKET_BYTES,
    )
    state = z.init(models.mlp(WIDTH, NUM_BLOCKS, torch.float32))
    overlap.clear()
    with overlap:
        z.step(state, torch.ones(4, WIDTH))


@pytest.mark.parametrize("is_hybrid", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_backward_hides_all_hops_of_a_sum(
    group: NativeGroup, overlap: Overlap, stage: int, is_hybrid: bool
) -> None:
    """At least one block of matmuls, but for the last bucket, which no backward follows."""
    _step(group, overlap, stage, is_hybrid=is_hybrid)
    spans = overlap.spans_of("grads")
    assert all(list(hops) == ["inner", "outer"] for hops in spans)
    assert len(spans) == NUM_BLOCKS + 1
    *others, before, last = spans
    assert all(span >= 2 for hops in others for span in hops.values())
    # The first block has one matmul, because nobody needs the gradient of its input.
    assert all(span == 1 for span in before.values())
    assert all(span == 0 for span in last.values())


def test_a_block_hides_both_hops_of_a_gather(group: NativeGroup, overlap: Overlap) -> None:
    _step(group, overlap, 3, is_hybrid=False)
    spans = overlap.spans_of("params")
    assert all(list(hops) == ["outer", "inner"] for hops in spans)
    forward = spans[: NUM_BLOCKS + 1]
    # Each block has one matmul in forward; the first gather of a step has none before it.
    assert all(span == 0 for span in forward[0].values())
    assert all(span >= 1 for hops in forward[1:] for span in hops.values())


def test_hops_are_left_to_the_wait_where_the_host_waits(
    group: NativeGroup, overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a checked group compare labels on the host; so do values of another device."""
    call, x = Collective(AllReduce(), stream=Stream.GRADS), torch.ones(6000)
    zf.mesh(group, outer=2, inner=3)["outer", "inner"].start(call, x)
    assert overlap.axes() == ["inner", "outer", "inner"]
    overlap.clear()
    pending = zf.mesh(checked(group), outer=2, inner=3)["outer", "inner"].start(call, x)
    assert overlap.axes() == ["inner", "inner"]  # the label, and the first hop
    pending.wait()
    overlap.clear()
    monkeypatch.setattr(NativeGroup, "aside", lambda *_: None)
    zf.mesh(group, outer=2, inner=3)["outer", "inner"].start(call, x)
    assert overlap.axes() == ["inner"]


def test_axes_see_collectives_in_the_order_of_the_calls(
    group: NativeGroup, overlap: Overlap
) -> None:
    mesh = zf.mesh(group, outer=2, inner=3)
    both = mesh["outer", "inner"]
    calls = [
        Collective(op, name, stream=Stream.GRADS)
        for name, op in (("a", AllReduce()), ("b", AllGather()), ("c", AllReduce()))
    ]
    works = [both.start(call, torch.ones(6000)) for call in calls]
    works.append(
        mesh["outer"].start(Collective(AllReduce(), "d", stream=Stream.GRADS), torch.ones(6))
    )
    for work in reversed(works):
        work.wait()
    order = [(hop.name, hop.axis) for hop in overlap.hops]
    assert [name for name, axis in order if axis == "inner"] == ["a", "a", "b", "c", "c"]
    assert [name for name, axis in order if axis == "outer"] == ["a", "b", "c", "d"]
