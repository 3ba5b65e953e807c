"""Train a generator against a discriminator: two states, two steps.

    python examples/gan.py                          # one process
    torchrun --nproc-per-node 2 examples/gan.py     # two processes, on GPUs if there are two
    python examples/gan.py --simulate 2             # two simulated ranks in one process

Each network has a state of its own. The step of one network reads the whole parameters of the
other, as a part of the batch, so no gradient reaches them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfun as zf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, STEPS = 64, 60  # points of all ranks together


def make_models() -> tuple[nn.Module, nn.Module]:
    """Return a generator, from noise to points of the plane, and a discriminator of points."""
    torch.manual_seed(0)  # the same first values on every rank
    generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    return generator.to(DEVICE), discriminator.to(DEVICE)


def make_data(rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points of the unit circle, and noise."""
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        angles = 6.2832 * torch.rand(BATCH_SIZE, generator=random)
        points = torch.stack([angles.cos(), angles.sin()], dim=1)
        noise = torch.randn(BATCH_SIZE, 4, generator=random)
        yield points[rank::size].to(DEVICE), noise[rank::size].to(DEVICE)


def d_loss_of(discriminator: Any, real: Tensor, fake: Tensor) -> Tensor:
    return (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))).mean()


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Any]]:
    g_apply, d_apply = map(zf.functional, make_models())  # modules as functions of parameters

    def d_loss(params: Any, batch: Any) -> Tensor:
        return d_loss_of(lambda x: d_apply(params, x), *batch)

    def g_loss(params: Any, batch: Any) -> Tensor:
        noise, d_params = batch
        return F.softplus(-d_apply(d_params, g_apply(params, noise))).mean()

    g_zero = zf.zero(stage, g_loss, zf.optim.adam(1e-2, b1=0.5), group)
    d_zero = zf.zero(stage, d_loss, zf.optim.adam(1e-2, b1=0.5), group)
    g_state, d_state = g_zero.init(g_apply.params), d_zero.init(d_apply.params)
    losses = list[float]()
    for real, noise in make_data(group.rank, group.size):
        fake = g_apply(g_zero.params(g_state), noise)
        d_state, d_info = d_zero.step(d_state, (real, fake))
        g_state, g_info = g_zero.step(g_state, (noise, d_zero.params(d_state)))
        losses += [float(d_info.loss), float(g_info.loss)]  # the means over the ranks
    if group.rank == 0:
        print(f"loss of discriminator {losses[-2]:.4f}, of generator {losses[-1]:.4f}")
    return losses, {"g": g_zero.params(g_state), "d": d_zero.params(d_state)}


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
