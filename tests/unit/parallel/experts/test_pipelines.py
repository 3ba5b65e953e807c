"""Experts in the stages of a pipeline: the ranks of the expert axis have batches of their own."""

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
from tests.distributed.programs.experts import CHOICES, WIDTH, mixture_over, rule, whole_mixture
from tests.distributed.programs.experts import params as mixture_params
from zfun.errors import OptionError
from zfun.parallel import expert_parallel
from zfun.testing import same_bits

WIDE = torch.float64


def params(num_stages: int) -> list[dict[str, Any]]:
    """Two layers of experts, and between them stages without experts."""
    whole = mixture_params(WIDE)
    first, last = whole["layers"]
    between = [{"w": i * whole["head"].T} for i in range(1, num_stages - 1)]
    return [first, *between, {**last, "head": whole["head"]}]


def batch(rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4 + 2 * rank, WIDTH, generator=g, dtype=WIDE)


def layer(mixture: Any, p: Any, x: Tensor) -> Tensor:
    weights, chosen = F.linear(x, p["router"]).softmax(-1).topk(CHOICES, -1)
    return x + mixture(p["experts"], x, chosen, weights)


def turned(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, p["w"]))


def end(mixture: Any, p: Any, x: Tensor, batch: Tensor) -> Any:
    found = F.linear(layer(mixture, p, x), p["head"])
    return zf.weighted_mean((found - batch.flip(-1)).square().sum(), len(x))


@functools.cache
def plain(num_stages: int) -> Any:
    """One process with the tokens of all ranks in its batch."""

    def loss(p: Any, x: Tensor) -> Any:
        hidden = layer(whole_mixture, p[0], x)
        for between in p[1:-1]:
            hidden = turned(between, hidden)
        return end(whole_mixture, p[-1], hidden, x)

    def main(group: zf.Group) -> Any:
        zero = zf.zero(0, loss, rule(), group)
        state, seen = zero.init(params(num_stages)), []
        for step in range(3):
            state, info = zero.step(state, torch.cat([batch(rank, step) for rank in range(2)]))
            seen.append((info.loss, info.grad_norm))
        return seen, zero.params(state)

    return zf.simulate(1, main)[0]


def trained(
    group: zf.Group,
    stage: int,
    schedule: str,
    num_stages: int = 2,
    path: Any = None,
    count: int = 3,
    **sizes: int,
) -> Any:
    """Train; without steps, return the parameters of the state at the path."""
    mesh = zf.mesh(group, **sizes)
    over = functools.partial(expert_parallel, axis=mesh["ep"])
    first, last = (
        over(functools.partial(fn, mixture_over(mesh["ep"])), experts=["experts.*"])
        for fn in (layer, end)
    )
    stages = [first, *[over(turned, experts=[])] * (num_stages - 2), last]
    loss = zf.pipeline(stages, mesh["pp"], schedule, num_micro_batches=2)
    zero = zf.zero(stage, loss, rule(), mesh["dp"], bucket_bytes=1000)
    state, seen = zero.init(params(num_stages)), []
    if not count:
        return zero.params(zf.load(path, state).state)
    data = mesh.coordinates["dp"] * sizes["ep"] + mesh.coordinates["ep"]
    for step in range(count):
        state, info = zero.step(state, batch(data, step))
        seen.append((info.loss, info.grad_norm))
    if path is not None:
        zf.save(path, state)
    return seen, zero.params(state)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 4), ("zero_bubble", 2)])
@pytest.mark.parametrize("stage", range(4) if FORM != "everyday" else (1, 3))
def test_a_pipeline_of_experts_trains_as_one_process(
    stage: int, schedule: str, num_stages: int
) -> None:
    first, *others = zf.simulate(4, trained, stage, schedule, num_stages, pp=2, dp=1, ep=2)
    torch.testing.assert_close(first, plain(num_stages), rtol=1e-12, atol=1e-12)
    assert all(same_bits(other, first) for other in others)


def test_a_checkpoint_crosses_between_meshes(tmp_path: Path) -> None:
    saved = zf.simulate(4, trained, 3, "1f1b", 2, tmp_path, pp=2, dp=1, ep=2)[0][1]
    for stage, sizes in ((0, {"pp": 1, "dp": 1, "ep": 1}), (2, {"pp": 1, "dp": 2, "ep": 3})):
        size = sizes["pp"] * sizes["dp"] * sizes["ep"]
        found = zf.simulate(size, trained, stage, "1f1b", 2, tmp_path, 0, **sizes)
        assert all(same_bits(leaves, saved) for leaves in found)


def test_a_stage_that_knows_no_batches_of_its_own_is_refused() -> None:
    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, dp=1, ep=2)
        last = expert_parallel(lambda p, x: x.sum(), mesh["ep"], ["experts"])
        return zf.pipeline([lambda p, x: x, last], mesh["dp"], num_micro_batches=2)

    with pytest.raises(OptionError, match=r"got stage 0 without expert_parallel.*experts=\[\]"):
        zf.simulate(2, main)
