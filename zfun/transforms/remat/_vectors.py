"""Convert a tensor to a vector, and back to a tensor with the same strides and alignment.

Strides and alignment must return unchanged, because kernels may round differently for others. A
transposed tensor is therefore not made contiguous. The vector has every element once, in memory
order, without the repeats of ``expand`` and the gaps of a slice. A ``VectorForm`` describes the
layout of the tensor:

>>> x = torch.arange(6.0).view(2, 3).t()
>>> vector = vector_of(x)
>>> vector
tensor([0., 1., 2., 3., 4., 5.])
>>> again = tensor_of(vector.clone(), form_of(x))
>>> torch.equal(again, x), again.stride() == x.stride()
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Alignment of torch's allocators.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The layout of a tensor in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    skew: int  # elements between an aligned address and the first element


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds the elements directly, not conjugated or negated."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def form_of(tensor: Tensor) -> VectorForm:
    skew = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()
    return VectorForm(tuple(tensor.shape), tensor.stride(), skew)


def vector_of(tensor: Tensor) -> Tensor | None:
    """Return the elements in memory order, each once; ``None`` if empty or overlapping."""
    if not tensor.numel():
        return None
    found = tensor.detach()
    for dim, stride in enumerate(found.stride()):
        found = found.narrow(dim, 0, 1) if stride == 0 and found.shape[dim] > 1 else found
    found = found.permute(_order(found.shape, found.stride()))
    reach = 0
    for size, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if size > 1:
            if stride <= reach:
                return None
            reach += (size - 1) * stride
    return found.reshape(-1)


def tensor_of(vector: Tensor, form: VectorForm) -> Tensor:
    """The inverse of :func:`vector_of`, with the same strides and alignment."""
    size = [1 if stride == 0 else n for n, stride in zip(form.size, form.stride, strict=True)]
    reach = 1 + sum((n - 1) * stride for n, stride in zip(size, form.stride, strict=True))
    if form.skew or reach != vector.numel():
        room = vector.new_empty(form.skew + reach)
        order = _order(size, form.stride)
        sizes, strides = [size[dim] for dim in order], [form.stride[dim] for dim in order]
        room.as_strided(sizes, strides, form.skew).copy_(vector.view(sizes))
        return room.as_strided(form.size, form.stride, form.skew)
    return vector.as_strided(form.size, form.stride, vector.storage_offset())


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    return sorted(range(len(size)), key=lambda dim: stride[dim], reverse=True)
