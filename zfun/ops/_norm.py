"""Sums of squares that do not depend on how a vector is cut."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._twins import triton_for

__all__ = ["LIMBS", "LOWEST", "exact_row", "new_row", "squares_in_bins", "total_of_bins"]

# A chunk of this many elements stays in the cache while it is widened to float64.
_CHUNK = 1 << 16

# Leaves begin, and shards end, at multiples of this many elements (zfun.layout.ALIGNMENT), so that these units stay whole in every layout.
_UNIT = 32
_SUMS = 8  # of a unit
_EXPONENTS = 2200  # those of float64, from _LEAST on
_LEAST = -1100

# A long integer of so many limbs of 32 bits, the lowest bit of which stands for 2**LOWEST: the places of float64, and room above.
LIMBS = 70
LOWEST = _LEAST - 53


def squares_in_bins(x: Tensor) -> Tensor:
    """Sum the squares of a real tensor exactly, so that the result does not depend on how it is cut.

    The squares of 32 elements are added in float64 to eight sums, in a fixed order; such sums are then added without any rounding, as
    integers. So pieces of a vector that are cut at multiples of 32 add up to the same bits in any order and in any number; see
    [Note: exact sums].

    Args:
        x: 1-D, floating.

    Returns:
        An int64 tensor of fixed length; those of several pieces are added by :func:`total_of_bins`.

    Example:
        >>> total_of_bins(torch.stack([squares_in_bins(torch.tensor([3.0])), squares_in_bins(torch.tensor([4.0]))]))
        tensor(25., dtype=torch.float64)
    """
    if _jit.compiled() and _jit.is_plain(x):
        from zfun.ops import _squares_cpu

        array, add = _jit.as_array(x), _jit.telling(_squares_cpu.add_squares)
        rows: list[Any] = []

        def work(begin: int, end: int) -> None:
            row = new_row()
            add(array, begin, end, row)
            rows.append(row)

        _jit.in_parts(x.numel(), work)
        return exact_row(rows)
    triton = triton_for(x)
    if triton is not None and triton.takes(x):
        return triton.squares_in_bins(x)
    if _jit.is_abstract(x):
        return torch.empty(LIMBS + 1, dtype=torch.int64, device=x.device)
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
        # Each half of a mantissa has at most 27 bits: float64 adds 2**26 of them exactly, many more than a chunk has.
        digits = mantissa.mul_(2.0**27)
        top = digits.floor()
        high += torch.bincount(place, weights=top, minlength=_EXPONENTS).to(torch.int64)
        low += torch.bincount(place, weights=digits.sub_(top).mul_(2.0**26), minlength=_EXPONENTS).to(torch.int64)
    return torch.cat([_limbs(high, low), special.view(1).view(torch.int64)])


def new_row() -> Any:
    """Make the integers that ``add_squares`` adds to."""
    return np.zeros(LIMBS + 1, np.int64)


def exact_row(rows: list[Any]) -> Tensor:
    """Add what ``add_squares`` made of several pieces: what :func:`squares_in_bins` returns."""
    if len(rows) < 2:
        return torch.from_numpy(rows[0] if rows else new_row())
    total = np.sum(rows, axis=0)
    total[LIMBS:].view(np.float64)[0] = sum(float(row[LIMBS:].view(np.float64)[0]) for row in rows)
    return torch.from_numpy(total)


def _sum_units(chunk: Tensor) -> Tensor:
    """Add the squares of each 32 elements in float64 to eight sums; what becomes of a unit depends on nothing else."""
    tail = -chunk.numel() % _UNIT
    units = (torch.nn.functional.pad(chunk, (0, tail)) if tail else chunk).to(torch.float64, copy=True).square_().view(-1, _UNIT)
    # Not sum(1): on a device the order within such a sum may depend on how many there are.
    while units.shape[1] > _SUMS:
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


def total_of_bins(rows: Tensor) -> Tensor:
    """Add what :func:`squares_in_bins` returned for several pieces.

    Args:
        rows: int64, one row for each piece.

    Returns:
        The sum of the squares, a 0-dim float64 tensor on the CPU; not finite where an element is not. The host waits for the device
        once, to read the rows.

    Example:
        >>> total_of_bins(squares_in_bins(torch.full((100,), 2.0))[None])
        tensor(400., dtype=torch.float64)
    """
    if _jit.is_abstract(rows):
        return torch.empty((), dtype=torch.float64)
    read = rows.tolist()
    special = sum(struct.unpack("d", struct.pack("q", row[-1]))[0] for row in read)
    # Python's integers have no end, and its division rounds once.
    exact = sum(limb << (32 * k) for row in read for k, limb in enumerate(row[:-1]))
    try:
        total = exact / (1 << -LOWEST)
    except OverflowError:
        total = float("inf")
    return torch.tensor(total + special, dtype=torch.float64)
