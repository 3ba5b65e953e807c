"""The oracle: training in one process, in float64, with plain loops and without zfun.

The batch of a step is a list with one batch per rank. The loss is the mean of the ranks' losses;
the loss of a rank is the mean over micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
LossFn = Callable[[Params, Any], Tensor]


def agrees(x: Tensor, y: Tensor, before: Tensor) -> bool:
    """Whether ``before + update`` equals the fused step: bitwise, or within one rounding.

    Subtraction is exact only if a number changes by less than a factor of two. A number that
    shrinks to near zero has digits that an added update cannot represent.
    """
    x, y, before = (
        torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (x, y, before)
    )
    ratio = y.double() / before.double()
    largest = torch.maximum(y.double().abs(), before.double().abs())
    near = (ratio >= 0.5) & (ratio <= 2.0)
    rounding = torch.finfo(x.dtype).eps * largest + torch.finfo(x.dtype).smallest_normal
    return bool(torch.where(near, x == y, (x.double() - y.double()).abs() <= rounding).all())


def gradients(loss_fn: LossFn, params: Params, batches: Sequence[Any]) -> tuple[float, Params]:
    """Return the mean loss over all batches, and the gradients of the leaves that one uses."""
    total = 0.0
    sums: Params = {}
    for batch in batches:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        loss = loss_fn(leaves, batch)
        loss.backward()
        total += loss.item() / len(batches)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                sums[name] = sums.get(name, 0.0) + leaf.grad / len(batches)
    return total, sums


def norm(grads: Params) -> float:
    """Return the L2 norm over all leaves."""
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))


def clip(grads: Params, max_norm: float) -> Params:
    """Scale gradients so that their norm is at most ``max_norm``."""
    factor = 1.0 / max(1.0, (norm(grads) + 1e-6) / max_norm)
    return {name: g * factor for name, g in grads.items()}


def sgd(params: Params, grads: Params, state: Params, lr: float, momentum: float) -> Params:
    """One step of SGD with momentum for the leaves with gradients; ``state`` is changed."""
    out = dict(params)
    for name in grads:
        p = params[name]
        state[name] = grads[name] if name not in state else momentum * state[name] + grads[name]
        out[name] = p - lr * state[name]
    return out


def adamw(
    params: Params,
    grads: Params,
    state: dict[Any, Any],
    lr: float,
    decay: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Params:
    """One step of AdamW for the leaves with gradients; ``state`` is changed."""
    state["t"] = state.get("t", 0) + 1
    out = dict(params)
    for name in grads:
        p = params[name]
        t = state[name, "t"] = state.get((name, "t"), 0) + 1
        m = state[name, "m"] = b1 * state.get((name, "m"), 0.0) + (1 - b1) * grads[name]
        v = state[name, "v"] = b2 * state.get((name, "v"), 0.0) + (1 - b2) * grads[name] ** 2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        out[name] = p - lr * (m_hat / (v_hat.sqrt() + eps) + decay * p)
    return out


def lion(
    params: Params,
    grads: Params,
    state: Params,
    lr: float,
    decay: float,
    b1: float = 0.9,
    b2: float = 0.99,
) -> Params:
    """One step of Lion; ``state`` is changed."""
    out = {}
    for name, p in params.items():
        m = state.get(name, torch.zeros_like(p))
        out[name] = p - lr * (torch.sign(b1 * m + (1 - b1) * grads[name]) + decay * p)
        state[name] = b2 * m + (1 - b2) * grads[name]
    return out


def adagrad(
    params: Params, grads: Params, state: dict[Any, Any], lr: float, rate_decay: float, eps: float
) -> Params:
    """One step of Adagrad; ``state`` is changed."""
    state["t"] = state.get("t", -1) + 1
    out = {}
    for name, p in params.items():
        state[name] = state.get(name, 0.0) + grads[name] ** 2
        out[name] = p - lr / (1 + rate_decay * state["t"]) * grads[name] / (
            state[name].sqrt() + eps
        )
    return out


def lamb(
    params: Params,
    grads: Params,
    state: dict[Any, Any],
    lr: float,
    decay: float,
    low: float,
    high: float,
) -> Params:
    """One step of LAMB; ``state`` is changed."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    state["t"] = t = state.get("t", 0) + 1
    out = {}
    for name, p in params.items():
        m = state[name, "m"] = b1 * state.get((name, "m"), 0.0) + (1 - b1) * grads[name]
        v = state[name, "v"] = b2 * state.get((name, "v"), 0.0) + (1 - b2) * grads[name] ** 2
        d = m / (v.sqrt() + eps) + decay * p
        size, length = math.sqrt(float((p * p).sum())), math.sqrt(float((d * d).sum()))
        ratio = min(max(size / length, low), high) if size > 0 and length > 0 else 1.0
        out[name] = p - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * ratio * d
    return out


