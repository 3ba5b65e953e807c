"""Parts for chains of optimizers: directions, decay, scales, clipping.

A part takes gradients, or the updates of the part before it, and returns updates. The last part of
a chain is a negative scale, because updates are added to the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.optim._base import (
    InitFn,
    Optimizer,
    State,
    UpdateFn,
    as_optimizer,
    of_update,
    optimizer,
    remembered,
)
from zfun.optim._factors import FactorUpdate
from zfun.optim._labels import by_label
from zfun.optim._rows import aligned, check_fields, flat_view, step_count
from zfun.optim._rules import AdagradState, AdamState, LionState, SgdState
from zfun.optim._schedules import FINITE, Schedule, decay_at, rate_at, value_at
from zfun.optim._stepping import Kernel, elementwise, no_steps
from zfun.options import ANY, DECAY, OF_LEAVES, SCHEDULE, number, takes
from zfun.reductions import global_norm
from zfun.tree import Tree


class ScheduleState(NamedTuple):
    """State of :func:`scale_by_schedule`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
    """

    count: Tensor


@takes(max_norm=number(above=0, infinite=True, example="1.0"))
@remembered
def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Shrink gradients whose norm, over all leaves and ranks, is above a bound.

    ``g / max(1, (‖grads‖ + 1e-6) / max_norm)``, with the norm in float64 over every element once,
    sharded or not. The step of :func:`zfun.zero` has read that norm already, so the host does not
    wait for it again. At the end of a chain, behind this part, the kernels of :func:`adam`,
    :func:`adamw`, :func:`sgd`, :func:`lion` and :func:`adagrad` multiply as they read, so that no
    second gradient lies in memory. "On the difficulty of training recurrent neural networks",
    Pascanu, Mikolov and Bengio, 2013.

    Args:
        max_norm: the bound, above 0.

    Returns:
        An optimizer without state, for the front of a :func:`chain`.

    Raises:
        OptionError: ``max_norm`` is not above 0.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> grads = {"w": torch.tensor([30.0]), "b": torch.tensor([40.0])}
        >>> clip.update(grads, clip.init(grads), grads)[0]
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return _scaled(grads, _clipping(grads, max_norm)), state

    def prepare(grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        return None if grads is None else _times(_clipping(grads, max_norm))

    clip = optimizer(_no_state, update)
    fused = FactorUpdate(clip.update, lambda grads, state: _clipping(grads, max_norm))
    return clip._replace(update=fused, prepare=prepare)


@torch.no_grad()
def _clipping(grads: Tree, max_norm: float) -> Tensor:
    """Return the factor that shrinks gradients to a norm."""
    norm = global_norm(grads)
    # A number of the host would be turned over first on a device, and then multiply.
    bound = torch.full_like(norm, float(max_norm))
    # clamp keeps NaN, so a norm that is NaN reaches the parameters, or the step that tests for NaN.
    return torch.clamp((norm + 1e-6) / bound, min=1.0).reciprocal()


def _times(factor: Tensor) -> Optimizer:
    """Return the optimizer of one step that multiplies by a tensor."""
    times = of_update(_no_state, lambda grads, state, params: (_scaled(grads, factor), state))
    return times._replace(update=FactorUpdate(times.update, lambda grads, state: factor))


@takes(factor=number(example="-0.1"))
@remembered
def scale(factor: float) -> Optimizer:
    """Multiply by one number.

    Args:
        factor: the number; ``scale(-0.1)`` alone is gradient descent.

    Returns:
        An optimizer without state.

    Raises:
        OptionError: ``factor`` is not finite.

    Example:
        >>> scale(-0.5).apply({"w": torch.ones(1)}, (), {"w": torch.ones(1)})[0]
        {'w': tensor([0.5000])}
    """

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return _scaled(grads, float(factor)), state

    return optimizer(_no_state, update)


@takes(schedule=SCHEDULE)
@remembered
def scale_by_schedule(schedule: Schedule) -> Optimizer:
    """Multiply by a function of the number of steps taken so far.

    Args:
        schedule: ``schedule(step) -> float``; called with 0 at the first step.

    Returns:
        An optimizer with :class:`ScheduleState`.

    Raises:
        OptionError: ``schedule`` is not a function.

    Example:
        >>> halving = scale_by_schedule(lambda step: 0.5**step)
        >>> state = halving.init({"w": torch.ones(1)})
        >>> updates, state = halving.update({"w": torch.ones(1)}, state, {"w": torch.ones(1)})
        >>> halving.update(updates, state, {"w": torch.ones(1)})[0]
        {'w': tensor([0.5000])}
    """

    def init(params: Tree) -> ScheduleState:
        return ScheduleState(no_steps())

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        check_fields(state, "count")
        factor = value_at("the factor", schedule, step_count(state.count), FINITE)
        return _scaled(grads, factor), ScheduleState(state.count + 1)

    return optimizer(init, update)


@takes()
@remembered
def scale_by_adam(*, b1: float | Schedule = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Replace gradients by Adam's direction ``(m / (1 - b1ᵗ)) / (√(v / (1 - b2ᵗ)) + eps)``.

    :func:`adam` and :func:`adamw` take the same step in one pass over the memory. A chain takes one
    pass for each part, and differs by a few roundings in each step.

    Args:
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.

    Returns:
        An optimizer with :class:`AdamState`, to stand in a :func:`chain`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> adam = scale_by_adam()
        >>> grads = {"w": torch.tensor([3.0, -0.01])}
        >>> adam.update(grads, adam.init(grads), grads)[0]
        {'w': tensor([ 1.0000, -1.0000])}
    """

    def kernel_at(before: int, taken: int) -> Kernel:
        first = decay_at("b1", b1, before)
        # The kernel descends; a negative step size returns the direction.
        return ops.AdamRule(
            b1=first,
            b2=b2,
            step_size=-1.0 / (1.0 - first ** (taken + 1)),
            eps=eps,
            correction=math.sqrt(1.0 - b2 ** (taken + 1)),
        )

    return elementwise(AdamState, ("mu", "nu"), kernel_at)


