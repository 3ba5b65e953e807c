"""Sums of squares that do not depend on how a vector is cut."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import triton_for
from zfun.ops._exact import LIMBS, LOWEST
from zfun.ops._tensors import compiled, is_abstract, is_plain


def squares_in_bins(x: Tensor) -> Tensor:
    """Sum the squares of a real tensor exactly, so that cuts do not change the result.

    The squares of 32 elements are added in float64 to eight sums, in a fixed order; such sums are
    then added without any rounding, as integers. So pieces of a vector that are cut at multiples of
    32 add up to the same bits in any order and in any number; see [Note: exact sums].

    Args:
        x: 1-D, floating.

    Returns:
        An int64 tensor of fixed length; :func:`total_of_bins` adds those of several pieces.

    Example:
        >>> pieces = torch.tensor([3.0]), torch.tensor([4.0])
        >>> total_of_bins(torch.stack([squares_in_bins(piece) for piece in pieces]))
        tensor(25., dtype=torch.float64)
    """
    if compiled() and is_plain(x):
        from zfun.ops import numba

        return numba.squares_in_bins(x)
    triton = triton_for(x)
    if triton is not None and triton.takes(x):
        return triton.squares_in_bins(x)
    if is_abstract(x):
        return torch.empty(LIMBS + 1, dtype=torch.int64, device=x.device)
    return reference.squares_in_bins(x)


def total_of_bins(rows: Tensor) -> Tensor:
    """Add the rows that :func:`squares_in_bins` returned for several pieces.

    Args:
        rows: int64, one row for each piece.

    Returns:
        The sum of the squares, a 0-dim float64 tensor on the CPU; not finite where an element is
        not. The host waits for the device once, to read the rows; of more than four, it reads two.

    Example:
        >>> total_of_bins(squares_in_bins(torch.full((100,), 2.0))[None])
        tensor(400., dtype=torch.float64)
    """
    if is_abstract(rows):
        return torch.empty((), dtype=torch.float64, device="cpu")
    # Python adds a few rows faster than torch, and a thousand rows slowly.
    read = (_as_two(rows) if len(rows) > 4 else rows).tolist()
    special = sum(struct.unpack("d", struct.pack("q", row[-1]))[0] for row in read)
    # Python's integers have no end, and its division rounds once.
    exact = sum(limb << (32 * k) for row in read for k, limb in enumerate(row[:-1]))
    try:
        total = exact / (1 << -LOWEST)
    except OverflowError:
        total = float("inf")
    return torch.tensor(total + special, dtype=torch.float64, device="cpu")


# A digit is the 32 bits of a limb. Three digits, of which the first is not 0, have 65 to 96 bits.
_LOW = 0xFFFFFFFF


@torch.no_grad()
def total_on_device(rows: Tensor) -> Tensor:
    """Add rows as :func:`total_of_bins` does, to the same bits, without a wait of the host.

    Args:
        rows: int64, one row for each piece.

    Returns:
        The sum of the squares, a 0-dim float64 tensor on the device of the rows.

    Example:
        >>> total_on_device(squares_in_bins(torch.full((100,), 2.0))[None])
        tensor(400., dtype=torch.float64)
    """
    if is_abstract(rows):
        return torch.empty((), dtype=torch.float64, device="cpu")
    lower, upper = _as_two(rows)
    special = lower[-1:].view(torch.float64)[0]
    # Two more digits in front for the gather below, and room behind for what is carried.
    digits = torch.nn.functional.pad((lower + upper)[:-1], (2, 1))
    for _ in range(2):
        carried = digits >> 32
        digits = (digits & _LOW) + torch.nn.functional.pad(carried[:-1], (1, 0))
    # Now a digit carries at most 1. It is carried on by digits of ones alone, so a digit gets the
    # carry of the last digit below that has not ones alone.
    places = torch.arange(len(digits), device=digits.device)
    origin = torch.where(digits == _LOW, 0, places).cummax(0).values
    carry = (digits > _LOW).to(torch.int64)[origin]
    digits = (digits + torch.nn.functional.pad(carry[:-1], (1, 0))) & _LOW
    first = torch.where(digits != 0, places, 2).amax()
    third, second, top = digits[first - 2 + places[:3]]
    rest = ((digits != 0) & (places < first - 2)).any()
    # The upper 53 bits at most, and the lower ones, whose last bit stands for all below, add up in
    # float64 with one rounding.
    high = (top << 21) | (second >> 11)
    low = ((second & 0x7FF) << 32) | third | rest
    total = high.to(torch.float64) * 2.0**43 + low.to(torch.float64)
    # Two factors, because one may be outside of float64. Both products are exact, or infinite: the
    # terms are numbers of float64, so a total below its normal numbers has few digits.
    exponent = 32 * (first - 4) + LOWEST
    half = exponent >> 1
    for power in (half, exponent - half):
        total = total * ((power + 1023) << 52).view(torch.float64)
    return total + special


def _as_two(rows: Tensor) -> Tensor:
    """Add rows to two, one limb longer, of the lower and upper halves of the limbs.

    Halves, because the sum of whole limbs may need more than 64 bits.
    """
    limbs, zero = rows[:, :-1], rows.new_zeros(1)
    special = rows[:, -1].contiguous().view(torch.float64).sum().view(1).view(torch.int64)
    lower, upper = (limbs & 0xFFFFFFFF).sum(0), (limbs >> 32).sum(0)
    return torch.stack([torch.cat([lower, zero, special]), torch.cat([zero, upper, zero])])
