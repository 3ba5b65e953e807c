"""Codecs beside model axes: leaves that ranks share stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.compression import Compression, int4, int8
from zfun.parallel import dispatch, expert_parallel

WIDTH = 16
SHARED = ("scale", "shift", "out")


def params() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    shapes = {
        "scale": (WIDTH,),
        "up": (4 * WIDTH, WIDTH),
        "shift": (WIDTH,),
        "down": (WIDTH, 4 * WIDTH),
        "out": (3,),
        "experts": (2, WIDTH),
    }
    return {name: torch.randn(shape, generator=chance) / 4 for name, shape in shapes.items()}


def loss_over(mesh: Any) -> Any:
    def loss(held: dict[str, Tensor], batch: Tensor) -> Tensor:
        x = F.layer_norm(batch, (WIDTH,), held["scale"], held["shift"])
        x = x + F.linear(torch.tanh(F.linear(x, held["up"])), held["down"])
        experts = lambda rows, ids: rows * held["experts"][ids]
        chosen = (x[:, :1] > 0).long()
        x = x + dispatch(experts, x, chosen, torch.ones(len(x), 1), mesh["ep"], 2)
        return x.square().mean() + (x[:, :3] * held["out"]).mean()

    plan = {"up": "colwise", "down": "rowwise"}
    return expert_parallel(zf.tensor_parallel(loss, mesh["tp"], plan), mesh["ep"], ["experts"])


@pytest.mark.parametrize(
    ("stage", "compression"),
    [
        (0, Compression(grads=int8())),
        (2, Compression(grads=int4())),
        (3, Compression(grads=int8(), params=int8())),
    ],
)
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_codec_keeps_the_leaves_equal_that_ranks_share(
    stage: int, compression: Compression, axis: str
) -> None:
    """Blocks of a codec mix neighbours, and each rank of a model axis has other ones."""

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, **{"dp": 2, "ep": 1, "tp": 1} | {axis: 2})
        z = zf.zero(
            stage,
            loss_over(mesh),
            optim.sgd(0.1),
            mesh["dp"],
            compression=compression,
            schedule=zf.ScheduleOptions(persistence=0),
        )
        state = z.init(params())
        for step in range(2):
            chance = torch.Generator().manual_seed(10 * step + mesh.coordinates["dp"])
            state, _ = z.step(state, torch.randn(4, WIDTH, generator=chance))
        own = zf.unshard(state.params)
        return {name: own[name] for name in SHARED}, z.params(state)

    ranks = zf.simulate(4, main)
    for own, whole in ranks:
        for name in SHARED:
            assert torch.equal(own[name], ranks[0][0][name]), name
            assert not torch.equal(own[name], params()[name]), name
            assert torch.equal(whole[name], own[name])
