"""The leaves of gathered buckets as the loss sees them: views, with bucket nodes behind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun.transforms.call._buckets import BucketShard
from zfun.transforms.call._executor import Executor
from zfun.transforms.call._lazy import is_held
from zfun.transforms.call._written import check_unwritten, marks_of


class BucketViews:
    """The views of buckets in one call of a loss.

    [Note: bits of a released bucket]
    A bucket that is released and regathered in forward comes back behind the same outputs of the
    bucket node, whose data becomes the new buffer: a second node would add gradients in another
    order.

    Args:
        shards: the buckets.
        executor: puts bucket nodes behind trained leaves; ``None`` without a gradient.
        compares_frozen: whether frozen vectors are compared with their values before the loss.
    """

    def __init__(
        self, shards: Sequence[BucketShard], executor: Executor | None, *, compares_frozen: bool
    ) -> None:
        self._shards = shards
        self._executor = executor
        self._compares_frozen = compares_frozen
        self._views: dict[int, list[Tensor]] = {}
        self._marks: dict[int, list[int]] = {}
        # Views of a released buffer, which wait for another buffer.
        self._released: dict[int, list[Tensor]] = {}

    def of(self, bucket: int) -> list[Tensor] | None:
        """Return the views of a bucket, if made."""
        return self._views.get(bucket)

    def make(self, bucket: int, buffer: Tensor, *, in_forward: bool) -> list[Tensor]:
        """View the leaves of a gathered bucket as the inputs of operations."""
        shard = self._shards[bucket]
        views = shard.views(buffer)
        if shard.trained:
            views = self._with_gradient(bucket, views, in_forward)
        elif self._compares_frozen:
            self._marks[bucket] = marks_of(views)
        self._views[bucket] = views
        return views

    def _with_gradient(self, bucket: int, views: list[Tensor], in_forward: bool) -> list[Tensor]:
        executor = self._executor
        if executor is not None:
            if in_forward and (outputs := self._released.pop(bucket, None)) is not None:
                for output, view in zip(outputs, views, strict=True):
                    output.data = view
                return outputs
            # In backward code of the loss runs again; see [Note: reads in backward].
            if not in_forward and (again := executor.reducer.reopen(bucket, views)) is not None:
                return again
            if in_forward or bucket in executor.reducer.late:
                # The first use of a bucket may need no gradient, but later ones need the node.
                with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
                    return executor.open(bucket, views, again=True)
        # The views require a gradient, so that the second run saves the same tensors as the first;
        # no backward runs through these views.
        return [
            view.requires_grad_() if view.is_floating_point() or view.is_complex() else view
            for view in views
        ]

    def release(self, bucket: int, *, in_loss: bool) -> bool:
        """Let go of a bucket's buffer; return ``False`` where an operation holds a view."""
        views = self._views.get(bucket)
        if views is None:
            return True
        self._check(bucket, views)
        if in_loss and self._shards[bucket].trained:
            if is_held(views):
                # The operation that is about to run holds a view, or the loss keeps one.
                return False
            # Keep the views even if the schedule has no further use: this rank may leave the
            # schedule.
            nothing = views[0].new_empty(0)
            for view in views:
                view.data = nothing
            self._released[bucket] = views
        del self._views[bucket]
        return True

    def forget(self) -> None:
        """Drop all views, after a look whether the loss wrote to one."""
        for bucket, views in self._views.items():
            self._check(bucket, views)
        self.clear()

    def _check(self, bucket: int, views: list[Tensor]) -> None:
        check_unwritten(views, self._shards[bucket].slots, self._marks.pop(bucket, None))

    def clear(self) -> None:
        """Drop all views."""
        self._views.clear()
        self._released.clear()

    def nodes(self) -> dict[Any, int]:
        """Return the buckets by their nodes in autograd's graph."""
        found: dict[Any, int] = {}
        for bucket, views in [*self._views.items(), *self._released.items()]:
            node = views[0].grad_fn
            if node is not None:
                found[node] = bucket
        return found
