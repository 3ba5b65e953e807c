"""Optimizer arithmetic on flat buffers: the readable twins of the compiled kernels.

[Note: one arithmetic]
A step must give the same bits however the state is cut, and ``apply`` those of ``update`` and then add. So each rule is written once, as
element-wise operations in one fixed order; ``change`` only says where the result goes. Each operation is one IEEE rounding, or a function
that does not know the place of an element: ``mul``, ``add``, ``div`` and ``sqrt``, never ``add(alpha=)``, ``lerp``, ``addcmul`` or
``addcdiv``, which fuse a product and a sum in vector registers and need not do so in the tail. Constants are Python doubles.

Buffers are worked on in chunks, so that the temporaries stay in the cache and the memory is read about once. Cutting changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zfun.ops import _compiled
from zfun.ops._jit import is_abstract

__all__ = ["adam_step", "scale_into", "sgd_step"]

# Measured on one core with a 1 MiB L2 and a 32 MiB L3: smaller chunks pay for dispatch, larger ones for memory.
# Other devices pay more to launch.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _chunk_numel(x: Tensor) -> int:
    return min(x.numel(), _CPU_CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one length at the same places."""
    first = tensors[0]
    if first.numel() == 0:
        return
    size = _chunk_numel(first)
    if is_abstract(first):
        # Every chunk costs the same and there are no numbers to compute: a trillion parameters are planned in the time of one chunk.
        yield tuple(x.narrow(0, 0, size) for x in tensors)
        return
    yield from zip(*(x.split(size) for x in tensors), strict=True)


def _scratch(like: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(_chunk_numel(like), dtype=dtype, device=like.device) for _ in range(count)]


def _widen(chunk: tuple[Tensor, ...], spare: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copy into ``spare`` what has not the dtype that is computed in."""
    free = iter(spare)
    return [x if x.dtype == dtype else next(free)[: x.numel()].copy_(x) for x in chunk]


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
    l2: float,
    decay: float,
) -> None:
    """Take one step of Adam on a flat buffer, in place.

    ``g = grad + l2 p``, ``mu = b1 mu + (1 - b1) g``, ``nu = b2 nu + (1 - b2) g²``, ``u = -step_size mu / (√nu + eps) - decay p``,
    ``p = p + u``.
    The bias corrections are in ``step_size`` and ``eps``. Half types are computed in float32, ``u`` is rounded to the dtype of ``param``.

    Args:
        param: parameters, 1-D, contiguous, real; written if ``change`` is None, else only read.
        grad: gradients, 1-D, of the same length and of any floating dtype; only read.
        mu: first moments, 1-D, of the same length; written.
        nu: second moments, 1-D, of the same length; written.
        change: where ``u`` goes instead of being added, 1-D, in the dtype of ``param``.
        b1: decay of the first moment.
        b2: decay of the second moment.
        step_size: ``lr √(1 - b2ᵗ) / (1 - b1ᵗ)``.
        eps: ``eps √(1 - b2ᵗ)``.
        l2: weight decay that is part of the gradient.
        decay: weight decay beside the gradient, times the learning rate.

    Example:
        >>> p, g, mu, nu = torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1)
        >>> adam_step(p, g, mu, nu, None, b1=0.5, b2=0.75, step_size=0.5, eps=0.0, l2=0.0, decay=0.0)
        >>> p, mu, nu
        (tensor([0.5000]), tensor([0.5000]), tensor([0.2500]))
    """
    # Which twin runs must not depend on the gradient's dtype and strides: they do not agree in the last bit.
    if _compiled.takes(param, mu, nu, *(() if change is None else (change,))):
        _compiled.adam_step(param, grad, mu, nu, change, b1=b1, b2=b2, step_size=step_size, eps=eps, l2=l2, decay=decay)
        return
    dtype = _WIDE.get(param.dtype, param.dtype)
    spare = _scratch(param, 2 + sum(x.dtype != dtype for x in (param, grad, mu, nu)), dtype)
    for chunk in _chunks(param, grad, mu, nu, *(() if change is None else (change,))):
        t, u = (x[: chunk[0].numel()] for x in spare[:2])
        p, g, m, v = _widen(chunk[:4], spare[2:], dtype)
        if l2:
            torch.mul(p, l2, out=u)
            g = u.add_(g)
        torch.mul(g, 1.0 - b1, out=t)
        m.mul_(b1).add_(t)
        torch.mul(g, g, out=t)
        t.mul_(1.0 - b2)
        v.mul_(b2).add_(t)
        torch.sqrt(v, out=t)
        t.add_(eps)
        torch.div(m, t, out=u)
        u.mul_(-step_size)
        if decay:
            torch.mul(p, -decay, out=t)
            u.add_(t)
        _store(chunk[2], m)
        _store(chunk[3], v)
        _finish(chunk, 4, u)


@torch.no_grad()
def sgd_step(
    param: Tensor,
    grad: Tensor,
    velocity: Tensor | None,
    change: Tensor | None,
    *,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    l2: float,
) -> None:
    """Take one step of stochastic gradient descent on a flat buffer, in place.

    ``g = grad + l2 p``; with a velocity ``b = momentum b + g``, and ``g = b``, or ``g + momentum b`` after Nesterov;
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

    Example:
        >>> p, b = torch.ones(1), torch.ones(1)
        >>> sgd_step(p, torch.ones(1), b, None, learning_rate=0.5, momentum=0.5, nesterov=False, l2=0.0)
        >>> p, b
        (tensor([0.2500]), tensor([1.5000]))
    """
    dtype = _WIDE.get(param.dtype, param.dtype)
    buffers = (param, grad) if velocity is None else (param, grad, velocity)
    spare = _scratch(param, 2 + sum(x.dtype != dtype for x in buffers), dtype)
    for chunk in _chunks(*buffers, *(() if change is None else (change,))):
        t, u = (x[: chunk[0].numel()] for x in spare[:2])
        p, g, *rest = _widen(chunk[: len(buffers)], spare[2:], dtype)
        if l2:
            torch.mul(p, l2, out=t)
            g = t.add_(g)
        for b in rest:
            b.mul_(momentum).add_(g)
            _store(chunk[2], b)
            if nesterov:
                torch.mul(b, momentum, out=u)
                g = u.add_(g)
            else:
                g = b
        torch.mul(g, -learning_rate, out=u)
        _finish(chunk, len(buffers), u)


def _store(target: Tensor, value: Tensor) -> None:
    if target is not value:
        target.copy_(value)


def _finish(chunk: tuple[Tensor, ...], place: int, u: Tensor) -> None:
    """Write ``u`` where the change goes, or add it, rounded as it would be there, to the parameters."""
    if len(chunk) > place:
        chunk[place].copy_(u)
    else:
        chunk[0].add_(u.to(chunk[0].dtype))


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
    dtype = _WIDE.get(x.dtype, x.dtype)
    number = factor.to(device=x.device, dtype=dtype) if isinstance(factor, Tensor) else factor
    if dtype == x.dtype:
        torch.mul(x, number, out=out)
        return
    spare = _scratch(x, 1, dtype)
    for target, source in _chunks(out, x):
        (wide,) = _widen((source,), spare, dtype)
        target.copy_(wide.mul_(number))
