"""Options of Lightning that cannot hold when parameters live in a sharded state."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as callbacks_of_lightning
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from zfun.errors import OptionError

__all__ = ["check_trainer"]

# Callbacks that read or write whole parameters of the module between steps.
_WHOLE = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuse options before anything is built.

    Raises:
        OptionError: an option of the trainer or the module that cannot hold.
    """
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise OptionError(
            "gradients are clipped by norm, because each rank has a shard of them; got "
            "Trainer(gradient_clip_algorithm='value'); pass gradient_clip_algorithm='norm'"
        )
    if is_overridden("backward", module, LightningModule):
        raise OptionError(
            "backward runs in the engine, which sums gradients over the ranks; got "
            f"{type(module).__name__}.backward(); remove the method, and use manual optimization "
            "for a backward pass of your own"
        )
    kinds = tuple(
        getattr(callbacks_of_lightning, name)
        for name in _WHOLE
        if hasattr(callbacks_of_lightning, name)
    )
    for callback in getattr(trainer, "callbacks", []):
        if isinstance(callback, kinds):
            raise OptionError(
                "parameters live in a sharded state during fit, and no callback can average them; "
                f"got {type(callback).__name__}; remove the callback, or average in "
                "strategy.bound()"
            )
