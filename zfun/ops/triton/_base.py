"""How the kernels read and write numbers, and how they are launched."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def takes(*tensors: Tensor) -> bool:
    """Whether all of some tensors are contiguous and of a dtype that the kernels know."""
    return all(
        x.dtype in _FLOATS
        and x.layout == torch.strided
        and x.is_contiguous()
        and not x.is_neg()
        and not x._is_zerotensor()
        for x in tensors
    )


def as_pointer(x: Tensor) -> Tensor:
    """A tensor as a kernel takes it."""
    return x.detach().view(torch.int16) if x.dtype == torch.bfloat16 else x.detach()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any
) -> None:
    if device.type != "cuda":  # the interpreter
        kernel[grid](*args, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **constants, enable_fp_fusion=False)


@triton.jit
def number(x, READS: tl.constexpr):
    """Return a number that is an argument, or lies at an address."""
    return tl.load(x) if READS else x


@triton.jit
def load_wide(start, places, mask):
    """Read elements of an array as float32; 16-bit integers are those of bfloat16."""
    raw = tl.load(start + places, mask=mask, other=0)
    if start.dtype.element_ty == tl.int16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def store_narrow(start, places, x, mask):
    """Write float32 numbers as elements of an array, rounded to nearest, ties to even."""
    if start.dtype.element_ty == tl.int16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(start + places, tl.where(x != x, 0x7FC0, rounded).to(tl.int16), mask=mask)
    else:
        tl.store(start + places, x.to(start.dtype.element_ty), mask=mask)
