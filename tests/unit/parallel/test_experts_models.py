"""Mixtral and Qwen3-MoE of transformers over an expert axis, beside one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from tests.unit.parallel.test_tensor_models import GROUPED, InDouble, assert_close, loss_of, tokens
from zfun.collectives import Group
from zfun.parallel import ParallelLoss
from zfun.testing import same_bits

transformers = pytest.importorskip("transformers")
from zfun.interop.transformers import expert_parallel  # noqa: E402

SIZES = {**GROUPED, "num_experts_per_tok": 2}
MAKERS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, num_local_experts=4, experts_implementation="batched_mm"
        )
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES,
            num_experts=6,
            moe_intermediate_size=8,
            head_dim=4,
            norm_topk_prob=True,
            experts_implementation="eager",
        )
    ),
}
NUM_STEPS = 5 if FORM == "all" else 2
STAGES = (3, 0, 1, 2) if FORM == "all" else (3, 0)
LIMIT = 0.5
DECAY = 0.01


@functools.cache
def model_of(name: str) -> Any:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = MAKERS[name]().double().train()
    with torch.no_grad():
        for path, leaf in model.named_parameters():  # routers that choose, and norms that scale
            if leaf.dim() == 1 or "gate.weight" in path:
                leaf += 0.3 * torch.randn_like(leaf)
    torch.random.set_rng_state(state)
    return model


@functools.cache
def plain(name: str, num_batches: int = 4) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """The losses, norms and parameters of torch's own training on one process, with clipping."""
    mine = copy.deepcopy(model_of(name))
    update = torch.optim.AdamW(mine.parameters(), lr=1e-2, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        update.zero_grad()
        batches = [tokens(rank, step) for rank in range(num_batches)]
        with InDouble():
            loss = torch.stack([mine(input_ids=x, labels=x).loss for x in batches]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(mine.parameters(), LIMIT))
        update.step()
        losses.append(loss.detach())
    assert min(norms) > LIMIT
    return losses, norms, {key: leaf.detach() for key, leaf in mine.named_parameters()}


def over_experts(model: Any, axis: Group) -> ParallelLoss:
    return zf.parallel.expert_parallel(loss_of(expert_parallel(model, axis)), axis)


def train(group: Group, name: str, stage: int, **options: Any) -> Any:
    model, mesh = model_of(name), zf.mesh(group, dp=2, ep=2)
    clipped = zf.optim.chain(
        zf.optim.clip_by_global_norm(LIMIT), zf.optim.adamw(1e-2, weight_decay=0.01)
    )
    loss = over_experts(model, mesh["ep"])
    zero = zf.zero(stage, loss, clipped, mesh["dp"], bucket_bytes=4000, **options)
    state, losses, norms = zero.init(zf.functional(model).params), [], []
    for step in range(NUM_STEPS):
        state, info = zero.step(state, tokens(group.rank, step))
        losses.append(info.loss)
        norms.append(info.grad_norm)
    return losses, norms, zero.params(state)


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_trains_as_on_one_process_and_alike_at_every_stage(name: str) -> None:
    losses, norms, expected = plain(name)
    first = None
    for stage in STAGES:
        found, *others = zf.simulate(4, train, name, stage)
        assert all(same_bits(other, found) for other in others)
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.stack(found[1]), torch.stack(norms), rtol=0, atol=1e-12)
        assert_close(found[2], expected)
        assert first is None or same_bits(found, first)
        first = found
