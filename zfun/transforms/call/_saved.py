"""Views of gathered buckets that autograd saves for backward: packed as places, without memory.

Inside of a recomputed block autograd saves nothing here, because backward runs the block again. The
block then uses buckets again, in order, up to the last tensor that autograd saved in forward.
So ``SavedViews`` notes the uses and the saved tensors of each such block.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Packed", "SavedViews", "noting_recomputation"]

# A view of a gathered bucket: bucket, dtype, shape, strides and offset. The bucket is a list that
# all views share, because the reference count of the list tells whether a view is left.
Packed: TypeAlias = tuple[list[int], torch.dtype, tuple[int, ...], tuple[int, ...], Any]


# The marks of a recomputed block in the order: where the block begins, where recomputation stops,
# and where the block ends.
_BEGIN, _STOP, _END = -1, -2, -3

_current: ContextVar[tuple[SavedViews, Callable[[], None]] | None] = ContextVar(
    "zfun_saved_views", default=None
)


class SavedViews:
    """Knows the storages of gathered buckets, and packs the views that autograd saves.

    Args:
        num_buckets: the number of buckets.

    Attributes:
        order: the buckets of which views were saved, in order, each once in a row; in a recomputed
            block, the buckets that the block used.
        blocks: the uses in the recomputed blocks that are running, the innermost last.
    """

    def __init__(self, num_buckets: int) -> None:
        self.order: list[int] = []
        self.blocks: list[_Uses] = []
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

    @contextlib.contextmanager
    def current(self, set_aside: Callable[[], None]) -> Iterator[None]:
        """The context of the loss, in which recomputed blocks find this object.

        Args:
            set_aside: called where a recomputed block begins, so that the first use of a bucket in
                the block is noted. Not an attribute, because a cycle would keep the gradients of
                the call alive.
        """
        token = _current.set((self, set_aside))
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[_Uses]:
        """The context of a recomputed block in forward."""
        uses = _Uses()
        self.blocks.append(uses)
        try:
            yield uses
        finally:
            self.blocks.pop()
            buckets, stop = uses.buckets, uses.stop
            self.order += [_BEGIN, *buckets[:stop], _STOP, *buckets[stop:], _END]

    def use(self, bucket: int) -> None:
        """Note a use of a bucket in the running blocks."""
        for uses in self.blocks:
            if uses.buckets[-1:] != [bucket]:
                uses.buckets.append(bucket)

    def is_kept(self, bucket: int) -> bool:
        """Whether autograd's graph keeps a view of a bucket."""
        return sys.getrefcount(self._marks[bucket]) > max(map(sys.getrefcount, [[bucket]]))


class _Uses:
    """The buckets that a recomputed block has used, and how many until the last saved tensor."""

    __slots__ = ("buckets", "stop")

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.stop = 0


@contextlib.contextmanager
def noting_recomputation() -> Iterator[None]:
    """The context of a block in forward, inside of the saved-tensor hooks that recompute."""
    found = _current.get()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None or hooks is None:
        yield
        return
    saved, set_aside = found
    set_aside()
    pack, unpack = hooks
    with saved.recomputed() as uses:

        def note(tensor: Tensor) -> Any:
            uses.stop = len(uses.buckets)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield
