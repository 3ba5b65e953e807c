"""Compiled: the rules of optimizers; see [Note: one arithmetic].

Each rule is written for one element, and a kernel is loops over the rule: one where the change is
added to the parameters, one where the change is written for the caller to add. A choice that is the
same for all elements is a conditional expression, which costs next to nothing. ``fma`` stands where
torch's fused kernels have ``fma``, so the bits are those of torch.

LLVM makes vector code of a loop only if few pairs of arrays could overlap, so Adam's change has a
loop of its own, over a chunk that the first loop has left in the first cache.

All kernels but LAMB's, which needs norms on the way, are called alike: the buffers, first the
parameters, the gradients and whatever else the rule keeps, then the change (of length 0 for none);
which elements; the constants, in the dtype that is computed in. ``scale`` among them is a factor of
the gradients, mostly 1, and a product with 1 changes no bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops._tensors import as_array, is_plain, number, wide
from zfun.ops.numba._compile import entry, in_parts, jit
from zfun.ops.numba._float_bits import narrow, rounded, widen
from zfun.ops.numba._simd import fma, place
from zfun.ops.numba._squares import BLOCK, add_block, exact_row, new_row

# Elements of a chunk.
_CHUNK = 1 << 10


@jit
def _moved(p: Any, i: Any, u: Any) -> Any:
    """Return the parameter that a change makes."""
    return narrow(widen(p[i], u) + rounded(u, p), p)


@jit
def _moments(i: Any, g: Any, old: Any, m: Any, v: Any, l2: Any, constants: Any) -> Any:
    """Write the moments of Adam and LAMB, and return them as they were before they were rounded."""
    weight, from_x, b2, c2, scale = constants
    x = widen(g[i], b2) * scale
    x = fma(old, l2, x) if l2 != 0 else x
    before = widen(m[i], b2)
    mean = fma(weight, x - before, x if from_x != 0 else before)
    square = fma(c2 * x, x, widen(v[i], b2) * b2)
    m[i] = narrow(mean, m)
    v[i] = narrow(square, v)
    return mean, square


@jit
def _adam(mean: Any, square: Any, old: Any, p: Any, constants: Any) -> Any:
    """Return the new parameter and the change."""
    step, correction, eps, shrink, shrinks = constants
    u = step * mean / (math.sqrt(square) / correction + eps)
    new = rounded(old * shrink + u if shrinks != 0 else old + rounded(u, p), p)
    return new, new - old if shrinks != 0 else u


@jit
def adam(p: Any, g: Any, m: Any, v: Any, change: Any, begin: Any, end: Any, constants: Any) -> None:
    means, rule, l2 = constants[:5], constants[5:10], constants[10]
    if change.size == 0:
        for i in range(place(begin), place(end)):
            old = widen(p[i], l2)
            mean, square = _moments(i, g, old, m, v, l2, means)
            p[i] = narrow(_adam(mean, square, old, p, rule)[0], p)
    elif p.itemsize < 4:  # the moments of half types are rounded when they are written
        for i in range(place(begin), place(end)):
            old = widen(p[i], l2)
            mean, square = _moments(i, g, old, m, v, l2, means)
            change[i] = narrow(_adam(mean, square, old, p, rule)[1], change)
    else:
        for at in range(begin, end, _CHUNK):
            stop = min(at + _CHUNK, end)
            for i in range(place(at), place(stop)):
                _moments(i, g, widen(p[i], l2), m, v, l2, means)
            for i in range(place(at), place(stop)):
                mean, square, old = widen(m[i], l2), widen(v[i], l2), widen(p[i], l2)
                change[i] = narrow(_adam(mean, square, old, p, rule)[1], change)


@jit
def _direction(p: Any, mean: Any, square: Any, constants: Any) -> Any:
    unbias, uncorrect, eps, weight_decay = constants[5:]
    u = mean * unbias / (math.sqrt(square) * uncorrect + eps)
    return u + p * weight_decay if weight_decay != 0 else u


def _within(segments: Any, begin: int, end: int) -> Any:
    """Cut segments to a part of the buffer, at whole units of 32 from where each begins."""
    start, stop = segments[:, :1], segments[:, 1:]
    units = np.maximum(np.array([begin, end]) - start + 31, 0) // 32
    return np.minimum(start + units * 32, stop)


@jit
def _lamb_moments(p: Any, g: Any, m: Any, v: Any, constants: Any, segments: Any, rows: Any) -> None:
    """Write the moments, and add the squares of each segment and of its direction to its two rows.

    ``segments`` are int64 ``[k, 2]``, and ``rows`` int64 ``[k, 2, LIMBS + 1]``, as of
    ``add_block``.
    """
    zero = constants[0] - constants[0]
    direction, sums = np.empty(BLOCK, type(zero)), np.empty(BLOCK // 4, np.float64)
    for k in range(segments.shape[0]):
        low, high = segments[k, 0], segments[k, 1]
        for first in range(low, high, BLOCK):
            last = min(first + BLOCK, high)
            for at in range(first, last, _CHUNK):
                stop = min(at + _CHUNK, last)
                for i in range(place(at), place(stop)):
                    _moments(i, g, p[i], m, v, zero, constants[:5])
                for i in range(place(at), place(stop)):
                    direction[i - place(first)] = _direction(p[i], m[i], v[i], constants)
            add_block(p[first:last], sums, rows[k, 0])
            add_block(direction[: last - first], sums, rows[k, 1])


@jit
def _lamb_apply(
    p: Any, m: Any, v: Any, change: Any, constants: Any, segments: Any, factors: Any
) -> None:
    """Go along each segment's direction, computed again, which costs less than to keep it."""
    for k in range(segments.shape[0]):
        low, high = segments[k, 0], segments[k, 1]
        factor = factors[k]
        if change.size:
            for i in range(place(low), place(high)):
                change[i] = _direction(p[i], m[i], v[i], constants) * factor
        else:
            for i in range(place(low), place(high)):
                p[i] = _moved(p, i, _direction(p[i], m[i], v[i], constants) * factor)


