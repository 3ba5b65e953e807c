"""A rank of two: collectives and steps, beside the simulation; or a rank that waits for a lost one.

torchrun --standalone --nproc-per-node 2 -m tests.gpu.two_ranks DEVICE [lost]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import tree
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
from zfun.errors import PeerLost

OPS: list[Op] = [
    # The first call of a communicator, with a rank that keeps its tensor.
    Permute((0, 1)),
    Permute((1, 0)),
    AllGather(),
    ReduceScatter(),
    AllReduce(),
    Broadcast(1),
    Reduce(0),
    AllToAll(),
]


def results(group: zf.Group, device: str) -> list[Tensor]:
    """Return the results of all collectives, and the parameters after three steps of each stage."""
    x = (torch.arange(8.0) + group.rank).to(device)
    found = [group.start(Collective(op), x).wait().cpu() for op in OPS]
    for stage in range(4):
        params = tree.map(lambda leaf: leaf.to(device), models.mlp())
        z = zf.zero(stage, models.mlp_loss, zf.optim.adamw(1e-2), group)
        state = z.init(params)
        for step in models.mlp_batches(3, 2):
            state, _ = z.step(state, step[group.rank].to(device))
        found += [leaf.cpu() for leaf in tree.leaves(z.params(state))]
    return found


def compare(device: str) -> None:
    with zf.process_group() as group:
        found = results(group, device)
        expected = zf.simulate(2, lambda ranks: results(ranks, "cpu"))[group.rank]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        print("equal")


def lose(device: str) -> None:
    group: Any = zf.process_group(timeout_s=5.0)
    x = torch.ones(1 << 20, device=device)
    group.start(Collective(AllReduce()), x).wait()
    if group.rank == 1:
        time.sleep(30.0)
        return
    group.start(Collective(AllReduce()), x).wait()
    torch.cuda.synchronize()
    try:
        group.start(Collective(AllReduce()), x).wait()
    except PeerLost as error:
        print(error)
    group.close()
    print("goes on", float(torch.ones(3, device=device).sum()))


if __name__ == "__main__":
    (lose if "lost" in sys.argv else compare)(sys.argv[1])
