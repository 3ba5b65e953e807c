"""The options of one call of a loss, and parameters that carry these options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zfun.compression import Codec
from zfun.flat import Flat
from zfun.transforms.call._executor import Executor


@dataclass(frozen=True, slots=True)
class LossCall:
    """The options of one call of a loss.

    Attributes:
        executor: of the gradient function that calls the loss; ``None`` where no gradient is taken.
        compute_dtype: of floating leaves in the loss; ``None`` for the dtypes of the parameters.
        codec: of the gathers of parameters; ``None`` sends exact values.
    """

    executor: Executor | None = None
    compute_dtype: torch.dtype | None = None
    codec: Codec | None = None


class BoundParams(Flat):
    """The argument of a loss on sharded parameters: a :class:`zfun.Flat` and a call.

    A gradient function binds the parameters to a call, :func:`zfun.cast` adds a dtype, and
    :func:`zfun.shard_params` reads both. A user's function in between passes the argument on; a
    loss of other parameters inside this function is no part of the call.
    """

    __slots__ = ("call",)

    call: LossCall

    def __init__(self, params: Flat, call: LossCall) -> None:
        super().__init__(
            (), params.placement, params.layout, params.group, codec=params.codec, life=params.life
        )
        object.__setattr__(self, "call", call)


def call_of(params: Flat) -> LossCall:
    """Return the call to which parameters are bound, or an empty call."""
    return params.call if isinstance(params, BoundParams) else LossCall()
