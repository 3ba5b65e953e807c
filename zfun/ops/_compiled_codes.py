"""Signs and block codes on CPUs; see [Note: compiled kernels] and [Note: twins]."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _compiled

__all__ = ["pack_signs", "unpack_signs"]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# What has to be cast first is cast in pieces that stay in the cache.
_CHUNK = 1 << 16


@functools.cache
def _kernel(source: Callable[..., None]) -> Callable[..., None]:
    import numba
    from numba.core.errors import NumbaPerformanceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy")(source)
        except RuntimeError:  # neither the package's folder nor a cache folder of the user can be written
            return numba.njit(nogil=True, error_model="numpy")(source)


def _run(source: Callable[..., None], arrays: list[Any], strides: list[int], length: int, unit: int, constants: tuple[Any, ...]) -> None:
    """Run a kernel over ``length`` elements, cut at multiples of ``unit`` over torch's number of threads.

    Array k has ``unit / strides[k]`` elements for each unit.
    """
    kernel = _kernel(source)
    num_threads = min(torch.get_num_threads(), length // _compiled._MIN_PER_THREAD)
    if num_threads < 2:
        kernel(*arrays, *constants)
        return
    step = -(-length // num_threads // unit) * unit
    parts = [
        [array[start // stride : -(-min(start + step, length) // stride)] for array, stride in zip(arrays, strides, strict=True)]
        for start in range(0, length, step)
    ]
    waiting = [_compiled._pool(num_threads).submit(kernel, *part, *constants) for part in parts[1:]]
    kernel(*parts[0], *constants)
    for future in waiting:
        future.result()


def _native(x: Tensor) -> Tensor:
    """Widen what the machine has no numbers for; every half is a float32 too."""
    return x.contiguous() if x.dtype in (torch.float32, torch.float64) else x.float().contiguous()


def pack_signs(x: Tensor) -> Tensor:
    numel = x.shape[-1]
    out = torch.zeros((*x.shape[:-1], -(-numel // 8)), dtype=torch.uint8)
    if x.numel() == 0:
        return out
    for row, bits in zip(x.reshape(-1, numel), out.view(-1, out.shape[-1]), strict=True):
        size = numel if row.dtype in (torch.float32, torch.float64) else _CHUNK
        for piece, target in zip(row.split(size), bits.split(-(-size // 8)), strict=True):
            _run(_pack, [_native(piece).numpy(), target.numpy()], [1, 8], piece.numel(), 64, ())
    return out


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
    out = torch.empty((*packed.shape[:-1], numel), dtype=scales.dtype)
    if out.numel() == 0:
        return out
    integers = _INTEGERS[scales.dtype.itemsize]
    values = scales.contiguous().view(integers).reshape(-1)
    # A negative number differs from a positive one in the highest bit alone, whatever the floating type.
    highest = torch.iinfo(integers).min
    rows = zip(packed.reshape(-1, packed.shape[-1]), out.view(integers).view(-1, numel), values, strict=True)
    for bits, row, value in rows:
        array = row.numpy()
        positive = int(value.item())
        constants = (array.dtype.type(positive), array.dtype.type(highest ^ positive))
        _run(_unpack, [array, bits.contiguous().numpy()], [1, 8], numel, 64, constants)
    return out


def _unpack(out: Any, packed: Any, positive: Any, negative: Any) -> None:
    whole = out.size // 8
    for i in range(whole):
        byte = packed[i]
        for k in range(8):
            out[8 * i + k] = positive if (byte >> k) & 1 else negative
    for k in range(out.size - 8 * whole):
        out[8 * whole + k] = positive if (packed[whole] >> k) & 1 else negative
