"""For CUDA devices: kernels in Triton, which torch's CUDA wheels bring.

[Note: Triton kernels]
They are compiled for sm_80 and sm_90 and run in Triton's interpreter by the tests, where they give the bits of the readable forms; what
Adam and Adagrad make of the parameters, with a root and a quotient in it, is within two units in the last place and as much of the step.
**They have not been run on a GPU yet.**

One launch does a bucket, on torch's current stream. Products and sums are fused where the other forms have ``fma``, and nowhere else
(``enable_fp_fusion=False``), and quotients and roots are the rounded ones, so that a number has the same bits on every device: such kernels
wait for memory, not for arithmetic. bfloat16 travels as integers and is rounded by hand, to nearest and ties to even, because the
interpreter cuts it off. float64 is left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfun.ops._norm import LIMBS, LOWEST

__all__ = [
    "dequantise",
    "pack_signs",
    "quantise",
    "ravel_into",
    "squares_in_bins",
    "step",
    "sum_dequantised",
    "unpack_signs",
    "unravel_from",
]

_TILE = 1024
_UNITS = 128  # of 32 elements
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def takes(*tensors: Tensor) -> bool:
    """Whether all of some tensors are contiguous and of a dtype that the kernels know."""
    return all(x.dtype in _FLOATS and x.layout == torch.strided and x.is_contiguous() and not x.is_neg() for x in tensors)


def _pointer(x: Tensor) -> Tensor:
    """A tensor as a kernel takes it."""
    return x.detach().view(torch.int16) if x.dtype == torch.bfloat16 else x.detach()


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    if device.type != "cuda":  # the interpreter
        kernel[grid](*args, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **constants, enable_fp_fusion=False)


@triton.jit
def _widen(pointer, places, mask, BF16: tl.constexpr):
    raw = tl.load(pointer + places, mask=mask, other=0)
    if BF16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def _narrow(pointer, places, x, mask, BF16: tl.constexpr):
    if BF16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer + places, tl.where(x != x, 0x7FC0, rounded).to(tl.int16), mask=mask)
    else:
        tl.store(pointer + places, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _pack(x, out, numel, num_bytes, TILE: tl.constexpr, BF16: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, 8)
    i = byte[:, None] * 8 + place[None, :]
    mask = i < numel
    positive = (_widen(x + row * numel, i, mask, BF16) >= 0) & mask
    tl.store(out + row * num_bytes + byte, tl.sum(positive.to(tl.int32) << place[None, :], 1).to(tl.uint8), mask=byte < num_bytes)


@triton.jit
def _unpack(packed, scales, out, numel, num_bytes, TILE: tl.constexpr, BF16: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    bit = (tl.load(packed + row * num_bytes + i // 8, mask=mask, other=0).to(tl.int32) >> (i % 8).to(tl.int32)) & 1
    scale = _widen(scales, row, True, BF16)
    _narrow(out + row * numel, i, tl.where(bit == 1, scale, -scale), mask, BF16)


@triton.jit
def _code(x, scale, finite):
    # Added to a number of less than 2**22, it leaves no room for a fraction: the sum is rounded to an integer, ties to even.
    rounded = (tl.div_rn(x, scale) + 12582912.0) - 12582912.0
    return tl.where(finite, rounded, 0.0).to(tl.int32)


@triton.jit
def _quantise(
    rows,
    scales,
    codes,
    numel,
    row_bytes,
    scale_bytes,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    BF16: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    inside = 2 * pair < BLOCK
    low = block * BLOCK + 2 * pair
    has_low, has_high = inside & (low < numel), inside & (low + 1 < numel)
    a = _widen(rows + row * numel, low, has_low, BF16)
    b = _widen(rows + row * numel, low + 1, has_high, BF16)
    # As integers, numbers without their sign are in order, and those that are not finite above all others.
    sizes = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    peak = tl.max(sizes, 0)
    finite = peak < 0x7F800000  # type: ignore[operator]
    largest = tl.full((HALF,), 0, tl.int32) + peak
    whole = tl.full((HALF,), (1 << (BITS - 1)) - 1, tl.float32)  # type: ignore[operator]
    step = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), whole), 1.1754943508222875e-38)
    step = tl.where(finite, step, float("nan"))
    first = pair == 0
    tl.store(scales + row * (row_bytes // 4) + block + pair, step, mask=first)
    lower, upper = _code(a, step, finite), _code(b, step, finite)
    target = codes + row * row_bytes + scale_bytes
    if BITS == 8:
        tl.store(target + low, (lower & 255).to(tl.uint8), mask=has_low)
        tl.store(target + low + 1, (upper & 255).to(tl.uint8), mask=has_high)
    else:
        tl.store(target + low // 2, ((lower & 15) | ((upper & 15) << 4)).to(tl.uint8), mask=has_low)


@triton.jit
def _sum_codes(
    scales,
    codes,
    out,
    numel,
    row_bytes,
    scale_bytes,
    block,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    BF16: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    total = tl.full((TILE,), 0.0, tl.float32)
    for index in range(ROWS):
        row = part * ROWS + index
        scale = tl.load(scales + row * (row_bytes // 4) + i // block, mask=mask, other=0.0)
        source = codes + row * row_bytes + scale_bytes
        if BITS == 8:
            code = tl.load(source + i, mask=mask, other=0).to(tl.int32)
        else:
            nibble = tl.load(source + i // 2, mask=mask, other=0).to(tl.int32) >> (4 * (i % 2)).to(tl.int32)
            code = ((nibble & 15) ^ 8) - 8
        total += code.to(tl.float32) * scale
    _narrow(out + part * numel, i, total, mask, BF16)


@triton.jit
def _ravel(addresses, tiles, out, scale, TILE: tl.constexpr, SCALED: tl.constexpr, IN_BF16: tl.constexpr, BF16: tl.constexpr, like):
    tile = tiles + tl.program_id(0) * 4
    start, length, piece, local = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    i = tl.arange(0, TILE)
    source = tl.load(addresses + tl.maximum(piece, 0)).to(like.dtype)
    x = _widen(source + local, i, i < tl.where(piece >= 0, length, 0), IN_BF16)
    if SCALED:
        x = tl.where(piece >= 0, x * scale, 0.0)
    _narrow(out + start, i, x, i < length, BF16)


@triton.jit
def _unravel(addresses, tiles, source, TILE: tl.constexpr, IN_BF16: tl.constexpr, BF16: tl.constexpr, like):
    tile = tiles + tl.program_id(0) * 4
    start, length, piece, local = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    i = tl.arange(0, TILE)
    target = tl.load(addresses + tl.maximum(piece, 0)).to(like.dtype)
    mask = i < tl.where(piece >= 0, length, 0)
    _narrow(target + local, i, _widen(source + start, i, mask, IN_BF16), mask, BF16)


@triton.jit
def _start_step(param, grad, factor, scale, l2, i, mask, L2: tl.constexpr, FMA: tl.constexpr, BF16: tl.constexpr):
    p = tl.load(param + i, mask=mask, other=0.0)
    g = _widen(grad, i, mask, BF16)
    if factor is not None:
        g = g * tl.load(factor)
    else:
        g = g * scale
    if L2:
        g = tl.fma(p, l2, g) if FMA else g + p * l2
    return p, g


@triton.jit
def _end_step(param, change, out, p, new, delta, i, mask, BF16: tl.constexpr):
    if change is not None:
        tl.store(change + i, delta, mask=mask)
    else:
        tl.store(param + i, new, mask=mask)
        if out is not None:
            _narrow(out, i, new, mask, BF16)


@triton.jit
def _adam(
    param, grad, mu, nu, change, out, factor, numel, scale, weight, b2, rest2, step, eps, l2, keep, correction,
    TILE: tl.constexpr, NEAR: tl.constexpr, L2: tl.constexpr, DECAY: tl.constexpr, BF16: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    p, g = _start_step(param, grad, factor, scale, l2, i, mask, L2, True, BF16)  # type: ignore[arg-type]
    m = tl.load(mu + i, mask=mask, other=0.0)
    v = tl.load(nu + i, mask=mask, other=0.0)
    m = tl.fma(g - m, weight, m if NEAR else g)
    v = tl.fma(g * rest2, g, v * b2)
    tl.store(mu + i, m, mask=mask)
    tl.store(nu + i, v, mask=mask)
    u = tl.div_rn(m * step, tl.div_rn(tl.sqrt_rn(v), correction + tl.full((TILE,), 0.0, tl.float32)) + eps)
    if DECAY:
        new = u + p * keep
        _end_step(param, change, out, p, new, new - p, i, mask, OUT_BF16)
    else:
        _end_step(param, change, out, p, p + u, u, i, mask, OUT_BF16)


@triton.jit
def _sgd(
    param, grad, velocity, change, out, factor, numel, scale, step, momentum, l2,
    TILE: tl.constexpr, NESTEROV: tl.constexpr, L2: tl.constexpr, BF16: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    p, g = _start_step(param, grad, factor, scale, l2, i, mask, L2, False, BF16)  # type: ignore[arg-type]
    if velocity is not None:
        b = tl.load(velocity + i, mask=mask, other=0.0) * momentum + g
        tl.store(velocity + i, b, mask=mask)
        if NESTEROV:
            g = g + b * momentum
        else:
            g = b
    u = g * step
    _end_step(param, change, out, p, p + u, u, i, mask, OUT_BF16)


@triton.jit
def _lion(
    param, grad, mu, change, out, factor, numel, scale, b1, rest1, b2, rest2, step, decay,
    TILE: tl.constexpr, DECAY: tl.constexpr, BF16: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    p, g = _start_step(param, grad, factor, scale, 0.0, i, mask, False, False, BF16)  # type: ignore[arg-type]
    m = tl.load(mu + i, mask=mask, other=0.0)
    towards = m * b1 + g * rest1
    u = tl.where(towards > 0, 1.0, tl.where(towards < 0, -1.0, 0.0)) * step
    if DECAY:
        u = u + p * decay
    tl.store(mu + i, m * b2 + g * rest2, mask=mask)
    _end_step(param, change, out, p, p + u, u, i, mask, OUT_BF16)


@triton.jit
def _adagrad(
    param, grad, total, change, out, factor, numel, scale, step, eps, l2,
    TILE: tl.constexpr, L2: tl.constexpr, BF16: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < numel
    p, g = _start_step(param, grad, factor, scale, l2, i, mask, L2, False, BF16)  # type: ignore[arg-type]
    s = tl.load(total + i, mask=mask, other=0.0) + g * g
    tl.store(total + i, s, mask=mask)
    u = tl.div_rn(g, tl.sqrt_rn(s) + eps) * step
    _end_step(param, change, out, p, p + u, u, i, mask, OUT_BF16)


@triton.jit
def _squares(x, row, special, numel, scale, UNITS: tl.constexpr, LIFT: tl.constexpr, SCALED: tl.constexpr, BF16: tl.constexpr):
    # Eight sums of the squares of 32 elements, as [Note: exact sums] has them, are cut in digits of 32 bits, which are added as integers.
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    i = unit[:, None] * 32 + tl.arange(0, 8)[None, :]
    a, b = _square(x, i, numel, scale, SCALED, BF16), _square(x, i + 8, numel, scale, SCALED, BF16)
    c, d = _square(x, i + 16, numel, scale, SCALED, BF16), _square(x, i + 24, numel, scale, SCALED, BF16)
    total = (a + c) + (b + d)
    raw = total.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    exponent = raw >> 52
    finite = exponent < 2047
    if tl.max(exponent) == 2047:  # type: ignore[operator]
        tl.atomic_add(special, tl.sum(tl.where(finite, 0.0, total)))
    digits = tl.where(exponent > 0, (raw & 0xFFFFFFFFFFFFF) | 0x10000000000000, raw)
    digits = tl.where(finite, digits, 0)
    place = tl.maximum(exponent, 1) + LIFT
    limb, shift = place // 32, place % 32
    lower, upper = (digits & 0xFFFFFFFF) << shift, (digits >> 32) << shift
    first, second, third = lower & 0xFFFFFFFF, (lower >> 32) + (upper & 0xFFFFFFFF), upper >> 32
    used = digits > 0
    # Not a range: what is known only at run time ends none in the interpreter of Triton 3.6, which is that of torch 2.11.
    k = tl.min(tl.where(used, limb, 1 << 20))
    highest = tl.max(tl.where(used, limb, -3)) + 2  # type: ignore[operator]
    while k <= highest:  # type: ignore[operator]
        part = tl.where(limb == k, first, 0) + tl.where(limb + 1 == k, second, 0) + tl.where(limb + 2 == k, third, 0)
        tl.atomic_add(row + k, tl.sum(part))
        k += 1  # type: ignore[operator]


@triton.jit
def _square(x, i, numel, scale, SCALED: tl.constexpr, BF16: tl.constexpr):
    value = _widen(x, i, i < numel, BF16)
    if SCALED:
        value = value * scale
    return value.to(tl.float64) * value.to(tl.float64)


def squares_in_bins(x: Tensor, scale: float = 1.0) -> Tensor:
    """The exact sum of the squares of a vector, each times a factor in float32; all elements are finite where the last entry is 0."""
    row = torch.zeros(LIMBS + 1, dtype=torch.int64, device=x.device)
    args = (_pointer(x), row, row[LIMBS:].view(torch.float64), x.numel(), scale)
    flags = {"UNITS": _UNITS, "LIFT": -1075 - LOWEST, "SCALED": scale != 1.0, "BF16": _is_bf16(x)}
    if x.numel():
        _launch(_squares, (triton.cdiv(x.numel(), 32 * _UNITS),), x.device, *args, **flags)
    return row


def pack_signs(x: Tensor) -> Tensor:
    numel = x.shape[-1]
    out = torch.empty((*x.shape[:-1], -(-numel // 8)), dtype=torch.uint8, device=x.device)
    if x.numel():
        grid = (triton.cdiv(out.shape[-1], _TILE // 8), x.numel() // numel)
        x = x.contiguous()
        _launch(_pack, grid, x.device, _pointer(x), out, numel, out.shape[-1], TILE=_TILE // 8, BF16=_is_bf16(x))
    return out


def unpack_signs(packed: Tensor, numel: int, scales: Tensor) -> Tensor:
    out = torch.empty((*packed.shape[:-1], numel), dtype=scales.dtype, device=packed.device)
    if out.numel():
        packed, scales = packed.contiguous(), scales.contiguous()
        grid = (triton.cdiv(numel, _TILE), out.numel() // numel)
        args = (packed, _pointer(scales), _pointer(out), numel, packed.shape[-1])
        _launch(_unpack, grid, out.device, *args, TILE=_TILE, BF16=_is_bf16(out))
    return out


def quantise(rows: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    num_rows, numel = rows.shape
    if not num_rows:
        return
    rows, num_blocks = rows.contiguous(), triton.cdiv(numel, block)
    out[:, 4 * num_blocks + -(-numel * bits // 8) :] = 0
    args = (_pointer(rows), out.view(torch.float32), out, numel, out.shape[1], 4 * num_blocks)
    half = triton.next_power_of_2(block) // 2
    _launch(_quantise, (num_blocks, num_rows), out.device, *args, BLOCK=block, HALF=half, BITS=bits, BF16=_is_bf16(rows))


def dequantise(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    _read(messages, out, len(messages), 1, bits, block)


def sum_dequantised(messages: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    _read(messages, out, 1, len(messages), bits, block)


def _read(messages: Tensor, out: Tensor, num_parts: int, num_rows: int, bits: int, block: int) -> None:
    if not out.numel():
        return
    messages, numel = messages.contiguous(), out.numel() // num_parts
    args = (messages.view(torch.float32), messages.view(torch.int8), _pointer(out), numel, messages.shape[1])
    constants = {"ROWS": num_rows, "TILE": _TILE, "BITS": bits, "BF16": _is_bf16(out)}
    _launch(_sum_codes, (triton.cdiv(numel, _TILE), num_parts), out.device, *args, 4 * triton.cdiv(numel, block), block, **constants)


@functools.lru_cache(maxsize=1024)
def _tiles(places: tuple[tuple[int, int, int], ...], numel: int, device: torch.device) -> Tensor:
    """Cut a buffer in tiles that lie in one piece each, or in none: int64 rows of start, length, piece or -1, and place in the piece."""
    rows: list[tuple[int, int, int, int]] = []

    def cut(start: int, end: int, piece: int) -> None:
        rows.extend((at, min(_TILE, end - at), piece, at - start if piece >= 0 else 0) for at in range(start, end, _TILE))

    end = 0
    for piece, offset, length in places:
        cut(end, offset, -1)
        cut(offset, offset + length, piece)
        end = offset + length
    cut(end, numel, -1)
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device)


@functools.lru_cache(maxsize=4096)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device)


def _table(tensors: Sequence[Tensor | None], offsets: Sequence[int], buffer: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where tensors lie, as kernels take it, and one of them; None where they are not for one kernel."""
    present = [(x, offset) for x, offset in zip(tensors, offsets, strict=True) if x is not None and x.numel()]
    if not present or not takes(buffer, *(x for x, _ in present)) or {x.device for x, _ in present} != {buffer.device}:
        return None
    places = tuple((piece, offset, x.numel()) for piece, (x, offset) in enumerate(present))
    ends = [0, *(offset + length for _, offset, length in places)]
    starts = [*(offset for _, offset, _ in places), buffer.numel()]
    if len({x.dtype for x, _ in present}) > 1 or any(end > start for end, start in zip(ends, starts, strict=True)):
        return None
    addresses = _addresses(tuple(x.data_ptr() for x, _ in present), buffer.device)
    return addresses, _tiles(places, buffer.numel(), buffer.device), present[0][0]


