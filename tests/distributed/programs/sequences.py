"""A small transformer over data and sequence ranks, for simulated ranks and for real processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zfun as zf
from zfun.parallel import ring_attention, sequence_piece, tiled, token_mean, ulysses

WIDTH, HEADS, KV_HEADS, VOCAB, TOKENS = 24, 12, 3, 9, 24


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    head_dim = WIDTH // HEADS
    shapes = {
        "embedding": (VOCAB, WIDTH),
        "qkv": (WIDTH, (HEADS + 2 * KV_HEADS) * head_dim),
        "out": (WIDTH, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    return {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}


def loss_of(attend: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        ids, labels = batch
        x = params["embedding"][ids]
        heads = (x @ params["qkv"]).unflatten(-1, (HEADS + 2 * KV_HEADS, -1)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + attend(q, k, v).transpose(1, 2).flatten(-2) @ params["out"]
        end = tiled(lambda x, labels: token_mean(x @ params["head"], labels), 2)
        return end(x, labels)

    return loss_fn


def attention(axis: zf.Group, kind: str) -> Any:
    if kind == "ulysses":
        fused = ulysses(scaled_dot_product_attention, axis)
        return lambda q, k, v: fused(q, k, v, is_causal=True, enable_gqa=True)
    return lambda q, k, v: ring_attention(q, k, v, axis, causal=True, zigzag=kind == "zigzag")


def trained_over_sequences(group: zf.Group) -> Any:
    """Two steps of each kind of attention, over two meshes and two stages."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    found = []
    two = 1 if group.size % 4 else 2
    for dp, kind, stage in (
        (two, "ulysses", 3),
        (1, "zigzag", 2),
        (two, "ring", 3),
        (1, "ulysses", 1),
    ):
        mesh = zf.mesh(group, dp=dp, sp=group.size // dp)
        mine = ids.chunk(dp)[mesh["dp"].rank]
        batch = [
            sequence_piece(x, mesh["sp"], zigzag=kind == "zigzag") for x in (mine, mine.roll(-1, 1))
        ]
        zero = zf.zero(
            stage,
            loss_of(attention(mesh["sp"], kind)),
            zf.optim.adamw(0.01),
            mesh["dp", "sp"],
            bucket_bytes=500,
        )
        state = zero.init(params())
        for _ in range(2):
            state, info = zero.step(state, batch)
        found.append((zero.params(state), info.loss))
    return found
