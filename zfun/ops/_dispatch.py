"""Which kernels run where a tensor lives.

[Note: twins] A kernel of this package is written several times with one signature: readably in
torch, which is the reference and runs anywhere; for CPUs with Numba; for CUDA devices with Triton,
where that is installed (torch's CUDA wheels bring it; see [Note: Triton kernels]). All give the
same bits, save where a docstring says otherwise. The device chooses. The reference runs for tensors
that are not plain memory (abstract tensors, zeros without memory, views with a negation pending,
tensors that autograd records) and where ``use("reference")`` says so.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from zfun.ops._tensors import compiled, is_abstract


@functools.cache
def _has_triton() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def triton_for(x: Tensor) -> Any:
    """Return the Triton kernels where a tensor is on a CUDA device and they may run, else None."""
    if not x.is_cuda or not _has_triton() or not compiled() or is_abstract(x):
        return None
    from zfun.ops import triton

    return triton


def codes_for(x: Tensor) -> Any:
    """Return the module whose kernels pack and unpack a tensor, the reference if no other."""
    from zfun.ops import reference

    if not compiled() or is_abstract(x):
        return reference
    if x.device.type == "cpu":
        if type(x) is not Tensor or x.is_neg() or x._is_zerotensor():
            return reference
        from zfun.ops import numba

        return numba
    triton = triton_for(x)
    # float64 is left to torch; messages are bytes.
    takes = triton is not None and (x.dtype == torch.uint8 or triton.takes(x.contiguous()))
    return triton if takes else reference


def reads(messages: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels for where messages lie can write numbers of a dtype."""
    return not messages.is_cuda or dtype != torch.float64
