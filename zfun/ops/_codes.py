"""Numbers in few bits: blocks of integer codes with one scale each, and signs.

[Note: block codes] A row is cut in blocks; the last block may be short. A block has one float32
scale ``s = max(|x|) / q``, where q is 127 for 8 bits and 7 for 4, but no less than the smallest
normal number; a number has the code ``k = round(x / s)``, ties to even, and ``k s`` is read back.
All of it is float32 arithmetic, one IEEE rounding an operation, so every kernel and every rank gets
the same bits.

* Zero comes back as zero, so padding stays zero; the largest number of a block comes back to within
  rounding.
* Every number comes back to within ``s / 2``, which is ``max(|x|) / 254`` or ``max(|x|) / 14`` (and
  2**-127 for numbers as small as that), up to a few roundings of float32. float64 is rounded to
  float32 first.
* The error ``x - k s`` is a float32 number if x is, without any rounding, because k is not 0 only
  where k s is within a factor of two of x.
* A block with a number that is not finite (in float32) has the scale NaN, and comes back as NaN
  throughout: nothing that is not finite ever turns finite on its way. (The other way round,
  float32's largest number may come back infinite.)

A message is the scales of a row and then its codes, padded to whole 32-bit words. Codes are two's
complement; of two 4-bit codes to the byte the first has the low bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun.ops import reference
from zfun.ops._dispatch import codes_for, reads
from zfun.ops._tensors import is_abstract


def message_bytes(numel: int, *, bits: int, block: int) -> int:
    """Return the length of a message: ``4 ceil(numel / block) + 4 ceil(numel bits / 32)``.

    Args:
        numel: how many numbers.
        bits: of a code: 4 or 8.
        block: how many numbers share a scale.

    Returns:
        Bytes.

    Example:
        >>> message_bytes(1024, bits=8, block=256), message_bytes(1024, bits=4, block=256)
        (1040, 528)
    """
    return 4 * -(-numel // block) + 4 * -(-numel * bits // 32)


def quantise(rows: Tensor, *, bits: int, block: int) -> Tensor:
    """Write each row as a message of few bits a number.

    Args:
        rows: ``[m, n]``, floating.
        bits: of a code: 4 or 8.
        block: how many numbers share a scale; even.

    Returns:
        uint8 ``[m, message_bytes(n)]``.

    Example:
        >>> message = quantise(torch.tensor([[1.0, -2.0, 127.0]]), bits=8, block=32)
        >>> message.tolist()  # the scale is 1.0
        [[0, 0, 128, 63, 1, 254, 127, 0]]
        >>> dequantise(message, 3, bits=8, block=32)
        tensor([[  1.,  -2., 127.]])
    """
    rows = rows.detach()
    numel = rows.shape[1]
    out = rows.new_empty(
        rows.shape[0], message_bytes(numel, bits=bits, block=block), dtype=torch.uint8
    )
    if numel == 0 or is_abstract(rows):
        return out
    codes_for(rows).quantise(rows, out, bits=bits, block=block)
    return out


def dequantise(
    messages: Tensor, numel: int, *, bits: int, block: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Read messages that :func:`quantise` wrote.

    Args:
        messages: uint8 ``[m, message_bytes(numel)]``.
        numel: how many numbers each has.
        bits: of a code.
        block: how many numbers share a scale.
        dtype: of the result; float32 is rounded to it once.

    Returns:
        ``[m, numel]``.
    """
    messages = messages.contiguous()
    out = messages.new_empty(messages.shape[0], numel, dtype=dtype)
    if numel == 0 or is_abstract(messages):
        return out
    _reader(messages, dtype).dequantise(messages, out, bits=bits, block=block)
    return out


def sum_dequantised(
    messages: Tensor, numel: int, *, bits: int, block: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Read messages and add them in the order of their rows, in float32 (or float64), rounded once.

    Args:
        messages: uint8 ``[m, message_bytes(numel)]``; at least one.
        numel: how many numbers each has.
        bits: of a code.
        block: how many numbers share a scale.
        dtype: of the result.

    Returns:
        ``[numel]``.

    Example:
        >>> messages = quantise(torch.tensor([[127.0, 1.0], [127.0, 2.0]]), bits=8, block=32)
        >>> sum_dequantised(messages, 2, bits=8, block=32)
        tensor([254.,   3.])
    """
    messages = messages.contiguous()
    out = messages.new_empty(numel, dtype=dtype)
    if numel and not is_abstract(messages):
        _reader(messages, dtype).sum_dequantised(messages, out, bits=bits, block=block)
    return out


def _reader(messages: Tensor, dtype: torch.dtype) -> Any:
    return codes_for(messages) if reads(messages, dtype) else reference


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
