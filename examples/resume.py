"""Go on in the middle of an epoch, with a DistributedSampler and a StatefulDataLoader.

    python examples/resume.py --checkpoints runs/resume      # end with Ctrl-C, and run again
    torchrun --nproc-per-node 2 examples/resume.py --checkpoints runs/resume

torchdata's ``StatefulDataLoader`` is a ``DataLoader`` that knows how far it has come. A checkpoint
keeps the position of each rank's loader, so the next start, on as many ranks, gives each rank the
batches that are left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zfun as zf

BATCH_SIZE, STEPS, SAVE_EVERY = 16, 20, 5  # points of all ranks together


def make_loader(rank: int, size: int) -> tuple[Any, Any]:
    """Noise around one of four points, whose number is the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (128,), generator=generator)
    points = torch.randn(4, 8, generator=generator)
    noise = torch.randn(128, 8, generator=generator)
    data = TensorDataset(points[labels] + 0.5 * noise, labels)
    sampler: Any = DistributedSampler(data, num_replicas=size, rank=rank, drop_last=True)
    return StatefulDataLoader(data, BATCH_SIZE // size, sampler=sampler, drop_last=True), sampler


def batches(loader: Any, sampler: Any, step: int) -> Iterator[Any]:
    """Yield the batches that follow a number of steps."""
    epoch = max(step - 1, 0) // len(loader)
    while True:
        sampler.set_epoch(epoch)  # shuffles anew; the loader leaves out the batches already given
        yield from loader
        epoch += 1


def loss_fn(params: Any, batch: Any) -> Tensor:
    points, labels = batch
    logits = torch.tanh(points @ params["w1"] + params["b1"]) @ params["w2"]
    return torch.nn.functional.cross_entropy(logits, labels)


def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w1, w2 = torch.randn(8, 16, generator=generator), torch.randn(16, 4, generator=generator)
    return {"w1": w1 / 4, "b1": torch.zeros(16), "w2": w2 / 4}


def train(group: zf.Group, checkpoints: Path, num_steps: int = STEPS) -> tuple[list[float], Any]:
    zero = zf.zero(3, loss_fn, zf.optim.adamw(1e-2), group)
    state, losses = zero.init(initial()), list[float]()
    loader, sampler = make_loader(group.rank, group.size)
    if zf.checkpoint.latest(checkpoints):
        state = zf.load(checkpoints, state, loader=loader).state
    data = batches(loader, sampler, state.step)
    while state.step < num_steps:
        state, info = zero.step(state, next(data))
        losses.append(float(info.loss))
        if group.rank == 0:
            print(f"step {state.step}  loss {losses[-1]:.4f}")
        if state.step % SAVE_EVERY == 0:
            zf.save(checkpoints, state, loader=loader, keep=2)
    return losses, zero.params(state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    train(zf.process_group(), parser.parse_args().checkpoints)
