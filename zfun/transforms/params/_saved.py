"""Views of gathered buckets that autograd saves for backward: packed as places, without memory."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Packed", "SavedViews"]

# A view of a gathered bucket: of which, then dtype, shape, strides and offset. The bucket comes as
# a list, the same for all of its views, whose references say whether there are any.
Packed: TypeAlias = tuple[list[int], torch.dtype, tuple[int, ...], tuple[int, ...], Any]


class SavedViews:
    """Knows the storages of gathered buckets, and packs the views of them that autograd saves.

    Attributes:
        order: the buckets of which views were saved, in order, each once in a row.
    """

    def __init__(self, num_buckets: int) -> None:
        self.order: list[int] = []
        self._marks = [[bucket] for bucket in range(num_buckets)]
        # Which bucket a storage is.
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def know(self, tensor: Tensor, bucket: int) -> None:
        """Know a tensor as a gathered bucket."""
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being given to another storage while the entry
        # lives.
        self._storages[storage._cdata] = (bucket, StorageWeakRef(storage))

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Return what autograd is to keep of a tensor."""
        # Most of what is saved are activations, and this runs for each.
        try:
            found = self._storages.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # it is sparse
            return tensor
        if found is None or tensor.is_conj() or tensor.is_neg():
            return tensor
        bucket, _ = found
        if self.order[-1:] != [bucket]:
            self.order.append(bucket)
        # A plain tuple: what makes views takes no other since torch 2.15.
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
