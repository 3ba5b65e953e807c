"""Float8 linears of torchao inside a loss, emulated on the CPU.

Where torchao is installed, transformers imports it, which takes seconds and prints messages in all
tests. So the tests' environment does not have it; ``.ci/run --weekly`` puts it on the path.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun.testing import assert_same_bits

float8 = pytest.importorskip("torchao.float8")

BATCHES = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block that backward runs again; torchao wants lengths that 16 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.Linear(16, 16))


def made(recipe: str, **config: Any) -> zf.modules.Functional:
    whole = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), **config)
    return zf.functional(float8.convert_to_float8_training(net(), config=whole))


def trained(group: zf.Group, stage: int, apply: Any, precision: Any, num_micro: int) -> Any:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x.to(params["0.up.weight"].dtype)).float().square().mean()

    zero = zf.zero(
        stage,
        loss_fn,
        zf.optim.adamw(0.1),
        group,
        precision=precision,
        num_micro_batches=num_micro,
        bucket_bytes=3000,
    )
    state, losses = zero.init({key: leaf.clone() for key, leaf in apply.params.items()}), []
    for step in range(3):
        state, info = zero.step(state, BATCHES[group.rank] + step)
        losses.append(info.loss)
    return losses, zero.params(state)


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_has_the_same_bits_at_every_stage(
    recipe: str, precision: torch.dtype | None, num_micro: int
) -> None:
    apply = made(recipe, emulate=True)
    run = functools.cache(lambda stage: zf.simulate(2, trained, stage, apply, precision, num_micro))
    for stage in (1, 2, 3):
        # With micro-batches, stages 2 and 3 sum over the ranks first.
        assert_same_bits(run(stage), run(2 if stage > 1 else 0), f"stage {stage}: ")


def test_the_gathers_of_fsdp_in_float8_change_nothing() -> None:
    """torchao wraps the weights for FSDP2; the values and the messages are those of the weights."""
    expected = zf.simulate(2, trained, 3, made("tensorwise", emulate=True), None, 1)
    apply = made("tensorwise", emulate=True, enable_fsdp_float8_all_gather=True)
    assert_same_bits(zf.simulate(2, trained, 3, apply, None, 1), expected)


def test_the_products_are_in_float8() -> None:
    """Otherwise the laws above would say nothing."""
    found = zf.simulate(1, trained, 3, made("tensorwise", emulate=True), None, 1)[0][0]
    plain = zf.simulate(1, trained, 3, zf.functional(net()), None, 1)[0][0]
    assert all(a != b for a, b in zip(found, plain, strict=True))
    torch.testing.assert_close(found[0], plain[0], rtol=0.2, atol=0)
