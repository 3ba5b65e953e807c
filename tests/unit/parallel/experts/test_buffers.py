"""Buffers of a loss over a model axis: written in place or by assignment, and merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfun as zf
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.parallel import dispatch, expert_parallel
from zfun.testing import same_bits

WIDE = torch.float64


class Net(nn.Module):
    """Four experts behind a norm, and a buffer that is assigned; tokens choose in turn."""

    def __init__(self, axis: Group | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.norm = nn.BatchNorm1d(2, dtype=WIDE)
        self.experts = nn.Parameter(torch.arange(16, dtype=WIDE).view(4, 2, 2) / 8)
        self.register_buffer("seen", torch.zeros(2, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen / 2 + x.mean(0)
        x, chosen = self.norm(x), torch.arange(len(x)).view(-1, 1) % 4
        product = lambda rows, ids: (self.experts[ids] @ rows.unsqueeze(-1)).squeeze(-1)
        if self.axis is None:
            return product(x, chosen.flatten()).square().mean()
        ones = torch.ones_like(chosen, dtype=WIDE)
        return dispatch(product, x, chosen, ones, self.axis, 4).square().mean()


def draw(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 2, dtype=WIDE, generator=generator) + rank


def after_steps(zero: Any, whole: Any, rank: int, count: int = 2) -> Any:
    state = zero.init(whole)
    for step in range(count):
        state, _ = zero.step(state, draw(rank, step))
    return zero.params(state)


@pytest.mark.parametrize("rule", ["mean", "rank 0"])
def test_buffers_are_merged_over_an_expert_axis_as_over_data_axes(rule: str) -> None:
    apply = zf.functional(Net())
    whole = {**apply.params, **apply.buffers}
    buffers = lambda path, leaf: rule if path in apply.buffers else None

    def main(group: Group, ep: int) -> Any:
        mesh = zf.mesh(group, dp=4 // ep, ep=ep)
        loss: Any = zf.functional(Net(mesh["ep"] if ep > 1 else None))
        loss = expert_parallel(loss, mesh["ep"], ["experts"]) if ep > 1 else loss
        zero = zf.zero(3, loss, zf.optim.sgd(0.1), mesh["dp"], buffers=buffers)
        return after_steps(zero, whole, group.rank)

    expected = zf.simulate(4, main, 1)[0]
    assert expected["seen"].abs().min() > 0.05
    for found in zf.simulate(4, main, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_buffer_that_an_expert_axis_cuts_is_refused() -> None:
    def main(group: Group) -> Any:
        mesh = zf.mesh(group, dp=1, ep=2)
        loss = expert_parallel(zf.functional(Net(mesh["ep"])), mesh["ep"], ["experts", "seen"])
        rule = lambda path, leaf: "mean" if path == "seen" else None
        zero = zf.zero(1, loss, zf.optim.sgd(0.1), mesh["dp"], buffers=rule)
        return zero.init({**Net().state_dict()})

    with pytest.raises(OptionError, match="whole on the ranks of an expert axis; got 'seen'"):
        zf.simulate(2, main)


class Stage(nn.Module):
    """A matrix, and a buffer that is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2, dtype=WIDE))
        self.register_buffer("seen", torch.zeros(2, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen / 2 + x.mean(0)
        return F.linear(x, self.weight)


def buffer(path: str, leaf: Any) -> str | None:
    return "mean" if path.endswith("seen") else None


def test_a_loss_over_a_tensor_axis_may_assign_to_a_buffer() -> None:
    apply = zf.functional(Stage())

    def main(group: Group, tp: int) -> Any:
        mesh = zf.mesh(group, dp=1, tp=tp)
        loss: Any = lambda params, x: apply(params, x).square().mean()
        plan = {"weight": "colwise_gather_output"}
        loss = zf.tensor_parallel(loss, mesh["tp"], plan) if tp > 1 else loss
        zero = zf.zero(2, loss, zf.optim.sgd(0.1), mesh["dp"], buffers=buffer)
        return after_steps(zero, {**apply.params, **apply.buffers}, 1)

    (expected,) = zf.simulate(1, main, 1)
    assert expected["seen"].abs().min() > 0.1
    for found in zf.simulate(2, main, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_stage_with_views_may_assign_to_a_buffer() -> None:
    apply = zf.functional(Stage())
    whole = [{**apply.params, **apply.buffers} for _ in range(2)]

    def main(group: Group, schedule: str) -> Any:
        mesh = zf.mesh(group, pp=2, dp=1)
        last = lambda params, x: apply(params, x).square().mean()
        loss = zf.pipeline([apply, last], mesh["pp"], schedule, num_micro_batches=2)
        zero = zf.zero(1, loss, zf.optim.sgd(0.1), mesh["dp"], buffers=buffer)
        return after_steps(zero, whole, 1)

    expected = zf.simulate(2, main, "1f1b")[0]
    assert expected[0]["seen"].abs().min() > 0.1
    assert same_bits(zf.simulate(2, main, "zero_bubble")[0], expected)
