"""Numbers in one, four or eight bits, for compressed communication."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfun.ops.triton._base import TILE, as_pointer, launch, load_wide, store_narrow

_TILE = tl.constexpr(TILE)


@triton.jit
def _pack(x, out, numel, num_bytes, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, 8)
    i = byte[:, None] * 8 + place[None, :]
    mask = i < numel
    positive = (load_wide(x + row * numel, i, mask) >= 0) & mask
    tl.store(
        out + row * num_bytes + byte,
        tl.sum(positive.to(tl.int32) << place[None, :], 1).to(tl.uint8),
        mask=byte < num_bytes,
    )


@triton.jit
def _unpack(packed, scales, out, numel, num_bytes, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    bit = (
        tl.load(packed + row * num_bytes + i // 8, mask=mask, other=0).to(tl.int32)
        >> (i % 8).to(tl.int32)
    ) & 1
    scale = load_wide(scales, row, True)
    store_narrow(out + row * numel, i, tl.where(bit == 1, scale, -scale), mask)


@triton.jit
def _code(x, scale, finite):
    # The sum of 12582912 and a number below 2**22 has no bits for a fraction, so the sum is rounded
    # to an integer, ties to even.
    rounded = (tl.div_rn(x, scale) + 12582912.0) - 12582912.0
    return tl.where(finite, rounded, 0.0).to(tl.int32)


@triton.jit
def _quantise(
    rows,
    messages,
    numel,
    row_bytes,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    inside = 2 * pair < BLOCK
    low = block * BLOCK + 2 * pair
    has_low, has_high = inside & (low < numel), inside & (low + 1 < numel)
    a = load_wide(rows + row * numel, low, has_low)
    b = load_wide(rows + row * numel, low + 1, has_high)
    # As integers, numbers without their sign are in order, and those that are not finite above all
    # others.
    sizes = tl.maximum(
        a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    peak = tl.max(sizes, 0)
    finite = peak < 0x7F800000  # type: ignore[operator]
    largest = tl.full((HALF,), 0, tl.int32) + peak
    whole = tl.full((HALF,), (1 << (BITS - 1)) - 1, tl.float32)  # type: ignore[operator]
    step = tl.maximum(
        tl.div_rn(largest.to(tl.float32, bitcast=True), whole), 1.1754943508222875e-38
    )
    step = tl.where(finite, step, float("nan"))
    first = pair == 0
    message = messages + row * row_bytes
    tl.store(message.to(tl.pointer_type(tl.float32)) + block + pair, step, mask=first)
    lower, upper = _code(a, step, finite), _code(b, step, finite)
    target = message + 4 * tl.num_programs(0)
    if BITS == 8:
        tl.store(target + low, (lower & 255).to(tl.uint8), mask=has_low)
        tl.store(target + low + 1, (upper & 255).to(tl.uint8), mask=has_high)
    else:
        tl.store(target + low // 2, ((lower & 15) | ((upper & 15) << 4)).to(tl.uint8), mask=has_low)


@triton.jit
def _sum_codes(scales, codes, out, numel, row_bytes, block, ROWS: tl.constexpr, BITS: tl.constexpr):
    part = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    mask = i < numel
    total = tl.full((_TILE,), 0.0, tl.float32)
    for index in range(ROWS):
        row = part * ROWS + index
        scale = tl.load(scales + row * (row_bytes // 4) + i // block, mask=mask, other=0.0)
        source = codes + row * row_bytes
        if BITS == 8:
            code = tl.load(source + i, mask=mask, other=0).to(tl.int32)
        else:
            nibble = tl.load(source + i // 2, mask=mask, other=0).to(tl.int32) >> (4 * (i % 2)).to(
                tl.int32
            )
            code = ((nibble & 15) ^ 8) - 8
        total += code.to(tl.float32) * scale
    store_narrow(out + part * numel, i, total, mask)


def pack_signs(x: Tensor) -> Tensor:
    numel = x.shape[-1]
    out = torch.empty((*x.shape[:-1], -(-numel // 8)), dtype=torch.uint8, device=x.device)
    if x.numel():
        grid = (triton.cdiv(out.shape[-1], TILE // 8), x.numel() // numel)
        x = x.contiguous()
        launch(_pack, grid, x.device, as_pointer(x), out, numel, out.shape[-1], TILE=TILE // 8)
    return out


def unpack_signs(packed: Tensor, numel: int, scales: Tensor) -> Tensor:
    out = torch.empty((*packed.shape[:-1], numel), dtype=scales.dtype, device=packed.device)
    if out.numel():
        packed, scales = packed.contiguous(), scales.contiguous()
        grid = (triton.cdiv(numel, TILE), out.numel() // numel)
        args = (packed, as_pointer(scales), as_pointer(out), numel, packed.shape[-1])
        launch(_unpack, grid, out.device, *args, TILE=TILE)
    return out


def quantise(rows: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    num_rows, numel = rows.shape
    if not num_rows:
        return
    rows, num_blocks = rows.contiguous(), triton.cdiv(numel, block)
    out[:, 4 * num_blocks + -(-numel * bits // 8) :] = 0
    args = (as_pointer(rows), out, numel, out.shape[1])
    constants = {"BLOCK": block, "HALF": triton.next_power_of_2(block) // 2, "BITS": bits}
    launch(_quantise, (num_blocks, num_rows), out.device, *args, **constants)


def dequantise(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    _read(messages, out, len(messages), 1, bits, block)


def sum_dequantised(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    _read(messages, out, 1, len(messages), bits, block)


def _read(
    messages: Tensor, out: Tensor, num_parts: int, num_rows: int, bits: int, block: int
) -> None:
    if not out.numel():
        return
    numel = out.numel() // num_parts
    codes = messages.view(torch.int8)[:, 4 * triton.cdiv(numel, block) :]
    args = (messages.view(torch.float32), codes, as_pointer(out), numel, messages.shape[1], block)
    grid = (triton.cdiv(numel, TILE), num_parts)
    launch(_sum_codes, grid, out.device, *args, ROWS=num_rows, BITS=bits)
