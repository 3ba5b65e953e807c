"""``deepspeed.runtime.zero.utils``: the classes of optimizers that DeepSpeed shards by default."""

from __future__ import annotations

import torch

from zfun.interop.deepspeed import ops
from zfun.interop.deepspeed._absent import absent

ZERO_SUPPORTED_OPTIMIZERS = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    ops.FusedAdam,
    ops.DeepSpeedCPUAdam,
    ops.DeepSpeedCPUAdagrad,
    ops.DeepSpeedCPULion,
    ops.FusedLion,
]


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of these; zfun shards others too.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> is_zero_supported_optimizer(torch.optim.AdamW([weight]))
        True
        >>> is_zero_supported_optimizer(torch.optim.SGD([weight]))
        False
    """
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


__getattr__ = absent("runtime.zero.utils", globals())