def muon(
    params: Params, grads: Params, state: Params, lr: float, decay: float, momentum: float
) -> Params:
    """One step of Muon with Nesterov's momentum for matrices; ``state`` is changed."""
    out = {}
    for name, p in params.items():
        m = state[name] = (
            momentum * state.get(name, torch.zeros_like(p)) + (1 - momentum) * grads[name]
        )
        d = momentum * m + (1 - momentum) * grads[name]
        # The iteration applies a polynomial to each singular value.
        u, s, v = torch.linalg.svd(d / math.sqrt(float((d * d).sum())), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        scale = math.sqrt(max(1.0, p.shape[0] / p.shape[1]))
        out[name] = p - lr * (scale * (u * s) @ v + decay * p)
    return out


def one_bit(
    terms: list[Tensor],
    kept: list[Tensor],
    answers: list[Tensor],
    norm_of: Callable[[Tensor], Tensor] = torch.linalg.vector_norm,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Average the ranks' vectors in one bit per number, as in the paper: on whole vectors.

    Takes the vectors, the error of each rank's messages, and the error of each rank's answers for
    the rank's chunk. Returns the mean and both errors.
    """

    def signs(x: Tensor) -> Tensor:
        scale = (norm_of(x) / math.sqrt(max(x.numel(), 1))).to(x.dtype)
        return torch.where(x >= 0, scale, -scale)

    full = [x + error for x, error in zip(terms, kept, strict=True)]
    sent = [signs(c) for c in full]
    total = sent[0]
    for q in sent[1:]:
        total = total + q
    chunk = 8 * math.ceil(total.numel() / (8 * len(terms)))
    means = [
        a + error for a, error in zip((total / len(terms)).split(chunk or 1), answers, strict=False)
    ]
    answered = [signs(a) for a in means]
    lost = [a - q for a, q in zip(means, answered, strict=True)]
    lost += [total.new_zeros(0)] * (len(terms) - len(lost))
    return torch.cat([total[:0], *answered]), [c - q for c, q in zip(full, sent, strict=True)], lost


def onebit_adam(
    params: Params,
    grads: list[Params],
    state: dict[Any, Any],
    lr: float,
    freeze_step: int,
    decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Params:
    """One step of 1-bit Adam with the gradients of each rank; ``state`` is changed."""
    t, size = state.get("t", 0) + 1, len(grads)
    mean = {
        name: sum((g[name] for g in grads), torch.zeros_like(p)) / size
        for name, p in params.items()
    }
    if t <= freeze_step:
        return adamw(params, mean, state, lr, decay, b1, b2, eps)
    state["t"] = t
    out = {}
    for name, p in params.items():
        chunk = 8 * math.ceil(p.numel() / (8 * size))
        nothing = (
            [p.new_zeros(p.numel())] * size,
            [p.new_zeros(max(min(p.numel() - rank * chunk, chunk), 0)) for rank in range(size)],
        )
        terms = [(b1 * state[name, "m"] + (1 - b1) * g[name]).reshape(-1) for g in grads]
        m, *state[name, "errors"] = one_bit(terms, *state.get((name, "errors"), nothing))
        state[name, "m"] = m.view(p.shape)
        v_hat = (state[name, "v"] / (1 - b2**freeze_step)).sqrt() + eps
        out[name] = p - lr * (state[name, "m"] / (1 - b1**t) / v_hat + decay * p)
    return out
