"""Losses of activations that are cut along the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.errors import PlacementError

WIDTH = 4
PARAMS = {"embed": torch.randn(6, WIDTH), "norm": torch.ones(WIDTH)}
PARAMS |= {"up": torch.eye(WIDTH), "down": torch.eye(WIDTH)}
PLAN = {"up": "colwise", "down": "rowwise"}


def activations(held: dict[str, Tensor], ids: Tensor) -> Tensor:
    x = F.embedding(ids, held["embed"])
    h = torch.tanh(F.linear(F.layer_norm(x, (WIDTH,), held["norm"]), held["up"]))
    return x + F.linear(h, held["down"])


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda x: x.square().mean(),
    "with aux": lambda x: (x.square().mean(), "aux"),
    "weighted": lambda x: zf.weighted_mean(x.square().sum(), x.numel()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_tokens_of_one_rank_is_refused(name: str) -> None:
    def main(group: zf.Group, is_joined: bool) -> Any:
        mesh = zf.mesh(group, dp=1, tp=-1)

        def loss(held: dict[str, Tensor], ids: Tensor) -> Any:
            x = activations(held, ids)
            if is_joined and mesh["tp"].size > 1:
                x = zf.collectives.leave(x, mesh["tp"], 1)
            return LOSSES[name](x)

        cut = zf.tensor_parallel(loss, mesh["tp"], PLAN, sequence_dim=1)
        zero = zf.zero(1, cut, optim.sgd(0.1), mesh["dp"])
        ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])
        state, info = zero.step(zero.init(PARAMS), ids)
        return info.loss, zero.params(state)

    with pytest.raises(PlacementError, match=r"equal on all ranks of the axis; got \[.*leave\("):
        zf.simulate(2, main, False)
    (expected,) = zf.simulate(1, main, False)
    for found in zf.simulate(2, main, True):
        torch.testing.assert_close(found, expected)
