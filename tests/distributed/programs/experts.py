"""Programs over an expert axis, for simulated ranks and processes; see :mod:`bodies`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun.collectives import exchange_rows
from zfun.parallel import dispatch, expert_parallel
from zfun.testing import assert_same_bits

WIDTH, EXPERTS, CHOICES = 8, 6, 2

Mixture = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(shape, generator=g, dtype=torch.float64) / 2).to(dtype)
    layer = lambda: {
        "router": draw(EXPERTS, WIDTH),
        "experts": {"up": draw(EXPERTS, WIDTH, WIDTH), "bias": draw(EXPERTS, WIDTH)},
    }
    return {"layers": [layer(), layer()], "head": draw(WIDTH, WIDTH)}


def expert(p: dict[str, Tensor], rows: Tensor, ids: Tensor) -> Tensor:
    return torch.tanh(torch.bmm(p["up"][ids], rows.unsqueeze(-1)).squeeze(-1) + p["bias"][ids])


def whole_mixture(p: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = expert(p, x.repeat_interleave(chosen.shape[1], 0), chosen.flatten())
    return (rows.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1)


def mixture_over(axis: zf.Group) -> Mixture:
    def mixture(p: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return dispatch(lambda *rows: expert(p, *rows), x, chosen, weights, axis, EXPERTS)

    return mixture


def loss_with(mixture: Mixture, experts: int = EXPERTS) -> Callable[[Any, Tensor], Any]:
    """A loss of tokens, of which ranks have different numbers; ``experts`` that are chosen."""

    def loss(p: Any, x: Tensor) -> Any:
        target = x.flip(-1)
        for layer in p["layers"]:
            scores = F.linear(x, layer["router"])[:, :experts].softmax(-1)
            weights, chosen = scores.topk(CHOICES, -1)
            x = x + mixture(layer["experts"], x, chosen, weights)
        total = (F.linear(x, p["head"]) - target).square().sum()
        return zf.weighted_mean(total, len(x))

    return loss


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3 + rank, WIDTH, generator=g, dtype=torch.float64).to(dtype)


def rule() -> Any:
    return zf.optim.chain(zf.optim.clip_by_global_norm(0.5), zf.optim.adamw(0.05))


def rows_of_every_dtype(group: zf.Group) -> list[Tensor]:
    """Exchange rows of unequal numbers, some of them none and some many."""
    ranks, found = range(group.size), []
    for many, dtype in ((1, torch.float32), (1, torch.bfloat16), (1, torch.int64), (999, None)):
        counts = tuple(tuple(many * ((i * j + i) % 4) for j in ranks) for i in ranks)
        rows = sum(counts[group.rank])
        x = torch.arange(5 * rows).view(rows, 5).to(dtype or torch.float64) + 100 * group.rank
        y = exchange_rows(x, group, counts)
        back = exchange_rows(y, group, tuple(zip(*counts, strict=True)))
        assert_same_bits(back, x)
        found.append(y)
    return found


def trained_over_experts(group: zf.Group) -> Any:
    """Train at two stages, with clipping; all bits agree."""
    size = 2 if group.size % 2 == 0 else group.size
    mesh = zf.mesh(group, dp=group.size // size, ep=size)
    results: list[Any] = []
    for stage in (0, 3):
        loss = expert_parallel(loss_with(mixture_over(mesh["ep"])), mesh["ep"])
        zero = zf.zero(stage, loss, rule(), mesh["dp"], bucket_bytes=500)
        state, seen = zero.init(params()), []
        for step in range(2):
            state, info = zero.step(state, batch(group.rank, step))
            seen.append((info.loss, info.grad_norm))
        results.append((seen, zero.params(state)))
        assert_same_bits(results[-1], results[0], f"stage {stage}")
    return results[0], rows_of_every_dtype(group)
