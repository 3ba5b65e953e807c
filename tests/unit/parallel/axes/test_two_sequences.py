"""A tensor-parallel loss of two sequences, whose activations are cut along the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.errors import PlacementError

WIDTH, VOCABULARY = 4, 6
PLAN = {"up": "colwise", "down": "rowwise", "read": "colwise", "out": "rowwise"}
WIDE = torch.float64


def params() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    matrix = (WIDTH, WIDTH)
    shapes = {"source": (VOCABULARY, WIDTH), "target": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    shapes |= dict.fromkeys([*PLAN], matrix)
    return {
        name: torch.randn(shape, dtype=WIDE, generator=chance) for name, shape in shapes.items()
    }


def loss(held: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Encode one sequence; each token of the other one sees the sum of what it reads of that."""
    source, target = batch
    memory = F.layer_norm(F.embedding(source, held["source"]), (WIDTH,), held["norm"])
    memory = 2 * memory  # so that it is another tensor than that of the norm
    x = F.embedding(target, held["target"])
    h = torch.tanh(F.linear(F.layer_norm(x, (WIDTH,), held["norm"]), held["up"]))
    x = x + F.linear(h, held["down"])
    read = torch.tanh(F.linear(memory, held["read"])).sum(1, keepdim=True)
    h = F.linear(F.layer_norm(x, (WIDTH,), held["norm"]), held["up"])
    x = x + F.linear(h + read, held["out"])
    return F.layer_norm(x, (WIDTH,), held["norm"]).square().mean()


def trained(group: zf.Group, lengths: tuple[int, int], axis: bool) -> Any:
    mesh = zf.mesh(group, dp=1, tp=-1)
    cut = zf.tensor_parallel(loss, mesh["tp"], PLAN, sequence_dim=1) if axis else loss
    z = zf.zero(1, cut, optim.sgd(0.1), mesh["dp"])
    chance = torch.Generator().manual_seed(1)
    batch = tuple(torch.randint(VOCABULARY, (2, n), generator=chance) for n in lengths)
    state, info = z.step(z.init(params()), batch)
    return float(info.loss), float(info.grad_norm), z.params(state)


@pytest.mark.parametrize("lengths", [(8, 12), (12, 8), (16, 8), (8, 8)])
def test_each_sequence_keeps_its_length(lengths: tuple[int, int]) -> None:
    (expected,) = zf.simulate(1, trained, lengths, False)
    for found in zf.simulate(2, trained, lengths, True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_piece_as_long_as_another_sequence_is_refused() -> None:
    with pytest.raises(PlacementError, match="whose sequences have 8 and 16, over 2 ranks"):
        zf.simulate(2, trained, (8, 16), True)
