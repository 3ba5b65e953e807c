"""The rates of a facade's optimizer, by the methods of DeepSpeed's optimizers."""

from __future__ import annotations

import pytest
import torch

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import ADAMW, config, net, ranks, trained, weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_set_lr_counts_at_the_next_step(stage: int) -> None:
    def main(group: zf.Group) -> None:
        made = [
            deepspeed.initialize(
                model=net(), config=config(stage, optimizer=ADAMW), mpu=ranks(group)
            )[0]
            for _ in range(2)
        ]
        for engine in made:
            trained(engine, group, 0, 1)
        first, second = made
        before = weights(first)
        assert first.optimizer.get_lr() == 0.01
        first.optimizer.set_lr(0.03)
        for each in second.optimizer.param_groups:
            each["lr"] = 0.03
        assert (first.optimizer.get_lr(), first.get_lr()) == (0.03, [0.03])
        for engine in made:
            trained(engine, group, 1, 1)
        torch.testing.assert_close(weights(first), weights(second), rtol=0, atol=0)
        assert not torch.equal(weights(first)["scale"], before["scale"])

    zf.simulate(2, main)
