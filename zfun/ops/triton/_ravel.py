"""Many tensors to one buffer, in one launch.

A tile of the buffer lies in one tensor, or in none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfun.ops.triton._base import TILE, as_pointer, launch, load_wide, number, store_narrow, takes


@triton.jit
def _ravel(
    addresses,
    tiles,
    out,
    scale,
    TILE: tl.constexpr,
    READS: tl.constexpr,
    ALIGNED: tl.constexpr,
    like,
):
    tile = tiles + tl.program_id(0) * 4
    start, length, piece, local = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
    )
    i = tl.arange(0, TILE)
    address = tl.load(addresses + tl.maximum(piece, 0))
    source = address.to(like.dtype) + local
    target = out + start
    whole = (piece >= 0) & _is_whole(address, local, like, start, out, length, TILE)
    if ALIGNED and whole:
        x = load_wide(tl.multiple_of(source, 16), i, i < TILE)
        if scale is not None:
            x = x * number(scale, READS)
        store_narrow(tl.multiple_of(target, 16), i, x, i < TILE)
    else:
        x = load_wide(source, i, i < tl.where(piece >= 0, length, 0))
        if scale is not None:
            x = tl.where(piece >= 0, x * number(scale, READS), 0.0)
        store_narrow(target, i, x, i < length)


@triton.jit
def _is_whole(address, local, like, start, buffer, length, TILE: tl.constexpr):
    """Whether a tile is full and begins at multiples of 16 bytes: threads move 16 bytes at once."""
    item: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    buffer_item: tl.constexpr = buffer.dtype.element_ty.primitive_bitwidth // 8
    places = (address + local * item) | (start * buffer_item)
    return (length == TILE) & (places % 16 == 0)


@functools.lru_cache(maxsize=1024)
def _tiles(places: tuple[tuple[int, int, int], ...], numel: int, device: torch.device) -> Tensor:
    """Cut a buffer in tiles that lie in one piece each, or in none.

    The rows are int64: start, length, piece or -1, and place in the piece.
    """
    rows: list[tuple[int, int, int, int]] = []

    def cut(start: int, end: int, piece: int) -> None:
        rows.extend(
            (at, min(TILE, end - at), piece, at - start if piece >= 0 else 0)
            for at in range(start, end, TILE)
        )

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


def _table(
    tensors: Sequence[Tensor | None], offsets: Sequence[int], buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return addresses, tiles and one tensor; None where no kernel takes the tensors."""
    present = [
        (x, offset)
        for x, offset in zip(tensors, offsets, strict=True)
        if x is not None and x.numel()
    ]
    if (
        not present
        or not takes(buffer, *(x for x, _ in present))
        or {x.device for x, _ in present} != {buffer.device}
    ):
        return None
    places = tuple((piece, offset, x.numel()) for piece, (x, offset) in enumerate(present))
    ends = [0, *(offset + length for _, offset, length in places)]
    starts = [*(offset for _, offset, _ in places), buffer.numel()]
    if len({x.dtype for x, _ in present}) > 1 or any(
        end > start for end, start in zip(ends, starts, strict=True)
    ):
        return None
    addresses = _addresses(tuple(x.data_ptr() for x, _ in present), buffer.device)
    return addresses, _tiles(places, buffer.numel(), buffer.device), present[0][0]


def _is_aligned(buffer: Tensor) -> bool:
    return buffer.data_ptr() % 16 == 0


def ravel_into(
    out: Tensor,
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    scale: float | Tensor,
) -> bool:
    """Write a buffer, zeros in between too; whether it was done."""
    table = _table(tensors, offsets, out)
    if table is None:
        return False
    addresses, tiles, like = table
    if isinstance(scale, Tensor):
        factor = scale.to(torch.float32)
    else:
        factor = None if scale == 1.0 else scale
    launch(
        _ravel,
        (len(tiles),),
        out.device,
        addresses,
        tiles,
        as_pointer(out),
        factor,
        TILE=TILE,
        READS=isinstance(scale, Tensor),
        ALIGNED=_is_aligned(out),
        like=as_pointer(like),
    )
    torch.autograd.graph.increment_version(out)
    return True
