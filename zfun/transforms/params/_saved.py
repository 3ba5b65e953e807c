"""Views of gathered buckets that autograd saves for backward: packed as places, without memory."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Packed", "SavedViews"]

# A view of a gathered bucket: bucket, dtype, shape, strides and offset. The bucket is a list that
# all views share, because the reference count of the list tells whether a view is left.
Packed: TypeAlias = tuple[list[int], torch.dtype, tuple[int, ...], tuple[int, ...], Any]


class SavedViews:
    """Knows the storages of gathered buckets, and packs the views that autograd saves.

    Attributes:
        order: the buckets of which views were saved, in order, each once in a row.
    """

    def __init__(self, num_buckets: int) -> None:
        self.order: list[int] = []
        self._marks = [[bucket] for bucket in range(num_buckets)]
        # The bucket of each storage.
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def know(self, tensor: Tensor, bucket: int) -> None:
        """Know a tensor as a gathered bucket."""
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being given to another storage while the entry
        # lives.
        self._storages[storage._cdata] = (bucket, StorageWeakRef(storage))

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Return the form in which autograd keeps a tensor."""
        # Autograd saves mostly activations, and packs each, so this must be fast.
        try:
            found = self._storages.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor
            return tensor
        if found is None or tensor.is_conj() or tensor.is_neg():
            return tensor
        bucket, _ = found
        if self.order[-1:] != [bucket]:
            self.order.append(bucket)
        # A plain tuple, because torch 2.15 makes views from no other type of shape.
        return (
            self._marks[bucket],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def is_kept(self, bucket: int) -> bool:
        """Whether autograd's graph keeps a view of a bucket."""
        return sys.getrefcount(self._marks[bucket]) > max(map(sys.getrefcount, [[bucket]]))
