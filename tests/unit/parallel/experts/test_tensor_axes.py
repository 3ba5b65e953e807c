"""A tensor axis within experts, in a pipeline: numbers of one process, and plans of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from tests.unit.planner.test_meshes import Case
from zfun.parallel import dispatch, expert_parallel, token_mean

WIDTH, HIDDEN, WORDS, TOKENS, EXPERTS = 8, 4, 6, 4, 4
STYLES = {"h.*.experts.up": "colwise", "h.*.experts.down": "rowwise"}


@dataclass(frozen=True)
class Mixture(Case):
    """One layer of experts on each stage; ``routed`` by their tokens, or one after the other."""

    routed: bool = False

    def params(self) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=chance, dtype=torch.float64) / 2

        def layer() -> dict[str, Any]:
            up, down = draw(EXPERTS, HIDDEN, WIDTH), draw(EXPERTS, WIDTH, HIDDEN)
            return {"router": draw(EXPERTS, WIDTH), "experts": {"up": up, "down": down}}

        layers = {str(n): layer() for n in range(self.num_layers)}
        return {"embed": draw(WORDS, WIDTH), "h": layers, "head": draw(WORDS, WIDTH)}

    def batch(self, rank: int = 0, rows: int = 4) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, WORDS, (rows, TOKENS), generator=chance)
        return {"ids": ids, "labels": ids.flip(1).contiguous()}

    def layer(self, p: Any, x: Tensor, axis: zf.Group) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = F.linear(tokens, p["router"]).softmax(-1).topk(2)
        if not self.routed:
            chosen = torch.arange(chosen.numel(), device=x.device).view_as(chosen) % EXPERTS

        def run(rows: Tensor, ids: Tensor) -> Tensor:
            # Rows of one expert are neighbours for each source; plans know no other numbers.
            out = torch.zeros_like(rows)
            for expert in range(EXPERTS // axis.size):
                up, down = p["experts"]["up"][expert], p["experts"]["down"][expert]
                if self.routed:
                    at = (ids == expert).nonzero().flatten()
                else:
                    at = torch.arange(expert, len(rows), EXPERTS // axis.size, device=x.device)
                found = F.linear(torch.tanh(F.linear(rows[at], up)), down)
                out = out.index_add(0, at, found)
            return out

        return x + dispatch(run, tokens, chosen, weights, axis, EXPERTS).view_as(x)

    def stage_fn(self, number: int, axis: zf.Group) -> Callable[..., Any]:
        def run(p: Any, x: Any, batch: Any) -> Any:
            x = F.embedding(batch["ids"], p["embed"]) if number == 0 else x
            x = self.layer(p["h"][str(number)], x, axis)
            if number < self.num_layers - 1:
                return x
            return token_mean(F.linear(x, p["head"]), batch["labels"])

        return run

    def recipe(self, mesh: Any) -> Any:
        def cut(fn: Any) -> Any:
            inner = zf.tensor_parallel(fn, mesh["tp"], STYLES)
            return expert_parallel(inner, mesh["ep"], ["h.*.experts.*"])

        stages = range(self.num_layers)
        leaves = [[f"h.{number}.*"] for number in stages]
        leaves[0].append("embed")
        leaves[-1].append("head")
        loss = zf.pipeline(
            [cut(self.stage_fn(number, mesh["ep"])) for number in stages],
            mesh["pp"],
            self.schedule,
            num_micro_batches=self.num_micro_batches,
            leaves=leaves,
        )
        clipped = zf.optim.chain(zf.optim.clip_by_global_norm(0.5), zf.optim.adamw(0.05))
        return zf.zero(self.stage, loss, clipped, mesh["dp"], bucket_bytes=self.bucket_bytes)


SIZES = {"pp": 2, "dp": 1, "ep": 2, "tp": 2}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("stage", range(4) if FORM != "everyday" else (1, 3))
def test_a_tensor_axis_in_a_pipeline_of_experts_changes_nothing(stage: int, schedule: str) -> None:
    case = Mixture(SIZES, stage, schedule, routed=True)

    def steps(z: Any, batch: Callable[[int], Any]) -> Any:
        state, seen = z.init(case.params()), []
        for step in range(3):
            state, info = z.step(state, batch(2 * step))
            seen.append((info.loss, info.grad_norm))
        return seen, z.params(state)

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, **SIZES)
        return steps(case.recipe(mesh), lambda step: case.batch(step + mesh["ep"].rank))

    def alone(group: zf.Group) -> Any:
        def loss(p: Any, batch: Any) -> Any:
            first, last = (case.stage_fn(number, group) for number in (0, 1))
            return last(p, first(p, None, batch), batch)

        clipped = zf.optim.chain(zf.optim.clip_by_global_norm(0.5), zf.optim.adamw(0.05))
        both = lambda step: zf.tree.map(
            lambda x, y: torch.cat([x, y]), case.batch(step), case.batch(step + 1)
        )
        return steps(zf.zero(0, loss, clipped, group), both)

    (expected,) = zf.simulate(1, alone)
    for found in zf.simulate(math.prod(SIZES.values()), main):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_plan_of_a_pipeline_of_experts_is_the_run_and_folds() -> None:
    Mixture(SIZES, stage=1).check(rank=3)
    Mixture(SIZES, stage=3).check(rank=0, steps=1)  # in which ranks compare
    case = Mixture({**SIZES, "pp": 4}, stage=3, num_micro_batches=4, bucket_bytes=2**20)
    plan, folded = case.plan(0), case.plan(0, fold=True)
    assert folded.stages == plan.stages
    assert folded == plan
