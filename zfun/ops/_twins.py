"""Which kernels run where a tensor lives.

[Note: twins]
A kernel of this package is written several times with one signature: readably in torch, which is the reference and runs anywhere; for CPUs
with Numba; for CUDA devices with Triton, where it is installed (torch's CUDA wheels bring it; see [Note: Triton kernels]). All give the
same bits, save where a docstring says otherwise. The device chooses.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import is_abstract

__all__ = ["Twin", "reads", "triton_for", "twin_of"]


class Twin(Protocol):
    """The kernels of one kind of device; each is described where its reference is."""

    def pack_signs(self, x: Tensor) -> Tensor: ...

    def unpack_signs(self, packed: Tensor, numel: int, scales: Tensor) -> Tensor: ...

    def quantise(self, rows: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...

    def dequantise(self, messages: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...

    def sum_dequantised(self, messages: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...


@functools.cache
def _has_triton() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def triton_for(x: Tensor) -> Any:
    """Return the Triton kernels where a tensor is on a CUDA device and they may run now, else None."""
    if not x.is_cuda or not _has_triton() or not _jit.compiled() or is_abstract(x):
        return None
    from zfun.ops import _triton

    return _triton


def twin_of(x: Tensor) -> Twin | None:
    """Return the kernels for where a tensor lives; None where the readable form is all there is."""
    if not _jit.compiled() or is_abstract(x):
        return None
    if x.device.type == "cpu" and type(x) is Tensor and not x.is_neg():
        from zfun.ops import _codes_cpu

        return _codes_cpu
    triton = triton_for(x)
    # float64 is left to torch; messages are bytes.
    return triton if triton is not None and (x.dtype == torch.uint8 or triton.takes(x.contiguous())) else None


def reads(messages: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels for where messages lie read numbers of a dtype from them."""
    return not messages.is_cuda or dtype != torch.float64
