"""Configurations for DeepSpeed of a script that fine-tunes, with what the script's runs write."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

SIZES = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ADAMW = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
}
RISE = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
CONSTANT = {"scheduler": {"type": "WarmupLR", "params": RISE}}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {**RISE, "total_num_steps": "auto"}}}
_SCALE = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
HALF = {"bf16": _SCALE, "communication_data_type": "fp32"}
SCALED = {"fp16": _SCALE}
_SECOND = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_THIRD = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_HOST = {"device": "cpu", "pin_memory": True}


def _disk(folder: Path) -> dict[str, Any]:
    there = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    return {
        "offload_optimizer": {**there, "buffer_count": 4, "fast_init": False},
        "offload_param": {**there, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def sections(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return sections ``zero_optimization`` by name; a disk is a folder."""
    return {
        "0": {"stage": 0},
        "1": {"stage": 1},
        "2": _SECOND,
        "2 host": {**_SECOND, "offload_optimizer": _HOST},
        "3": _THIRD,
        "3 host": {**_THIRD, "offload_optimizer": _HOST, "offload_param": _HOST},
        "3 disk": {**_THIRD, **_disk(folder)},
    }


class Run(NamedTuple):
    """The losses, norms and rates that a run of the script has written."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]


def run(script: Path, flags: Sequence[str], folder: Path) -> Run:
    """Run a script as ``python script FLAGS`` does, and read what rank 0 has written."""
    with mock.patch.object(sys, "argv", [str(script), *flags]), redirect_stdout(StringIO()):
        runpy.run_path(str(script), run_name="__main__")
    dist.barrier()
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    rows = [row for row in state["log_history"] if "loss" in row]
    return Run(
        [row["loss"] for row in rows],
        [row["grad_norm"] for row in rows],
        [row["learning_rate"] for row in rows],
        load_file(folder / "model.safetensors"),
    )


def with_rates(rates: Sequence[float]) -> Any:
    """Return a context in which a trainer takes these learning rates in turn."""

    def create_scheduler(trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        del num_training_steps
        made = trainer.optimizer if optimizer is None else optimizer
        first = trainer.args.learning_rate
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            made, lambda step: rates[min(step, len(rates) - 1)] / first
        )
        return trainer.lr_scheduler

    return mock.patch.object(transformers.Trainer, "create_scheduler", create_scheduler)


def assert_same(found: Run, expected: Run, name: str) -> None:
    """Check that two runs have the same bits; learning rates are logged before or after a step."""
    assert found.losses == expected.losses, name
    assert found.norms == expected.norms, name
    assert found.weights.keys() == expected.weights.keys(), name
    assert all(torch.equal(x, expected.weights[key]) for key, x in found.weights.items()), name


def assert_close(found: Run, expected: Run, name: str, tolerance: float = 1e-5) -> None:
    """Check losses, norms and weights of a run."""
    kept = {key: found.weights[key].float() for key in expected.weights}
    for one, other in ((found.losses, expected.losses), (found.norms, expected.norms)):
        torch.testing.assert_close(
            torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance, msg=name
        )
    torch.testing.assert_close(kept, expected.weights, rtol=0, atol=10 * tolerance, msg=name)
