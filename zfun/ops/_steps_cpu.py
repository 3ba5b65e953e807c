"""Compiled: the rules of optimizers; see [Note: one arithmetic] and [Note: units].

A choice that is the same for all elements is a conditional expression, which costs next to nothing. ``fma`` stands where torch's fused
kernels have it, so that their bits come out.

All kernels but LAMB's, which needs norms on the way, are called alike: the buffers, first the parameters, the gradients and what else the
rule keeps, then where the change and the copy go (of length 0 for none); which elements; the factor of the gradient, in the dtype that is
computed in; the constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zfun.ops._jit import jit
from zfun.ops._lanes import count, fma, inlined, put, root, rounded, same_sign, start, take, unit_of, will_read, will_write
from zfun.ops._squares_cpu import BLOCK, add_block, add_unit, digits, no_sums, settle

__all__ = ["CONSTANTS", "adagrad", "adam", "lamb_apply", "lamb_moments", "lion", "plain_sgd", "sgd"]


@jit
def _move(i: Any, like: Any, p: Any, to: Any, old: Any, u: Any) -> None:
    """Add to the parameters, or say what is to be added to them."""
    inlined()
    changes, change, copies, out = to
    if changes:
        will_write(change, i, like)
        put(change, i, u)
    else:
        new = rounded(old + rounded(u, p), p)
        put(p, i, new)
        if copies:
            will_write(out, i, like)
            put(out, i, new)


@jit
def _replace(i: Any, like: Any, p: Any, to: Any, old: Any, value: Any) -> None:
    """Write what the parameters become, or say how far that is."""
    inlined()
    changes, change, copies, out = to
    new = rounded(value, p)
    if changes:
        will_write(change, i, like)
        put(change, i, new - old)
    else:
        put(p, i, new)
        if copies:
            will_write(out, i, like)
            put(out, i, new)


@jit
def _moments(x: Any, m: Any, v: Any, weight: Any, from_x: Any, b2: Any, c2: Any) -> Any:
    inlined()
    return fma(weight, x - m, x if from_x != 0 else m), fma(c2 * x, x, v * b2)


@jit
def _adam(i: Any, like: Any, at: Any, to: Any, scale: Any, constants: Any) -> None:
    inlined()
    p, g, m, v = at
    weight, from_x, b2, c2, step, correction, eps, l2, shrink, shrinks = constants
    will_read(g, i, like)
    will_read(m, i, like)
    will_read(v, i, like)
    will_read(p, i, like)
    x = take(g, i, like) * scale
    old = take(p, i, like)
    x = fma(old, l2, x) if l2 != 0 else x
    mean, square = _moments(x, take(m, i, like), take(v, i, like), weight, from_x, b2, c2)
    u = step * mean / (root(square) / correction + eps)
    put(m, i, mean)
    put(v, i, square)
    if shrinks != 0:
        _replace(i, like, p, to, old, old * shrink + u)
    else:
        _move(i, like, p, to, old, u)


@jit
def adam(p: Any, g: Any, m: Any, v: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, constants: Any) -> None:
    at = start(p), start(g), start(m), start(v)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(scale)
    whole = end - (end - begin) % count(unit)
    for i in range(begin, whole, count(unit)):
        _adam(i, unit, at, to, scale, constants)
    for i in range(whole, end):
        _adam(i, scale, at, to, scale, constants)


@jit
def _direction(p: Any, mean: Any, square: Any, constants: Any) -> Any:
    inlined()
    unbias, uncorrect, eps, weight_decay = constants[4:]
    u = mean * unbias / (root(square) * uncorrect + eps)
    return u + p * weight_decay if weight_decay != 0 else u


@jit
def _lamb(i: Any, like: Any, at: Any, scale: Any, constants: Any) -> Any:
    """Write the moments; the parameters and the direction."""
    inlined()
    p, g, m, v = at
    weight, from_x, b2, c2 = constants[:4]
    will_read(g, i, like)
    will_read(m, i, like)
    will_read(v, i, like)
    will_read(p, i, like)
    old = take(p, i, like)
    mean, square = _moments(take(g, i, like) * scale, take(m, i, like), take(v, i, like), weight, from_x, b2, c2)
    put(m, i, mean)
    put(v, i, square)
    return old, _direction(old, mean, square, constants)


@jit
def _lamb_block(at: Any, begin: Any, end: Any, scale: Any, constants: Any, guesses: Any, rows: Any) -> Any:
    """Take a whole block, and add the squares of the parameters and of the direction on the way; whether the guesses were good."""
    unit = unit_of(scale)
    first, second = digits(guesses[0]), digits(guesses[1])
    sizes, steps = no_sums(unit), no_sums(unit)
    for i in range(begin, end, count(unit)):
        old, u = _lamb(i, unit, at, scale, constants)
        sizes = add_unit(old, first[0], first[1], sizes)
        steps = add_unit(u, second[0], second[1], steps)
    return settle(guesses[0], sizes, rows[0]), settle(guesses[1], steps, rows[1])


@jit
def _directions(at: Any, begin: Any, end: Any, scale: Any, constants: Any, direction: Any) -> None:
    """Write the direction of moments that are written already."""
    p, _, m, v = at
    for i in range(begin, end):
        direction[i - begin] = _direction(take(p, i, scale), take(m, i, scale), take(v, i, scale), constants)


@jit
def _within(begin: Any, end: Any, start_: Any, stop: Any) -> Any:
    """Cut a segment to a part of the buffer, at whole units of 32 from where it begins."""
    low = start_ + max(begin - start_ + 31, 0) // 32 * 32
    high = start_ + max(end - start_ + 31, 0) // 32 * 32
    return min(low, stop), min(high, stop)


@jit
def lamb_moments(p: Any, g: Any, m: Any, v: Any, begin: Any, end: Any, scale: Any, constants: Any, segments: Any, rows: Any) -> None:
    """Write the moments, and add the squares of the parameters and of the direction of each segment to its two rows.

    Args:
        p: parameters.
        g: gradients.
        m: first moments.
        v: second moments.
        begin: where this part of the buffers begins.
        end: where it ends; what belongs to it of a segment is cut at multiples of 32 from where that begins.
        scale: factor of the gradients.
        constants: of the rule.
        segments: int64 ``[k, 2]``: where each begins and ends.
        rows: int64 ``[k, 2, LIMBS + 1]``, to which is added as by ``add_squares``.
    """
    at = start(p), start(g), start(m), start(v)
    direction, spare = np.empty(BLOCK, p.dtype), np.empty(BLOCK // 4, np.float64)
    guess_size = guess_step = 0
    for k in range(segments.shape[0]):
        low, high = _within(begin, end, segments[k, 0], segments[k, 1])
        for first in range(low, high, BLOCK):
            last = min(first + BLOCK, high)
            known_size = known_step = False
            if last - first == BLOCK and guess_size != 0 and guess_step != 0:
                known_size, known_step = _lamb_block(at, first, last, scale, constants, (guess_size, guess_step), rows[k])
            else:
                for i in range(first, last):
                    _lamb(i, scale, at, scale, constants)
            if not known_size:
                guess_size = add_block(p[first:last], guess_size, spare, rows[k, 0])
            if not known_step:
                _directions(at, first, last, scale, constants, direction)
                guess_step = add_block(direction[: last - first], guess_step, spare, rows[k, 1])


@jit
def _go(i: Any, like: Any, at: Any, to: Any, factor: Any, constants: Any) -> None:
    inlined()
    p, m, v = at
    will_read(m, i, like)
    will_read(v, i, like)
    will_read(p, i, like)
    old = take(p, i, like)
    _move(i, like, p, to, old, _direction(old, take(m, i, like), take(v, i, like), constants) * factor)


@jit
def lamb_apply(p: Any, m: Any, v: Any, change: Any, out: Any, begin: Any, end: Any, constants: Any, segments: Any, factors: Any) -> None:
    """Go along the direction of each segment, which costs less to compute again than to keep, times its factor."""
    at = start(p), start(m), start(v)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(constants[0])
    for k in range(segments.shape[0]):
        low, high = _within(begin, end, segments[k, 0], segments[k, 1])
        whole = high - (high - low) % count(unit)
        for i in range(low, whole, count(unit)):
            _go(i, unit, at, to, factors[k], constants)
        for i in range(whole, high):
            _go(i, constants[0], at, to, factors[k], constants)


@jit
def _plain_sgd(i: Any, like: Any, at: Any, to: Any, scale: Any, step: Any, l2: Any) -> None:
    inlined()
    p, g = at
    will_read(g, i, like)
    will_read(p, i, like)
    x = take(g, i, like) * scale
    old = take(p, i, like)
    x = x + old * l2 if l2 != 0 else x
    _move(i, like, p, to, old, x * step)


@jit
def plain_sgd(p: Any, g: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, constants: Any) -> None:
    step, l2 = constants
    at = start(p), start(g)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(scale)
    whole = end - (end - begin) % count(unit)
    for i in range(begin, whole, count(unit)):
        _plain_sgd(i, unit, at, to, scale, step, l2)
    for i in range(whole, end):
        _plain_sgd(i, scale, at, to, scale, step, l2)


@jit
def _sgd(i: Any, like: Any, at: Any, to: Any, scale: Any, constants: Any) -> None:
    inlined()
    p, g, b = at
    step, momentum, nesterov, l2 = constants
    will_read(g, i, like)
    will_read(b, i, like)
    will_read(p, i, like)
    x = take(g, i, like) * scale
    old = take(p, i, like)
    x = x + old * l2 if l2 != 0 else x
    velocity = take(b, i, like) * momentum + x
    put(b, i, velocity)
    x = x + velocity * momentum if nesterov != 0 else velocity
    _move(i, like, p, to, old, x * step)


@jit
def sgd(p: Any, g: Any, b: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, constants: Any) -> None:
    at = start(p), start(g), start(b)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(scale)
    whole = end - (end - begin) % count(unit)
    for i in range(begin, whole, count(unit)):
        _sgd(i, unit, at, to, scale, constants)
    for i in range(whole, end):
        _sgd(i, scale, at, to, scale, constants)


@jit
def _lion(i: Any, like: Any, at: Any, to: Any, scale: Any, constants: Any) -> None:
    inlined()
    p, g, m = at
    b1, c1, b2, c2, step, decay = constants
    will_read(g, i, like)
    will_read(m, i, like)
    will_read(p, i, like)
    x = take(g, i, like) * scale
    old = take(p, i, like)
    mean = take(m, i, like)
    u = same_sign(step, mean * b1 + x * c1)
    put(m, i, mean * b2 + x * c2)
    _move(i, like, p, to, old, u + old * decay if decay != 0 else u)


@jit
def lion(p: Any, g: Any, m: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, constants: Any) -> None:
    at = start(p), start(g), start(m)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(scale)
    whole = end - (end - begin) % count(unit)
    for i in range(begin, whole, count(unit)):
        _lion(i, unit, at, to, scale, constants)
    for i in range(whole, end):
        _lion(i, scale, at, to, scale, constants)


@jit
def _adagrad(i: Any, like: Any, at: Any, to: Any, scale: Any, constants: Any) -> None:
    inlined()
    p, g, s = at
    step, eps, l2 = constants
    will_read(g, i, like)
    will_read(s, i, like)
    will_read(p, i, like)
    x = take(g, i, like) * scale
    old = take(p, i, like)
    x = x + old * l2 if l2 != 0 else x
    squares = take(s, i, like) + x * x
    put(s, i, squares)
    _move(i, like, p, to, old, x / (root(squares) + eps) * step)


@jit
def adagrad(p: Any, g: Any, s: Any, change: Any, out: Any, begin: Any, end: Any, scale: Any, constants: Any) -> None:
    at = start(p), start(g), start(s)
    to = change.size > 0, start(change), out.size > 0, start(out)
    unit = unit_of(scale)
    whole = end - (end - begin) % count(unit)
    for i in range(begin, whole, count(unit)):
        _adagrad(i, unit, at, to, scale, constants)
    for i in range(whole, end):
        _adagrad(i, scale, at, to, scale, constants)


def _adam_constants(b1: float, b2: float, step_size: float, correction: float, eps: float, l2: float, decay: float) -> list[float]:
    return [*_moment_constants(b1, b2), -step_size, correction, eps, l2, 1.0 - decay, float(decay != 0.0)]


def _lamb_constants(b1: float, b2: float, bias: float, correction: float, eps: float, weight_decay: float) -> list[float]:
    return [*_moment_constants(b1, b2), 1.0 / bias, 1.0 / correction, eps, weight_decay]


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
