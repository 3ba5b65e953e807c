"""A frozen leaf has no gradient and no optimizer state, and never moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faults.programs.small import STAGES, batch_of, fresh
from zfun import optim, tree
from zfun.errors import (
    SpecMismatch,
)
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(60)


def is_trainable(path: str, leaf: Any) -> bool:
    return path.startswith("h.1") or path == "out"


@pytest.mark.parametrize("size", [1, 3])
def test_frozen_leaves_are_equal_across_stages_and_do_not_move(size: int) -> None:
    def main(group: zf.Group, stage: int) -> Any:
        offload = (
            zf.stores.Offload(params=zf.stores.host()) if stage == 3 and group.size == 3 else None
        )
        z = zf.zero(
            stage,
            models.mlp_loss,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=is_trainable,
            offload=offload,
        )
        state, losses = z.init(fresh()), []
        for step in range(3):
            state, info = z.step(state, batch_of(group, step))
            losses.append(float(info.loss))
        assert state.frozen is not None
        assert state.frozen.placement is (zf.S if stage == 3 else zf.R)
        assert [slot.path for slot in state.params.layout.leaves] == ["h.1.w", "h.1.b", "out"]
        assert [slot.path for slot in state.opt_state.mu.layout.leaves] == ["h.1.w", "h.1.b", "out"]
        return z.params(state), losses

    runs = [run for stage in STAGES for run in zf.simulate(size, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)
    before, (after, _) = fresh(), runs[0]
    for path, x, y in zip(tree.paths(before), tree.leaves(before), tree.leaves(after), strict=True):
        assert same_bits(x, y) != is_trainable(path, x), path


def test_partition_by_hand_equals_trainable() -> None:
    trained, frozen = zf.partition(fresh(), is_trainable)

    def main(group: zf.Group) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            return models.mlp_loss(zf.combine(params, frozen), x)

        z = zf.zero(1, loss_fn, optim.adamw(0.1), group)
        named = zf.zero(1, models.mlp_loss, optim.adamw(0.1), group, trainable=is_trainable)
        one, other = z.init(trained), named.init(fresh())
        for step in range(2):
            one, _ = z.step(one, batch_of(group, step))
            other, _ = named.step(other, batch_of(group, step))
        return zf.combine(z.params(one), frozen), named.params(other)

    for by_hand, by_name in zf.simulate(2, main):
        assert_same_bits(by_hand, by_name)


def test_another_trainable_set_needs_another_state() -> None:
    def main(group: zf.Group) -> None:
        trained, _ = zf.partition(fresh(), is_trainable)
        optimizer = zf.shard_optimizer(optim.adamw(0.1), group)
        state = optimizer.init(trained)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        _, grads = vg(fresh(), batch_of(group))
        with pytest.raises(
            SpecMismatch,
            match=r"parameters and gradients must have one layout|must have the tree|must keep "
            r"the structure",
        ):
            zf.apply(optimizer, grads, state, trained)

    zf.simulate(2, main)


def test_integer_leaves_may_be_frozen() -> None:
    params = {
        **fresh(),
        "steps": torch.arange(3),
        "mask": torch.tensor([True, False, True, True, True]),
    }

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return models.mlp_loss(p, x * p["mask"]) + p["steps"].sum() * p["out"].sum() * 0.01

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(
            stage,
            loss_fn,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, leaf: leaf.is_floating_point(),
        )
        state = z.init(params)
        for step in range(2):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    runs = [run for stage in STAGES for run in zf.simulate(3, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)
    assert_same_bits((runs[0]["steps"], runs[0]["mask"]), (params["steps"], params["mask"]))