def ravel_into(out: Tensor, tensors: Sequence[Tensor | None], offsets: Sequence[int], scale: float) -> bool:
    """Write a buffer, zeros in between too; whether it was done."""
    table = _table(tensors, offsets, out)
    if table is None:
        return False
    addresses, tiles, like = table
    flags = {"SCALED": scale != 1.0, "IN_BF16": _is_bf16(like), "BF16": _is_bf16(out)}
    _launch(_ravel, (len(tiles),), out.device, addresses, tiles, _pointer(out), scale, TILE=_TILE, **flags, like=_pointer(like))
    torch.autograd.graph.increment_version(out)
    return True


def unravel_from(source: Tensor, tensors: Sequence[Tensor | None], offsets: Sequence[int]) -> bool:
    """Copy the pieces of a buffer to tensors; whether it was done."""
    table = _table(tensors, offsets, source)
    if table is None:
        return False
    addresses, tiles, like = table
    flags = {"IN_BF16": _is_bf16(source), "BF16": _is_bf16(like)}
    _launch(_unravel, (len(tiles),), source.device, addresses, tiles, _pointer(source), TILE=_TILE, **flags, like=_pointer(like))
    torch.autograd.graph.increment_version([x for x in tensors if x is not None])
    return True


def step(
    rule: str,
    param: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    change: Tensor | None,
    out: Tensor | None,
    scale: float | Tensor,
    constants: Mapping[str, float],
) -> bool:
    """Take a step of a rule; whether there is a kernel for it, and for float32 parameters and moments."""
    held = [param, *moments, *(() if change is None else (change,))]
    if rule not in _RULES or any(x.dtype != torch.float32 for x in held) or not takes(*held, grad, *(() if out is None else (out,))):
        return False
    kernel, numbers, flags = _RULES[rule](dict(constants))
    velocity = (None,) if rule == "plain_sgd" else ()
    # A factor that lives on the device is read there: the host need not wait for it.
    factor = scale.to(device=param.device, dtype=torch.float32) if isinstance(scale, Tensor) else None
    number = 1.0 if isinstance(scale, Tensor) else scale
    buffers = [param, grad, *moments, *velocity, change, out, factor]
    pointers = [None if x is None else _pointer(x) for x in buffers]
    flags = {**flags, "BF16": _is_bf16(grad), "OUT_BF16": out is not None and _is_bf16(out)}
    numel = param.numel()
    if numel:
        _launch(kernel, (triton.cdiv(numel, _TILE),), param.device, *pointers, numel, number, *numbers, TILE=_TILE, **flags)
    written = [*moments, *([change] if change is not None else [param] if out is None else [param, out])]
    torch.autograd.graph.increment_version(written)
    return True


