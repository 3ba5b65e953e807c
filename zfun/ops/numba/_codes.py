"""Compiled: signs and block codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops.numba._compile import entry, in_parts, jit

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Elements that must be cast first are cast in pieces that stay in the cache.
_CHUNK = 1 << 16


def _in_pieces(work: Callable[[int, int], None], numel: int, unit: int) -> None:
    """Call ``work(start, end)`` for pieces cut at multiples of ``unit``, over torch's threads."""
    size = -(-_CHUNK // unit) * unit

    def several(begin: int, end: int) -> None:
        first, last = (min(-(-place // unit) * unit, numel) for place in (begin, end))
        for start in range(first, last, size):
            work(start, min(start + size, last))

    in_parts(numel, several)


def _native(x: Tensor) -> Tensor:
    """Widen numbers of half types to float32, which has them all."""
    return x.contiguous() if x.dtype in (torch.float32, torch.float64) else x.float().contiguous()


def pack_signs(x: Tensor) -> Tensor:
    numel = x.shape[-1]
    out = x.new_zeros((*x.shape[:-1], -(-numel // 8)), dtype=torch.uint8)
    if x.numel() == 0:
        return out
    for row, bits in zip(x.reshape(-1, numel), out.view(-1, out.shape[-1]), strict=True):

        def work(start: int, end: int, row: Tensor = row, bits: Tensor = bits) -> None:
            entry(_pack)(_native(row[start:end]).numpy(), bits[start // 8 : -(-end // 8)].numpy())

        _in_pieces(work, numel, 8)
    return out


@jit
def _pack(x: Any, out: Any) -> None:
    whole = x.size // 8
    for i in range(whole):
        j = 8 * i
        byte = np.uint8(x[j] >= 0)
        for k in range(1, 8):
            byte |= np.uint8(x[j + k] >= 0) << np.uint8(k)
        out[i] = byte
    if whole < out.size:
        byte = np.uint8(0)
        for k in range(x.size - 8 * whole):
            byte |= np.uint8(x[8 * whole + k] >= 0) << np.uint8(k)
        out[whole] = byte


def unpack_signs(packed: Tensor, numel: int, scales: Tensor) -> Tensor:
    out = scales.new_empty((*packed.shape[:-1], numel))
    if out.numel() == 0:
        return out
    integers = _INTEGERS[scales.dtype.itemsize]
    values = scales.contiguous().view(integers).reshape(-1)
    # A negative number differs from a positive one in the highest bit alone, whatever the floating
    # type.
    highest = torch.iinfo(integers).min
    rows = zip(
        packed.reshape(-1, packed.shape[-1]),
        out.view(integers).view(-1, numel),
        values,
        strict=True,
    )
    for bits, row, value in rows:
        array, packed_bits, positive = row.numpy(), bits.contiguous().numpy(), int(value.item())
        constants = (array.dtype.type(positive), array.dtype.type(highest ^ positive))

        def work(
            start: int,
            end: int,
            array: Any = array,
            bits: Any = packed_bits,
            constants: tuple[Any, ...] = constants,
        ) -> None:
            entry(_unpack)(array[start:end], bits[start // 8 : -(-end // 8)], *constants)

        _in_pieces(work, numel, 8)
    return out


@jit
def _unpack(out: Any, packed: Any, positive: Any, negative: Any) -> None:
    whole = out.size // 8
    for i in range(whole):
        byte = packed[i]
        for k in range(8):
            out[8 * i + k] = positive if (byte >> k) & 1 else negative
    for k in range(out.size - 8 * whole):
        out[8 * whole + k] = positive if (packed[whole] >> k) & 1 else negative


def quantise(rows: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    numel = rows.shape[1]
    for row, message in zip(rows, out, strict=True):
        scales, codes = _parts(message, numel, block)
        codes[-(-numel * bits // 8) :] = 0

        def work(
            start: int, end: int, row: Tensor = row, scales: Any = scales, codes: Any = codes
        ) -> None:
            values = row[start:end].float().contiguous().numpy()
            scale, code = scales[start // block : -(-end // block)], codes[start * bits // 8 :]
            entry(_scales)(
                values, values.view(np.int32), scale, block, np.float32((1 << (bits - 1)) - 1)
            )
            entry(_codes8 if bits == 8 else _codes4)(values, scale, code, block)

        _in_pieces(work, numel, block)


@jit
def _scales(x: Any, word: Any, scales: Any, block: Any, largest_code: Any) -> None:
    for b in range(scales.size):
        start, end = b * block, min((b + 1) * block, x.size)
        # As integers, numbers without their sign are in order, and those that are not finite above
        # all others.
        peak = np.int32(0)
        for i in range(start, end):
            peak = max(peak, word[i] & np.int32(0x7FFFFFFF))
        if peak >= np.int32(0x7F800000):
            scales[b] = np.float32(np.nan)
            continue
        largest = np.float32(0)
        for i in range(start, end):
            largest = max(largest, abs(x[i]))
        scales[b] = max(largest / largest_code, np.float32(2.0**-126))


@jit
def _codes8(x: Any, scales: Any, codes: Any, block: Any) -> None:
    # Its sum with a number below 2**22 has no bits for a fraction, so the sum is rounded to an
    # integer, ties to even.
    magic = np.float32(12582912.0)
    for b in range(scales.size):
        start, end, scale = b * block, min((b + 1) * block, x.size), scales[b]
        if np.isnan(scale):
            codes[start:end] = np.int8(0)
        else:
            for i in range(start, end):
                codes[i] = np.int8(np.int32((x[i] / scale + magic) - magic))


@jit
def _codes4(x: Any, scales: Any, codes: Any, block: Any) -> None:
    magic = np.float32(12582912.0)
    for b in range(scales.size):
        start, end, scale = b * block, min((b + 1) * block, x.size), scales[b]
        if np.isnan(scale):
            codes[start // 2 : (end + 1) // 2] = np.int8(0)
            continue
        for i in range(start // 2, end // 2):
            low = np.int32((x[2 * i] / scale + magic) - magic)
            high = np.int32((x[2 * i + 1] / scale + magic) - magic)
            codes[i] = np.int8((low & np.int32(15)) | (high << np.int32(4)))
        if end % 2:
            codes[end // 2] = np.int8(np.int32((x[end - 1] / scale + magic) - magic) & np.int32(15))


def dequantise(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    for message, row in zip(messages, out, strict=True):
        sum_dequantised(message[None], row, bits=bits, block=block)


def sum_dequantised(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    parts = [_parts(message, out.numel(), block) for message in messages]

    def work(start: int, end: int) -> None:
        # A piece stays in the cache while the messages are added: each is read once, and the sum is
        # written once.
        piece = out[start:end]
        is_wide = piece.dtype in (torch.float32, torch.float64)
        total = piece if is_wide else torch.empty_like(piece, dtype=torch.float32)
        for index, (scales, codes) in enumerate(parts):
            arrays = (total.numpy(), scales[start // block :], codes[start * bits // 8 :])
            entry(_read8 if bits == 8 else _read4)(*arrays, block, index > 0)
        if total is not piece:
            piece.copy_(total)

    _in_pieces(work, out.numel(), block)


@jit
def _read8(out: Any, scales: Any, codes: Any, block: Any, add: Any) -> None:
    for start in range(0, out.size, block):
        scale, end = scales[start // block], min(start + block, out.size)
        if add:
            for i in range(start, end):
                out[i] += np.float32(codes[i]) * scale
        else:
            for i in range(start, end):
                out[i] = np.float32(codes[i]) * scale


@jit
def _read4(out: Any, scales: Any, codes: Any, block: Any, add: Any) -> None:
    for start in range(0, out.size, block):
        scale, end = scales[start // block], min(start + block, out.size)
        # Four bits of two's complement c are the number (c ^ 8) - 8.
        if add:
            for i in range(start // 2, end // 2):
                code = np.int32(codes[i])
                out[2 * i] += np.float32(((code & 15) ^ 8) - 8) * scale
                out[2 * i + 1] += np.float32(code >> np.int32(4)) * scale
            if end % 2:
                out[end - 1] += np.float32(((np.int32(codes[end // 2]) & 15) ^ 8) - 8) * scale
        else:
            for i in range(start // 2, end // 2):
                code = np.int32(codes[i])
                out[2 * i] = np.float32(((code & 15) ^ 8) - 8) * scale
                out[2 * i + 1] = np.float32(code >> np.int32(4)) * scale
            if end % 2:
                out[end - 1] = np.float32(((np.int32(codes[end // 2]) & 15) ^ 8) - 8) * scale


def _parts(message: Tensor, numel: int, block: int) -> tuple[Any, Any]:
    """View a message as its scales and its codes."""
    data = message.numpy()
    size = 4 * -(-numel // block)
    return data[:size].view(np.float32), data[size:].view(np.int8)
