"""What one call of a loss needs beside its parameters, and the parameters with that beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zfun.compression import Codec
from zfun.flat import Flat
from zfun.transforms.grads._executor import Executor

__all__ = ["BoundParams", "LossCall", "call_of"]


@dataclass(frozen=True, slots=True)
class LossCall:
    """What one call of a loss needs beside its parameters.

    Attributes:
        executor: of the gradient function that calls the loss; ``None`` where no gradient is taken.
        compute_dtype: of floating leaves as the loss sees them; ``None`` for their own.
        codec: the format in which parameters are gathered; ``None`` for exactly.
    """

    executor: Executor | None = None
    compute_dtype: torch.dtype | None = None
    codec: Codec | None = None


class BoundParams(Flat):
    """The argument of a loss on sharded parameters: a :class:`zfun.Flat` and its call.

    A gradient function binds its parameters to its call, :func:`zfun.cast` adds a dtype, and
    :func:`zfun.shard_params` takes both apart. A user's function between them passes the argument
    on, and a loss that it calls with other parameters is no part of the call.
    """

    __slots__ = ("call",)

    call: LossCall

    def __init__(self, params: Flat, call: LossCall) -> None:
        super().__init__(
            (), params.placement, params.layout, params.group, codec=params.codec, life=params.life
        )
        object.__setattr__(self, "call", call)


def call_of(params: Flat) -> LossCall:
    """Return the call that parameters are bound to; an empty one for others."""
    return params.call if isinstance(params, BoundParams) else LossCall()
