"""The rules of optimizers on flat buffers.

[Note: one arithmetic] A step must give the same bits however the state is cut, and ``apply`` those
of ``update`` and then add. So each rule is written once, as element-wise operations in one fixed
order; ``change`` only says where the result goes. Each operation rounds once, as IEEE 754 has it:
``mul``, ``add``, ``div`` and those of ``_rounding``, never ``add(alpha=)``, ``lerp``, ``addcmul``
or ``addcdiv``, which fuse a product and a sum in vector registers and need not do so in the tail.
Constants are Python doubles. The compiled kernels do the same, operation for operation.

Buffers are worked on in chunks, so that the temporaries stay in the cache and the memory is read
about once. Cutting changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun.ops._tensors import wide
from zfun.ops.reference._norm import squares_in_bins
from zfun.ops.reference._rounding import fma_into, root_into

# Measured on one core with a 1 MiB L2 and a 32 MiB L3: smaller chunks pay for dispatch, larger ones
# for memory. Other devices pay more to launch.
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


class _WorkSpace(NamedTuple):
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
) -> Iterator[_WorkSpace]:
    """Yield the chunks of a step, and write back each after the caller has worked on it.

    The caller writes the change of the parameters to ``result``, or, if ``whole``, the new
    parameters.
    """
    dtype = wide(param.dtype)
    wide_param, wide_grad, result, spare, *wide_moments = (
        torch.empty(_chunk_numel(param), dtype=dtype, device=param.device)
        for _ in range(4 + len(moments))
    )
    factor = scale.to(device=param.device, dtype=dtype) if isinstance(scale, Tensor) else scale
    for p, g, to, copy, *ms in _chunks(param, grad, change, out, *moments):
        assert p is not None
        assert g is not None
        numel = p.numel()
        x = wide_grad[:numel].copy_(g)
        if isinstance(factor, Tensor) or factor != 1.0:
            x.mul_(factor)
        held = [
            m if m.dtype == dtype else w[:numel].copy_(m)
            for m, w in zip(ms, wide_moments, strict=True)
            if m is not None
        ]
        old, u = p if p.dtype == dtype else wide_param[:numel].copy_(p), result[:numel]
        yield _WorkSpace(old, x, tuple(held), u, spare[:numel])
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
    """Write ``decay mean + (1 - decay) x`` to a mean, from the nearer end as ``torch.lerp``."""
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


def _adam(
    works: Iterator[_WorkSpace],
    *,
    b1: float,
    b2: float,
    step_size: float,
    eps: float,
    l2: float,
    decay: float,
    correction: float,
) -> None:
    for p, g, (m, v), u, t in works:
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


def _sgd(
    works: Iterator[_WorkSpace], *, learning_rate: float, momentum: float, nesterov: bool, l2: float
) -> None:
    for p, g, moments, u, t in works:
        if l2:
            g.add_(torch.mul(p, l2, out=t))
        for b in moments:
            b.mul_(momentum).add_(g)
            if nesterov:
                g.add_(torch.mul(b, momentum, out=t))
            else:
                g.copy_(b)
        torch.mul(g, -learning_rate, out=u)


def _lion(
    works: Iterator[_WorkSpace], *, b1: float, b2: float, learning_rate: float, decay: float
) -> None:
    for p, g, (m,), u, t in works:
        torch.mul(m, b1, out=u)
        u.add_(torch.mul(g, 1.0 - b1, out=t)).sign_().mul_(-learning_rate)
        if decay:
            u.add_(torch.mul(p, -decay, out=t))
        m.mul_(b2).add_(g.mul_(1.0 - b2))


def _adagrad(works: Iterator[_WorkSpace], *, learning_rate: float, eps: float, l2: float) -> None:
    for p, g, (s,), u, t in works:
        if l2:
            g.add_(torch.mul(p, l2, out=t))
        s.add_(torch.mul(g, g, out=t))
        root_into(t, s)
        torch.div(g, t.add_(eps), out=u)
        u.mul_(-learning_rate)


_RULES: dict[str, Callable[..., None]] = {
    "adam": _adam,
    "sgd": _sgd,
    "plain_sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
}


def step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    out: Tensor | None,
    scale: float | Tensor,
    constants: Mapping[str, Any],
) -> None:
    """Take a step of a rule, chunk by chunk."""
    whole = constants.get("decay", 0.0) != 0.0 and rule == "adam"
    works = _working(param, grad, moments, change, scale, out, whole=whole)
    _RULES[rule](works, **constants)


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    segments: Sequence[tuple[int, int]],
    scale: float | Tensor,
    constants: Mapping[str, float],
) -> tuple[list[Tensor], Tensor]:
    """Write the moments of LAMB; return the squares of segments and directions, and directions."""
    b1, b2, eps = constants["b1"], constants["b2"], constants["eps"]
    bias, correction = constants["bias"], constants["correction"]
    weight_decay = constants["weight_decay"]
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
    pieces = [x[start:stop] for x in (param, direction) for start, stop in segments]
    return [squares_in_bins(piece) for piece in pieces], direction


def lamb_apply(
    param: Tensor,
    direction: Tensor,
    change: Tensor | None,
    out: Tensor | None,
    segments: Sequence[tuple[int, int]],
    factors: Sequence[float],
) -> None:
    """Go along the direction of each segment, times its factor."""
    end = 0
    for (start, stop), factor in zip(segments, factors, strict=True):
        direction[end:start].zero_()
        direction[start:stop].mul_(factor)
        end = stop
    direction[end:].zero_()
    if change is not None:
        change.copy_(direction)
        return
    param.add_(direction.to(param.dtype))
    if out is not None:
        out.copy_(param)


def scale_into(out: Tensor, x: Tensor, factor: float | Tensor) -> None:
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