@jit
def _plain_sgd(i: Any, p: Any, g: Any, constants: Any) -> Any:
    step, l2, scale = constants
    x = widen(g[i], step) * scale
    x = x + widen(p[i], step) * l2 if l2 != 0 else x
    return x * step


@jit
def plain_sgd(p: Any, g: Any, change: Any, begin: Any, end: Any, constants: Any) -> None:
    if change.size:
        for i in range(place(begin), place(end)):
            change[i] = narrow(_plain_sgd(i, p, g, constants), change)
    else:
        for i in range(place(begin), place(end)):
            p[i] = _moved(p, i, _plain_sgd(i, p, g, constants))


@jit
def _sgd(i: Any, p: Any, g: Any, b: Any, constants: Any) -> Any:
    step, momentum, nesterov, l2, scale = constants
    x = widen(g[i], step) * scale
    x = x + widen(p[i], step) * l2 if l2 != 0 else x
    velocity = widen(b[i], step) * momentum + x
    b[i] = narrow(velocity, b)
    return (x + velocity * momentum if nesterov != 0 else velocity) * step


@jit
def sgd(p: Any, g: Any, b: Any, change: Any, begin: Any, end: Any, constants: Any) -> None:
    if change.size:
        for i in range(place(begin), place(end)):
            change[i] = narrow(_sgd(i, p, g, b, constants), change)
    else:
        for i in range(place(begin), place(end)):
            p[i] = _moved(p, i, _sgd(i, p, g, b, constants))


@jit
def _lion(i: Any, p: Any, g: Any, m: Any, constants: Any) -> Any:
    b1, c1, b2, c2, step, decay, scale = constants
    x, mean = widen(g[i], step) * scale, widen(m[i], step)
    towards = mean * b1 + x * c1
    nothing = (step - step) * step  # zero with the sign of the step, as in torch
    u = step if towards > 0 else (-step if towards < 0 else nothing)
    m[i] = narrow(mean * b2 + x * c2, m)
    return u + widen(p[i], step) * decay if decay != 0 else u


@jit
def lion(p: Any, g: Any, m: Any, change: Any, begin: Any, end: Any, constants: Any) -> None:
    if change.size:
        for i in range(place(begin), place(end)):
            change[i] = narrow(_lion(i, p, g, m, constants), change)
    else:
        for i in range(place(begin), place(end)):
            p[i] = _moved(p, i, _lion(i, p, g, m, constants))


@jit
def _adagrad(i: Any, p: Any, g: Any, s: Any, constants: Any) -> Any:
    step, eps, l2, scale = constants
    x = widen(g[i], step) * scale
    x = x + widen(p[i], step) * l2 if l2 != 0 else x
    squares = widen(s[i], step) + x * x
    s[i] = narrow(squares, s)
    return x / (math.sqrt(squares) + eps) * step


@jit
def adagrad(p: Any, g: Any, s: Any, change: Any, begin: Any, end: Any, constants: Any) -> None:
    if change.size:
        for i in range(place(begin), place(end)):
            change[i] = narrow(_adagrad(i, p, g, s, constants), change)
    else:
        for i in range(place(begin), place(end)):
            p[i] = _moved(p, i, _adagrad(i, p, g, s, constants))


def _moment_constants(c: Any, scale: float) -> list[float]:
    # torch.lerp goes from the nearer end: from the gradient where it has the larger weight.
    weight = 1.0 - c.b1
    first = weight if weight < 0.5 else weight - 1.0
    return [first, float(weight >= 0.5), c.b2, 1.0 - c.b2, scale]


def _adam_constants(c: Any, scale: float) -> list[float]:
    rule = [-c.step_size, c.correction, c.eps, 1.0 - c.decay, float(c.decay != 0.0)]
    return [*_moment_constants(c, scale), *rule, c.l2]


