"""Gradients of an engine that are read between its backward passes, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun.errors import OptionError
from zfun.interop import Engine

SHARDED_OR_NOT = pytest.mark.parametrize("stage", [1, 3])
# The leaves of one micro-batch are those that the other one misses.
BATCHES = torch.linspace(-1, 2, 12, dtype=torch.float64).view(2, 2, 3)


class Heads(nn.Module):
    """A body with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
        self.double()
        for index, param in enumerate(self.parameters()):
            param.data = torch.linspace(-1, index + 1, param.numel()).double().view_as(param)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh()).square().mean()


def started() -> tuple[Heads, torch.optim.Optimizer]:
    net = Heads()
    return net, torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5, eps=1e-2)


def plain(steps: int = 2) -> dict[str, Tensor]:
    net, optimizer = started()
    for _ in range(steps):
        optimizer.zero_grad()
        for head, x in enumerate(BATCHES):
            (net(x, head) / len(BATCHES)).backward()
        optimizer.step()
    return net.state_dict()


def read(engine: Engine) -> None:
    # The gradient of one parameter stands for all.
    assert engine.module.body.weight.grad is not None  # pyrefly: ignore[missing-attribute]


def norm(engine: Engine) -> None:
    engine.norm()


# The reads after each of the two passes of a step.
READS = [
    [[], [read]],
    [[read], []],
    [[norm], []],
    [[norm], [norm]],
    [[norm, read], [read, norm, read]],
]


@pytest.mark.parametrize("reads", READS, ids=["last", "first", "norm", "norms", "all"])
@SHARDED_OR_NOT
def test_reads_of_gradients_change_no_step(
    stage: int, reads: list[list[Callable[[Engine], None]]]
) -> None:
    expected = plain()

    def main(group: zf.Group) -> None:
        net, optimizer = started()
        engine = Engine(net, optimizer, zero=stage, group=group, accumulate=len(BATCHES))
        for _ in range(2):
            for head, x in enumerate(BATCHES):
                engine.backward(engine(x, head))
                for fn in reads[head]:
                    fn(engine)
            engine.step()
        torch.testing.assert_close(engine.state_dict(), expected, rtol=1e-10, atol=1e-12)

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_weighted_passes_go_on_after_the_norm(stage: int) -> None:
    weights = (1.0, 3.0, 2.0)

    def trained(group: zf.Group, *, reads: bool) -> dict[str, Any]:
        net, optimizer = started()
        engine = Engine(net, optimizer, zero=stage, group=group, accumulate=3)
        for turn, weight in enumerate(weights):
            loss = engine(BATCHES[turn % 2], turn % 2)
            engine.backward(zf.transforms.weighted_mean(loss * weight, torch.tensor(weight)))
            if reads:
                engine.norm()
        engine.step()
        return engine.state_dict()

    def main(group: zf.Group) -> None:
        torch.testing.assert_close(trained(group, reads=True), trained(group, reads=False))

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_a_pass_after_the_norm_of_a_stray_gradient_is_refused(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net, optimizer = started()
        engine = Engine(net, optimizer, zero=stage, group=group, accumulate=2)
        engine.backward(engine(BATCHES[0], 0) + net.body.weight.square().sum())
        engine.norm()
        with pytest.raises(OptionError, match=r"outside of calls.*norm\(\).*engine\.run"):
            engine.backward(engine(BATCHES[1], 1))

    zf.simulate(2, main)
