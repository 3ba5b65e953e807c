"""Find disks in noise with a U-Net; a step takes the mean of BatchNorm's statistics over the ranks.

python examples/unet.py                          # one process
torchrun --nproc-per-node 2 examples/unet.py     # two processes, on GPUs if there are two
python examples/unet.py --simulate 2             # two simulated ranks in one process
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfun as zf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, STEPS = 8, 20  # images of all ranks


def layer(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = layer(1, 8), layer(8, 16), layer(16 + 8, 8)
        self.head = nn.Parameter(torch.randn(1, 8, 1, 1) / 8)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = F.interpolate(self.middle(F.max_pool2d(fine, 2)), scale_factor=2)
        return F.conv2d(self.up(torch.cat([fine, coarse], dim=1)), self.head)


def make_model() -> UNet:
    torch.manual_seed(0)  # the same first values on every rank
    return UNet().to(DEVICE)


def make_data(rank: int, size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    random, grid = torch.Generator().manual_seed(seed), torch.arange(16.0)
    for _ in range(STEPS):
        x, y = 16 * torch.rand(2, BATCH_SIZE, 1, 1, generator=random)
        disks = ((grid - x).square() + (grid[:, None] - y).square() < 25)[:, None].float()
        images = disks + 0.5 * torch.randn(disks.shape, generator=random)
        yield images[rank::size].to(DEVICE), disks[rank::size].to(DEVICE)


def loss_of(net: Any, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(net(batch[0]), batch[1])


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    apply = zf.functional(make_model())  # the module as a function of parameters and buffers
    loss_fn = lambda params, batch: loss_of(partial(apply, params), batch)
    rule = lambda path, leaf: "mean" if path in apply.buffers else None
    zero = zf.zero(stage, loss_fn, zf.optim.sgd(0.05, momentum=0.9), group, buffers=rule)
    state, losses = zero.init({**apply.params, **apply.buffers}), list[float]()
    for batch in make_data(group.rank, group.size):
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))  # the mean over the ranks
    params, (images, disks) = zero.params(state), next(make_data(0, 1, seed=1))
    right = (apply.bind(params).eval()(images) > 0) == (disks > 0)  # with the statistics
    if group.rank == 0:
        print(f"loss {losses[-1]:.4f}, {right.float().mean():.0%} of the pixels right")
    return losses, params


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
