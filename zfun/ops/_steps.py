"""Optimizer steps on flat buffers; abstract buffers have no numbers, so a step does nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import triton_for
from zfun.ops._exact import LIMBS
from zfun.ops._norm import total_of_bins
from zfun.ops._tensors import compiled, is_abstract, is_plain


def _step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    out: Tensor | None,
    scale: float | Tensor,
    constants: Mapping[str, Any],
) -> None:
    """Take a step of a rule with the kernels for where the parameters live, in place.

    Args:
        rule: name of the rule, the same for all kernels.
        param: parameters.
        grad: gradients; which kernels run does not depend on them.
        moments: the other buffers that the rule reads and writes.
        change: where the change goes, or None.
        out: where a copy of the parameters goes, or None.
        scale: factor of the gradient.
        constants: by name.
    """
    arguments = (rule, param, grad, moments, change, out, scale, constants)
    triton, taken = triton_for(param), is_abstract(param)
    if triton is not None:
        taken = triton.step(*arguments)
    elif compiled() and is_plain(param):
        from zfun.ops import numba

        taken = numba.step(*arguments)
    if not taken:
        reference.step(*arguments)


@torch.no_grad()
def adam_step(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    change: Tensor | None,
    *,
    b1: float,
    b2: float,
    step_size: float,
    eps: float,
    l2: float = 0.0,
    decay: float = 0.0,
    correction: float = 1.0,
    scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> None:
    """Take one step of Adam on a flat buffer, in place.

    ``g = scale grad + l2 p``, ``mu = mu + (1 - b1) (g - mu)``, ``nu = b2 nu + (1 - b2) g²``,
    ``p = (1 - decay) p - step_size mu / (√nu / correction + eps)``. Half types are computed in
    float32 and rounded once.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: first moments, 1-D, of the same length; written.
        nu: second moments, 1-D, of the same length; written.
        change: where the change of ``param`` is written instead of being added, 1-D, in the dtype
            of ``param``. With a ``decay`` the sum has the bits of the step itself only where a
            parameter becomes neither twice nor half as large.
        b1: decay of the first moment.
        b2: decay of the second moment.
        step_size: ``lr / (1 - b1ᵗ)``.
        eps: added to the root mean square.
        l2: weight decay that is part of the gradient.
        decay: weight decay beside the gradient, times the learning rate.
        correction: ``√(1 - b2ᵗ)``.
        scale: factor of the gradient: of a loss scale, or of clipping.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with
            ``change``.

    Example:
        >>> p, g, mu, nu = torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
        >>> adam_step(p, g, mu, nu, None, b1=0.5, b2=0.75, step_size=0.5, eps=0.0)
        >>> p, mu, nu
        (tensor([0.5000]), tensor([0.5000]), tensor([0.2500]))
    """
    constants = {
        "b1": b1,
        "b2": b2,
        "step_size": step_size,
        "eps": eps,
        "l2": l2,
        "decay": decay,
        "correction": correction,
    }
    _step("adam", param, grad, (mu, nu), change, out, scale, constants)


@torch.no_grad()
def sgd_step(
    param: Tensor,
    grad: Tensor,
    velocity: Tensor | None,
    change: Tensor | None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    l2: float = 0.0,
    scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> None:
    """Take one step of stochastic gradient descent on a flat buffer, in place.

    ``g = scale grad + l2 p``; with a velocity ``b = momentum b + g``, and ``g = b``, or
    ``g + momentum b`` after Nesterov; ``p = p - learning_rate g``.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        velocity: momentum buffer, 1-D, of the same length, or None; written.
        change: where the change goes instead of being added, 1-D, in the dtype of ``param``.
        learning_rate: step size.
        momentum: decay of the velocity.
        nesterov: look ahead along the velocity.
        l2: weight decay.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with
            ``change``.

    Example:
        >>> p, b = torch.ones(1), torch.ones(1)
        >>> sgd_step(p, torch.ones(1), b, None, learning_rate=0.5, momentum=0.5)
        >>> p, b
        (tensor([0.2500]), tensor([1.5000]))
    """
    velocities = () if velocity is None else (velocity,)
    constants = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "nesterov": nesterov,
        "l2": l2,
    }
    _step(
        "sgd" if velocities else "plain_sgd", param, grad, velocities, change, out, scale, constants
    )


@torch.no_grad()
def lion_step(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    change: Tensor | None,
    *,
    b1: float,
    b2: float,
    learning_rate: float,
    decay: float = 0.0,
    scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> None:
    """Take one step of Lion on a flat buffer, in place.

    ``g = scale grad``, ``u = -learning_rate sign(b1 mu + (1 - b1) g) - decay p``,
    ``mu = b2 mu + (1 - b2) g``, ``p = p + u``. "Symbolic Discovery of Optimization Algorithms",
    Chen et al., 2023.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: momentum, 1-D, of the same length; written.
        change: where ``u`` goes instead of being added, 1-D, in the dtype of ``param``.
        b1: how much of the momentum is in the step.
        b2: decay of the momentum.
        learning_rate: step size.
        decay: weight decay, times the learning rate.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with
            ``change``.

    Example:
        >>> p, mu = torch.zeros(2), torch.zeros(2)
        >>> lion_step(p, torch.tensor([3.0, -0.5]), mu, None, b1=0.5, b2=0.5, learning_rate=0.5)
        >>> p, mu
        (tensor([-0.5000,  0.5000]), tensor([ 1.5000, -0.2500]))
    """
    constants = {"b1": b1, "b2": b2, "learning_rate": learning_rate, "decay": decay}
    _step("lion", param, grad, (mu,), change, out, scale, constants)


@torch.no_grad()
def adagrad_step(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    change: Tensor | None,
    *,
    learning_rate: float,
    eps: float,
    l2: float = 0.0,
    scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> None:
    """Take one step of Adagrad on a flat buffer, in place.

    ``g = scale grad + l2 p``, ``total = total + g²``, ``p = p - learning_rate g / (√total + eps)``.
    "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi, Hazan and
    Singer, 2011.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        total: sums of squared gradients, 1-D, of the same length; written.
        change: where the change goes instead of being added, 1-D, in the dtype of ``param``.
        learning_rate: step size.
        eps: added to the root.
        l2: weight decay that is part of the gradient.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with
            ``change``.

    Example:
        >>> p, total = torch.zeros(2), torch.zeros(2)
        >>> adagrad_step(p, torch.tensor([3.0, -0.5]), total, None, learning_rate=0.5, eps=0.0)
        >>> p, total
        (tensor([-0.5000,  0.5000]), tensor([9.0000, 0.2500]))
    """
    constants = {"learning_rate": learning_rate, "eps": eps, "l2": l2}
    _step("adagrad", param, grad, (total,), change, out, scale, constants)


@torch.no_grad()
def lamb_step(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    change: Tensor | None,
    *,
    segments: Sequence[tuple[int, int]],
    b1: float,
    b2: float,
    learning_rate: float,
    eps: float,
    weight_decay: float = 0.0,
    bias: float = 1.0,
    correction: float = 1.0,
    bounds: tuple[float, float] = (0.0, float("inf")),
    gather: Callable[[Tensor], Tensor] | None = None,
    scale: float | Tensor = 1.0,
    out: Tensor | None = None,
) -> None:
    """Take one step of LAMB on a flat buffer, in place.

    Moments as in :func:`adam_step`; ``d = (1 / bias) mu / ((1 / correction) √nu + eps) +
    weight_decay p``; and for each layer, a segment of the buffer, ``p = p - learning_rate ratio
    d`` with ``ratio = |p| / |d|`` within the bounds, or 1 where either norm is 0. Norms are exact,
    so that they do not depend on how layers are cut. "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes", You et al., 2020.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: first moments, 1-D, of the same length; written.
        nu: second moments, 1-D, of the same length; written.
        change: where the change goes instead of being added, 1-D, in the dtype of ``param``.
        segments: where each layer begins and ends in this buffer, ascending; elements in none do
            not move. A layer may be cut at multiples of 32 elements from where it begins, and a
            rank that has nothing of a layer passes an empty segment.
        b1: decay of the first moment.
        b2: decay of the second moment.
        learning_rate: step size.
        eps: added to the root mean square.
        weight_decay: share of a parameter that is added to its direction.
        bias: ``1 - b1ᵗ``.
        correction: ``√(1 - b2ᵗ)``.
        bounds: the least and the largest ratio.
        gather: where layers are cut over ranks: takes int64 ``[2 len(segments), k]`` and returns
            those of all ranks, stacked.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with
            ``change``.

    Example:
        >>> p, mu, nu = torch.full((4,), 2.0), torch.zeros(4), torch.zeros(4)
        >>> rule = {"b1": 0.0, "b2": 0.0, "learning_rate": 0.5, "eps": 0.0}
        >>> lamb_step(p, torch.ones(4), mu, nu, None, segments=[(0, 4)], **rule)
        >>> p
        tensor([1., 1., 1., 1.])
    """
    if is_abstract(param):
        if gather is not None and segments:
            # A plan counts the exchange of the norms.
            squares = 2 * len(segments), LIMBS + 1
            gather(torch.empty(squares, dtype=torch.int64, device=param.device))
        return
    constants = {
        "b1": b1,
        "b2": b2,
        "bias": bias,
        "eps": eps,
        "weight_decay": weight_decay,
        "correction": correction,
    }
    moments = (param, grad, mu, nu, segments, scale, constants)
    if compiled() and is_plain(param):
        from zfun.ops import numba

        rows = numba.lamb_moments(*moments)
        if rows is not None:
            factors = [-learning_rate * ratio for ratio in _ratios(rows, bounds, gather)]
            numba.lamb_apply(param, mu, nu, change, out, segments, factors, constants)
            return
    rows, direction = reference.lamb_moments(*moments)
    factors = [-learning_rate * ratio for ratio in _ratios(rows, bounds, gather)]
    reference.lamb_apply(param, direction, change, out, segments, factors)


def _ratios(
    squares: list[Tensor], bounds: tuple[float, float], gather: Callable[[Tensor], Tensor] | None
) -> list[float]:
    """Return the ratio of each layer, of the squares of all layers and then of all directions."""
    if not squares:
        return []
    mine = torch.stack(squares)
    rows = mine[None] if gather is None else gather(mine)
    norms = [math.sqrt(total_of_bins(rows[:, i]).item()) for i in range(len(squares))]
    low, high = bounds
    found = []
    for size, step in zip(norms[: len(norms) // 2], norms[len(norms) // 2 :], strict=True):
        found.append(min(max(size / step, low), high) if size > 0.0 and step > 0.0 else 1.0)
    return found


@torch.no_grad()
def scale_into(out: Tensor, x: Tensor, factor: float | Tensor) -> None:
    """Multiply a flat buffer by one number; half types are multiplied in float32 and rounded once.

    Args:
        out: where the product goes, 1-D, of the length and dtype of ``x``.
        x: 1-D, real.
        factor: a number, or a 0-dim tensor on any device, so that the host need not wait for it.

    Example:
        >>> out = torch.empty(2)
        >>> scale_into(out, torch.tensor([1.0, 2.0]), torch.tensor(0.5, dtype=torch.float64))
        >>> out
        tensor([0.5000, 1.0000])
    """
    if is_abstract(x):
        return
    reference.scale_into(out, x, factor)
