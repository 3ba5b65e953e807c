"""``deepspeed.ops.lion``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops._described import Described

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(Described):
    """Lion; see :func:`zfun.optim.lion`.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate.
        betas: share of the momentum in the step, and decay of the momentum.
        weight_decay: weight decay.
        set_grad_none: accepted and not used.

    Example:
        >>> import torch
        >>> FusedLion(torch.nn.Linear(2, 1).parameters(), lr=0.1).param_groups[0]["betas"]
        (0.9, 0.99)
    """

    kind = "Lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """:class:`FusedLion` by DeepSpeed's name for CPUs."""


__getattr__ = absent("ops.lion", globals())
