"""Numbers and buffers that the ranks of a step must have alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop.engine import Engine


class Noisy(nn.Module):
    """A model with noise that its loop draws, and statistics that forward writes."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("noise", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(x)).tanh() + self.noise)


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(
    group: zf.Group, stage: int, between: Callable[..., None], steps: int = 3, **options: Any
) -> Any:
    """Take steps, and before each let a function of engine, optimizer, rank and step run."""
    model = Noisy()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    engine = Engine(model, adam, zero=stage, group=group, **options)
    for step in range(steps):
        between(engine, adam, group.rank, step)
        engine.backward(engine(batch_of(group.rank, step)).square().mean())
        engine.step()
    return engine.state_dict()


def by_rank(engine: Any, adam: Any, rank: int, step: int) -> None:
    adam.param_groups[0]["lr"] = 0.1 / (1 + rank)


def by_momentum(engine: Any, adam: Any, rank: int, step: int) -> None:
    adam.param_groups[0]["betas"] = (0.9 - 0.1 * rank * step, 0.999)


def by_plateau(engine: Any, adam: Any, rank: int, step: int) -> None:
    torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0).step(1.0)
    adam.param_groups[0]["lr"] *= 0.5 if rank == 1 and step == 2 else 1.0


@EACH_STAGE
@pytest.mark.parametrize(
    ("between", "name", "value"),
    [(by_rank, "lr", 0.05), (by_momentum, "beta1", 0.8), (by_plateau, "lr", 0.05)],
)
def test_ranks_step_with_the_same_numbers(
    stage: int, between: Any, name: str, value: float
) -> None:
    with pytest.raises(OptionError, match=rf"got .*{value} on rank 1, and .* on rank 0; give a s"):
        zf.simulate(2, lambda group: trained(group, stage, between))
    # Numbers that all ranks have are taken, and one rank has its own.
    alike = lambda engine, adam, rank, step: between(engine, adam, 0, step)
    zf.simulate(2, lambda group: trained(group, stage, alike))
    zf.simulate(1, lambda group: trained(group, stage, between))


def test_a_step_that_was_refused_may_be_repeated() -> None:
    def main(group: zf.Group) -> Any:
        model = Noisy()
        adam = torch.optim.Adam(model.parameters(), 0.1)
        engine = Engine(model, adam, zero=2, group=group)
        engine.backward(engine(batch_of(group.rank)).square().mean())
        adam.param_groups[0]["lr"] = 0.1 * group.rank
        with pytest.raises(OptionError, match="the same numbers of the optimizer"):
            engine.step()
        adam.param_groups[0]["lr"] = 0.1
        engine.step()
        return engine.state_dict()

    nothing = lambda engine, adam, rank, step: None
    found = zf.simulate(2, main)
    expected = zf.simulate(2, lambda group: trained(group, 2, nothing, steps=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_bound_of_the_norm_is_the_same_on_all_ranks() -> None:
    def clipped(engine: Any, adam: Any, rank: int, step: int) -> None:
        engine.clip_norm = 1.0 + rank

    with pytest.raises(
        OptionError, match=r"got the bound of the norm 2.0 on rank 1, and 1.0 on rank 0"
    ):
        zf.simulate(2, lambda group: trained(group, 2, clipped, clip_norm=1.0))


def drawn(engine: Any, adam: Any, rank: int, step: int) -> None:
    engine.module.noise.copy_(batch_of(7 + rank, step)[:, 0])


def assigned(engine: Any, adam: Any, rank: int, step: int) -> None:
    engine.module.noise = batch_of(7 + rank, step)[:, 0].clone()


def of_rank_0(engine: Any, adam: Any, rank: int, step: int) -> None:
    if rank == 0 and step:
        drawn(engine, adam, rank, step)


def before_a_state(engine: Any, adam: Any, rank: int, step: int) -> None:
    drawn(engine, adam, rank, step)
    assert engine.state.step == step


def before_an_evaluation(engine: Any, adam: Any, rank: int, step: int) -> None:
    drawn(engine, adam, rank, step)
    with torch.no_grad():
        engine(batch_of(rank))


def after_an_evaluation(engine: Any, adam: Any, rank: int, step: int) -> None:
    with torch.no_grad():
        engine(batch_of(rank))
    drawn(engine, adam, rank, step)


EACH_WRITE = pytest.mark.parametrize(
    "write",
    [drawn, assigned, of_rank_0, before_a_state, before_an_evaluation, after_an_evaluation],
)


@EACH_STAGE
@EACH_WRITE
def test_buffers_that_code_writes_are_the_same_on_all_ranks(stage: int, write: Any) -> None:
    with pytest.raises(OptionError, match=r"another value of buffer 'noise' on rank 1 than on ra"):
        zf.simulate(2, lambda group: trained(group, stage, write))
    # Where all ranks write the same value, and where each rank keeps its own.
    alike = lambda engine, adam, rank, step: write(engine, adam, 0, step)
    zf.simulate(2, lambda group: trained(group, stage, alike))
    zf.simulate(2, lambda group: trained(group, stage, write, buffers="by rank"))


@EACH_STAGE
def test_buffers_that_forward_writes_differ_until_the_step(stage: int) -> None:
    """Also those of forward passes without gradients, which code then copies."""

    def between(engine: Any, adam: Any, rank: int, step: int) -> None:
        with torch.no_grad():
            engine(batch_of(5 + rank))
            engine.module.norm(torch.randn(4, 4))

    zf.simulate(2, lambda group: trained(group, stage, between))
