"""The dtypes of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zfun import tree
from zfun.flat import Flat
from zfun.optim import LossScale, dynamic_loss_scale, static_loss_scale
from zfun.options import FLOATING, instance, number, takes
from zfun.transforms import unshard


@takes(
    param=FLOATING | None,
    compute=FLOATING | None,
    reduce=FLOATING | None,
    master=FLOATING | None,
    loss_scale=number(above=0, example="2.0**16")
    | instance(LossScale, "a loss scale of zf.optim", "zf.optim.dynamic_loss_scale()")
    | None,
)
@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training run; ``None`` leaves a dtype unchanged.

    Attributes:
        param: the dtype of parameters and frozen leaves between steps; complex and integer leaves
            keep their dtypes.
        compute: the dtype of parameters in the loss and in gathers.
        reduce: the dtype in which gradients are sent, summed over the ranks and accumulated. By
            default float32 for half parameters, else the dtype of the parameters.
        master: the dtype of master weights, for narrower parameters; the optimizer's state has this
            dtype too.
        loss_scale: a rule that changes the scale from step to step, or one number; ``None`` for no
            scale.

    Example:
        >>> Precision(compute=torch.bfloat16).master is None
        True
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    loss_scale: LossScale | float | None = None


def policy_of(precision: torch.dtype | Precision | None) -> Precision:
    """Return the dtypes of a precision."""
    match precision:
        case None:
            return Precision()
        case Precision():
            scale = precision.loss_scale
            rule = (
                scale if scale is None or isinstance(scale, LossScale) else static_loss_scale(scale)
            )
            return replace(precision, loss_scale=rule)
        case torch.bfloat16:
            return Precision(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
        case _:
            return Precision(
                torch.float16, torch.float16, torch.float32, torch.float32, dynamic_loss_scale()
            )


def whole_tree(params: tree.Tree) -> tree.Tree:
    return unshard(params) if isinstance(params, Flat) else params
