"""Plugins of the Trainer: dtypes, which the state has, and an average of the parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from zfun.errors import OptionError
from zfun.interop.lightning._options import dtype_of
from zfun.optim import Schedule
from zfun.options import DECAY, takes

GRAD_SCALER = {
    "scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}
"""The numbers of a GradScaler that was made without arguments."""


class Dtypes(FabricPrecision):
    """The dtypes of a run: that of the parameters and inputs, and that of autocast if any."""

    def __init__(self, precision: str) -> None:
        self.precision: Any = precision
        self.is_mixed = precision.endswith("-mixed")
        self.compute = dtype_of(precision)
        self.dtype = torch.float32 if self.is_mixed else self.compute
        # That of the strategy, once it is known.
        self.device: torch.device = torch.device("cpu")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Compute under autocast if the precision is mixed, as Lightning does."""
        if not self.is_mixed:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        """Cast the floating tensors of a batch to the dtype of the parameters."""
        return self._cast(data, self.dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast the floating tensors that a model of Fabric returns to the default dtype."""
        return self._cast(data, torch.get_default_dtype())

    def _cast(self, data: Any, dtype: torch.dtype) -> Any:
        if self.compute is torch.float32:
            return data
        return apply_to_collection(data, dtype=Tensor, function=_convert_fp_tensor, dst_type=dtype)


def precision_of(plugin: FabricPrecision) -> str:
    """Return the name of the dtypes of a plugin, and refuse a loss scale of its own."""
    if not isinstance(plugin, FabricPrecision):
        raise OptionError(
            "a strategy of zfun works with the classes of the package lightning; got "
            f"{type(plugin).__name__} of {type(plugin).__module__.partition('.')[0]}; make the "
            "Trainer with import lightning.pytorch as pl, and a Fabric with lightning.fabric"
        )
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        numbers = {name: x for name, x in scaler.state_dict().items() if name in GRAD_SCALER}
        if numbers != GRAD_SCALER:
            raise OptionError(
                "a strategy of zfun has the loss scale in its state; got a plugin whose GradScaler "
                f"has {numbers}; pass initial_scale_power= and loss_scale_window= to the strategy"
            )
    return plugin.precision


class ZfunPrecision(Dtypes, Precision):
    """The dtypes of a run of the Trainer, for the strategies ``zfun_stage_1`` to ``zfun_stage_3``.

    Args:
        precision: as for Fabric: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-true"``
            or ``"16-mixed"``. The ``-true`` ones keep parameters in the dtype beside float32 master
            weights, as DeepSpeed does; the ``-mixed`` ones keep them in float32, under autocast.

    Raises:
        OptionError: another precision.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        # That of a strategy, which has the gradients.
        self.clip: Callable[..., None] | None = None

    def convert_input(self, data: Any) -> Any:
        """Cast the floating tensors of a batch, which a mixed precision leaves to autocast."""
        return data if self.is_mixed else super().convert_input(data)

    def backward(
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass of the engine, or that of the module's own ``backward``."""
        pull = functools.partial(model.trainer.strategy.pull, tensor)
        if not is_overridden("backward", model, LightningModule):
            pull(*args, **kwargs)
        elif self.compute is not torch.float16:
            model.backward(tensor, *args, **kwargs)
        else:
            # Of this loss alone, because the engine scales it.
            tensor.backward = pull  # pyrefly: ignore[method-assign]
            try:
                model.backward(tensor, *args, **kwargs)
            finally:
                del tensor.backward

    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run forward, backward and the step of the engine in the order of plain Lightning."""
        gradients = functools.partial(self._gradients, optimizer, model, closure)
        if self.precision != "16-mixed":
            return optimizer.step(closure=gradients, **kwargs)
        # A GradScaler takes no closure, so that hooks of the optimizer come after backward.
        result = gradients()
        optimizer.step(**kwargs)
        return result

    def _gradients(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any]) -> Any:
        """Run forward and backward, and the hooks before the step."""
        result = closure()
        # Lightning leaves the gradients of fused optimizers as they are.
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            model.trainer.strategy.unscale(optimizer)
        self._after_closure(model, optimizer)
        # A module that has run the closure itself calls step() without one.
        is_own = closure is not do_nothing_closure
        if model.automatic_optimization and is_own and result is None:
            raise OptionError(
                "all ranks take every step, so training_step() returns a loss; got None; return "
                "a loss of 0 times an output for a batch to skip"
            )
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the sharded gradients of an optimizer."""
        if clip_val:
            assert self.clip is not None, "a strategy has clip()"
            is_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
            self.clip(optimizer, float(clip_val), by_value=is_value)


@takes(decay=DECAY)
class EmaAveraging(Callback):
    """Keep an average of the parameters beside a strategy of zfun; see :func:`zfun.optim.ema`.

    The average is sharded and saved as the moments are, where Lightning's ``WeightAveraging`` keeps
    a whole model. Validation uses the average, and after ``fit`` the module has it. Training, what
    resumes from a checkpoint, ``test``, ``validate`` and ``predict`` with ``ckpt_path=``, and
    ``load_from_checkpoint`` use the parameters.

    Args:
        decay: as for :func:`zfun.optim.ema`.

    Example:
        >>> EmaAveraging(0.999).decay
        0.999
    """

    def __init__(self, decay: float | Schedule) -> None:
        self.decay = decay
        self._context = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that keeps no average."""
        del pl_module, stage
        if not hasattr(trainer.strategy, "averaged"):
            raise OptionError(
                "EmaAveraging() is an average in the state of zfun; got the strategy "
                f"{type(trainer.strategy).__name__}; pass strategy='zfun_stage_2', or use "
                "WeightAveraging() of Lightning"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module the average."""
        del pl_module
        strategy: Any = trainer.strategy
        self._context.enter_context(strategy.averaged())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module its parameters."""
        del trainer, pl_module
        self._context.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give the module its parameters."""
        del trainer, pl_module, exception
        self._context.close()
