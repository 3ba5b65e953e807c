"""Mixed precision as a transform of the loss.

[Note: where the cast is]
The loss computes in one dtype, and its parameters are kept in another.
For whole parameters the cast is an operation of autograd like any other. For sharded ones it comes
before the gather, so that what is sent has the narrower of the two dtypes: the cast binds the dtype
to the parameters that it passes on (``LossCall``), and :func:`zfun.shard_params` reads it there.
Inside of ``shard_params`` the cast never sees a sharded value; ``shard_params`` knows it by its
type and takes it outside. What stands inside of another function still gets lazy leaves, and casts
what they gather. Leaf by leaf the gradients are the same in all these ways: summed over the uses in
the compute dtype, then cast once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import OptionError, checked_options
from zfun.flat import Flat
from zfun.placement import S
from zfun.transforms.params._call import BoundParams, call_of
from zfun.transforms.params._lazy import LazyLeaf
from zfun.typing import Loss

__all__ = ["CastLoss", "cast", "cast_leaves"]


@dataclass(frozen=True, slots=True)
class CastLoss:
    """What :func:`cast` returns: a loss that other transforms can look into.

    Attributes:
        loss: what is called.
        dtype: what it computes in.
        batch: whether the batch is cast as well.
    """

    loss: Loss
    dtype: torch.dtype
    batch: bool

    def __call__(self, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of the cast parameters."""
        if self.batch:
            batch = cast_leaves(batch, self.dtype)
        if not (isinstance(params, Flat) and params.placement is S):
            return self.loss(cast_leaves(params, self.dtype), batch)
        call = dataclasses.replace(call_of(params), compute_dtype=self.dtype)
        return self.loss(BoundParams(params, call), batch)


@checked_options
def cast(loss: Loss, dtype: torch.dtype, *, batch: bool = True) -> Loss:
    """Let a loss compute in a dtype of its own, while parameters and gradients keep theirs.

    With :func:`zfun.shard_params`, on either side of it, parameters are cast before they are
    gathered: in bfloat16 half the bytes are sent. Gradients are summed over the ranks in the dtype
    that :func:`zfun.data_parallel` says.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``.
        dtype: what floating leaves of the parameters are cast to; complex and integer ones stay as
            they are.
        batch: whether floating tensors of the batch are cast as well.

    Returns:
        A loss of the same parameters.

    Raises:
        OptionError: ``dtype`` is not a floating dtype.

    Example:
        >>> import zfun as zf
        >>> loss = zf.cast(lambda params, batch: (params["w"] * batch).sum(), torch.bfloat16)
        >>> zf.value_and_grad(loss)({"w": torch.tensor([1.0, 1.001])}, torch.tensor(3.0))
        (tensor(6.), {'w': tensor([3., 3.])})

    After Micikevicius et al., "Mixed Precision Training" (2018).
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(
            f"cast() takes a floating dtype; got {dtype!r}; use torch.bfloat16 or torch.float16"
        )
    return CastLoss(loss, dtype, batch)


def cast_leaves(value: tree.Tree, dtype: torch.dtype) -> tree.Tree:
    """Cast the floating tensors of a tree, each once, so that what was one tensor is one afterwards."""
    done: dict[int, Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = leaf.recast(dtype) if isinstance(leaf, LazyLeaf) else leaf.to(dtype)
        return done[id(leaf)]

    return tree.map(one, value)
