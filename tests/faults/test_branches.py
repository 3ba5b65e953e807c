"""Ranks may skip leaves and take other branches: no rank hangs, and the gradient is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, STAGES, batch_of, fresh
from zfun import optim, tree
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(60)


def branching(rank: int, kind: str) -> Any:
    """A loss that uses other blocks, or another order of blocks, on rank 1 than on the others."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = list(params["h"])
        if rank == 1:
            layers = {
                "skips one": layers[:1] + layers[2:],
                "skips the last": layers[:-1],
                "other order": layers[::-1],
                "uses one twice": [*layers, layers[0]],
                "uses nothing": [],
                "as the others": layers,
            }[kind]
        for layer in layers:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return (
            (x.sum(1) if kind == "uses nothing" and rank == 1 else x @ params["out"]).pow(2).mean()
        )

    return loss_fn


def averaged_training(kind: str, size: int, num_steps: int) -> Any:
    params, lr = fresh(), 0.1
    for step in range(num_steps):
        leaves, spec = tree.flatten(params)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for rank in range(size):
            mine = [leaf.clone().requires_grad_() for leaf in leaves]
            loss = branching(rank, kind)(
                tree.unflatten(spec, mine), models.mlp_batches(step + 1, size)[step][rank]
            )
            for slot, leaf in zip(total, mine, strict=True):
                grad = (
                    torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0]
                    if loss.requires_grad
                    else None
                )
                if grad is not None:
                    slot += grad / size
        params = tree.unflatten(
            spec, [leaf - lr * grad for leaf, grad in zip(leaves, total, strict=True)]
        )
    return params


@pytest.mark.parametrize(
    "kind", ["skips one", "skips the last", "other order", "uses one twice", "uses nothing"]
)
@EACH_STAGE
def test_a_rank_may_take_another_branch(stage: int, kind: str) -> None:
    size, num_steps = 3, 3

    def main(group: zf.Group, switches: bool) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            # In the second form every rank traces the common path, and diverges in the second step.
            return branching(group.rank, kind if step or not switches else "as the others")(
                params, x
            )

        z = zf.zero(stage, loss_fn, optim.sgd(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(num_steps):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    expected = averaged_training(kind, size, num_steps)
    for found in zf.simulate(size, main, False):
        for path, x, y in zip(
            tree.paths(expected), tree.leaves(found), tree.leaves(expected), strict=True
        ):
            torch.testing.assert_close(
                x, y, rtol=1e-12, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}"
            )
    runs = zf.simulate(size, main, True)
    assert all(same_bits(run, runs[0]) for run in runs)


@pytest.mark.parametrize("kind", ["skips one", "skips the last", "other order", "uses one twice"])
def test_a_rank_may_take_another_branch_with_frozen_leaves(kind: str) -> None:
    """Frozen and trained blocks alternate, so ranks wait for gathers of both kinds in different
    orders.
    """

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(
            stage,
            branching(group.rank, kind),
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, leaf: not path.startswith(("h.1", "h.3", "h.5")),
        )
        state = z.init(models.mlp(num_layers=7))
        for step in range(3):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    runs = [run for stage in (0, 3) for run in zf.simulate(3, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)


def test_branches_are_equal_to_the_last_bit_across_stages() -> None:
    def main(group: zf.Group, stage: int, kind: str) -> Any:
        z = zf.zero(stage, branching(group.rank, kind), optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(3):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    for kind in ("skips one", "other order", "uses one twice", "uses nothing"):
        runs = [run for stage in STAGES for run in zf.simulate(3, main, stage, kind)]
        assert all(same_bits(run, runs[0]) for run in runs), kind


@EACH_STAGE
def test_a_leaf_that_no_rank_uses_has_gradient_zero(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        params = {
            **fresh(),
            "unused": torch.ones(7, dtype=torch.float64),
            "other": {"b": torch.ones((), dtype=torch.float64)},
        }
        z = zf.zero(
            stage, models.mlp_loss, optim.adamw(0.1, weight_decay=0.0), group, bucket_bytes=300
        )
        state = z.init(params)
        for step in range(2):
            state, info = z.step(state, batch_of(group, step))
            assert not info.skipped
        after = z.params(state)
        assert_same_bits((after["unused"], after["other"]), (params["unused"], params["other"]))
        assert not same_bits(after["h"], params["h"])

    zf.simulate(2, main)
