"""Decoders of transformers, cut between layers: bits of accumulate, one process within 1e-12."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zfun as zf
from zfun import optim
from zfun.errors import OptionError
from zfun.parallel import pipeline
from zfun.testing import assert_same_bits

transformers = pytest.importorskip("transformers")

from zfun.interop.transformers import pipeline_stages  # noqa: E402

SIZES = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 5,
    "max_position_embeddings": 16,
}
KINDS = {
    "llama": ("Llama", {}),
    "tied llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 3}),
    "qwen3": ("Qwen3", {"head_dim": 4}),
    "mistral": ("Mistral", {"sliding_window": 3, "head_dim": 4}),
}


@functools.cache
def made(kind: str) -> Any:
    name, more = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 32, (4, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def trained(group: zf.Group, kind: str, stage: int, pp: int, num_stages: int) -> Any:
    """Train a model over the data ranks alone, or cut in stages."""
    apply = zf.functional(made(kind))
    mesh = zf.mesh(group, pp=pp, dp=-1)
    options: dict[str, Any] = {}
    if num_stages == 0:
        loss: Any = lambda params, batch: apply(params, **batch).loss
        options["num_micro_batches"] = 2
    else:
        stages = pipeline_stages(apply.module, num_stages)
        loss = pipeline(stages.functions, mesh["pp"], num_micro_batches=2, leaves=stages.leaves)
    z = zf.zero(stage, loss, optim.adamw(1e-2), mesh["dp"], **options)
    state = z.init(apply.params)
    for step in range(3):
        state, info = z.step(state, batch(mesh.coordinates["dp"], step))
    return z.params(state), info.loss


@pytest.mark.parametrize(
    ("kind", "stage", "pp", "num_stages"),
    [
        ("llama", 3, 2, 2),
        ("llama", 1, 4, 4),
        ("qwen2", 2, 2, 4),
        ("qwen3", 0, 2, 2),
        ("mistral", 3, 2, 2),
    ],
)
def test_a_decoder_in_stages_has_the_bits_of_accumulate(
    kind: str, stage: int, pp: int, num_stages: int
) -> None:
    want = zf.simulate(2, lambda group: trained(group, kind, stage, 1, 0))[0]
    for found in zf.simulate(2 * pp, lambda group: trained(group, kind, stage, pp, num_stages)):
        assert_same_bits(found, want)


@functools.cache
def in_one_process(kind: str) -> Any:
    """Train the model as torch does, on the micro-batches of both data ranks."""
    model = copy.deepcopy(made(kind))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        micro = [
            {name: x.chunk(2)[k] for name, x in batch(rank, step).items()}
            for rank in range(2)
            for k in range(2)
        ]
        loss = torch.stack([model(**part).loss for part in micro]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}, loss.detach()


@pytest.mark.parametrize(
    ("kind", "stage", "pp"),
    [("tied llama", 1, 2), ("llama", 2, 4), ("qwen2", 1, 2), ("tied llama", 3, 4)],
)
def test_a_decoder_in_stages_is_that_of_one_process(kind: str, stage: int, pp: int) -> None:
    """Also where the embedding is tied to the head, and both stages add to its gradient."""
    want = in_one_process(kind)
    found = zf.simulate(2 * pp, lambda group: trained(group, kind, stage, pp, pp))
    for rank in found:
        assert_same_bits(rank, found[0])
        torch.testing.assert_close(rank, want, rtol=0, atol=1e-12)


def test_stages_share_the_layers_and_leave_the_model_as_it_is() -> None:
    model = made("llama")
    before = [name for name, _ in model.named_parameters()]
    stages = pipeline_stages(model, 2)
    assert [name for name, _ in model.named_parameters()] == before
    assert sorted(itertools.chain(*stages.leaves)) == sorted(before)
    assert sum(".0." in name or ".1." in name or ".2." in name for name in stages.leaves[0]) == 27
    tied = pipeline_stages(made("tied llama"), 3).leaves
    assert ["model.embed_tokens.weight" in names for names in tied] == [True, False, True]


def test_other_models_are_refused() -> None:
    with pytest.raises(OptionError, match=r"got 6 stages for 5 layers; use at most 5"):
        pipeline_stages(made("llama"), 6)
    with pytest.raises(OptionError, match=r"got 'Linear' \(Linear\)"):
        pipeline_stages(nn.Linear(2, 2), 1)
