"""The value of a loss: a scalar, or a sum and a weight, and an optional aux value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops
from zfun.errors import ZfunError

__all__ = ["NO_AUX", "WeightedMean", "parse", "weighted_mean"]


class WeightedMean(NamedTuple):
    """A sum and a weight, so that the mean can cover more ranks and micro-batches.

    Attributes:
        total: the sum of the losses, a scalar.
        weight: the divisor, a scalar, such as the number of tokens.
    """

    total: Tensor
    weight: Tensor

    @property
    def mean(self) -> Tensor:
        """The sum divided by the weight."""
        return self.total / self.weight

    def __float__(self) -> float:
        return float(self.mean)


def weighted_mean(total: Tensor, weight: Tensor | float) -> WeightedMean:
    """Return a loss that is averaged by weight over ranks and micro-batches, not rank by rank.

    The mean of the ranks' means is the true mean over tokens only where all ranks have equally
    many. A loss function that returns a weighted mean instead of a scalar gets the true mean:
    :func:`data_parallel` and :func:`accumulate` add totals and weights, and divide at the end.

    Args:
        total: the sum of the losses of this batch, a scalar.
        weight: the weight of this batch, a scalar without a gradient.

    Returns:
        The value for a loss function to return.

    Example:
        >>> import zfun as zf
        >>> def loss_fn(params, batch):
        ...     return zf.weighted_mean((params["w"] * batch).sum(), batch.numel())
        >>> def main(group):
        ...     vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
        ...     batch = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])][group.rank]
        ...     loss, grads = vg({"w": torch.tensor(1.0)}, batch)
        ...     return float(loss)
        >>> zf.simulate(2, main)
        [4.0, 4.0]
    """
    # A count of tokens has more bits than a half type.
    total = total.to(ops.wide(total.dtype))
    return WeightedMean(
        total, torch.as_tensor(weight, dtype=total.dtype, device=total.device).detach()
    )


# Stands for the aux value of a loss that returns none.
NO_AUX = object()


def parse(out: Any) -> tuple[Any, Tensor, Tensor | None, Any]:
    """Split the result of a loss into value, sum, weight and aux."""
    aux: Any = NO_AUX
    if type(out) is tuple and len(out) == 2:
        out, aux = out
    total, weight = (out.total, out.weight) if isinstance(out, WeightedMean) else (out, None)
    if not isinstance(total, Tensor) or total.numel() != 1:
        got = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, Tensor)
            else type(total).__name__
        )
        raise ZfunError(
            f"a loss must return a scalar tensor, (scalar, aux) or weighted_mean(...); got {got}; "
            "reduce it with mean() or sum()"
        )
    # Sums over ranks and micro-batches, and loss scales, need more bits than a half type has.
    total = total.reshape(()).to(ops.wide(total.dtype))
    return out, total, weight, aux
