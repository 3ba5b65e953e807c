"""The exact sum of squares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfun.ops._exact import LIMBS, LOWEST
from zfun.ops.triton._base import as_pointer, launch, load_wide

_UNITS = 128  # of 32 elements
# With fewer, a thread holds so many numbers that half of the multiprocessor stays empty.
NUM_WARPS = 8


@triton.jit
def _squares(x, row, special, numel, UNITS: tl.constexpr, LIFT: tl.constexpr):
    # Eight sums of the squares of 32 elements, as [Note: exact sums] has them, are cut in digits of
    # 32 bits, which are added as integers.
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    i = unit[:, None] * 32 + tl.arange(0, 8)[None, :]
    a, b = _square(x, i, numel), _square(x, i + 8, numel)
    c, d = _square(x, i + 16, numel), _square(x, i + 24, numel)
    total = (a + c) + (b + d)
    raw = total.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    exponent = raw >> 52
    finite = exponent < 2047
    if tl.max(exponent) == 2047:  # type: ignore[operator]
        tl.atomic_add(special, tl.sum(tl.where(finite, 0.0, total)))
    digits = tl.where(exponent > 0, (raw & 0xFFFFFFFFFFFFF) | 0x10000000000000, raw)
    digits = tl.where(finite, digits, 0)
    place = tl.maximum(exponent, 1) + LIFT
    limb, shift = place // 32, place % 32
    lower, upper = (digits & 0xFFFFFFFF) << shift, (digits >> 32) << shift
    first, second, third = lower & 0xFFFFFFFF, (lower >> 32) + (upper & 0xFFFFFFFF), upper >> 32
    used = digits > 0
    # Not a range: the interpreter of Triton 3.6, which torch 2.11 brings, takes no bound that is
    # known only at run time.
    k = tl.min(tl.where(used, limb, 1 << 20))
    highest = tl.max(tl.where(used, limb, -3)) + 2  # type: ignore[operator]
    while k <= highest:  # type: ignore[operator]
        part = (
            tl.where(limb == k, first, 0)
            + tl.where(limb + 1 == k, second, 0)
            + tl.where(limb + 2 == k, third, 0)
        )
        tl.atomic_add(row + k, tl.sum(part))
        k += 1  # type: ignore[operator]


@triton.jit
def _square(x, i, numel):
    value = load_wide(x, i, i < numel)
    return value.to(tl.float64) * value.to(tl.float64)


def squares_in_bins(x: Tensor) -> Tensor:
    """Sum the squares of a vector exactly; the last entry is 0 if all elements are finite."""
    row = torch.zeros(LIMBS + 1, dtype=torch.int64, device=x.device)
    args = (as_pointer(x), row, row[LIMBS:].view(torch.float64), x.numel())
    flags = {"UNITS": _UNITS, "LIFT": -1075 - LOWEST}
    if x.numel():
        grid = (triton.cdiv(x.numel(), 32 * _UNITS),)
        launch(_squares, grid, x.device, *args, **flags, num_warps=NUM_WARPS)
    return row