def _adam_numbers(c: dict[str, float]) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
    weight = 1.0 - c["b1"]
    near = weight < 0.5
    rest2, keep = 1.0 - c["b2"], 1.0 - c["decay"]
    numbers = (weight if near else weight - 1.0, c["b2"], rest2, -c["step_size"], c["eps"], c["l2"], keep, c["correction"])
    return _adam, numbers, {"NEAR": near, "L2": c["l2"] != 0.0, "DECAY": c["decay"] != 0.0}


def _sgd_numbers(c: dict[str, float]) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
    return _sgd, (-c["learning_rate"], c["momentum"], c["l2"]), {"NESTEROV": bool(c["nesterov"]), "L2": c["l2"] != 0.0}


def _lion_numbers(c: dict[str, float]) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
    numbers = (c["b1"], 1.0 - c["b1"], c["b2"], 1.0 - c["b2"], -c["learning_rate"], -c["decay"])
    return _lion, numbers, {"DECAY": c["decay"] != 0.0}


def _adagrad_numbers(c: dict[str, float]) -> tuple[Any, tuple[float, ...], dict[str, bool]]:
    return _adagrad, (-c["learning_rate"], c["eps"], c["l2"]), {"L2": c["l2"] != 0.0}


_RULES: dict[str, Any] = {
    "adam": _adam_numbers,
    "sgd": _sgd_numbers,
    "plain_sgd": _sgd_numbers,
    "lion": _lion_numbers,
    "adagrad": _adagrad_numbers,
}
