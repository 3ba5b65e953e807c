"""Leaves to a flat buffer and back, and what is read off a buffer in the same breath."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.ops import _compiled
from zfun.ops._optimizers import is_abstract

# Below this a copy costs less than its dispatch.
_SMALL = 1 << 12

# A chunk of this many elements stays in the cache while it is widened to float64.
_CHUNK = 1 << 18


def ravel(
    tensors: Sequence[Tensor | None],
    offsets: Sequence[int],
    numel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scale: float = 1.0,
) -> Tensor:
    """Copy tensors into one new zero-padded buffer.

    Args:
        tensors: what to copy, of any shape; ``None`` leaves its place zero.
        offsets: where each begins, in elements of the buffer.
        numel: length of the buffer, in elements.
        dtype: dtype of the buffer; tensors are cast to it. A complex tensor is written as pairs of real numbers.
        device: where the buffer lives.
        scale: factor applied to every element after the cast.

    Returns:
        The 1-D buffer; what no tensor covers is zero.

    Example:
        >>> ravel([torch.ones(2), None, torch.ones(1)], [0, 2, 4], 6, dtype=torch.float32, device=torch.device("cpu"), scale=0.5)
        tensor([0.5000, 0.5000, 0.0000, 0.0000, 0.5000, 0.0000])
    """
    out = torch.empty(numel, dtype=dtype, device=device)
    sources: list[Tensor] = []
    lengths: list[int] = []  # of what is copied and of the gaps, by turns
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor is None or tensor.numel() == 0:
            continue
        source = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        sources.append(source)
        lengths += [offset - end, source.numel()]
        end = offset + source.numel()
    # One call makes all the views; each by itself would cost more than to copy a small tensor.
    pieces = out.split([*lengths, numel - end])
    gaps = [gap for gap in pieces[::2] if gap.numel()]
    targets = [piece.view(source.shape) for piece, source in zip(pieces[1::2], sources, strict=True)]
    if len(gaps) > _SMALL // 64 and numel < _CHUNK:
        out.zero_()
    elif gaps:
        torch._foreach_zero_(gaps)
    large = [i for i, source in enumerate(sources) if source.numel() >= _SMALL]
    small = [i for i, source in enumerate(sources) if source.numel() < _SMALL]
    for i in large:
        if sources[i].dtype == dtype and scale != 1.0:
            torch.mul(sources[i], scale, out=targets[i])
        else:
            targets[i].copy_(sources[i])
            if scale != 1.0:
                targets[i].mul_(scale)
    if small:
        few = [targets[i] for i in small]
        torch._foreach_copy_(few, [sources[i] for i in small])
        if scale != 1.0 and large:
            torch._foreach_mul_(few, scale)
        elif scale != 1.0:
            out.mul_(scale)
    return out


def unravel(buffer: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """View a piece of a buffer as a tensor of some shape: zero-copy, and differentiable.

    Args:
        buffer: 1-D.
        offset: where the piece begins, in elements of the buffer.
        shape: shape of the result.
        dtype: whether the result is complex. Its precision is that of the buffer.

    Returns:
        A view of ``buffer``.

    Example:
        >>> unravel(torch.arange(6.0), 2, (2, 2), torch.float32)
        tensor([[2., 3.],
                [4., 5.]])
    """
    numel = 1
    for dim in shape:
        numel *= dim
    if dtype.is_complex:
        return torch.view_as_complex(buffer.narrow(0, offset, 2 * numel).view(*shape, 2))
    return buffer.narrow(0, offset, numel).view(tuple(shape))


# Leaves begin, and shards end, at multiples of this many elements (zfun.layout.ALIGNMENT), so that these units stay whole in every layout.
_UNIT = 32
_EXPONENTS = 2200  # those of float64, from _LOWEST on
_LOWEST = -1100
_LIMBS = 70  # of 32 bits each: as many as float64 has binary places, and room above


def squares_in_bins(x: Tensor) -> Tensor:
    """Sum the squares of a real tensor exactly, so that the result does not depend on how it is cut.

    The squares of 32 elements are added in float64, in a fixed order; such sums are then added without any rounding, as integers, by
    exponent. So pieces of a vector that are cut at multiples of 32 add up to the same bits in any order and in any number (the idea of
    reproducible
    summation: Demmel and Nguyen, 2013).

    Args:
        x: 1-D, floating.

    Returns:
        An int64 tensor of fixed length; those of several pieces are added by :func:`total_of_bins`.

    Example:
        >>> total_of_bins(torch.stack([squares_in_bins(torch.tensor([3.0])), squares_in_bins(torch.tensor([4.0]))]))
        tensor(25., dtype=torch.float64)
    """
    if x.device.type == "cpu" and not is_abstract(x):
        return _squares_on_cpu(x)
    high = torch.zeros(_EXPONENTS, dtype=torch.float64, device=x.device)
    low = torch.zeros_like(high)
    special = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.split(_CHUNK // 4) if x.numel() else ():
        units = _sum_units(chunk)
        total = units.sum()
        if not torch.isfinite(total):
            special = special + total
            continue
        mantissa, exponent = torch.frexp(units)
        place = exponent.to(torch.int64) - _LOWEST
        # Each half of a mantissa has at most 27 bits: float64 adds 2**26 of them exactly.
        digits = mantissa.mul_(2.0**27)
        top = digits.floor()
        high += torch.bincount(place, weights=top, minlength=_EXPONENTS)
        low += torch.bincount(place, weights=digits.sub_(top).mul_(2.0**26), minlength=_EXPONENTS)
    return torch.cat([_limbs(high.to(torch.int64), low.to(torch.int64)), special.view(1).view(torch.int64)])


def _squares_on_cpu(x: Tensor) -> Tensor:
    high = torch.zeros(2048, dtype=torch.int64)
    low = torch.zeros_like(high)
    special = torch.zeros(1, dtype=torch.float64)
    for chunk in (x,) if _compiled.takes(x) else x.split(_CHUNK):
        wide = chunk if _compiled.takes(chunk) else chunk.to(torch.promote_types(chunk.dtype, torch.float32)).contiguous()
        whole = wide.numel() // _UNIT * _UNIT
        _compiled.square_bins(wide[:whole], high, low, special)
        if whole < wide.numel():
            tail = torch.nn.functional.pad(wide[whole:], (0, _UNIT - wide.numel() + whole))
            _compiled.square_bins(tail, high, low, special)
    # A mantissa with exponent e of the format stands for mantissa * 2**(e - 1075); see _limbs.
    pad = (-1022 - _LOWEST, _EXPONENTS - 2048 + 1022 + _LOWEST)
    return torch.cat([_limbs(torch.nn.functional.pad(high, pad), torch.nn.functional.pad(low, pad)), special.view(torch.int64)])


def _sum_units(chunk: Tensor) -> Tensor:
    """Add the squares of each 32 elements in float64; what becomes of a unit depends on nothing else."""
    tail = -chunk.numel() % _UNIT
    units = (torch.nn.functional.pad(chunk, (0, tail)) if tail else chunk).to(torch.float64, copy=True).square_().view(-1, _UNIT)
    # Not sum(1): on a device the order within such a sum may depend on how many there are.
    while units.shape[1] > 1:
        half = units.shape[1] // 2
        units = units[:, :half] + units[:, half:]
    return units.view(-1)


def _limbs(high: Tensor, low: Tensor) -> Tensor:
    """Carry sums by exponent into the limbs of one long integer: few numbers, and still exact."""
    out = torch.zeros(_LIMBS, dtype=torch.int64, device=high.device)
    used = torch.nonzero(high + low).view(-1)
    # value = (high * 2**26 + low) * 2**(exponent - 53); limb 0 stands for 2**(_LOWEST - 53).
    for sums, lift in ((high[used], 26), (low[used], 0)):
        place = used + lift
        for piece, more in ((sums & (2**27 - 1), 0), (sums >> 27, 27)):
            shifted = piece << ((place + more) % 32)
            out.index_add_(0, (place + more) // 32, shifted & (2**32 - 1))
            out.index_add_(0, (place + more) // 32 + 1, shifted >> 32)
    return out


def total_of_bins(rows: Tensor) -> Tensor:
    """Add what :func:`squares_in_bins` returned for several pieces.

    Args:
        rows: int64, one row for each piece.

    Returns:
        The sum of the squares, a 0-dim float64 tensor; not finite where an element is not.

    Example:
        >>> total_of_bins(squares_in_bins(torch.full((100,), 2.0))[None])
        tensor(400., dtype=torch.float64)
    """
    limbs = rows[:, :-1].sum(0).tolist()
    special = float(rows[:, -1].contiguous().view(torch.float64).sum())
    # Python's integers have no end, and its division rounds once.
    exact = sum(limb << (32 * k) for k, limb in enumerate(limbs))
    try:
        total = exact / (1 << (53 - _LOWEST))
    except OverflowError:
        total = float("inf")
    return torch.tensor(total + special, dtype=torch.float64, device=rows.device)


def fingerprint(x: Tensor) -> int:
    """Reduce the bits of a tensor to one integer that differs, in all likelihood, when any bit does.

    It is meant to find accidents (ranks that start from different values), not adversaries. It runs where the tensor lives.

    Args:
        x: any tensor.

    Returns:
        A non-negative integer below 2**63.

    Example:
        >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3)), fingerprint(torch.tensor(0.0)) == fingerprint(torch.tensor(-0.0))
        (True, False)
    """
    # A copy, because a tensor of one element counts as contiguous whatever its stride.
    raw = x.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = torch.view_as_real(raw.resolve_conj()).reshape(-1) if raw.is_complex() else raw
    data = raw.view(torch.uint8)
    state = x.numel() * 0x9E3779B97F4A7C15 + 1
    for chunk in data.split(8 * _CHUNK) if data.numel() else ():
        tail = -chunk.numel() % 8
        words = (torch.cat([chunk, chunk.new_zeros(tail)]) if tail else chunk.clone()).view(torch.int64)
        places = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=x.device)
        # Two sums with wrap-around: the plain one and one that knows the places; the high bits are folded down so that they count.
        mixed = (words ^ (words >> 29)) * places
        first, second = words.sum().item(), (mixed ^ (mixed >> 31)).sum().item()
        state = ((state ^ int(first)) * 0xBF58476D1CE4E5B9 + int(second)) & ((1 << 64) - 1)
        state ^= state >> 27
    return state & ((1 << 63) - 1)
