"""A byte-level GPT in plain PyTorch, without any code for sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfun as zf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Params: TypeAlias = "Mapping[str, Tensor]"
Batch: TypeAlias = "tuple[Tensor, Tensor]"


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a model and of a batch."""

    width: int
    num_blocks: int
    num_heads: int
    length: int  # of a sequence, in bytes
    batch_size: int  # sequences on each rank
    vocab: int = 256  # a token is a byte
    tied: bool = False  # the head is the embedding, transposed


PRESETS = {
    "tiny": GPTConfig(width=32, num_blocks=2, num_heads=2, length=16, batch_size=2),
    "demo": GPTConfig(width=384, num_blocks=4, num_heads=6, length=64, batch_size=4),
    "small": GPTConfig(width=512, num_blocks=8, num_heads=8, length=128, batch_size=2),
    "medium": GPTConfig(width=768, num_blocks=16, num_heads=12, length=128, batch_size=1),
}


class Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def attention(self, x: Tensor) -> Tensor:
        # [batch, length, 3 * width] -> three of [batch, heads, length, width / heads]
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + mlp


class GPT(nn.Module):
    """Tokens ``[batch, length]`` to logits of each next token ``[batch, length, vocab]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.length, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.embed(tokens) + self.position(places))
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_loss(model: nn.Module) -> Callable[[Params, Batch], Tensor]:
    """Turn a module into a loss that is a pure function of the parameters.

    The loss computes with its argument ``params`` and not with the module's own parameters. Every
    transform of ``(params, batch) -> loss`` therefore applies: ``torch.func.grad``, ``vmap``, or
    ``zf.shard_params``.
    """

    apply = zf.functional(model)

    def loss_fn(params: Params, batch: Batch) -> Tensor:
        tokens, targets = batch
        logits = apply(params, tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss_fn


def init(
    config: GPTConfig, seed: int = 0
) -> tuple[Callable[[Params, Batch], Tensor], dict[str, Tensor]]:
    """Return the loss and initial parameters; equal seeds give equal parameters on every rank."""
    # every call passes the parameters, so the module needs no numbers
    with torch.device("meta"):
        model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    return make_loss(model), {
        name: _first_value(name, weight, generator) for name, weight in model.named_parameters()
    }


def _first_value(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros(weight.shape)
    if weight.ndim == 1:  # the factor of a LayerNorm
        return torch.ones(weight.shape)
    return 0.02 * torch.randn(weight.shape, generator=generator)