def _lamb_constants(c: Any) -> list[float]:
    return [*_moment_constants(c, 1.0), 1.0 / c.bias, 1.0 / c.correction, c.eps, c.weight_decay]


def _lion_constants(c: Any, scale: float) -> list[float]:
    return [c.b1, 1.0 - c.b1, c.b2, 1.0 - c.b2, -c.learning_rate, -c.decay, scale]


# Each rule: its kernel, and its constants in the order of the kernel, as Python's doubles, which
# the dtype of the kernel rounds.
_RULES: dict[str, tuple[Any, Callable[[Any, float], list[float]]]] = {
    "adam": (adam, _adam_constants),
    "lion": (lion, _lion_constants),
    "sgd": (sgd, lambda c, scale: [-c.learning_rate, c.momentum, c.nesterov, c.l2, scale]),
    "plain_sgd": (plain_sgd, lambda c, scale: [-c.learning_rate, c.l2, scale]),
    "adagrad": (adagrad, lambda c, scale: [-c.learning_rate, c.eps, c.l2, scale]),
}


def step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    constants: Any,
    scale: float,
) -> bool:
    """Take a step of a rule; whether there is a kernel for such tensors."""
    if not _takes(param, *moments, *(() if change is None else (change,))):
        return False
    kernel, in_order = _RULES[rule]
    run, kind = entry(kernel), number(wide(param.dtype))
    tensors = (param, _readable(grad, wide(param.dtype)), *moments)
    arrays = [*map(as_array, tensors), _target(param, change)]
    numbers = tuple(map(kind, in_order(constants, scale)))
    in_parts(param.numel(), lambda begin, end: run(*arrays, begin, end, numbers))
    torch.autograd.graph.increment_version([*moments, param if change is None else change])
    return True


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    segments: Sequence[tuple[int, int]],
    constants: Any,
) -> list[Tensor] | None:
    """Take the first half of a step of LAMB.

    Returns:
        The squares of the parameters of each segment and then those of their directions, as
        ``squares_in_bins`` returns them; None where there is no kernel for such tensors.
    """
    # lamb_apply() computes the directions again from the written moments. The moments of half types
    # are rounded when they are written, and would give another direction.
    if param.dtype != wide(param.dtype) or not _takes(param, mu, nu):
        return None
    run, kind = entry(_lamb_moments), number(param.dtype)
    arrays = [as_array(x) for x in (param, _readable(grad, param.dtype), mu, nu)]
    numbers = tuple(map(kind, _lamb_constants(constants)))
    # Elements of no segment have moments too: every second piece is a segment, and the others lie
    # between.
    places = np.array([0, *itertools.chain.from_iterable(segments), param.numel()], np.int64)
    pieces = np.stack([places[:-1], places[1:]], 1)
    found: list[Any] = []

    def work(begin: int, end: int) -> None:
        rows = np.stack([new_row()] * 2 * len(pieces)).reshape(len(pieces), 2, -1)
        run(*arrays, numbers, _within(pieces, begin, end), rows)
        found.append(rows[1::2])

    in_parts(param.numel(), work)
    torch.autograd.graph.increment_version([mu, nu])
    places_of = [(which, k) for which in range(2) for k in range(len(segments))]
    return [exact_row([rows[k, which] for rows in found]) for which, k in places_of]


def lamb_apply(
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    change: Tensor | None,
    segments: Sequence[tuple[int, int]],
    factors: Sequence[float],
    constants: Any,
) -> None:
    """Take the second half of a step of LAMB, after :func:`lamb_moments`."""
    run, kind = entry(_lamb_apply), number(param.dtype)
    to = change if change is None or _takes(change, param) else torch.empty_like(param)
    arrays = [*(as_array(x) for x in (param, mu, nu)), _target(param, to)]
    numbers = tuple(map(kind, _lamb_constants(constants)))
    end = 0
    for start, stop in [*segments, (param.numel(), param.numel())]:
        if to is not None:
            to[end:start].zero_()
        end = stop
    pieces, far = np.array(segments, np.int64).reshape(-1, 2), np.array(factors, kind)
    in_parts(
        param.numel(),
        lambda begin, end: run(*arrays, numbers, _within(pieces, begin, end), far),
    )
    torch.autograd.graph.increment_version([param if to is None else to])
    if change is not None and to is not change and to is not None:
        change.copy_(to)


def _target(param: Tensor, change: Tensor | None) -> Any:
    """Return where the change goes, an array of length 0 for none."""
    return np.zeros(0, number(param.dtype)) if change is None else as_array(change)


def _takes(param: Tensor, *others: Tensor) -> bool:
    return is_plain(param, *others) and all(x.dtype is param.dtype for x in others)


def _readable(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad if is_plain(grad) else grad.new_empty(grad.shape, dtype=dtype).copy_(grad)
