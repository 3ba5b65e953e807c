"""Configurations of DeepSpeed that are used in the wild, and values of a run for ``"auto"``."""

from __future__ import annotations

from pathlib import Path

import torch

from zfun.interop import AutoValues

FOLDER = Path(__file__).parents[1] / "fixtures" / "ds_configs"
FILES = sorted(FOLDER.glob("*.json"))

AUTO = AutoValues(
    world_size=2,
    micro_batch_size=3,
    num_micro_batches=2,
    max_grad_norm=0.5,
    dtype=torch.float32,
    hidden_size=16,
    learning_rate=0.05,
    betas=(0.9, 0.95),
    eps=1e-6,
    weight_decay=0.1,
    num_warmup=3,
    num_steps=10,
)
# Of the file that leaves nothing to auto, and so contradicts other values.
WITHOUT_RATES = AutoValues(world_size=2, micro_batch_size=3, num_micro_batches=2)


def auto_of(path: Path) -> AutoValues:
    """Return the values of a run that a file needs."""
    return WITHOUT_RATES if "onebit" in path.name else AUTO
