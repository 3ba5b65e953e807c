"""Losses and gradient functions that zfun knows by type, and the value of a loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops
from zfun.errors import OptionError, ZfunError
from zfun.options import SCALAR, number, takes
from zfun.transforms.grads._pullback import Pullback
from zfun.typing import Gradient, Loss


class ZfunLoss(Loss):
    """A loss that a transform has returned.

    Transforms return dataclasses without equality, because torch.compile of torch 2.11 hashes those
    that compiled code makes before they have attributes.
    """

    __slots__ = ()


class ZfunGradient(Gradient):
    """A gradient function that a transform has returned."""

    __slots__ = ()

    @abstractmethod
    def vjp(self, params: Any, batch: Any) -> tuple[Any, Pullback]:
        """Return the outputs of the function, and the pullback; see :func:`zfun.vjp`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ComposedGradient(ZfunGradient):
    """A gradient function around another one, into which transforms cannot look.

    Attributes:
        call: the function.
        forward: the function in two halves, ``(params, batch) -> (out, pullback)``.
    """

    call: Gradient
    forward: Callable[[Any, Any], tuple[Any, Pullback]]

    @ops.uncompiled
    def __call__(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """Return the loss and the gradients."""
        return self.call(params, batch)

    @ops.uncompiled
    def vjp(self, params: Any, batch: Any) -> tuple[Any, Pullback]:
        """Return the outputs of the function, and the pullback; see :func:`zfun.vjp`."""
        return self.forward(params, batch)


def start_vjp(vg: Gradient, params: Any, batch: Any) -> tuple[Any, Pullback]:
    """Run the first half of a gradient function that zfun made."""
    if not isinstance(vg, ZfunGradient):
        raise OptionError(
            "vjp() divides a gradient function that zfun made; got the function "
            f"{getattr(vg, '__name__', type(vg).__name__)!r} inside of transforms; make the "
            "gradient function with value_and_grad()"
        )
    return vg.vjp(params, batch)


def changed_grads(vg: Gradient, change: Callable[[Any], Any]) -> ComposedGradient:
    """Return a gradient function whose gradients go through a function."""

    def call(params: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = vg(params, batch)
        return value, change(grads)

    def forward(params: Any, batch: Any) -> tuple[Any, Pullback]:
        out, pullback = start_vjp(vg, params, batch)
        return out, pullback.then(change)

    return ComposedGradient(call, forward)


def check_loss(fn: Any, transform: str) -> None:
    """Refuse a gradient function where a transform takes a loss."""
    if isinstance(fn, ZfunGradient):
        raise OptionError(
            f"{transform} takes a loss; got a gradient function; apply the transforms of a loss "
            "inside of value_and_grad()"
        )


def check_gradient(fn: Any, transform: str) -> None:
    """Refuse a loss where a transform takes a gradient function."""
    if isinstance(fn, ZfunLoss):
        raise OptionError(
            f"{transform} takes a gradient function; got a loss; wrap the loss in value_and_grad() "
            "first"
        )


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


@takes(total=SCALAR, weight=number(0) | SCALAR)
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
    return WeightedMean(total, scalar_on(total.device, weight, total.dtype))


def scalar_on(device: torch.device, value: Any, dtype: torch.dtype) -> Tensor:
    """Return a scalar as a tensor on a device, without a gradient."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype)
    # A kernel fills the tensor; a copy from the host would wait.
    return torch.full((), value, dtype=dtype, device=device)


def reciprocal(weight: Tensor) -> float | Tensor:
    """Return the factor of a mean of this weight: 1 over it, and 1 for 0, as over no tokens.

    On a device it stays a tensor, so that the host does not wait.
    """
    if weight.device.type == "cpu":
        return 1.0 / (float(weight) or 1.0)
    exact = weight.to(torch.float64)
    return (exact + (exact == 0)).reciprocal()


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
    if total.is_complex():
        raise ZfunError(
            f"a loss must return a real scalar; got {total.dtype}; take its abs() or its real part"
        )
    # Sums over ranks and micro-batches, and loss scales, need more bits than a half type has.
    total = total.reshape(()).to(ops.wide(total.dtype))
    return out, total, weight, aux
