"""``deepspeed.ops.lamb``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops._described import Described, refuse

__all__ = ["FusedLamb"]


class FusedLamb(Described):
    """LAMB; see :func:`zfun.optim.lamb`.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate.
        bias_correction: only ``True``.
        betas: decays of the moments.
        eps: added to the root mean square.
        eps_inside_sqrt: only ``False``.
        weight_decay: weight decay.
        max_grad_norm: only 0; write ``gradient_clipping`` into the configuration.
        max_coeff: largest ratio of trust.
        min_coeff: smallest ratio of trust.
        amsgrad: only ``False``.

    Raises:
        OptionError: an option that the kernel does not have.

    Example:
        >>> import torch
        >>> FusedLamb(torch.nn.Linear(2, 1).parameters(), lr=0.1).param_groups[0]["max_coeff"]
        10.0
    """

    kind = "Lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        always = "leave the option out"
        refuse("FusedLamb", "bias_correction", bias_correction, True, always)
        refuse("FusedLamb", "eps_inside_sqrt", eps_inside_sqrt, False, always)
        refuse("FusedLamb", "amsgrad", amsgrad, False, always)
        refuse(
            "FusedLamb",
            "max_grad_norm",
            max_grad_norm,
            0.0,
            "write gradient_clipping into the configuration",
        )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_coeff": max_coeff, "min_coeff": min_coeff})


__getattr__ = absent("ops.lamb", globals())
