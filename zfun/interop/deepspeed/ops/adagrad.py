"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops._described import Described, refuse

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Described):
    """Adagrad; see :func:`zfun.optim.adagrad`.

    Args:
        model_params: parameters, or groups of parameters.
        lr: learning rate.
        eps: added to the root.
        weight_decay: weight decay.
        amsgrad: only ``False``.
        fp32_optimizer_states: accepted and not used.

    Raises:
        OptionError: an option that the kernel does not have.

    Example:
        >>> import torch
        >>> DeepSpeedCPUAdagrad(torch.nn.Linear(2, 1).parameters()).param_groups[0]["lr"]
        0.01
    """

    kind = "Adagrad"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdagrad", "amsgrad", amsgrad, False, "leave the option out")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


__getattr__ = absent("ops.adagrad", globals())
