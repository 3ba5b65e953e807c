"""Mixed precision as a transform of the loss.

[Note: where the cast is]
The loss computes in one dtype, and the parameters are kept in another.
For whole parameters the cast is an operation of autograd like any other. Sharded parameters are
cast before the gather, so that the all-gather sends the narrower of the two dtypes: the cast binds
the dtype to the parameters (``LossCall``), and :func:`zfun.shard_params` reads the dtype there.
A cast inside of ``shard_params`` never sees a sharded value, because ``shard_params`` recognises
``CastLoss`` by type and moves the cast outside. A cast inside of another function receives lazy
leaves and casts the gathered tensors. The gradient of a leaf is the same in all these cases: summed
over the uses in the compute dtype, then cast once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.flat import Flat
from zfun.options import FLOATING, FUNCTION, takes
from zfun.placement import S
from zfun.transforms._batches import map_batch
from zfun.transforms.call._call import BoundParams, call_of
from zfun.transforms.call._lazy import LazyLeaf
from zfun.transforms.grads._value import ZfunLoss, check_loss
from zfun.typing import Loss


@dataclass(frozen=True, slots=True, eq=False)
class CastLoss(ZfunLoss):
    """The loss that :func:`cast` returns, into which other transforms can look.

    Attributes:
        loss: the inner loss.
        dtype: the dtype in which the loss computes.
        batch: whether the batch is cast as well.
    """

    loss: Loss
    dtype: torch.dtype
    batch: bool

    @property
    def __wrapped__(self) -> Loss:
        return self.loss

    def __call__(self, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of the cast parameters."""
        if self.batch:
            batch = map_batch(_caster(self.dtype), batch)
        if isinstance(params, Flat) and params.placement is S:
            call = dataclasses.replace(call_of(params), compute_dtype=self.dtype)
            params = BoundParams(params, call)
        else:
            params = cast_leaves(params, self.dtype)
        try:
            return self.loss(params, batch)
        except RuntimeError as error:
            if "dtype" in str(error):
                error.add_note(
                    f"zfun runs this loss in {self.dtype} (precision= or zf.cast): parameters and "
                    f"floating tensors of the batch are {self.dtype}, and tensors that the loss "
                    "makes are not. Make them with dtype=x.dtype of a tensor at hand; or train "
                    "without precision=, and compute under torch.autocast inside of the loss."
                )
            raise


@takes(loss=FUNCTION, dtype=FLOATING)
def cast(loss: Loss, dtype: torch.dtype, *, batch: bool = True) -> Loss:
    """Let a loss compute in another dtype than that of parameters and gradients.

    With :func:`zfun.shard_params`, on either side of the cast, parameters are cast before the
    gather: in bfloat16 the all-gather sends half the bytes. :func:`zfun.data_parallel` chooses the
    dtype in which gradients are summed over the ranks.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``.
        dtype: the new dtype of floating leaves of the parameters; complex and integer leaves are
            not cast.
        batch: whether floating tensors of the batch are cast as well, inside of mappings and
            dataclasses too; a :class:`zfun.Flat` in the batch is not cast.

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
    check_loss(loss, "cast()")
    return CastLoss(loss, dtype, batch)


def cast_leaves(value: tree.Tree, dtype: torch.dtype) -> tree.Tree:
    """Cast the floating tensors of a tree, each once, so that tied leaves stay one tensor."""
    return tree.map(_caster(dtype), value)


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    done: dict[int, Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = leaf.recast(dtype) if isinstance(leaf, LazyLeaf) else leaf.to(dtype)
        return done[id(leaf)]

    return one
