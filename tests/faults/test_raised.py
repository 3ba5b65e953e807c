"""A rank that raises ends all ranks with that error; an error on all ranks harms no state."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, STAGES, batch_of, fresh
from zfun import optim
from zfun.errors import (
    PeerLost,
)
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(60)


@EACH_STAGE
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_raises_in_mid_step_ends_all_ranks_with_the_same_error(
    stage: int, where: str
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
            if where == "forward":
                raise ValueError("bad batch in shard 7")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
            raise ValueError("bad batch in shard 7")

    seen: list[BaseException] = []

    def main(group: zf.Group) -> None:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for i, layer in enumerate(params["h"]):
                x = torch.tanh(x @ layer["w"] + layer["b"])
                if group.rank == 1 and i == 1 and step == 1:
                    x = Fails.apply(x)
            return (x @ params["out"]).pow(2).mean()

        z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(2):
            try:
                state, _ = z.step(state, batch_of(group, step))
            except PeerLost as error:
                seen.append(error)
                raise

    started = time.monotonic()
    with pytest.raises(ValueError, match="bad batch in shard 7"):
        zf.simulate(3, main)
    assert time.monotonic() - started < 20
    assert len(seen) == 2
    assert all("rank 1 failed: ValueError: bad batch in shard 7" in str(error) for error in seen)


def test_a_state_survives_an_error_in_the_loss() -> None:
    def main(group: zf.Group) -> None:
        fail = [True]

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            out = models.mlp_loss(params, x)
            if fail.pop() if fail else False:
                raise ValueError("out of data")
            return out

        for stage in STAGES:
            fail[:] = [True]
            z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, bucket_bytes=300)
            state = z.init(fresh())
            before = z.params(state)
            with pytest.raises(ValueError, match="out of data"):
                z.step(state, batch_of(group))
            # Every rank raised at the same place, so training may go on from the old state.
            assert_same_bits(z.params(state), before)
            state, info = z.step(state, batch_of(group))
            assert not info.skipped

    zf.simulate(2, main)
