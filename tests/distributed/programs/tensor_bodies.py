"""Programs over tensor axes, for simulated ranks and processes; see :mod:`bodies`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun.errors import PlacementError, SpecMismatch
from zfun.parallel import vocab_cross_entropy
from zfun.testing import assert_same_bits

PLAN = {
    "table": "embedding_rowwise",
    "layers.*.up*": "colwise",
    "layers.*.down*": "rowwise",
    "head": "colwise",
}


def params() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g) / 4
    layer = lambda: {
        "up": draw(32, 16),
        "up_bias": draw(32),
        "down": draw(16, 32),
        "down_bias": draw(16),
        "norm": 1 + draw(16),
    }
    return {"table": draw(24, 16), "layers": [layer(), layer()], "head": draw(24, 16)}


def loss_over(axis: zf.Group) -> Any:
    def block(p: Any, x: Tensor) -> Tensor:
        y = F.linear(F.rms_norm(x, (16,), p["norm"]), p["up"], p["up_bias"])
        return x + F.linear(F.gelu(y), p["down"], p["down_bias"])

    def loss(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids[:, :-1], p["table"])
        for layer in p["layers"]:
            x = zf.remat(block)(layer, x)
        return vocab_cross_entropy(F.linear(x, p["head"]), ids[:, 1:], axis, vocab_size=24)

    return loss


def trained_over_tensor_ranks(group: zf.Group) -> Any:
    """Train on 2 data ranks x 2 tensor ranks at each stage, with clipping; all bits agree."""
    mesh = zf.mesh(group, dp=2, tp=2)
    axis, results = mesh["tp"], []
    clipped = zf.optim.chain(zf.optim.clip_by_global_norm(0.1), zf.optim.adamw(0.01))
    for stage in (0, 3):
        loss = zf.tensor_parallel(loss_over(axis), axis, PLAN)
        zero = zf.zero(stage, loss, clipped, mesh["dp"], bucket_bytes=2000)
        state, losses = zero.init(params()), []
        for step in range(2):
            g = torch.Generator().manual_seed(10 * step + mesh.coordinates["dp"])
            state, info = zero.step(state, torch.randint(0, 24, (2, 8), generator=g))
            losses.append(info.loss)
        results.append((losses, zero.params(state)))
        assert_same_bits(results[-1], results[0], f"stage {stage}")
    return results[0]


def refused_over_tensor_ranks(group: zf.Group) -> list[str]:
    """Wrong programs are errors on every rank, and the axis works afterwards."""
    found = []
    for plan, use, kind in (
        ({"w": "colwise" if group.rank % 2 else "rowwise"}, F.linear, SpecMismatch),
        ({"w": "colwise"}, torch.matmul, PlacementError),
    ):
        loss = lambda p, x, use=use: use(x, p["w"]).sum()
        cut = zf.tensor_parallel(loss, group, plan)
        try:
            cut({"w": torch.ones(4, 4)}, torch.ones(2, 4))
        except kind as error:
            found.append(str(error).split(";")[0])
    zf.collectives.barrier(group)
    return found