@takes()
@remembered
def scale_by_lion(*, b1: float | Schedule = 0.9, b2: float = 0.99) -> Optimizer:
    """Replace gradients by Lion's direction ``sign(b1 m + (1 - b1) g)``.

    Args:
        b1: share of the momentum in the step, in [0, 1), or a function of the number of steps taken
            so far.
        b2: decay of the momentum, in [0, 1).

    Returns:
        An optimizer with :class:`LionState`, to stand in a :func:`chain`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> lion = scale_by_lion()
        >>> grads = {"w": torch.tensor([3.0, -0.01, 0.0])}
        >>> lion.update(grads, lion.init(grads), grads)[0]
        {'w': tensor([ 1., -1.,  0.])}
    """

    def kernel_at(before: int) -> Kernel:
        return ops.LionRule(decay_at("b1", b1, before), b2, learning_rate=-1.0)

    return elementwise(LionState, ("mu",), kernel_at)


@takes()
@remembered
def scale_by_adagrad(*, eps: float = 1e-10) -> Optimizer:
    """Replace gradients by Adagrad's direction ``g / (√s + eps)``, where ``s`` sums all g² so far.

    Args:
        eps: added to the root.

    Returns:
        An optimizer with :class:`AdagradState`, to stand in a :func:`chain`.

    Raises:
        OptionError: ``eps`` is negative or not finite.

    Example:
        >>> adagrad = scale_by_adagrad()
        >>> grads = {"w": torch.tensor([3.0, -0.01])}
        >>> updates, state = adagrad.update(grads, adagrad.init(grads), grads)
        >>> adagrad.update(grads, state, grads)[0]
        {'w': tensor([ 0.7071, -0.7071])}
    """
    rule = ops.AdagradRule(learning_rate=-1.0, eps=eps)
    return elementwise(AdagradState, ("total",), lambda before: rule)


@takes(decay=DECAY)
@remembered
def trace(decay: float | Schedule, *, nesterov: bool = False) -> Optimizer:
    """Replace gradients by their momentum ``b = decay b + g``, or ``g + decay b`` after Nesterov.

    Args:
        decay: decay of the momentum, in [0, 1), or a function of the number of steps taken so far.
        nesterov: look ahead along the momentum.

    Returns:
        An optimizer with :class:`SgdState`, to stand in a :func:`chain`.

    Raises:
        OptionError: ``decay`` is not in [0, 1).

    Example:
        >>> momentum = trace(0.5)
        >>> grads = {"w": torch.ones(2)}
        >>> updates, state = momentum.update(grads, momentum.init(grads), grads)
        >>> momentum.update(grads, state, grads)[0]
        {'w': tensor([1.5000, 1.5000])}
    """

    def kernel_at(before: int) -> Kernel:
        return ops.SgdRule(-1.0, decay_at("decay", decay, before), nesterov)

    return elementwise(SgdState, ("velocity",), kernel_at)


