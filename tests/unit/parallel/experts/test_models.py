"""Mixtral and Qwen3-MoE of transformers over an expert axis, beside one process."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from tests.unit.parallel.test_tensor_models import GROUPED, InDouble, loss_of, tokens
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.parallel import ParallelLoss
from zfun.testing import same_bits

transformers = pytest.importorskip("transformers")
from zfun.interop.transformers import expert_parallel, tp_plan  # noqa: E402

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
NUM_STEPS = 5 if FORM != "everyday" else 2
STAGES = (3, 0, 1, 2) if FORM != "everyday" else (3, 0)
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


def over_experts(model: Any, mesh: Any) -> ParallelLoss:
    loss = loss_of(expert_parallel(model, mesh["ep"]))
    return zf.parallel.expert_parallel(loss, mesh["ep"])


def train(
    group: Group,
    name: str,
    stage: int = 3,
    make: Callable[[Any, Any], ParallelLoss] = over_experts,
    **sizes: int,
) -> Any:
    """Losses, norms, parameters, and how many numbers a rank holds between steps."""
    model, mesh = model_of(name), zf.mesh(group, **sizes)
    update = zf.optim.adamw(1e-2, weight_decay=DECAY)
    update = zf.optim.chain(zf.optim.clip_by_global_norm(LIMIT), update)
    zero = zf.zero(stage, make(model, mesh), update, mesh["dp"], bucket_bytes=4000)
    state, losses, norms = zero.init(zf.functional(model).params), [], []
    rank = mesh.coordinates["dp"] * sizes["ep"] + mesh.coordinates["ep"]
    for step in range(NUM_STEPS):
        state, info = zero.step(state, tokens(rank, step))
        losses.append(info.loss)
        norms.append(info.grad_norm)
    held = sum(buffer.numel() for buffer in state.params.buffers)
    return losses, norms, zero.params(state), held


def checked(name: str, *args: Any, **sizes: int) -> Any:
    """Train on simulated ranks, which have the same result, and that of one process."""
    first, *others = zf.simulate(math.prod(sizes.values()), train, name, *args, **sizes)
    assert all(same_bits(other[:3], first[:3]) for other in others)
    losses, norms, expected = plain(name, sizes["dp"] * sizes["ep"])
    torch.testing.assert_close(first[0], losses, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack(first[1]), torch.stack(norms), rtol=0, atol=1e-12)
    assert first[2].keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(first[2][path], leaf, rtol=0, atol=1e-12, msg=path)
    return first


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_trains_as_on_one_process_and_alike_at_every_stage(name: str) -> None:
    first = None
    for stage in STAGES if name == "mixtral" else STAGES[: len(STAGES) // 2]:
        found = checked(name, stage, dp=2, ep=2)
        assert first is None or same_bits(found[:3], first[:3])
        first = found


def test_leaves_that_are_gathered_lie_on_the_ranks_of_both_axes() -> None:
    matrices = ["*_proj.weight", "*embed*", "lm_head*", "*gate.weight"]

    def gathering(model: Any, mesh: Any) -> ParallelLoss:
        loss = loss_of(expert_parallel(model, mesh["ep"]))
        return zf.parallel.expert_parallel(loss, mesh["ep"], gathered=matrices)

    held = checked("mixtral", 3, gathering, dp=1, ep=4)[3]
    leaves = [leaf for _, leaf in model_of("mixtral").named_parameters()]
    norms = sum(leaf.numel() for leaf in leaves if leaf.dim() == 1)
    cut = sum(leaf.numel() for leaf in leaves) - norms
    assert 0 <= held - cut // 4 - norms < 64 * len(leaves)  # padding


def test_experts_and_matrices_are_cut_over_axes_of_their_own() -> None:
    def both(model: Any, mesh: Any) -> ParallelLoss:
        loss = loss_of(expert_parallel(model, mesh["ep"]))
        inner = zf.tensor_parallel(loss, mesh["tp"], tp_plan(model))
        return zf.parallel.expert_parallel(inner, mesh["ep"])

    checked("mixtral", 3, both, dp=1, ep=2, tp=2)


def test_a_model_refuses_what_its_experts_cannot_do() -> None:
    def main(group: Group, case: str) -> Any:
        if case == "others":
            return expert_parallel(model_of("mixtral"), group)
        if case == "none":
            llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
            return expert_parallel(llama, group)
        if case == "sorted":
            config = transformers.Llama4TextConfig(
                **GROUPED, head_dim=4, intermediate_size_mlp=8, num_local_experts=2
            )
            return expert_parallel(transformers.Llama4ForCausalLM(config), group)
        return expert_parallel(model_of("mixtral"), group)(tokens(0))

    for size, case, match in (
        (3, "others", "got 4 experts over 3 ranks; use an axis whose size divides"),
        (2, "none", "LlamaForCausalLM has none; call zf.parallel.dispatch"),
        (2, "sorted", "Llama4ForCausalLM has none; call zf.parallel.dispatch"),
        (2, "whole", "a rank has 1/2 of the experts; got 4 of 4; put the loss into"),
    ):
        with pytest.raises(OptionError, match=match):
            zf.simulate(size, main, case)
