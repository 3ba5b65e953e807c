"""``deepspeed.ops.adam``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops._described import Described, refuse

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

_ALWAYS = "leave the option out: moments are always corrected"
_NEVER = "leave the option out: there is no maximum of moments"


class FusedAdam(Described):
    """Adam or AdamW, fused; see :func:`zfun.optim.adamw`.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate.
        bias_correction: only ``True``.
        betas: decays of the moments.
        eps: added to the root mean square.
        adam_w_mode: whether weight decay is decoupled.
        weight_decay: weight decay.
        amsgrad: only ``False``.
        set_grad_none: accepted and not used.

    Raises:
        OptionError: an option that the kernel does not have.

    Example:
        >>> import torch
        >>> FusedAdam(torch.nn.Linear(2, 1).parameters(), lr=0.1).param_groups[0]["lr"]
        0.1
    """

    kind = "Adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        name = type(self).__name__
        refuse(name, "bias_correction", bias_correction, True, _ALWAYS)
        refuse(name, "amsgrad", amsgrad, False, _NEVER)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adam_w_mode": adam_w_mode})


class DeepSpeedCPUAdam(FusedAdam):
    """:class:`FusedAdam` with the arguments of DeepSpeed's Adam for CPUs.

    The place of the state is chosen by ``offload_optimizer`` of the configuration.

    Args:
        model_params: parameters, or groups of parameters.
        lr: learning rate.
        bias_correction: only ``True``.
        betas: decays of the moments.
        eps: added to the root mean square.
        weight_decay: weight decay.
        amsgrad: only ``False``.
        adamw_mode: whether weight decay is decoupled.
        fp32_optimizer_states: accepted and not used; moments have the dtype of master weights.

    Raises:
        OptionError: an option that the kernel does not have.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


__getattr__ = absent("ops.adam", globals())
