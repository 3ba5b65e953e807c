"""Which kernels run where a tensor lives.

[Note: twins]
A kernel of this package is written several times with one signature: readably in torch, which is the reference and runs anywhere; for CPUs
with Numba. All give the same bits, save where a docstring says otherwise. The device chooses.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import is_abstract

__all__ = ["Twin", "twin_of"]


class Twin(Protocol):
    """The kernels of one kind of device; each is described where its reference is."""

    def pack_signs(self, x: Tensor) -> Tensor: ...

    def unpack_signs(self, packed: Tensor, numel: int, scales: Tensor) -> Tensor: ...

    def quantise(self, rows: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...

    def dequantise(self, messages: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...

    def sum_dequantised(self, messages: Tensor, out: Tensor, *, bits: int, block: int) -> None: ...


def twin_of(x: Tensor) -> Twin | None:
    """Return the kernels for where a tensor lives; None where the readable form is all there is."""
    if not _jit.compiled() or is_abstract(x):
        return None
    if x.device.type == "cpu" and type(x) is Tensor and not x.is_neg():
        from zfun.ops import _codes_cpu

        return _codes_cpu
    return None