@takes(mask=OF_LEAVES | None)
@remembered
def add_decayed_weights(
    weight_decay: float, *, mask: Callable[[str, Any], bool] | None = None
) -> Optimizer:
    """Add ``weight_decay p`` to gradients or updates.

    In front of :func:`scale_by_adam` this is the L2 penalty of :func:`adam`; behind, and in front
    of :func:`scale_by_learning_rate`, the decoupled decay of :func:`adamw`.

    Args:
        weight_decay: share of the parameter that is added; not negative.
        mask: ``mask(path, leaf)`` says which leaves decay; by default all of them.

    Returns:
        An optimizer without state, to stand in a :func:`chain`; with a mask, one by label.

    Raises:
        OptionError: ``weight_decay`` is negative or not finite.

    Example:
        >>> decay = add_decayed_weights(0.5, mask=lambda path, leaf: leaf.ndim > 1)
        >>> params = {"w": torch.ones(1, 2), "b": torch.ones(2)}
        >>> grads = {"w": torch.zeros(1, 2), "b": torch.zeros(2)}
        >>> decay.update(grads, decay.init(params), params)[0]
        {'w': tensor([[0.5000, 0.5000]]), 'b': tensor([0., 0.])}
    """

    @torch.no_grad()
    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        rows = aligned(params, gradients=grads)
        return tree.unflatten(
            tree.structure(params), [_decayed(g, p, float(weight_decay)) for p, g in rows]
        ), state

    everywhere = optimizer(_no_state, update)
    return everywhere if mask is None else masked(everywhere, mask)


def _decayed(g: Tensor, p: Tensor, weight_decay: float) -> Tensor:
    # Multiply and add round separately, not add(alpha=), because bits must not depend on where a
    # shard was cut.
    wide = torch.promote_types(ops.wide(g.dtype), ops.wide(p.dtype))
    return p.detach().to(wide).mul(weight_decay).add_(g.detach()).to(g.dtype)


@takes(inner=ANY, mask=OF_LEAVES)
def masked(
    inner: Optimizer | tuple[InitFn, UpdateFn], mask: Callable[[str, Any], bool]
) -> Optimizer:
    """Apply an optimizer to some leaves; the gradients of the others pass through unchanged.

    Args:
        inner: the optimizer of the chosen leaves. The other leaves have no state.
        mask: ``mask(path, leaf)`` chooses leaves by path, shape and dtype.

    Returns:
        An optimizer by label (:func:`by_label`): ``"masked"`` for the chosen leaves, ``"rest"``.

    Raises:
        OptionError: ``mask`` is not a function.
        PlacementError: ``inner`` is sharded already.

    Example:
        >>> signs = masked(scale_by_lion(), lambda path, leaf: leaf.ndim > 1)
        >>> grads = {"w": torch.full((1, 2), 7.0), "b": torch.full((2,), 7.0)}
        >>> signs.update(grads, signs.init(grads), grads)[0]
        {'w': tensor([[1., 1.]]), 'b': tensor([7., 7.])}
    """
    parts = {"masked": as_optimizer(inner), "rest": _unchanged()}
    return by_label(parts, lambda path, leaf: "masked" if mask(path, leaf) else "rest")


@takes()
@remembered
def scale_by_learning_rate(learning_rate: float | Schedule) -> Optimizer:
    """Multiply by minus the learning rate: the last part of a chain, for descent.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.

    Returns:
        :func:`scale` of a number, :func:`scale_by_schedule` of a function.

    Raises:
        OptionError: ``learning_rate`` is negative, not finite, or neither number nor function.

    Example:
        >>> from zfun.optim import chain
        >>> adamw = chain(scale_by_adam(), add_decayed_weights(0.5), scale_by_learning_rate(0.5))
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> adamw.apply(grads, adamw.init(params), params)[0]
        {'w': tensor([0.2500, 1.2500])}
    """
    if callable(learning_rate):
        schedule = learning_rate
        return scale_by_schedule(lambda step: -rate_at(schedule, step))
    return scale(-float(learning_rate))


@remembered
def _unchanged() -> Optimizer:
    return optimizer(_no_state, lambda grads, state, params: (grads, state))


def _no_state(params: Tree) -> tuple[()]:
    return ()


def _scaled(grads: Tree, factor: float | Tensor) -> Tree:
    def one(g: Tensor) -> Tensor:
        out = torch.empty_like(g, memory_format=torch.contiguous_format, requires_grad=False)
        ops.scale_into(flat_view(out), flat_view(g), factor)
        return out

    return tree.map(one, grads)
