"""The methods of DeepSpeed's engine that return sizes and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.engine import Engine


class EngineNumbers(nn.Module):
    """Sizes of a batch, rates, norms and the stage."""

    optimizer: torch.optim.Optimizer | None
    _settings: Settings
    _core: Engine
    _group: Group
    _grad_norm: float | None

    def train_batch_size(self) -> int:
        """Return the samples of one step, over all ranks."""
        return self._batch().train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples that a rank computes at a time."""
        return self._batch().micro

    def _batch(self) -> Any:
        if self._settings.recipe.batch is None:
            raise OptionError(
                "the sizes of a batch come from the configuration; got one without any; write "
                "train_micro_batch_size_per_gpu"
            )
        return self._settings.recipe.batch

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one step of a rank."""
        return self._settings.recipe.num_micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, of a micro-batch, and the number of micro-batches."""
        return self._batch()[:3]

    def zero_optimization_stage(self) -> int:
        """Return the stage."""
        return self._settings.recipe.stage

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self._settings.recipe.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether the stage is at least 2."""
        return self._settings.recipe.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether the stage is 3."""
        return self._settings.recipe.stage == 3

    def gradient_clipping(self) -> float:
        """Return the bound of the gradient's norm; 0 for none."""
        return self._settings.recipe.max_grad_norm

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient, before clipping; ``None`` before a step."""
        return self._grad_norm

    def _numbers(self, *names: str) -> list[Any]:
        """Return the first of these numbers that each group has, or 0."""
        if self.optimizer is None:
            return []
        groups = self.optimizer.param_groups
        return [next((group[x] for x in names if x in group), 0.0) for group in groups]

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [float(rate) for rate in self._numbers("lr")]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the decays, of each parameter group."""
        return self._numbers("betas", "momentum")

    def get_type(self) -> list[str]:
        """Return the name of the optimizer for each parameter group."""
        made = getattr(self.optimizer, "optimizer", None)
        return [type(made).__name__ for _ in self._numbers("lr")]

    def loss_scale(self) -> float:
        """Return the factor of the loss in backward; 1 without one."""
        return self._core.loss_scale

    @property
    def cur_scale(self) -> float:
        """The factor of the loss in backward; 1 without one."""
        return self._core.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the factor of the loss changes."""
        values = self._settings.values
        return values["fp16.enabled"] and not values["fp16.loss_scale"]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as written."""
        return self._settings.config

    @property
    def gradient_average(self) -> bool:
        """Whether gradients are a mean over the ranks."""
        return True

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are sent."""
        return self._settings.recipe.precision.reduce or torch.float32

    def get_sequence_parallel_group(self) -> None:
        """Return ``None``: no rank holds a part of a sequence."""

    def get_sequence_parallel_world_size(self) -> int:
        """Return 1."""
        return 1

    def get_sequence_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    def get_data_parallel_rank(self) -> int:
        """Return the rank."""
        return self._group.rank
