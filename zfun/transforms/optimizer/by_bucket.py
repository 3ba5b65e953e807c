"""The state of an optimizer, built from the states of single buckets.

[Note: state by bucket]
``init`` of an optimizer on one bucket makes the part of the state that belongs to the bucket: one
buffer in place of a list of buffers. :class:`StateBuilder` runs ``init`` bucket by bucket, so that
only one bucket of unrounded parameters exists at a time, and only one bucket of a state that goes
into a store. The parts are joined by their places in the state.

An optimizer need not be so: its state may have tensors that belong to no bucket. The builder
therefore first runs ``init`` on tensors without memory, of all buckets and of each. If the parts do
not join to the whole, the builder keeps the parameters, and runs ``init`` once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zfun import stores
from zfun.collectives import Group
from zfun.flat import Flat, empty_like
from zfun.layout import Layout
from zfun.optim import Optimizer
from zfun.placement import Placement, R
from zfun.transforms.optimizer._cut import CutState, cut_state, last_of
from zfun.transforms.optimizer._placing import layout_for


class StateBuilder:
    """Builds the state of an optimizer bucket by bucket; see [Note: state by bucket].

    Args:
        optimizer: before it was offloaded.
        at_once: makes the state of all buckets, of an optimizer that cannot go bucket by bucket.
        layout: of the parameters, with buckets of one label each.
        dtypes: the dtype of the parameters of each bucket.
        placement: of the parameters.
        group: the ranks that share the parameters.
        store: of the state; ``None`` to keep the state in memory.
        fraction: the share of the elements whose state goes to the store.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        at_once: Callable[[Flat], Any],
        layout: Layout,
        dtypes: Sequence[torch.dtype],
        placement: Placement,
        group: Group,
        store: stores.Store | None,
        fraction: float,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.placement = placement
        self.group = group
        self._optimizer = optimizer
        self._at_once = at_once
        self._store = store
        self._stored = last_of([slot.padded_numel for slot in layout.buckets], fraction)
        self._cut = _cut_by_bucket(optimizer, layout, dtypes, placement, group)
        self._params: dict[int, Flat] = {}
        self._buffers: dict[tuple[int, int], Any] = {}
        self._others: dict[int, Any] = {}

    def add(self, bucket: int, params: Flat) -> None:
        """Take the parameters of one bucket, with placement ``R`` or the optimizer's.

        Raises:
            OffloadError: the store cannot keep the state.
        """
        if self._cut is None:
            self._params[bucket] = params
            return
        with stores.locating(leaf=self.layout.label(bucket)):
            kept: dict[int, Any] = {}
            for index, part in self._cut.pieces(bucket, self._optimizer.init(params)).items():
                if not isinstance(part, Flat):
                    self._others.setdefault(index, part)
                elif self._store is None or bucket not in self._stored:
                    kept[index] = part.buffers[0]
                else:
                    kept[index] = self._store.put(part.buffers[0], "state")
            # The next bucket is made when this one takes no more memory.
            stores.flush(list(kept.values()))
        self._buffers |= {(index, bucket): value for index, value in kept.items()}

    def result(self) -> Any:
        """Return the state of all buckets."""
        if self._cut is not None:
            return self._cut.joined(self._buffers, self._others)
        parts = [self._params.pop(bucket) for bucket in range(len(self.layout.buckets))]
        first = parts[0] if parts else Flat((), self.placement, self.layout, self.group)
        buffers = (part.buffers[0] for part in parts)
        return self._at_once(Flat(buffers, first.placement, self.layout, first.group))


def _cut_by_bucket(
    optimizer: Optimizer,
    layout: Layout,
    dtypes: Sequence[torch.dtype],
    placement: Placement,
    group: Group,
) -> CutState | None:
    """Make a state without memory, and cut it; ``None`` if the states of buckets do not join."""
    if not layout.buckets or layout_for(optimizer, layout) != layout:
        return None
    is_placed = optimizer.placement is placement and optimizer.group is group
    if not (placement is R or optimizer.placement is None or is_placed):
        return None  # a change of placement would communicate
    with _disable_current_modes():
        params = empty_like(Flat((), placement, layout, group), dtypes, "meta")
        try:
            cut = cut_state(optimizer.init(params), layout)
            is_joined = cut is not None and all(
                _fits(cut, bucket, optimizer.init(params.select([bucket])))
                for bucket in range(len(layout.buckets))
            )
        except Exception:  # noqa: BLE001, the user's code runs here and may raise anything
            return None
    return cut if is_joined else None


def _fits(cut: CutState, bucket: int, state: Any) -> bool:
    """Whether the state of one bucket is a part of the whole state."""
    wanted = cut.buffers(bucket)
    for index, part in cut.pieces(bucket, state).items():
        if isinstance(part, Flat):
            if len(part.buffers) != 1 or not _same(part.buffers[0], wanted.pop(index, None)):
                return False
        # Other values must be known without the parameters.
        elif not (_is_known(part) and _same(part, cut.parts[index])):
            return False
    return not wanted


def _is_known(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.ndim == 0 and not value.is_meta)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
            return False
        return first.is_meta or bool((first == second).all())
    return type(first) is type(second) and first == second
