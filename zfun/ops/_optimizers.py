"""Optimizer arithmetic on flat buffers: the readable twins of the compiled kernels.

[Note: one arithmetic]
A step must give the same bits however the state is cut, and ``apply`` those of ``update`` and then add. So each rule is written once, as
element-wise operations in one fixed order; ``change`` only says where the result goes. Each operation is one IEEE rounding: ``mul``,
``add``, ``div`` and those of ``_rounding``, never ``add(alpha=)``, ``lerp``, ``addcmul`` or ``addcdiv``, which fuse a product and a sum in
vector registers and need not do so in the tail. Constants are Python doubles. The compiled kernels do the same, operation for operation.

Buffers are worked on in chunks, so that the temporaries stay in the cache and the memory is read about once. Cutting changes no bits.
Abstract buffers have no numbers to work on: what a step writes is there already, and it makes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.ops import _steps
from zfun.ops._jit import is_abstract, wide
from zfun.ops._norm import squares_in_bins, total_of_bins
from zfun.ops._rounding import fma_into, root_into

__all__ = ["adagrad_step", "adam_step", "lamb_step", "lion_step", "scale_into", "sgd_step"]

# Measured on one core with a 1 MiB L2 and a 32 MiB L3: smaller chunks pay for dispatch, larger ones for memory.
# Other devices pay more to launch.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


def _chunk_numel(x: Tensor) -> int:
    return min(x.numel(), _CPU_CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK)


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """Cut tensors of one length at the same places."""
    first = next(x for x in tensors if x is not None)
    size = _chunk_numel(first)
    for start in range(0, first.numel(), max(size, 1)):
        yield tuple(None if x is None else x[start : start + size] for x in tensors)


class _Work(NamedTuple):
    """A chunk of a step, in the dtype that is computed in; all but ``param`` may be overwritten."""

    param: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]
    result: Tensor
    spare: Tensor


def _working(
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    scale: float | Tensor,
    out: Tensor | None,
    *,
    whole: bool = False,
) -> Iterator[_Work]:
    """Yield the chunks of a step, and put back what became of each.

    The caller writes to ``result`` what is to be added to the parameters, or, if ``whole``, what they become.
    """
    dtype = wide(param.dtype)
    wide_param, wide_grad, result, spare, *wide_moments = (
        torch.empty(_chunk_numel(param), dtype=dtype, device=param.device) for _ in range(4 + len(moments))
    )
    factor = scale.to(device=param.device, dtype=dtype) if isinstance(scale, Tensor) else scale
    for p, g, to, copy, *ms in _chunks(param, grad, change, out, *moments):
        assert p is not None
        assert g is not None
        numel = p.numel()
        x = wide_grad[:numel].copy_(g)
        if isinstance(factor, Tensor) or factor != 1.0:
            x.mul_(factor)
        held = [m if m.dtype == dtype else w[:numel].copy_(m) for m, w in zip(ms, wide_moments, strict=True) if m is not None]
        old, u = p if p.dtype == dtype else wide_param[:numel].copy_(p), result[:numel]
        yield _Work(old, x, tuple(held), u, spare[:numel])
        for m, new in zip(ms, held, strict=True):
            if m is not None and m is not new:
                m.copy_(new)
        if to is None:
            p.copy_(u) if whole else p.add_(u.to(p.dtype))
        elif whole:
            torch.sub(u.to(p.dtype), p, out=to)
        else:
            to.copy_(u)
        if copy is not None:
            copy.copy_(p)


def _mix(mean: Tensor, x: Tensor, decay: float, spare: Tensor) -> None:
    """Write ``decay mean + (1 - decay) x`` to a running mean, from the nearer end, as ``torch.lerp`` does."""
    weight = 1.0 - decay
    torch.sub(x, mean, out=spare)
    if weight < 0.5:
        fma_into(mean, spare, weight, mean)
    else:
        fma_into(mean, spare, weight - 1.0, x)


def _mix_squares(mean: Tensor, x: Tensor, decay: float, spare: Tensor) -> None:
    """Write ``decay mean + (1 - decay) x²`` to a running mean of squares."""
    torch.mul(x, 1.0 - decay, out=spare)
    fma_into(mean, spare, x, mean.mul_(decay))


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
    ``p = (1 - decay) p - step_size mu / (√nu / correction + eps)``. Half types are computed in float32 and rounded once.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: first moments, 1-D, of the same length; written.
        nu: second moments, 1-D, of the same length; written.
        change: where what is to be added to ``param`` goes instead of being added, 1-D, in the dtype of ``param``. With a ``decay`` the sum
            has the bits of the step itself only where a parameter becomes neither twice nor half as large.
        b1: decay of the first moment.
        b2: decay of the second moment.
        step_size: ``lr / (1 - b1ᵗ)``.
        eps: added to the root mean square.
        l2: weight decay that is part of the gradient.
        decay: weight decay beside the gradient, times the learning rate.
        correction: ``√(1 - b2ᵗ)``.
        scale: factor of the gradient: of a loss scale, or of clipping.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with ``change``.

    Example:
        >>> p, g, mu, nu = torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
        >>> adam_step(p, g, mu, nu, None, b1=0.5, b2=0.75, step_size=0.5, eps=0.0)
        >>> p, mu, nu
        (tensor([0.5000]), tensor([0.5000]), tensor([0.2500]))
    """
    constants = {"b1": b1, "b2": b2, "step_size": step_size, "eps": eps, "l2": l2, "decay": decay, "correction": correction}
    if _steps.step("adam", param, grad, (mu, nu), change, out, scale, constants):
        return
    for p, g, (m, v), u, t in _working(param, grad, (mu, nu), change, scale, out, whole=decay != 0.0):
        if l2:
            fma_into(g, p, l2, g)
        _mix(m, g, b1, t)
        _mix_squares(v, g, b2, t)
        root_into(t, v)
        t.div_(correction).add_(eps)
        torch.mul(m, -step_size, out=u)
        u.div_(t)
        if decay:
            u.add_(torch.mul(p, 1.0 - decay, out=t))


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

    ``g = scale grad + l2 p``; with a velocity ``b = momentum b + g``, and ``g = b``, or ``g + momentum b`` after Nesterov;
    ``p = p - learning_rate g``.

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
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with ``change``.

    Example:
        >>> p, b = torch.ones(1), torch.ones(1)
        >>> sgd_step(p, torch.ones(1), b, None, learning_rate=0.5, momentum=0.5)
        >>> p, b
        (tensor([0.2500]), tensor([1.5000]))
    """
    velocities = () if velocity is None else (velocity,)
    constants = {"learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov, "l2": l2}
    if _steps.step("sgd" if velocities else "plain_sgd", param, grad, velocities, change, out, scale, constants):
        return
    for p, g, moments, u, t in _working(param, grad, velocities, change, scale, out):
        if l2:
            g.add_(torch.mul(p, l2, out=t))
        for b in moments:
            b.mul_(momentum).add_(g)
            if nesterov:
                g.add_(torch.mul(b, momentum, out=t))
            else:
                g.copy_(b)
        torch.mul(g, -learning_rate, out=u)


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

    ``g = scale grad``, ``u = -learning_rate sign(b1 mu + (1 - b1) g) - decay p``, ``mu = b2 mu + (1 - b2) g``, ``p = p + u``.
    "Symbolic Discovery of Optimization Algorithms", Chen et al., 2023.

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
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with ``change``.

    Example:
        >>> p, mu = torch.zeros(2), torch.zeros(2)
        >>> lion_step(p, torch.tensor([3.0, -0.5]), mu, None, b1=0.5, b2=0.5, learning_rate=0.5)
        >>> p, mu
        (tensor([-0.5000,  0.5000]), tensor([ 1.5000, -0.2500]))
    """
    constants = {"b1": b1, "b2": b2, "learning_rate": learning_rate, "decay": decay}
    if _steps.step("lion", param, grad, (mu,), change, out, scale, constants):
        return
    for p, g, (m,), u, t in _working(param, grad, (mu,), change, scale, out):
        torch.mul(m, b1, out=u)
        u.add_(torch.mul(g, 1.0 - b1, out=t)).sign_().mul_(-learning_rate)
        if decay:
            u.add_(torch.mul(p, -decay, out=t))
        m.mul_(b2).add_(g.mul_(1.0 - b2))


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
    "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi, Hazan and Singer, 2011.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        total: sums of squared gradients, 1-D, of the same length; written.
        change: where the change goes instead of being added, 1-D, in the dtype of ``param``.
        learning_rate: step size.
        eps: added to the root.
        l2: weight decay that is part of the gradient.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with ``change``.

    Example:
        >>> p, total = torch.zeros(2), torch.zeros(2)
        >>> adagrad_step(p, torch.tensor([3.0, -0.5]), total, None, learning_rate=0.5, eps=0.0)
        >>> p, total
        (tensor([-0.5000,  0.5000]), tensor([9.0000, 0.2500]))
    """
    constants = {"learning_rate": learning_rate, "eps": eps, "l2": l2}
    if _steps.step("adagrad", param, grad, (total,), change, out, scale, constants):
        return
    for p, g, (s,), u, t in _working(param, grad, (total,), change, scale, out):
        if l2:
            g.add_(torch.mul(p, l2, out=t))
        s.add_(torch.mul(g, g, out=t))
        root_into(t, s)
        torch.div(g, t.add_(eps), out=u)
        u.mul_(-learning_rate)


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

    Moments as in :func:`adam_step`; ``d = (1 / bias) mu / ((1 / correction) √nu + eps) + weight_decay p``; and for each layer, a segment of
    the buffer, ``p = p - learning_rate ratio d`` with ``ratio = |p| / |d|`` within the bounds, or 1 where either norm is 0. Norms are
    exact, so that they do not depend on how layers are cut.
    "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", You et al., 2020.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: first moments, 1-D, of the same length; written.
        nu: second moments, 1-D, of the same length; written.
        change: where the change goes instead of being added, 1-D, in the dtype of ``param``.
        segments: where each layer begins and ends in this buffer, ascending; what is in none does not move. A layer may be cut at multiples
            of 32 elements from where it begins, and is an empty segment where nothing of it is.
        b1: decay of the first moment.
        b2: decay of the second moment.
        learning_rate: step size.
        eps: added to the root mean square.
        weight_decay: share of a parameter that is added to its direction.
        bias: ``1 - b1ᵗ``.
        correction: ``√(1 - b2ᵗ)``.
        bounds: the least and the largest ratio.
        gather: where layers are cut over ranks: takes int64 ``[2 len(segments), k]`` and returns those of all ranks, stacked.
        scale: factor of the gradient.
        out: where a copy of the new parameters goes, 1-D, of any floating dtype; not with ``change``.

    Example:
        >>> p, mu, nu = torch.full((4,), 2.0), torch.zeros(4), torch.zeros(4)
        >>> lamb_step(p, torch.ones(4), mu, nu, None, segments=[(0, 4)], b1=0.0, b2=0.0, learning_rate=0.5, eps=0.0)
        >>> p
        tensor([1., 1., 1., 1.])
    """
    if is_abstract(param):
        return
    constants = {"b1": b1, "b2": b2, "bias": bias, "eps": eps, "weight_decay": weight_decay, "correction": correction}
    rows = _steps.lamb_moments(param, grad, mu, nu, segments, scale, constants)
    if rows is not None:
        factors = [-learning_rate * ratio for ratio in _ratios(rows, bounds, gather)]
        _steps.lamb_apply(param, mu, nu, change, out, segments, factors, constants)
        return
    direction = torch.empty(param.shape, dtype=wide(param.dtype), device=param.device)
    for p, g, (m, v), u, t in _working(param, grad, (mu, nu), direction, scale, None):
        _mix(m, g, b1, t)
        _mix_squares(v, g, b2, t)
        root_into(t, v)
        t.mul_(1.0 / correction).add_(eps)
        torch.mul(m, 1.0 / bias, out=u)
        u.div_(t)
        if weight_decay:
            u.add_(torch.mul(p, weight_decay, out=t))
    ratios = _ratios([squares_in_bins(x[start:stop]) for x in (param, direction) for start, stop in segments], bounds, gather)
    end = 0
    for (start, stop), ratio in zip(segments, ratios, strict=True):
        direction[end:start].zero_()
        direction[start:stop].mul_(-learning_rate * ratio)
        end = stop
    direction[end:].zero_()
    if change is not None:
        change.copy_(direction)
        return
    param.add_(direction.to(param.dtype))
    if out is not None:
        out.copy_(param)


def _ratios(squares: list[Tensor], bounds: tuple[float, float], gather: Callable[[Tensor], Tensor] | None) -> list[float]:
    """Return how far each layer goes along its direction, of the squares of the layers and then of their directions."""
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
    dtype = wide(x.dtype)
    number = factor.to(device=x.device, dtype=dtype) if isinstance(factor, Tensor) else factor
    if dtype == x.dtype:
        torch.mul(x, number, out=out)
        return
    spare = torch.empty(_chunk_numel(x), dtype=dtype, device=x.device)
    for target, source in _chunks(out, x):
        assert target is not None
        assert source is not None
        target.copy_(spare[: source.numel()].copy_(source).mul_(number))
