"""Pipeline, data and tensor axes in one run: the numbers of one data axis, and its checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from zfun import optim

WIDTH, HIDDEN, MICRO = 6, 8, 2
PLAN = {"up": "colwise", "bias": "colwise", "down": "rowwise"}
Params = list[dict[str, Tensor]]


def params() -> Params:
    chance = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64) / 2

    return [
        {
            "norm": draw(WIDTH),
            "up": draw(HIDDEN, WIDTH),
            "bias": draw(HIDDEN),
            "down": draw(WIDTH, HIDDEN),
        }
        for _ in range(2)
    ]


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = torch.tanh(F.linear(F.layer_norm(x, (WIDTH,), p["norm"]), p["up"], p["bias"]))
    return x + F.linear(h, p["down"])


def last(p: dict[str, Tensor], x: Tensor, batch: Tensor) -> Tensor:
    return (block(p, x) - batch.flip(-1)).square().mean()


def plain(p: Params, batch: Tensor) -> Tensor:
    return last(p[1], block(p[0], batch), batch)


def rule() -> Any:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.05))


def steps(z: Any, rank: int, path: Path | None, count: int) -> Any:
    state = z.init(params())
    if path is not None and count == 1:
        state = zf.load(path, state).state
    seen = []
    for step in range(state.step, state.step + count):
        chance = torch.Generator().manual_seed(100 * step + rank)
        batch = torch.randn(2 * MICRO, WIDTH, generator=chance, dtype=torch.float64)
        state, info = z.step(state, batch)
        seen.append((float(info.loss), float(info.grad_norm)))
    if path is not None and count == 2:
        zf.save(path, state)
    return seen, z.params(state)


def over_three_axes(
    group: zf.Group, stage: int, schedule: str, path: Path | None = None, count: int = 3
) -> Any:
    mesh = zf.mesh(group, pp=2, dp=2, tp=2)
    cut = functools.partial(zf.tensor_parallel, axis=mesh["tp"], plan=PLAN)
    loss = zf.pipeline([cut(block), cut(last)], mesh["pp"], schedule, num_micro_batches=MICRO)
    z = zf.zero(stage, loss, rule(), mesh["dp"])
    return steps(z, mesh.coordinates["dp"], path, count)


def over_data(group: zf.Group, stage: int, path: Path | None = None, count: int = 3) -> Any:
    z = zf.zero(stage, plain, rule(), group, num_micro_batches=MICRO)
    return steps(z, group.rank, path, count)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


STAGES = [0, 1, 2, 3] if FORM != "everyday" else [1, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("stage", STAGES)
def test_three_axes_give_the_numbers_of_one(stage: int, schedule: str) -> None:
    expected = zf.simulate(2, over_data, stage)[0]
    ranks = zf.simulate(8, over_three_axes, stage, schedule)
    for found in ranks:
        close(found, expected)
        assert found[0] == ranks[0][0]


def test_a_checkpoint_of_three_axes_is_one_of_a_data_axis(tmp_path: Path) -> None:
    expected = zf.simulate(2, over_data, 3)[0]
    zf.simulate(8, over_three_axes, 3, "1f1b", tmp_path / "three", 2)
    (found, *_) = zf.simulate(2, over_data, 1, tmp_path / "three", 1)
    close(found[1], expected[1])
    zf.simulate(2, over_data, 2, tmp_path / "one", 2)
    for found in zf.simulate(8, over_three_axes, 1, "gpipe", tmp_path / "one", 1):
        close(found[1], expected[1])


def test_stages_cut_a_leaf_of_theirs_in_one_way() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, pp=2, dp=1, tp=2)
        cut = functools.partial(zf.tensor_parallel, axis=mesh["tp"])
        loss = zf.pipeline(
            [
                cut(lambda p, x: F.linear(x, p["w"]), plan={"w": "colwise_gather_output"}),
                cut(lambda p, x: F.linear(x, p["w"]).sum(), plan={"w": "rowwise"}),
            ],
            mesh["pp"],
            num_micro_batches=1,
            leaves=[["w"], ["w"]],
        )
        zf.zero(1, loss, optim.sgd(0.1), mesh["dp"]).init({"w": torch.ones(4, 4)})

    with pytest.raises(zf.errors.OptionError, match=r"spread it over an axis in one way; .* 'w'"):
        zf.simulate(4, main)
