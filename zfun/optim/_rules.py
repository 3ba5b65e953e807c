"""The update rules: SGD, Adam, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.errors import OptionError, checked_options
from zfun.optim._base import InitFn, Optimizer, State, aligned, check_trainable, flat_view, own, remembered, step_count
from zfun.optim._schedules import Schedule, check_decay, check_rate, decay_at, rate_at
from zfun.tree import Tree

__all__ = ["AdamState", "SgdState", "adam", "adamw", "sgd"]


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
    velocity: Tree | None


@checked_options
@remembered
def sgd(
    learning_rate: float | Schedule, *, momentum: float | Schedule = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """Stochastic gradient descent, with momentum if asked for.

    ``g = grad + weight_decay p``, ``b = momentum b + g``, ``p = p - learning_rate b``; after Nesterov
    ``p = p - learning_rate (g + momentum b)``. Equal to ``torch.optim.SGD``.
    "On the importance of initialization and momentum in deep learning", Sutskever, Martens, Dahl and Hinton, 2013.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        momentum: decay of the velocity, in [0, 1), or a function of the number of steps taken so far.
        nesterov: look ahead along the velocity; needs a momentum.
        weight_decay: L2 penalty, added to the gradient.

    Returns:
        An optimizer with :class:`SgdState`.

    Raises:
        OptionError: an option has a value that it cannot take.

    Example:
        >>> optimizer = sgd(0.5, momentum=0.5)
        >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params, state = optimizer.apply(grads, state, params)
        >>> params, state.count
        ({'w': tensor([-0.2500])}, tensor(2))
    """
    check_rate(learning_rate)
    check_decay("momentum", momentum)
    _check("weight_decay", weight_decay)
    if nesterov and not momentum:
        raise OptionError("nesterov looks ahead along the velocity and needs a momentum; got momentum=0; set it, 0.9 is usual")

    def init(params: Tree) -> SgdState:
        check_trainable(params)
        return SgdState(_no_steps(), _zeros_like(params) if momentum else None)

    def step(grads: Tree, state: State, params: Tree, into: _Into) -> tuple[Tree, SgdState]:
        velocities = {} if state.velocity is None else {"the velocity": state.velocity}
        rows = aligned(params, gradients=grads, **velocities)
        held = own([row[2] for row in rows], into.donate) if velocities else [None] * len(rows)
        before = step_count(state.count)
        rate, decay = rate_at(learning_rate, before), decay_at("momentum", momentum, before)
        targets, changes = into.targets([row[0] for row in rows])
        for row, target, change, velocity in zip(rows, targets, changes, held, strict=True):
            ops.sgd_step(
                flat_view(target),
                flat_view(row[1]),
                None if velocity is None else flat_view(velocity),
                None if change is None else flat_view(change),
                learning_rate=rate,
                momentum=decay,
                nesterov=nesterov,
                l2=weight_decay,
            )
        spec = tree.structure(params)
        after = SgdState(state.count + 1, tree.unflatten(spec, held) if velocities else None)
        return tree.unflatten(spec, into.results(targets, changes)), after

    return _assemble(init, step)


@checked_options
@remembered
def adam(
    learning_rate: float | Schedule, *, b1: float | Schedule = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam: each element steps by its mean gradient over its root mean square gradient.

    ``g = grad + weight_decay p``, ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g²``,
    ``p = p - learning_rate (m / (1 - b1ᵗ)) / (√(v / (1 - b2ᵗ)) + eps)``. Equal to ``torch.optim.Adam``. Complex numbers are pairs of reals.
    "Adam: A method for stochastic optimization", Kingma and Ba, 2015.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: L2 penalty, added to the gradient.

    Returns:
        An optimizer with :class:`AdamState`.

    Raises:
        OptionError: an option has a value that it cannot take.

    Example:
        >>> optimizer = adam(0.5)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([-0.5000,  0.5000])}
    """
    return _adam(learning_rate, b1, b2, eps, l2=weight_decay, decay=0.0)


