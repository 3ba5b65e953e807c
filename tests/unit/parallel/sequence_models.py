"""Tiny models of transformers, trained plainly and over a sequence axis, in float64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf

transformers = pytest.importorskip("transformers")

VOCAB, TOKENS = 29, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
NAMES = ("Llama", "Qwen2", "Qwen3", "GPTNeoX")


@functools.cache
def model_of(name: str, heads: int = 4, kv_heads: int = 2) -> Any:
    """Return the model, the same each time; nobody trains it in place."""
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    others: dict[str, Any] = {"num_attention_heads": heads, "hidden_size": 6 * heads}
    if name != "GPTNeoX":
        others |= {"num_key_value_heads": kv_heads, "head_dim": 6}
    config = getattr(transformers, f"{name}Config")(**(SIZES | others))
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    # Norms and biases begin as ones and zeros, which hide mistakes.
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.add_(0.1 * torch.randn_like(leaf))
    torch.random.set_rng_state(state)
    return model


def batch_of(step: int, samples: int = 2) -> dict[str, Tensor]:
    """Return whole sequences, of which some tokens count nothing, unevenly."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (samples, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, : 5 + step] = -100
    labels[-1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def optimizers(name: str) -> tuple[Any, Any]:
    """Return an optimizer of zfun, and the same one of torch as a function of parameters."""
    if name == "sgd":
        return zf.optim.sgd(0.3), lambda leaves: torch.optim.SGD(leaves, 0.3)
    # The gradient of a key's bias is zero but for rounding, which a small eps would enlarge.
    options = {"weight_decay": 0.1, "eps": 1e-3}
    return zf.optim.adamw(0.01, **options), lambda leaves: torch.optim.AdamW(
        leaves, 0.01, **options
    )


@functools.cache
def plain(name: str, optimizer: str, steps: int, heads: int = 4, kv_heads: int = 2) -> Any:
    """Return the losses, and the parameters after some steps, of the model on one process."""
    model = copy.deepcopy(model_of(name, heads, kv_heads))
    update = optimizers(optimizer)[1](model.parameters())
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        logits = model(batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        count = (labels != -100).sum()
        update.zero_grad()
        # Norms of transformers round gradients to float32, so the sum must be differentiated, as
        # zfun does; a mean would be rounded otherwise.
        total.backward()
        for leaf in model.parameters():
            leaf.grad /= count
        update.step()
        losses.append(float(total.detach() / count))
    return losses, {key: leaf.detach() for key, leaf in model.named_parameters()}


def train(
    group: zf.Group,
    name: str,
    stage: int,
    optimizer: str = "adamw",
    sizes: tuple[int, int] = (2, 2),
    kind: str = "ulysses",
    zigzag: bool = False,
    steps: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
) -> Any:
    """Train over a mesh of data and sequence ranks."""
    from zfun.interop.transformers import sequence_parallel

    mesh = zf.mesh(group, dp=sizes[0], sp=sizes[1])
    model = sequence_parallel(model_of(name, heads, kv_heads), mesh["sp"], kind, zigzag=zigzag)
    apply = zf.functional(model)

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = apply(
            params, input_ids=batch["input_ids"], position_ids=batch["position_ids"]
        ).logits
        return zf.parallel.token_mean(logits, batch["shift_labels"])

    zero = zf.zero(stage, loss_fn, optimizers(optimizer)[0], mesh["dp", "sp"], bucket_bytes=8_000)
    state, losses = zero.init(apply.params), []
    for step in range(steps):
        whole = batch_of(step)
        mine = {key: leaf.chunk(sizes[0])[mesh["dp"].rank] for key, leaf in whole.items()}
        batch = zf.parallel.sequence_batch(mine, mesh["sp"], zigzag=zigzag)
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))
    return losses, zero.params(state)
