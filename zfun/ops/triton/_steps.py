"""The rules of optimizers: kernels that share a beginning and an end, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfun.ops.triton._base import TILE, as_pointer, launch, load_wide, number, takes


@triton.jit
def _places(numel, taken, TILE: tl.constexpr):
    """Return the places of a tile, and a mask; of a step that is not taken, no place is read."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    stop = numel
    if taken is not None:
        stop = tl.where(tl.load(taken) != 0, numel, 0)
    return i, i < stop


@triton.jit
def _start_step(param, grad, scale, l2, i, mask, FMA: tl.constexpr, READS: tl.constexpr):
    p = tl.load(param + i, mask=mask, other=0.0)
    g = load_wide(grad, i, mask) * number(scale, READS)
    if l2 is not None:
        g = tl.fma(p, l2, g) if FMA else g + p * l2
    return p, g


@triton.jit
def _end_step(param, change, new, delta, i, mask):
    if change is not None:
        tl.store(change + i, delta, mask=mask)
    else:
        tl.store(param + i, new, mask=mask)


@triton.jit
def _adam(
    param, grad, mu, nu, change, numel, taken, scale, weight, b2, rest2, step, eps, l2, keep,
    correction,
    TILE: tl.constexpr, NEAR: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    i, mask = _places(numel, taken, TILE)  # type: ignore[arg-type]
    p, g = _start_step(param, grad, scale, l2, i, mask, True, READS)  # type: ignore[arg-type]
    m = tl.load(mu + i, mask=mask, other=0.0)
    v = tl.load(nu + i, mask=mask, other=0.0)
    m = tl.fma(g - m, weight, m if NEAR else g)
    v = tl.fma(g * rest2, g, v * b2)
    tl.store(mu + i, m, mask=mask)
    tl.store(nu + i, v, mask=mask)
    u = tl.div_rn(
        m * step, tl.div_rn(tl.sqrt_rn(v), correction + tl.full((TILE,), 0.0, tl.float32)) + eps
    )
    if keep is not None:
        new = u + p * keep
        _end_step(param, change, new, new - p, i, mask)
    else:
        _end_step(param, change, p + u, u, i, mask)


@triton.jit
def _sgd(
    param, grad, velocity, change, numel, taken, scale, step, momentum, l2,
    TILE: tl.constexpr, NESTEROV: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    i, mask = _places(numel, taken, TILE)  # type: ignore[arg-type]
    p, g = _start_step(param, grad, scale, l2, i, mask, False, READS)  # type: ignore[arg-type]
    if velocity is not None:
        b = tl.load(velocity + i, mask=mask, other=0.0) * momentum + g
        tl.store(velocity + i, b, mask=mask)
        if NESTEROV:
            g = g + b * momentum
        else:
            g = b
    u = g * step
    _end_step(param, change, p + u, u, i, mask)


@triton.jit
def _lion(
    param, grad, mu, change, numel, taken, scale, b1, rest1, b2, rest2, step, decay,
    TILE: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    i, mask = _places(numel, taken, TILE)  # type: ignore[arg-type]
    p, g = _start_step(param, grad, scale, None, i, mask, False, READS)  # type: ignore[arg-type]
    m = tl.load(mu + i, mask=mask, other=0.0)
    towards = m * b1 + g * rest1
    u = tl.where(towards > 0, 1.0, tl.where(towards < 0, -1.0, 0.0)) * step
    if decay is not None:
        u = u + p * decay
    tl.store(mu + i, m * b2 + g * rest2, mask=mask)
    _end_step(param, change, p + u, u, i, mask)


@triton.jit
def _adagrad(
    param, grad, total, change, numel, taken, scale, step, eps, l2,
    TILE: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    i, mask = _places(numel, taken, TILE)  # type: ignore[arg-type]
    p, g = _start_step(param, grad, scale, l2, i, mask, False, READS)  # type: ignore[arg-type]
    s = tl.load(total + i, mask=mask, other=0.0) + g * g
    tl.store(total + i, s, mask=mask)
    u = tl.div_rn(g, tl.sqrt_rn(s) + eps) * step
    _end_step(param, change, p + u, u, i, mask)


def step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    constants: Any,
    scale: float | Tensor,
    taken: Tensor | None = None,
) -> bool:
    """Take a step of a rule; whether there is a kernel for the rule and these dtypes."""
    held = [param, *moments, *(() if change is None else (change,))]
    if any(x.dtype != torch.float32 for x in held) or not takes(*held, grad):
        return False
    kernel, numbers, flags = _RULES[rule](constants)
    velocity = (None,) if rule == "plain_sgd" else ()
    buffers = [param, grad, *moments, *velocity, change]
    pointers = [None if x is None else as_pointer(x) for x in buffers]
    numel = param.numel()
    if numel:
        launch(
            kernel,
            (triton.cdiv(numel, TILE),),
            param.device,
            *pointers,
            numel,
            None if taken is None else taken.view(torch.uint8),
            scale.to(torch.float32) if isinstance(scale, Tensor) else scale,
            *numbers,
            TILE=TILE,
            READS=isinstance(scale, Tensor),
            **flags,
        )
    torch.autograd.graph.increment_version([*moments, param if change is None else change])
    return True


# The kernel of a rule, its numbers (None without such a term), and its choices.
_Call: TypeAlias = tuple[Any, tuple[float | None, ...], dict[str, bool]]


def _adam_call(c: Any) -> _Call:
    weight = 1.0 - c.b1
    near = weight < 0.5
    first = weight if near else weight - 1.0
    moments, keep = (first, c.b2, 1.0 - c.b2), 1.0 - c.decay if c.decay else None
    numbers = (*moments, -c.step_size, c.eps, c.l2 or None, keep, c.correction)
    return _adam, numbers, {"NEAR": near}


def _sgd_call(c: Any) -> _Call:
    return _sgd, (-c.learning_rate, c.momentum, c.l2 or None), {"NESTEROV": bool(c.nesterov)}


def _lion_call(c: Any) -> _Call:
    decay = -c.decay if c.decay else None
    return _lion, (c.b1, 1.0 - c.b1, c.b2, 1.0 - c.b2, -c.learning_rate, decay), {}


def _adagrad_call(c: Any) -> _Call:
    return _adagrad, (-c.learning_rate, c.eps, c.l2 or None), {}


_RULES: dict[str, Callable[[Any], _Call]] = {
    "adam": _adam_call,
    "sgd": _sgd_call,
    "plain_sgd": _sgd_call,
    "lion": _lion_call,
    "adagrad": _adagrad_call,
}
