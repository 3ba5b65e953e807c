"""Signs, eight to the byte."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import codes_for, reads
from zfun.ops._tensors import is_abstract


def pack_signs(x: Tensor) -> Tensor:
    """Keep of each element its sign, in one bit.

    Element i of a row becomes bit ``i % 8`` of byte ``i // 8``: 1 for numbers that are not
    negative, both zeros among them, and 0 for negative numbers and NaN. The bits behind the last
    element are 0. A sign does not say that a number was not finite: the scale that is sent beside
    the signs must, as a norm does.

    Args:
        x: ``[..., n]``, floating or integer.

    Returns:
        uint8 ``[..., ceil(n / 8)]``.

    Example:
        >>> pack_signs(torch.tensor([1.0, -2.0, 0.0, -0.0, float("nan")])).tolist()
        [13]
    """
    if is_abstract(x):
        return x.new_empty((*x.shape[:-1], -(-x.shape[-1] // 8)), dtype=torch.uint8)
    kernels = codes_for(x) if x.is_floating_point() else reference
    return kernels.pack_signs(x.detach())


def unpack_signs(
    packed: Tensor, numel: int, *, scale: Tensor | float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``scale`` with the signs that :func:`pack_signs` kept.

    Args:
        packed: uint8 ``[..., ceil(numel / 8)]``.
        numel: how many elements a row has.
        scale: the value of a positive sign: one number, or one for each row, ``[...]``. A row whose
            scale is NaN is NaN throughout.
        dtype: of the result.

    Returns:
        ``[..., numel]``: ``scale`` or ``-scale``, rounded to ``dtype`` once.

    Example:
        >>> unpack_signs(torch.tensor([13], dtype=torch.uint8), 5, scale=0.5).tolist()
        [0.5, -0.5, 0.5, 0.5, -0.5]
    """
    if is_abstract(packed):
        return packed.new_empty((*packed.shape[:-1], numel), dtype=dtype)
    scales = torch.as_tensor(scale, dtype=dtype, device=packed.device).expand(packed.shape[:-1])
    readable = dtype.is_floating_point and reads(packed, dtype)
    kernels = codes_for(packed) if readable else reference
    return kernels.unpack_signs(packed, numel, scales)
