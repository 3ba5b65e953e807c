"""How many functions the host calls, and objects it makes, in a step of stage 3 over nccl's group.

Counts stand for times, which depend on the machine. The fake process group of torch sends nothing.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import zfun as zf
from zfun.collectives.backends._nccl import NativeGroup

PACKAGE = str(Path(zf.__file__).parent)
LEAVES = ("a", "b", "c", "d")


def _loss(params: Any, x: Tensor) -> Tensor:
    for block in params.values():
        for name in LEAVES:
            x = torch.tanh(x @ block[name])
    return x.mean()


def _calls(group: NativeGroup, num_blocks: int) -> int:
    """Count the calls of functions of zfun in the third step."""
    params = {f"h.{i}": {name: torch.eye(8) for name in LEAVES} for i in range(num_blocks)}
    zero = zf.zero(3, _loss, zf.optim.adamw(0.01), group, bucket_bytes=1024)
    state, batch = zero.init(params), torch.ones(2, 8)
    assert len(state.params.buffers) == num_blocks
    for _ in range(2):
        state, _ = zero.step(state, batch)
    count = 0

    def look(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        zero.step(state, batch)
    finally:
        sys.setprofile(before)
    return count


def test_a_block_of_four_leaves_costs_few_calls() -> None:
    """A bound with little room: who needs more calls for each block should know the reason."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with NativeGroup(dist.group.WORLD, FakeStore(), 0, 8, 20.0, None) as group:
            few, many = _calls(group, 4), _calls(group, 12)
    finally:
        dist.destroy_process_group()
    assert (many - few) / 8 <= 310


def test_saved_activations_have_no_objects_of_their_storages() -> None:
    """Python's collector would visit each such object until backward."""
    counts: list[int] = []

    def count() -> None:
        counts.append(sum(isinstance(x, torch.UntypedStorage) for x in gc.get_objects()))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        count()
        for _ in range(50):
            x = torch.tanh(x @ w)
        count()
        return x.mean()

    zero = zf.zero(3, loss, zf.optim.adamw(0.01), zf.process_group())
    zero.step(zero.init(torch.eye(8)), torch.ones(2, 8))
    before, after = counts
    assert after - before < 5
