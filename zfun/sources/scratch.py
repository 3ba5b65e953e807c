"""Memory for a short time, which goes back to the system when dropped."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from zfun import ops

# The allocator of the C library keeps freed blocks of up to 32 MiB for itself, in between blocks
# that stay; smaller ones than this find a hole.
_LEAST_BYTES = 1 << 20


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in memory that the process gives back as soon as the last view is dropped.

    Example:
        >>> scratch((2, 3), torch.float32, torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    small = torch.zeros(0, dtype=dtype, device=device)
    if num_bytes < _LEAST_BYTES or device.type != "cpu" or ops.is_abstract(small):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(*shape)
