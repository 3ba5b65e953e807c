"""Classify images with a Vision Transformer of Hugging Face, fed by a DataLoader.

    python examples/vit.py                          # one process
    torchrun --nproc-per-node 2 examples/vit.py     # two processes, on GPUs if there are two
    python examples/vit.py --simulate 2             # two simulated ranks in one process

The model is the unmodified class of ``transformers``, and the input is an ordinary ``Dataset``.
Each rank loads its share of every batch with torch's ``DistributedSampler``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import zfun as zf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, EPOCHS = 16, 3  # images of all ranks together


def make_model() -> ViTForImageClassification:
    torch.manual_seed(0)  # the same first values on every rank
    labels: Any = {"num_labels": 4}
    config = ViTConfig(
        image_size=16, patch_size=4, num_channels=1, **labels, qkv_bias=False,
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    model: Any = ViTForImageClassification(config)
    return model.to(DEVICE)


def make_data(rank: int, size: int) -> Iterator[Any]:
    """Noise with one bright quadrant, whose number is the label."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 1, 16, 16, generator=generator)
    labels = torch.randint(4, (128,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        image[:, row : row + 8, column : column + 8] += 2
    data = TensorDataset(images, labels)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_size=BATCH_SIZE // size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # shuffle the images anew
        yield from loader


def loss_of(net: Any, batch: Any) -> Tensor:
    images, labels = (x.to(DEVICE) for x in batch)
    return F.cross_entropy(net(images).logits, labels)


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    apply = zf.functional(make_model())  # the module as a function of its parameters
    loss_fn = lambda params, batch: loss_of(partial(apply, params), batch)
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(1e-3), group)
    state, losses = zero.init(apply.params), list[float]()
    for batch in make_data(group.rank, group.size):
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))  # the mean over the ranks
        if group.rank == 0:
            print(f"step {state.step}  loss {losses[-1]:.4f}")
    return losses, zero.params(state)


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