@checked_options
@remembered
def adamw(
    learning_rate: float | Schedule, *, b1: float | Schedule = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with weight decay beside the gradient.

    :func:`adam` without L2 penalty, and ``learning_rate weight_decay p`` is taken off in the same step. Equal to ``torch.optim.AdamW``.
    "Decoupled weight decay regularization", Loshchilov and Hutter, 2019.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: share of the parameter that a step with learning rate 1 would take off.

    Returns:
        An optimizer with :class:`AdamState`.

    Raises:
        OptionError: an option has a value that it cannot take.

    Example:
        >>> optimizer = adamw(0.5, weight_decay=0.5)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params
        {'w': tensor([0.2500, 1.2500])}
    """
    return _adam(learning_rate, b1, b2, eps, l2=0.0, decay=weight_decay)


def _adam(learning_rate: float | Schedule, b1: float | Schedule, b2: float, eps: float, *, l2: float, decay: float) -> Optimizer:
    check_rate(learning_rate)
    check_decay("b1", b1)
    _check("b2", b2, 1.0)
    _check("eps", eps)
    _check("weight_decay", l2 + decay)

    def init(params: Tree) -> AdamState:
        check_trainable(params)
        return AdamState(_no_steps(), _zeros_like(params), _zeros_like(params))

    def step(grads: Tree, state: State, params: Tree, into: _Into) -> tuple[Tree, AdamState]:
        rows = aligned(params, gradients=grads, mu=state.mu, nu=state.nu)
        before = step_count(state.count)
        rate, first = rate_at(learning_rate, before), decay_at("b1", b1, before)
        # √(v / c) + eps = (√v + eps √c) / √c: the correction moves into two constants and costs no pass over memory.
        root = math.sqrt(1.0 - b2 ** (before + 1))
        mus = own([row[2] for row in rows], into.donate)
        nus = own([row[3] for row in rows], into.donate)
        targets, changes = into.targets([row[0] for row in rows])
        for row, target, change, mu, nu in zip(rows, targets, changes, mus, nus, strict=True):
            ops.adam_step(
                flat_view(target),
                flat_view(row[1]),
                flat_view(mu),
                flat_view(nu),
                None if change is None else flat_view(change),
                b1=first,
                b2=b2,
                step_size=rate * root / (1.0 - first ** (before + 1)),
                eps=eps * root,
                l2=l2,
                decay=rate * decay,
            )
        spec = tree.structure(params)
        after = AdamState(state.count + 1, tree.unflatten(spec, mus), tree.unflatten(spec, nus))
        return tree.unflatten(spec, into.results(targets, changes)), after

    return _assemble(init, step)


class _Into(NamedTuple):
    """Where a step goes: into new updates, into copies of the parameters, or into the parameters themselves."""

    updates: bool
    donate: bool

    def targets(self, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | list[None]]:
        if self.updates:
            return list(params), [torch.empty_like(p, memory_format=torch.contiguous_format, requires_grad=False) for p in params]
        return own(params, self.donate), [None] * len(params)

    def results(self, targets: list[Tensor], changes: list[Tensor] | list[None]) -> Sequence[Tensor | None]:
        return changes if self.updates else targets


def _assemble(init: InitFn, step: Callable[[Tree, State, Tree, _Into], tuple[Tree, State]]) -> Optimizer:
    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return step(grads, state, params, _Into(updates=True, donate=False))

    def apply(grads: Tree, state: State, params: Tree, *, donate: bool = False) -> tuple[Tree, State]:
        return step(grads, state, params, _Into(updates=False, donate=donate))

    return Optimizer(init, update, apply)


def _no_steps() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def _zeros_like(params: Tree) -> Tree:
    def zeros(p: Tensor) -> Tensor:
        return torch.zeros_like(p, memory_format=torch.contiguous_format, requires_grad=False)

    return tree.map(zeros, params)


def _check(name: str, value: float, below: float = math.inf) -> None:
    if not 0.0 <= value < below:
        raise OptionError(f"{name} lies in [0, {below}); got {value}")
