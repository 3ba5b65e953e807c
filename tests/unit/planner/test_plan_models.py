"""The plan of a model of Hugging Face equals a real step on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.unit.planner.test_plan import EVERYTHING, check, composed

transformers = pytest.importorskip("transformers")

VOCABULARY = 61


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **drops)
    )


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "qwen2": qwen2}


def problem(name: str, *, remat: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = MODELS[name]().train()
    if remat:
        # The second name is that of older versions.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        switch = next(getattr(module, name) for name in names if hasattr(module, name))
        switch({"use_reentrant": False})
    apply = zf.functional(module)

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return apply(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss, {path: leaf.clone() for path, leaf in apply.params.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"parts": EVERYTHING},
    "mixed precision": {"precision": torch.bfloat16},
    "remat": {},
    "accumulation": {"num_micro_batches": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_equals_a_real_step(name: str, stage: int, variant: str) -> None:
    loss, params = problem(name, remat=variant == "remat")
    options = dict(VARIANTS[variant])
    if "parts" in options:
        options["parts"] = EVERYTHING[: 3 if stage == 3 else 2]
    tokens = torch.arange(4 * 12).reshape(4, 12) % VOCABULARY
    plan = check(composed(stage, loss, **options), params, tokens, 2)
    assert bool(plan.flops.recomputed) == (variant == "remat")
