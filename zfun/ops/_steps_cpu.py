"""Compiled: the rules of optimizers; see [Note: one arithmetic].

[Note: how the loops look]
Each rule is one loop over the elements of slices. A choice that is the same for all elements is a conditional expression, of which LLVM
makes a masked move, or two loops. Where the result goes is a loop of its own, because a vector loop first checks that its arrays do not
overlap, and one array under two names always does. Each loop is a function of its own, or LLVM gives up before it has made two loops of
such a choice (13 % of a step with momentum). ``fma`` stands where torch's fused kernels have it, so that their bits come out. A copy
of the parameters in fewer bits is made block by block, while the block is in the cache: packing inside the loop would halve its width.

All kernels but LAMB's, which needs norms on the way, are called alike: the buffers, first the parameters, the gradients and what else the
rule keeps, then where the change and the copy go (of length 0 for none); which elements; the factor of the gradient and 1, in the dtype
that is computed in; the constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zfun.ops._jit import jit
from zfun.ops._numbers import fma, wide_vectors, widen
from zfun.ops._ravel_cpu import BLOCK, add_block, convert

__all__ = ["CONSTANTS", "adagrad", "adam", "lamb_apply", "lamb_moments", "lion", "plain_sgd", "sgd"]

# Elements between two copies: a few KiB of each array, at home in every L1.
_BLOCK = 1024


@jit
def _block(out: Any, begin: Any, end: Any) -> Any:
    return min(_BLOCK, end - begin) if out.size else end - begin


@jit
def _moments(x: Any, m: Any, v: Any, weight: Any, from_x: Any, b2: Any, c2: Any) -> Any:
    return fma(weight, x - m, x if from_x != 0 else m), fma(c2 * x, x, v * b2)


@jit
def _adam(ps: Any, gs: Any, ms: Any, vs: Any, scale: Any, constants: Any) -> None:
    wide_vectors()
    weight, from_x, b2, c2, step, correction, eps, l2, shrink = constants
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = fma(ps[i], l2, x) if l2 != 0 else x
        mean, square = _moments(x, ms[i], vs[i], weight, from_x, b2, c2)
        u = step * mean / (np.sqrt(square) / correction + eps)
        ms[i] = mean
        vs[i] = square
        ps[i] = ps[i] * shrink + u


@jit
def _adam_change(ps: Any, gs: Any, ms: Any, vs: Any, cs: Any, scale: Any, constants: Any) -> None:
    wide_vectors()
    weight, from_x, b2, c2, step, correction, eps, l2, shrink = constants
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = fma(ps[i], l2, x) if l2 != 0 else x
        mean, square = _moments(x, ms[i], vs[i], weight, from_x, b2, c2)
        u = step * mean / (np.sqrt(square) / correction + eps)
        ms[i] = mean
        vs[i] = square
        cs[i] = (ps[i] * shrink + u) - ps[i] if shrink != 1 else u


@jit
def adam(p: Any, g: Any, m: Any, v: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, one: Any, constants: Any) -> None:
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        if change.size:
            _adam_change(p[at:stop], g[at:stop], m[at:stop], v[at:stop], change[at:stop], scale, constants)
        else:
            _adam(p[at:stop], g[at:stop], m[at:stop], v[at:stop], scale, constants)
        if out.size:
            convert(p[at:stop], out[at:stop], one)


@jit
def _direction(p: Any, mean: Any, square: Any, constants: Any) -> Any:
    bias, correction, eps, weight_decay = constants[4:]
    u = mean / bias / (np.sqrt(square) / correction + eps)
    return u + p * weight_decay if weight_decay != 0 else u


@jit
def _lamb(ps: Any, gs: Any, ms: Any, vs: Any, cs: Any, scale: Any, constants: Any) -> None:
    wide_vectors()
    weight, from_x, b2, c2 = constants[:4]
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        mean, square = _moments(x, ms[i], vs[i], weight, from_x, b2, c2)
        ms[i] = mean
        vs[i] = square
        cs[i] = _direction(ps[i], mean, square, constants)


@jit
def lamb_moments(p: Any, g: Any, m: Any, v: Any, begin: Any, end: Any, scale: Any, constants: Any, rows: Any) -> None:
    """Write the moments, and add the squares of the parameters and of the direction to two rows, as ``add_squares`` does."""
    direction = np.empty(BLOCK, p.dtype)
    sums, spare = np.empty(32, np.int64), np.empty(BLOCK // 4, np.float64)
    first = second = 0
    for at in range(begin, end, BLOCK):
        stop = min(at + BLOCK, end)
        ps, cs = p[at:stop], direction[: stop - at]
        _lamb(ps, g[at:stop], m[at:stop], v[at:stop], cs, scale, constants)
        first = add_block(ps, first, sums, spare, rows[0])
        second = add_block(cs, second, sums, spare, rows[1])


@jit
def lamb_apply(p: Any, m: Any, v: Any, change: Any, out: Any, begin: Any, end: Any, factor: Any, one: Any, constants: Any) -> None:
    """Go along the direction, which costs less to compute again than to keep."""
    wide_vectors()
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        ps, ms, vs = p[at:stop], m[at:stop], v[at:stop]
        if change.size:
            cs = change[at:stop]
            for i in range(ps.size):
                cs[i] = _direction(ps[i], ms[i], vs[i], constants) * factor
        else:
            for i in range(ps.size):
                ps[i] = ps[i] + _direction(ps[i], ms[i], vs[i], constants) * factor
        if out.size:
            convert(ps, out[at:stop], one)


@jit
def _plain_sgd(ps: Any, gs: Any, scale: Any, step: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        ps[i] = ps[i] + x * step


@jit
def _plain_sgd_change(ps: Any, gs: Any, cs: Any, scale: Any, step: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        cs[i] = x * step


@jit
def plain_sgd(p: Any, g: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, one: Any, constants: Any) -> None:
    step, l2 = constants
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        if change.size:
            _plain_sgd_change(p[at:stop], g[at:stop], change[at:stop], scale, step, l2)
        else:
            _plain_sgd(p[at:stop], g[at:stop], scale, step, l2)
        if out.size:
            convert(p[at:stop], out[at:stop], one)


@jit
def _sgd(ps: Any, gs: Any, bs: Any, scale: Any, step: Any, momentum: Any, nesterov: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        velocity = bs[i] * momentum + x
        x = x + velocity * momentum if nesterov != 0 else velocity
        bs[i] = velocity
        ps[i] = ps[i] + x * step


@jit
def _sgd_change(ps: Any, gs: Any, bs: Any, cs: Any, scale: Any, step: Any, momentum: Any, nesterov: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        velocity = bs[i] * momentum + x
        x = x + velocity * momentum if nesterov != 0 else velocity
        bs[i] = velocity
        cs[i] = x * step


@jit
def sgd(p: Any, g: Any, b: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, one: Any, constants: Any) -> None:
    step, momentum, nesterov, l2 = constants
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        if change.size:
            _sgd_change(p[at:stop], g[at:stop], b[at:stop], change[at:stop], scale, step, momentum, nesterov, l2)
        else:
            _sgd(p[at:stop], g[at:stop], b[at:stop], scale, step, momentum, nesterov, l2)
        if out.size:
            convert(p[at:stop], out[at:stop], one)


@jit
def _lion(ps: Any, gs: Any, ms: Any, scale: Any, one: Any, constants: Any) -> None:
    wide_vectors()
    b1, c1, b2, c2, step, decay = constants
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        mixed = ms[i] * b1 + x * c1
        u = step if mixed > 0 else (-step if mixed < 0 else one - one)
        u = u + ps[i] * decay if decay != 0 else u
        ms[i] = ms[i] * b2 + x * c2
        ps[i] = ps[i] + u


@jit
def _lion_change(ps: Any, gs: Any, ms: Any, cs: Any, scale: Any, one: Any, constants: Any) -> None:
    wide_vectors()
    b1, c1, b2, c2, step, decay = constants
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        mixed = ms[i] * b1 + x * c1
        u = step if mixed > 0 else (-step if mixed < 0 else one - one)
        u = u + ps[i] * decay if decay != 0 else u
        ms[i] = ms[i] * b2 + x * c2
        cs[i] = u


@jit
def lion(p: Any, g: Any, m: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, one: Any, constants: Any) -> None:
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        if change.size:
            _lion_change(p[at:stop], g[at:stop], m[at:stop], change[at:stop], scale, one, constants)
        else:
            _lion(p[at:stop], g[at:stop], m[at:stop], scale, one, constants)
        if out.size:
            convert(p[at:stop], out[at:stop], one)


@jit
def _adagrad(ps: Any, gs: Any, ss: Any, scale: Any, step: Any, eps: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        total = ss[i] + x * x
        ss[i] = total
        ps[i] = ps[i] + x / (np.sqrt(total) + eps) * step


@jit
def _adagrad_change(ps: Any, gs: Any, ss: Any, cs: Any, scale: Any, step: Any, eps: Any, l2: Any) -> None:
    wide_vectors()
    for i in range(ps.size):
        x = widen(gs[i], scale) * scale
        x = x + ps[i] * l2 if l2 != 0 else x
        total = ss[i] + x * x
        ss[i] = total
        cs[i] = x / (np.sqrt(total) + eps) * step


@jit
def adagrad(p: Any, g: Any, s: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, one: Any, constants: Any) -> None:
    step, eps, l2 = constants
    size = _block(out, begin, end)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        if change.size:
            _adagrad_change(p[at:stop], g[at:stop], s[at:stop], change[at:stop], scale, step, eps, l2)
        else:
            _adagrad(p[at:stop], g[at:stop], s[at:stop], scale, step, eps, l2)
        if out.size:
            convert(p[at:stop], out[at:stop], one)


def _adam_constants(b1: float, b2: float, step_size: float, correction: float, eps: float, l2: float, decay: float) -> list[float]:
    return [*_moment_constants(b1, b2), -step_size, correction, eps, l2, 1.0 - decay]


def _lamb_constants(b1: float, b2: float, bias: float, correction: float, eps: float, weight_decay: float) -> list[float]:
    return [*_moment_constants(b1, b2), bias, correction, eps, weight_decay]


def _moment_constants(b1: float, b2: float) -> list[float]:
    # torch.lerp goes from the nearer end: from the gradient where it has the larger weight.
    weight = 1.0 - b1
    return [weight if weight < 0.5 else weight - 1.0, float(weight >= 0.5), b2, 1.0 - b2]


def _lion_constants(b1: float, b2: float, learning_rate: float, decay: float) -> list[float]:
    return [b1, 1.0 - b1, b2, 1.0 - b2, -learning_rate, -decay]


# The constants of each rule, as Python's doubles and in the order of its kernel; the kernel's dtype rounds them.
CONSTANTS: dict[str, Callable[..., list[float]]] = {
    "adam": _adam_constants,
    "lamb": _lamb_constants,
    "lion": _lion_constants,
    "sgd": lambda learning_rate, momentum, nesterov, l2: [-learning_rate, momentum, nesterov, l2],
    "plain_sgd": lambda learning_rate, momentum, nesterov, l2: [-learning_rate, l2],
    "adagrad": lambda learning_rate, eps, l2: [-learning_rate, eps, l2],
}
