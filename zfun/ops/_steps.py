"""Optimizer steps on flat buffers.

A rule is a record of the numbers of one step, and is called on 1-D buffers of one length:
``rule(param, grad, *moments, change)``. Parameters are contiguous and real. Gradients have any
floating dtype, and are only read. Moments are written. Where ``change`` is a tensor like the
parameters, it takes the change and the parameters stay; where ``change`` is None, the parameters
step in place. Half types are computed in float32 and rounded once. Abstract buffers have no
numbers, so a step does nothing.

The rules of single elements multiply the gradient by ``scale``, a number or a 0-dim tensor, with
the bits of :func:`scale_into` first. Where gradients have the dtype that the step is computed in,
the kernel multiplies, and no product lies in memory. They write nothing where ``taken``, a 0-dim
truth value, is False. Both may lie on the device of the buffers; then the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import triton_for
from zfun.ops._exact import LIMBS
from zfun.ops._norm import total_of_bins
from zfun.ops._tensors import compiled, is_abstract, is_plain, wide


def _step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    constants: Any,
    scale: float | Tensor | None,
    taken: Tensor | None = None,
) -> None:
    """Take a step with the kernels for where the parameters live."""
    abstract = is_abstract(param)
    if taken is not None and taken.is_cpu and not abstract:
        if not bool(taken):
            return
        taken = None
    if scale is not None and grad.dtype != wide(param.dtype):
        # The product is rounded to the dtype of the gradients, so it is made beside them.
        product = torch.empty_like(grad)
        scale_into(product, grad, scale)
        grad, scale = product, None
    if abstract:
        return
    factor: Any = 1.0 if scale is None else scale
    if not isinstance(factor, Tensor) or factor.is_cpu:
        factor = float(factor)
    arguments: Any = (rule, param, grad, moments, change, constants, factor)
    if compiled() and is_plain(param):
        from zfun.ops import numba

        if numba.step(*arguments):
            return
    with torch.no_grad():
        triton = triton_for(param)
        if triton is None or not triton.step(*arguments, taken):
            reference.step(*arguments, taken=taken)


@dataclass(frozen=True, slots=True)
class AdamRule:
    """One step of Adam: ``rule(param, grad, mu, nu, change)`` on flat buffers.

    ``g = grad + l2 p``, ``mu = mu + (1 - b1) (g - mu)``, ``nu = b2 nu + (1 - b2) g²``,
    ``p = (1 - decay) p - step_size mu / (√nu / correction + eps)``. Where the change is written
    with a ``decay``, the sum has the bits of the step itself only where a parameter becomes neither
    twice nor half as large.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        step_size: ``lr / (1 - b1ᵗ)``.
        eps: added to the root mean square.
        l2: weight decay that is part of the gradient.
        decay: weight decay beside the gradient, times the learning rate.
        correction: ``√(1 - b2ᵗ)``.

    Example:
        >>> p, g, mu, nu = torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
        >>> AdamRule(b1=0.5, b2=0.75, step_size=0.5, eps=0.0)(p, g, mu, nu, None)
        >>> p, mu, nu
        (tensor([0.5000]), tensor([0.5000]), tensor([0.2500]))
    """

    b1: float
    b2: float
    step_size: float
    eps: float
    l2: float = 0.0
    decay: float = 0.0
    correction: float = 1.0

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        mu: Tensor,
        nu: Tensor,
        change: Tensor | None,
        scale: float | Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        _step("adam", param, grad, (mu, nu), change, self, scale, taken)


@dataclass(frozen=True, slots=True)
class SgdRule:
    """One step of gradient descent: ``rule(param, grad, velocity, change)`` on flat buffers.

    ``g = grad + l2 p``; with a velocity, which may be None, ``b = momentum b + g``, and ``g = b``,
    or ``g + momentum b`` after Nesterov; ``p = p - learning_rate g``.

    Attributes:
        learning_rate: step size.
        momentum: decay of the velocity.
        nesterov: look ahead along the velocity.
        l2: weight decay.

    Example:
        >>> p, b = torch.ones(1), torch.ones(1)
        >>> SgdRule(learning_rate=0.5, momentum=0.5)(p, torch.ones(1), b, None)
        >>> p, b
        (tensor([0.2500]), tensor([1.5000]))
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    l2: float = 0.0

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        velocity: Tensor | None,
        change: Tensor | None,
        scale: float | Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        if velocity is None:
            _step("plain_sgd", param, grad, (), change, self, scale, taken)
        else:
            _step("sgd", param, grad, (velocity,), change, self, scale, taken)

    def without_velocity(
        self,
        param: Tensor,
        grad: Tensor,
        change: Tensor | None,
        scale: float | Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        """Take a step without a velocity."""
        self(param, grad, None, change, scale, taken)


@dataclass(frozen=True, slots=True)
class LionRule:
    """One step of Lion: ``rule(param, grad, mu, change)`` on flat buffers.

    ``u = -learning_rate sign(b1 mu + (1 - b1) grad) - decay p``, ``mu = b2 mu + (1 - b2) grad``,
    ``p = p + u``. "Symbolic Discovery of Optimization Algorithms", Chen et al., 2023.

    Attributes:
        b1: how much of the momentum is in the step.
        b2: decay of the momentum.
        learning_rate: step size.
        decay: weight decay, times the learning rate.

    Example:
        >>> p, mu = torch.zeros(2), torch.zeros(2)
        >>> LionRule(b1=0.5, b2=0.5, learning_rate=0.5)(p, torch.tensor([3.0, -0.5]), mu, None)
        >>> p, mu
        (tensor([-0.5000,  0.5000]), tensor([ 1.5000, -0.2500]))
    """

    b1: float
    b2: float
    learning_rate: float
    decay: float = 0.0

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        mu: Tensor,
        change: Tensor | None,
        scale: float | Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        _step("lion", param, grad, (mu,), change, self, scale, taken)


@dataclass(frozen=True, slots=True)
class AdagradRule:
    """One step of Adagrad: ``rule(param, grad, total, change)`` on flat buffers.

    ``g = grad + l2 p``, ``total = total + g²``, ``p = p - learning_rate g / (√total + eps)``.
    "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi, Hazan and
    Singer, 2011.

    Attributes:
        learning_rate: step size.
        eps: added to the root.
        l2: weight decay that is part of the gradient.

    Example:
        >>> p, total = torch.zeros(2), torch.zeros(2)
        >>> AdagradRule(learning_rate=0.5, eps=0.0)(p, torch.tensor([3.0, -0.5]), total, None)
        >>> p, total
        (tensor([-0.5000,  0.5000]), tensor([9.0000, 0.2500]))
    """

    learning_rate: float
    eps: float
    l2: float = 0.0

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        total: Tensor,
        change: Tensor | None,
        scale: float | Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        _step("adagrad", param, grad, (total,), change, self, scale, taken)


@dataclass(frozen=True, slots=True)
class LambRule:
    """One step of LAMB: ``rule(param, grad, mu, nu, change, segments, gather)`` on flat buffers.

    Moments as in :class:`AdamRule`; ``d = (1 / bias) mu / ((1 / correction) √nu + eps) +
    weight_decay p``; and for each layer, a segment of the buffer, ``p = p - learning_rate ratio
    d`` with ``ratio = |p| / |d|`` within the bounds, or 1 where either norm is 0. Norms are exact,
    so that they do not depend on how layers are cut. "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes", You et al., 2020.

    ``segments`` say where each layer begins and ends in this buffer, ascending; elements in none do
    not move. A layer may be cut at multiples of 32 elements from where it begins, and a rank that
    has nothing of a layer passes an empty segment. Where layers are cut over ranks, ``gather``
    takes int64 ``[2 len(segments), k]`` and returns those of all ranks, stacked.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        learning_rate: step size.
        eps: added to the root mean square.
        weight_decay: share of a parameter that is added to its direction.
        bias: ``1 - b1ᵗ``.
        correction: ``√(1 - b2ᵗ)``.
        bounds: the least and the largest ratio.

    Example:
        >>> p, mu, nu = torch.full((4,), 2.0), torch.zeros(4), torch.zeros(4)
        >>> rule = LambRule(b1=0.0, b2=0.0, learning_rate=0.5, eps=0.0)
        >>> rule(p, torch.ones(4), mu, nu, None, segments=[(0, 4)])
        >>> p
        tensor([1., 1., 1., 1.])
    """

    b1: float
    b2: float
    learning_rate: float
    eps: float
    weight_decay: float = 0.0
    bias: float = 1.0
    correction: float = 1.0
    bounds: tuple[float, float] = (0.0, float("inf"))

    @torch.no_grad()
    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        mu: Tensor,
        nu: Tensor,
        change: Tensor | None,
        segments: Sequence[tuple[int, int]],
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if is_abstract(param):
            if gather is not None and segments:
                # A plan counts the exchange of the norms.
                squares = 2 * len(segments), LIMBS + 1
                gather(torch.empty(squares, dtype=torch.int64, device=param.device))
            return
        if compiled() and is_plain(param):
            from zfun.ops import numba

            rows = numba.lamb_moments(param, grad, mu, nu, segments, self)
            if rows is not None:
                factors = self._factors(rows, gather)
                numba.lamb_apply(param, mu, nu, change, segments, factors, self)
                return
        rows, direction = reference.lamb_moments(param, grad, mu, nu, segments, self)
        reference.lamb_apply(param, direction, change, segments, self._factors(rows, gather))

    def _factors(
        self, squares: list[Tensor], gather: Callable[[Tensor], Tensor] | None
    ) -> list[float]:
        """Return how far each layer goes, of the squares of all layers and of all directions."""
        if not squares:
            return []
        mine = torch.stack(squares)
        rows = mine[None] if gather is None else gather(mine)
        norms = [math.sqrt(total_of_bins(rows[:, i]).item()) for i in range(len(squares))]
        low, high = self.bounds
        half = len(norms) // 2
        ratios = (
            min(max(size / step, low), high) if size > 0.0 and step > 0.0 else 1.0
            for size, step in zip(norms[:half], norms[half:], strict=True)
        )
        return [-self.learning_rate * ratio for ratio in ratios]


@torch.no_grad()
def scale_into(out: Tensor, x: Tensor, factor: float | Tensor) -> None:
    """Multiply a flat buffer by one number; half types are multiplied in float32 and rounded once.

    Args:
        out: where the product goes, 1-D, of the length and dtype of ``x``.
        x: 1-D, real.
        factor: a number, or a 0-dim tensor on the CPU or on the device of ``x``, so that the host
            need not wait for it.

    Example:
        >>> out = torch.empty(2)
        >>> scale_into(out, torch.tensor([1.0, 2.0]), torch.tensor(0.5, dtype=torch.float64))
        >>> out
        tensor([0.5000, 1.0000])
    """
    if is_abstract(x):
        return
    reference.scale_into(out, x, factor)
