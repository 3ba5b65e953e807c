"""Begin the update of a step over stores while forward and backward run.

See [Note: the streamed update] in ``_plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zfun import stores
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.optim import Optimizer, PrepareInner
from zfun.transforms.call._hooks import Done
from zfun.transforms.optimizer._cut import cut_state
from zfun.transforms.optimizer._placing import can_fail
from zfun.transforms.optimizer._stream import StreamedUpdate, streamed


@dataclass(slots=True)
class UpdateHook:
    """The step of a complete bucket of gradients that steps the bucket.

    Attributes:
        update: of this step; ``None`` to leave the gradients to a later update.
        left: the buckets to leave to the end of the step, when the ranks have agreed on the leaves
            that none of them used.
    """

    update: StreamedUpdate | None = None
    left: set[int] = field(default_factory=set)

    def start(self, buffer: Tensor, layout: Layout, bucket: int) -> Done:
        """Step a bucket, and pass on the gradients, or a Spent if the memory may be written."""
        del layout
        if self.update is None or bucket in self.left:
            return Done(buffer)
        return Done(self.update.take(bucket, buffer))


def begin(
    optimizer: Optimizer,
    state: Any,
    params: Flat,
    *,
    donate: bool,
    in_backward: bool,
    stores_grads: bool,
    missed: Mapping[str, int | None],
) -> StreamedUpdate | None:
    """Begin an update before forward, and start the first reads.

    Args:
        optimizer: an optimizer.
        state: the state, of which some is in a store.
        params: the parameters.
        donate: let the update take over ``state`` and ``params``.
        in_backward: whether backward makes the gradients that the optimizer takes.
        stores_grads: whether the gradients go to a store.
        missed: the steps that leaves have missed, for the buckets whose leaves all have gradients.

    Returns:
        The update, for a hook of the gradients; ``None`` if the update must see all gradients
        first. Then the first reads are under way.
    """
    # A store that cannot fail is host memory, where nothing is read.
    if not can_fail(state):
        return None
    is_early = in_backward and _sees_one_bucket(optimizer)
    update = streamed(optimizer, None, state, params) if is_early else None
    if update is None:
        _prefetch(state, params.layout)
    else:
        update.begin(donate=donate, stores_grads=stores_grads, missed=missed)
    return update


def _sees_one_bucket(optimizer: Optimizer) -> bool:
    """Whether no part of an optimizer looks at all gradients, or at leaves on several ranks."""
    if optimizer.by_leaf:
        return False
    if isinstance(optimizer.prepare, PrepareInner):
        return _sees_one_bucket(optimizer.prepare.inner)
    if optimizer.parts:
        return all(map(_sees_one_bucket, optimizer.parts))
    return optimizer.prepare is None


def _prefetch(state: Any, layout: Layout) -> None:
    """Start the first reads of an update after backward."""
    cut = cut_state(state, layout)
    if cut is None:
        return
    num_left = stores.READ_AHEAD + 1
    for bucket in range(len(layout.buckets)):
        kept = stores.stored(cut.buffers(bucket))
        for x in kept if num_left else ():
            with stores.locating(leaf=layout.label(bucket)):
                x.prefetch()
        num_left -= num_left > 0 and len(kept) > 0
