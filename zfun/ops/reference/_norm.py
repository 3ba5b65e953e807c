"""Sums of squares that do not depend on how a vector is cut; see [Note: exact sums]."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.ops._exact import LIMBS, LOWEST, SUMS, UNIT

# A chunk of this many elements stays in the cache while it is widened to float64.
_CHUNK = 1 << 16

# The exponents of float64, from the least on.
_LEAST = LOWEST + 53
_EXPONENTS = 2200


def squares_in_bins(x: Tensor) -> Tensor:
    high = torch.zeros(_EXPONENTS, dtype=torch.int64, device=x.device)
    low = torch.zeros_like(high)
    special = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.split(_CHUNK) if x.numel() else ():
        units = _sum_units(chunk)
        total = units.sum()
        if not torch.isfinite(total):
            special = special + total
            continue
        mantissa, exponent = torch.frexp(units)
        place = exponent.to(torch.int64) - _LEAST
        # Each half of a mantissa has at most 27 bits: float64 adds 2**26 of them exactly, many more
        # than a chunk has.
        digits = mantissa.mul_(2.0**27)
        top = digits.floor()
        high += torch.bincount(place, weights=top, minlength=_EXPONENTS).to(torch.int64)
        low += torch.bincount(
            place, weights=digits.sub_(top).mul_(2.0**26), minlength=_EXPONENTS
        ).to(torch.int64)
    return torch.cat([_limbs(high, low), special.view(1).view(torch.int64)])


def _sum_units(chunk: Tensor) -> Tensor:
    """Add the squares of each 32 elements in float64 to eight sums, in a fixed order."""
    tail = -chunk.numel() % UNIT
    units = (
        (torch.nn.functional.pad(chunk, (0, tail)) if tail else chunk)
        .to(torch.float64, copy=True)
        .square_()
        .view(-1, UNIT)
    )
    # Not sum(1): on a device the order within such a sum may depend on how many there are.
    while units.shape[1] > SUMS:
        half = units.shape[1] // 2
        units = units[:, :half] + units[:, half:]
    return units.reshape(-1)


def _limbs(high: Tensor, low: Tensor) -> Tensor:
    """Carry sums by exponent into the limbs of one long integer: few numbers, and still exact."""
    out = torch.zeros(LIMBS, dtype=torch.int64, device=high.device)
    used = torch.nonzero(high + low).view(-1)
    # value = (high * 2**26 + low) * 2**(exponent - 53); limb 0 stands for 2**LOWEST.
    for sums, lift in ((high[used], 26), (low[used], 0)):
        place = used + lift
        for piece, more in ((sums & (2**27 - 1), 0), (sums >> 27, 27)):
            shifted = piece << ((place + more) % 32)
            out.index_add_(0, (place + more) // 32, shifted & (2**32 - 1))
            out.index_add_(0, (place + more) // 32 + 1, shifted >> 32)
    return out
