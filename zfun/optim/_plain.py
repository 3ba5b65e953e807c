"""Steps on flat buffers that have no kernel yet."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.ops._optimizers import _WIDE, _chunks, _finish, _scratch, _store, _widen

__all__ = ["adagrad_step", "lion_step"]


@torch.no_grad()
def lion_step(
    param: Tensor, grad: Tensor, mu: Tensor, change: Tensor | None, *, b1: float, b2: float, learning_rate: float, decay: float
) -> None:
    """``u = -learning_rate sign(b1 mu + (1 - b1) grad) - decay p``, ``mu = b2 mu + (1 - b2) grad``, ``p = p + u``."""
    dtype = _WIDE.get(param.dtype, param.dtype)
    spare = _scratch(param, 2 + sum(x.dtype != dtype for x in (param, grad, mu)), dtype)
    for chunk in _chunks(param, grad, mu, *(() if change is None else (change,))):
        t, u = (x[: chunk[0].numel()] for x in spare[:2])
        p, g, m = _widen(chunk[:3], spare[2:], dtype)
        torch.mul(g, 1.0 - b1, out=t)
        torch.mul(m, b1, out=u)
        u.add_(t).sign_().mul_(-learning_rate)
        if decay:
            torch.mul(p, -decay, out=t)
            u.add_(t)
        torch.mul(g, 1.0 - b2, out=t)
        m.mul_(b2).add_(t)
        _store(chunk[2], m)
        _finish(chunk, 3, u)


@torch.no_grad()
def adagrad_step(param: Tensor, grad: Tensor, total: Tensor, change: Tensor | None, *, learning_rate: float, eps: float, l2: float) -> None:
    """``g = grad + l2 p``, ``total = total + g²``, ``p = p - learning_rate g / (√total + eps)``."""
    dtype = _WIDE.get(param.dtype, param.dtype)
    spare = _scratch(param, 2 + sum(x.dtype != dtype for x in (param, grad, total)), dtype)
    for chunk in _chunks(param, grad, total, *(() if change is None else (change,))):
        t, u = (x[: chunk[0].numel()] for x in spare[:2])
        p, g, s = _widen(chunk[:3], spare[2:], dtype)
        if l2:
            torch.mul(p, l2, out=u)
            g = u.add_(g)
        torch.mul(g, g, out=t)
        s.add_(t)
        torch.sqrt(s, out=t)
        t.add_(eps)
        torch.div(g, t, out=u)
        u.mul_(-learning_rate)
        _store(chunk[2], s)
        _finish(chunk, 3, u)
