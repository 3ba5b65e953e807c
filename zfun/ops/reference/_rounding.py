"""Products and sums rounded once, and nearest roots, made of ordinary torch operations.

Compiled kernels have an instruction for ``x y + z``; torch has none that computes the same in every
place of a vector. This module makes one of operations whose rounding errors are numbers again and
can be added back ("Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
odd", Boldo and Melquiond, 2008). That holds for numbers near neither end of the range of float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fma_into(out: Tensor, x: Tensor, y: Tensor | float, z: Tensor) -> None:
    """Write ``x y + z``, rounded once; ``out`` may be any of the others.

    Tensors are float32 or float64; a number is rounded to the dtype first.

    Example:
        >>> x, out = torch.tensor([1.0 + 2.0**-12]), torch.empty(1)
        >>> fma_into(out, x, x, torch.tensor([-1.0 - 2.0**-11]))
        >>> out.item() == 2.0**-24, (x * x - (1.0 + 2.0**-11)).item()
        (True, 0.0)
    """
    factor = y if isinstance(y, Tensor) else torch.full((), y, dtype=x.dtype, device=x.device)
    if x.dtype == torch.float32:
        # The product of two numbers of float32 is one of float64. Where the sum is not, its last
        # bit says so, and no tie is mistaken.
        total, error = _two_sum(x.double() * factor.double(), z.double())
        out.copy_(_odd(total, error))
        return
    high, low = _two_product(x, factor)
    upper, lower = _two_sum(z, low)
    total, error = _two_sum(high, upper)
    exact = total + _odd(*_two_sum(lower, error))
    out.copy_(torch.where(torch.isfinite(exact), exact, x * factor + z))


def root_into(out: Tensor, x: Tensor) -> None:
    """Write the nearest square root; torch's own on CPUs is off by a place now and then.

    ``x`` is not negative, and of the dtype of ``out``: float32 or float64.
    """
    if x.device.type != "cpu":
        torch.sqrt(x, out=out)
    elif x.dtype == torch.float32:
        out.copy_(x.double().sqrt_())
    else:
        root = x.sqrt()
        high, low = _two_product(root, root)
        better = root + ((x - high) - low) / (2.0 * root)
        out.copy_(torch.where((x > 1e-200) & torch.isfinite(x), better, root))


def _two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _two_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    product = x * y
    (a, b), (c, d) = _halves(x), _halves(y)
    return product, ((a * c - product) + a * d + b * c) + b * d


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * 134217729.0  # 2**27 + 1
    upper = scaled - (scaled - x)
    return upper, x - upper


def _odd(total: Tensor, error: Tensor) -> Tensor:
    """Return ``total + error``, or of the two numbers around that the one whose last bit is 1."""
    bits = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error.abs() > 0) & torch.isfinite(error) & (bits & 1 == 0)
    return (bits + torch.where(inexact, towards, 0)).view(torch.float64)
