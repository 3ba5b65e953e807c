"""``deepspeed.zero``: parameters in pieces, before and after ``initialize``.

========================  =====================================================================
``partition_parameters``  ``Init`` and ``GatheredParameters``
``_owners``               where the values of a partitioned parameter are
``stage3``                the estimators of stage 3
``stage_1_and_2``         the estimators of stage 2
========================  =====================================================================
"""

from __future__ import annotations

from typing import Any

import torch

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime.zero import stage3, stage_1_and_2
from zfun.interop.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
]


def register_external_parameter(module: torch.nn.Module, parameter: Any) -> None:
    """Do nothing: a parameter is gathered where it is used, in any module.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> register_external_parameter(torch.nn.Identity(), layer.weight)
    """


unregister_external_parameter = register_external_parameter

__getattr__ = absent("zero", globals())
