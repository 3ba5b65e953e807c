"""A tensor's memory as a vector, and the tensor again.

What is kept elsewhere comes back with the same strides and the same alignment: kernels may round differently on others. So a transposed
tensor is not made contiguous. Its elements are taken in the order in which they lie in memory, each once (what ``expand`` repeats, and what
a slice leaves out, is not there), and its form says how to lay them out again:

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

__all__ = ["Form", "form_of", "is_plain", "tensor_of", "vector_of"]

# What torch's allocators align to.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor lies in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    skew: int  # elements between an aligned address and its beginning


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its elements as they are."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def form_of(tensor: Tensor) -> Form:
    skew = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()
    return Form(tuple(tensor.shape), tensor.stride(), skew)


def vector_of(tensor: Tensor) -> Tensor | None:
    """Return the elements of a tensor in the order of its memory, each once; ``None`` where they overlap, or are none."""
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


def tensor_of(vector: Tensor, form: Form) -> Tensor:
    """The inverse of :func:`vector_of`: the same strides, and as well aligned."""
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
