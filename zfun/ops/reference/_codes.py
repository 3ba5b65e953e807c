"""Signs, eight to the byte, and numbers in few bits; see [Note: block codes]."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.ops._tensors import wide
from zfun.ops.reference._sums import sum_in_rank_order

# The smallest normal number of float32: below it a quotient would lose bits, or a device might give
# zero.
_LEAST_SCALE = 2.0**-126


def quantise(rows: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    numel, largest = rows.shape[1], (1 << (bits - 1)) - 1
    padded = torch.nn.functional.pad(rows.float(), (0, -numel % block)).unflatten(1, (-1, block))
    peak = padded.abs().amax(2)
    scale = (peak / largest).clamp(min=_LEAST_SCALE)
    scale = torch.where(torch.isfinite(peak), scale, torch.nan)
    quotient = (padded / scale[:, :, None]).round()
    codes = torch.where(torch.isfinite(scale)[:, :, None], quotient, 0.0).to(torch.int8)
    codes = codes.flatten(1)[:, :numel]
    scales, packed = _parts(out, numel, block)
    scales.copy_(scale)
    tail = packed.shape[1] * 8 // bits - numel
    codes = torch.nn.functional.pad(codes, (0, tail)).view(torch.uint8)
    packed.copy_(codes if bits == 8 else codes[:, ::2] & 15 | codes[:, 1::2] << 4)


def dequantise(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    numel = out.shape[1]
    scales, packed = _parts(messages, numel, block)
    if bits == 4:
        packed = torch.stack([packed << 4, packed & 240], 2).flatten(1)
    codes = packed[:, :numel].contiguous().view(torch.int8).float() / (16 if bits == 4 else 1)
    out.copy_(codes * scales.repeat_interleave(block, 1)[:, :numel])


def sum_dequantised(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    terms = out.new_empty(messages.shape[0], out.numel(), dtype=wide(out.dtype))
    dequantise(messages, terms, bits=bits, block=block)
    total = torch.empty_like(terms[0])
    sum_in_rank_order(list(terms), total)
    out.copy_(total)


def _parts(messages: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    """View messages as their scales and their codes."""
    size = 4 * -(-numel // block)
    if messages.stride(0) % 4 or messages.storage_offset() % 4:  # no place for a float32
        messages = messages.clone(memory_format=torch.contiguous_format)
    return messages[:, :size].view(torch.float32), messages[:, size:]


def pack_signs(x: Tensor) -> Tensor:
    bits = (x >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, numel: int, scales: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    positive = ((packed[..., None] >> places) & 1).flatten(-2)[..., :numel].bool()
    column = scales[..., None]
    return torch.where(positive, column, -column)
