"""An average of the parameters, for Lightning's Trainer."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from zfun.errors import OptionError
from zfun.optim import Schedule
from zfun.options import DECAY, takes


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
