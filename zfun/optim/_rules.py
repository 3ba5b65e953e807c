"""Element-wise rules: SGD, Adam, AdamW, Lion, Adagrad."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from zfun import ops
from zfun.errors import OptionError
from zfun.optim._base import Optimizer, remembered
from zfun.optim._schedules import Schedule, decay_at, rate_at
from zfun.optim._stepping import Kernel, of_rules
from zfun.options import DECAY, number, takes
from zfun.tree import Tree


class AdamState(NamedTuple):
    """State of :func:`adam` and :func:`adamw`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        mu: first moments, a tree like the parameters.
        nu: second moments, a tree like the parameters.
    """

    count: Tensor
    mu: Tree
    nu: Tree


class SgdState(NamedTuple):
    """State of :func:`sgd`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        velocity: momentum buffers, a tree like the parameters; None without momentum.
    """

    count: Tensor
    velocity: Tree | None = None


class LionState(NamedTuple):
    """State of :func:`lion`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        mu: momentum, a tree like the parameters.
    """

    count: Tensor
    mu: Tree


class AdagradState(NamedTuple):
    """State of :func:`adagrad`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        total: sums of squared gradients, a tree like the parameters.
    """

    count: Tensor
    total: Tree


@takes(momentum=DECAY)
@remembered
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float | Schedule = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent, with or without momentum.

    ``g = grad + weight_decay p``, ``b = momentum b + g``, ``p = p - learning_rate b``; with
    Nesterov ``p = p - learning_rate (g + momentum b)``. Equal to ``torch.optim.SGD``. "On the
    importance of initialization and momentum in deep learning", Sutskever, Martens, Dahl and
    Hinton, 2013.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        momentum: decay of the velocity, in [0, 1), or a function of the number of steps taken so
            far.
        nesterov: look ahead along the velocity; needs a momentum.
        weight_decay: L2 penalty, added to the gradient.

    Returns:
        An optimizer with :class:`SgdState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> import torch
        >>> optimizer = sgd(0.5, momentum=0.5)
        >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params, state = optimizer.apply(grads, state, params)
        >>> params, state.count
        ({'w': tensor([-0.2500])}, tensor(2))
    """
    if nesterov and not momentum:
        raise OptionError(
            "nesterov looks ahead along the velocity and needs a momentum; got momentum=0; 0.9 "
            "is usual"
        )

    def kernel_at(before: int) -> Kernel:
        rate, decay = rate_at(learning_rate, before), decay_at("momentum", momentum, before)
        rule = ops.SgdRule(rate, decay, nesterov, weight_decay)
        return rule if momentum else rule.without_velocity

    return of_rules(SgdState, ("velocity",) if momentum else (), kernel_at)


@takes()
@remembered
def adam(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam: each element steps by the mean gradient over the root mean square gradient.

    ``g = grad + weight_decay p``, ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g²``, ``p = p -
    learning_rate (m / (1 - b1ᵗ)) / (√(v / (1 - b2ᵗ)) + eps)``. Equal to ``torch.optim.Adam``.
    Complex numbers are pairs of reals. "Adam: A method for stochastic optimization", Kingma and Ba,
    2015.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: L2 penalty, added to the gradient.

    Returns:
        An optimizer with :class:`AdamState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> import torch
        >>> optimizer = adam(0.5)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([-0.5000,  0.5000])}
    """
    return _adam(learning_rate, b1, b2, eps, l2=weight_decay, decay=0.0)


@takes()
@remembered
def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Adam with decoupled weight decay.

    :func:`adam` without L2 penalty, and each step also subtracts ``learning_rate weight_decay p``.
    Equal to ``torch.optim.AdamW``. "Decoupled weight decay regularization", Loshchilov and Hutter,
    2019.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: share of the parameter that a step with learning rate 1 would subtract.

    Returns:
        An optimizer with :class:`AdamState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> import torch
        >>> optimizer = adamw(0.5, weight_decay=0.5)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([0.2500, 1.2500])}
    """
    return _adam(learning_rate, b1, b2, eps, l2=0.0, decay=weight_decay)


def _adam(
    learning_rate: float | Schedule,
    b1: float | Schedule,
    b2: float,
    eps: float,
    *,
    l2: float,
    decay: float,
) -> Optimizer:

    def kernel_at(before: int, taken: int) -> Kernel:
        rate, first = rate_at(learning_rate, before), decay_at("b1", b1, before)
        return ops.AdamRule(
            b1=first,
            b2=b2,
            step_size=rate / (1.0 - first ** (taken + 1)),
            eps=eps,
            l2=l2,
            decay=rate * decay,
            correction=math.sqrt(1.0 - b2 ** (taken + 1)),
        )

    return of_rules(AdamState, ("mu", "nu"), kernel_at)


@takes()
@remembered
def lion(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Lion: each element steps by the sign of the momentum, with half the state of Adam.

    ``p = p - learning_rate (sign(b1 m + (1 - b1) g) + weight_decay p)``, then ``m = b2 m + (1 - b2)
    g``. Steps are larger than Adam's, so a learning rate 3 to 10 times smaller is usual. The sign
    of a complex number is taken part by part. "Symbolic Discovery of Optimization Algorithms", Chen
    et al., 2023.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: share of the momentum in the step, in [0, 1), or a function of the number of steps
            taken so far.
        b2: decay of the momentum, in [0, 1).
        weight_decay: share of the parameter that a step with learning rate 1 would subtract.

    Returns:
        An optimizer with :class:`LionState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> import torch
        >>> optimizer = lion(0.5)
        >>> params, grads = {"w": torch.zeros(3)}, {"w": torch.tensor([3.0, -0.01, 0.0])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([-0.5000,  0.5000,  0.0000])}
    """

    def kernel_at(before: int) -> Kernel:
        rate = rate_at(learning_rate, before)
        return ops.LionRule(decay_at("b1", b1, before), b2, rate, rate * weight_decay)

    return of_rules(LionState, ("mu",), kernel_at)


@takes(rate_decay=number(0))
@remembered
def adagrad(
    learning_rate: float | Schedule,
    *,
    rate_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adagrad: each element steps by the gradient over the root of the sum of squared gradients.

    ``g = grad + weight_decay p``, ``s = s + g²``, ``p = p - learning_rate / (1 + rate_decay (t -
    1)) g / (√s + eps)`` at step t. Equal to ``torch.optim.Adagrad``. "Adaptive Subgradient Methods
    for Online Learning and Stochastic Optimization", Duchi, Hazan and Singer, 2011.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        rate_decay: how fast the learning rate falls with the number of steps.
        eps: added to the root.
        weight_decay: L2 penalty, added to the gradient.

    Returns:
        An optimizer with :class:`AdagradState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> import torch
        >>> optimizer = adagrad(0.5)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([-0.5000,  0.5000])}
    """

    def kernel_at(before: int, taken: int) -> Kernel:
        rate = rate_at(learning_rate, before) / (1.0 + rate_decay * taken)
        return ops.AdagradRule(rate, eps, weight_decay)

    return of_rules(AdagradState, ("total",), kernel_at)
