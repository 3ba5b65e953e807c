"""Optimizers by the names of DeepSpeed's kernels.

``initialize`` takes one as it takes an optimizer of torch. Alone, or under a strategy of Lightning,
an optimizer steps by the same rule of ``zfun.optim``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops._described import Described

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "OnebitAdam",
]

_Betas = tuple[float, float]


class FusedAdam(Described):
    """Adam, or AdamW with ``adam_w_mode``; see :func:`zfun.optim.adamw`.

    Raises:
        OptionError: ``bias_correction=False`` or ``amsgrad=True``.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> optimizer = FusedAdam(layer.parameters(), lr=0.25)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> optimizer.step()
        >>> layer.weight.item()
        0.75
    """

    kind = "Adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        only = {"bias_correction": (bias_correction, True), "amsgrad": (amsgrad, False)}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "adam_w_mode": adam_w_mode,
            },
            only,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """:class:`FusedAdam` with other arguments; ``offload_optimizer`` chooses the place."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class OnebitAdam(Described):
    """1-bit Adam; see :func:`zfun.optim.onebit_adam`. It steps inside of an engine only."""

    kind = "OneBitAdam"

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        only = {
            "eps_inside_sqrt": (eps_inside_sqrt, False),
            "amsgrad": (amsgrad, False),
            "max_grad_norm": (max_grad_norm, 0.0),
        }
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "freeze_step": freeze_step}, only)


class FusedLamb(Described):
    """LAMB; see :func:`zfun.optim.lamb`.

    Raises:
        OptionError: an option that the rule does not have.
    """

    kind = "Lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        only = {
            "bias_correction": (bias_correction, True),
            "eps_inside_sqrt": (eps_inside_sqrt, False),
            "max_grad_norm": (max_grad_norm, 0.0),
            "amsgrad": (amsgrad, False),
        }
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_coeff": max_coeff, "min_coeff": min_coeff}, only)


class FusedLion(Described):
    """Lion; see :func:`zfun.optim.lion`."""

    kind = "Lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: _Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """:class:`FusedLion` with other arguments."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: _Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(Described):
    """Adagrad; see :func:`zfun.optim.adagrad`."""

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
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, {"amsgrad": (amsgrad, False)})


__getattr__ = absent("ops", globals())
