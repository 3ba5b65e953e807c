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

from collections.abc import Callable, Iterator, Sequence
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
    *,
    whole: bool = False,
    scale: float | Tensor = 1.0,
    taken: Tensor | None = None,
) -> Iterator[_WorkSpace]:
    """Yield the chunks of a step, and write back each after the caller has worked on it.

    The caller writes the change of the parameters to ``result``, or, if ``whole``, the new
    parameters. Where ``taken`` is False, everything keeps its values.
    """
    dtype = wide(param.dtype)
    factor = scale.to(dtype) if isinstance(scale, Tensor) else scale
    wide_param, wide_grad, result, spare, *wide_moments = (
        torch.empty(_chunk_numel(param), dtype=dtype, device=param.device)
        for _ in range(4 + len(moments))
    )
    for p, g, to, *ms in _chunks(param, grad, change, *moments):
        assert p is not None
        assert g is not None
        numel = p.numel()
        held = [
            m if m.dtype == dtype and taken is None else w[:numel].copy_(m)
            for m, w in zip(ms, wide_moments, strict=True)
            if m is not None
        ]
        old, u = p if p.dtype == dtype else wide_param[:numel].copy_(p), result[:numel]
        x = wide_grad[:numel].copy_(g)
        if isinstance(factor, Tensor) or factor != 1.0:
            x.mul_(factor)
        yield _WorkSpace(old, x, tuple(held), u, spare[:numel])
        for m, new in zip(ms, held, strict=True):
            if m is not None and m is not new:
                m.copy_(new if taken is None else torch.where(taken, new.to(m.dtype), m))
        if taken is not None:
            rounded = u.to(p.dtype)
            old, new = (p, p + rounded) if to is None else (to, rounded)
            if whole:
                new = rounded if to is None else rounded - p
            old.copy_(torch.where(taken, new, old))
        elif to is None:
            p.copy_(u) if whole else p.add_(u.to(p.dtype))
        elif whole:
            torch.sub(u.to(p.dtype), p, out=to)
        else:
            to.copy_(u)


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


def _adam(works: Iterator[_WorkSpace], c: Any) -> None:
    for p, g, (m, v), u, t in works:
        if c.l2:
            fma_into(g, p, c.l2, g)
        _mix(m, g, c.b1, t)
        _mix_squares(v, g, c.b2, t)
        root_into(t, v)
        t.div_(c.correction).add_(c.eps)
        torch.mul(m, -c.step_size, out=u)
        u.div_(t)
        if c.decay:
            u.add_(torch.mul(p, 1.0 - c.decay, out=t))


def _sgd(works: Iterator[_WorkSpace], c: Any) -> None:
    for p, g, moments, u, t in works:
        if c.l2:
            g.add_(torch.mul(p, c.l2, out=t))
        for b in moments:
            b.mul_(c.momentum).add_(g)
            if c.nesterov:
                g.add_(torch.mul(b, c.momentum, out=t))
            else:
                g.copy_(b)
        torch.mul(g, -c.learning_rate, out=u)


def _lion(works: Iterator[_WorkSpace], c: Any) -> None:
    for p, g, (m,), u, t in works:
        torch.mul(m, c.b1, out=u)
        u.add_(torch.mul(g, 1.0 - c.b1, out=t)).sign_().mul_(-c.learning_rate)
        if c.decay:
            u.add_(torch.mul(p, -c.decay, out=t))
        m.mul_(c.b2).add_(g.mul_(1.0 - c.b2))


def _adagrad(works: Iterator[_WorkSpace], c: Any) -> None:
    for p, g, (s,), u, t in works:
        if c.l2:
            g.add_(torch.mul(p, c.l2, out=t))
        s.add_(torch.mul(g, g, out=t))
        root_into(t, s)
        torch.div(g, t.add_(c.eps), out=u)
        u.mul_(-c.learning_rate)


_RULES: dict[str, Callable[[Iterator[_WorkSpace], Any], None]] = {
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
    constants: Any,
    scale: float | Tensor,
    taken: Tensor | None = None,
) -> None:
    """Take a step of a rule, chunk by chunk; ``scale`` is a factor of the gradients."""
    whole = rule == "adam" and constants.decay != 0.0
    works = _working(param, grad, moments, change, whole=whole, scale=scale, taken=taken)
    _RULES[rule](works, constants)


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    segments: Sequence[tuple[int, int]],
    constants: Any,
) -> tuple[list[Tensor], Tensor]:
    """Write the moments of LAMB; return the squares of segments and directions, and directions."""
    c, direction = constants, torch.empty(param.shape, dtype=wide(param.dtype), device=param.device)
    for p, g, (m, v), u, t in _working(param, grad, (mu, nu), direction):
        _mix(m, g, c.b1, t)
        _mix_squares(v, g, c.b2, t)
        root_into(t, v)
        t.mul_(1.0 / c.correction).add_(c.eps)
        torch.mul(m, 1.0 / c.bias, out=u)
        u.div_(t)
        if c.weight_decay:
            u.add_(torch.mul(p, c.weight_decay, out=t))
    pieces = [x[start:stop] for x in (param, direction) for start, stop in segments]
    return [squares_in_bins(piece) for piece in pieces], direction


def lamb_apply(
    param: Tensor,
    direction: Tensor,
    change: Tensor | None,
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
    if change is None:
        param.add_(direction.to(param.dtype))
    else:
        change.copy_(direction)


def scale_into(out: Tensor, x: Tensor, factor: float | Tensor) -> None:
    dtype = wide(x.dtype)
    # A number of the host goes to a device with the launch; a copy would wait.
    number = factor.to(dtype) if isinstance(factor, Tensor) else factor
    if dtype == x.dtype:
        torch.mul(x, number, out=out)
        return
    spare = torch.empty(_chunk_numel(x), dtype=dtype, device=x.device)
    for target, source in _chunks(out, x):
        assert target is not None
        assert source is not None
        target.copy_(spare[: source.numel()].copy_(source).mul_(number))
