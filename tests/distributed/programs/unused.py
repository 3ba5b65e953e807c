"""Programs that leave leaves out in some steps; run on simulated ranks and on processes.

A batch has a row for each micro-batch and a column for each leaf: 0 where the loss does not use the
leaf, 1 where it does, 2 where the leaf is used and has a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.testing import assert_same_bits

SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (40,), "base": (7,), "c": (), "d": (6, 9)}
Ways = Sequence[Sequence[Sequence[Sequence[int]]]]
"""By step, rank and micro-batch, one number for each leaf."""


def params() -> dict[str, Tensor]:
    """Return leaves with values that differ."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    """Pull each leaf that is used towards a number that depends on the place of the leaf."""
    total = torch.zeros((), dtype=torch.float64)
    for index, (leaf, way) in enumerate(zip(SHAPES, batch[0].tolist(), strict=True)):
        if way:
            p = params[leaf].double()
            total = total + (way == 1) * (0.1 * (p - index).square().sum() + (0.3 * p).sum())
    return total


def batches_of(ways: Ways) -> list[list[Tensor]]:
    """Return ``batches[step][rank]``."""
    return [[torch.tensor(rank, dtype=torch.int64) for rank in step] for step in ways]


def plain(make: Any, ways: Ways, max_norm: float | None = None) -> dict[str, Tensor]:
    """Train with an optimizer of torch, which skips parameters without ``grad``.

    Args:
        make: ``make(parameters)`` returns the optimizer, and maybe a scheduler.
        ways: of the leaves.
        max_norm: of the gradients.
    """
    leaves = {name: torch.nn.Parameter(p) for name, p in params().items()}
    optimizer, *scheduler = make(leaves)
    for step in ways:
        for p in leaves.values():
            p.grad = None
        rows = [torch.tensor([micro]) for rank in step for micro in rank]
        torch.stack([loss_fn(leaves, row) for row in rows]).mean().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), max_norm)
        optimizer.step()
        for each in scheduler:
            each.step()
    return {name: p.detach() for name, p in leaves.items()}


def train(
    group: zf.Group, stage: int, rule: Any, ways: Ways, **options: Any
) -> tuple[dict[str, Tensor], zf.recipes.ZeroState]:
    """Train with ``zf.zero``; return the parameters and the last state."""
    zero = make(group, stage, rule, ways, **options)
    state = zero.init(params())
    for step in batches_of(ways):
        state, _ = zero.step(state, step[group.rank])
    return zero.params(state), state


def make(group: zf.Group, stage: int, rule: Any, ways: Ways, **options: Any) -> zf.recipes.Zero:
    options = {"bucket_bytes": 200, "num_micro_batches": len(ways[0][0]), **options}
    return zf.zero(stage, loss_fn, rule, group, **options)


def some_ways(num_steps: int, size: int, num_micro: int = 1, seed: int = 0) -> Ways:
    """Return ways in which each leaf but one is left out by all ranks in some steps."""
    generator = torch.Generator().manual_seed(seed)
    ways = torch.randint(0, 3, (num_steps, size, num_micro, len(SHAPES)), generator=generator)
    for step in range(num_steps):
        for leaf in range(len(SHAPES)):
            if (step + leaf) % 3 == 0:
                ways[step, :, :, leaf] = 0
    ways[..., list(SHAPES).index("base")] = 1
    found: Ways = ways.tolist()
    return found


def left_out(group: zf.Group) -> Any:
    """Leave leaves out at every stage, with the numbers of torch and equal bits."""
    ways = some_ways(6, group.size)
    oracle = plain(
        lambda leaves: [
            adamw := torch.optim.AdamW(leaves.values(), lr=0.1, weight_decay=0.1),
            torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.2, 6),
        ],
        ways,
    )
    found = []
    for stage in range(4):
        rule = optim.adamw(optim.linear(0.1, 0.02, 6), weight_decay=0.1)
        whole, state = train(group, stage, rule, ways)
        for name, p in whole.items():
            torch.testing.assert_close(p, oracle[name], rtol=1e-12, atol=1e-14)
        assert any(state.missed.counts.values())
        found.append((whole, dict(state.missed.counts)))
        assert_same_bits(found[-1], found[0], f"stage {stage} and stage 0")
    return found[0]


BODIES = [left_out]
