"""Adapt a frozen Llama of Hugging Face with LoRA: gradients for the adapters alone.

    python examples/lora.py                          # one process
    torchrun --nproc-per-node 2 examples/lora.py     # two processes, on GPUs if there are two
    python examples/lora.py --simulate 2             # two simulated ranks in one process

``trainable=...`` splits the tree. Stage 3 shards the frozen leaves too, and gathers them where the
loss uses them; gradients and optimizer state exist for the adapters only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import zfun as zf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, STEPS = 8, 30  # sequences of all ranks together
SIZES: Any = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class LoRA(nn.Module):
    """A frozen linear layer, and the product of two thin matrices beside the layer."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias) + x @ self.lora_a.T @ self.lora_b.T


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same first values on every rank
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.mlp.down_proj = LoRA(layer.mlp.up_proj), LoRA(layer.mlp.down_proj)
    return model.to(DEVICE)


def make_data(rank: int, size: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):  # sequences of every second, third, ... number
        first, step = torch.randint(1, 8, (2, BATCH_SIZE, 1), generator=random)
        yield ((first + step * torch.arange(16)) % 32)[rank::size].to(DEVICE)


def loss_of(net: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    apply = zf.functional(make_model())  # the module as a function of its parameters
    loss_fn = lambda params, batch: loss_of(partial(apply, params), batch)
    trained = lambda path, leaf: "lora" in path
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(1e-2), group, trainable=trained)
    state, losses = zero.init(apply.params), list[float]()
    for batch in make_data(group.rank, group.size):
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))  # the mean over the ranks
    if group.rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses, zero.params(state)  # the whole tree; zf.partition() takes the adapters out


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
