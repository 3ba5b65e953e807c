"""The bucket node, and the tape that collects what the nodes receive.

[Note: the bucket node]
Between the flat buffers and the user's loss stands one autograd node for each bucket. Forward, it gives views of the (gathered) buffer.
Backward, autograd runs it when the gradients of all its views are complete; it copies them into one communication buffer and hands that to
the tape. So reduction starts inside backward, bucket by bucket, and the same node serves every stage: what becomes of the buffer is up to
the sinks that ``data_parallel``, ``shard_grads`` and ``offload`` put on the tape.

The tape starts the collectives in one order, from the last bucket of the layout to the first, whatever the order in which nodes fire: a
bucket that is ready early waits for those before it, and one that this rank never used is sent as zeros at the end. So ranks may skip
leaves, and nothing hangs.

A bucket may be opened more than once in a forward pass (it was gathered, released and gathered again): its gradient is the sum over its
nodes, in the order in which they fire. The mean is taken once, by the last of them, so that one node or three give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun import ops
from zfun.layout import Layout

__all__ = ["Handle", "Sink", "Tape"]

# Reductions in flight: one that runs while the next bucket is filled.
_MAX_IN_FLIGHT = 2


class Handle(Protocol):
    """What has been started: a collective, or a move to a store."""

    def wait(self) -> Any:
        """Return the result, once it is there."""
        ...


class Sink(Protocol):
    """What happens to a bucket's gradients once they are complete."""

    def start(self, buffer: Any, layout: Layout, bucket: int) -> Handle:
        """Take a bucket over; waiting on the handle gives what goes to the next sink, or to the caller."""
        ...


class Tape:
    """Collects the gradients of one call of the loss, bucket by bucket.

    Args:
        layout: of the parameters.
        sinks: what each bucket goes through, in order.
    """

    def __init__(self, layout: Layout, sinks: Sequence[Sink]) -> None:
        self.layout = layout
        self.sinks = tuple(sinks)
        self.anchors: list[Tensor] = []
        self.scale = 1.0
        self.on_complete: list[Callable[[int], None]] = []
        self.on_finish: list[Callable[[], None]] = []
        count = len(layout.buckets)
        self._opened = [0] * count
        self._fired = [0] * count
        self._sums: list[Tensor | None] = [None] * count
        self._ready = [False] * count
        self._next = count - 1
        self._in_flight: list[tuple[int, Handle]] = []
        self._results: list[Any] = [None] * count

    def open(self, bucket: int, views: Sequence[Tensor]) -> list[Tensor]:
        """Put a node behind the views of a bucket; what it returns is what the loss may use."""
        anchor = torch.empty(0, device=self.layout.device, requires_grad=True)
        self.anchors.append(anchor)
        self._opened[bucket] += 1
        outputs = _BucketNode.apply(anchor, self, bucket, list(views))
        return list(outputs)

    def contribute(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a bucket's leaves from one of its nodes."""
        self._fired[bucket] += 1
        complete = self._fired[bucket] == self._opened[bucket]
        before = self._sums[bucket]
        if before is None:
            self._sums[bucket] = self._ravel(bucket, grads, self.scale if complete else 1.0)
        else:
            slots = [self.layout.leaves[i] for i in self.layout.buckets[bucket].leaves]
            for slot, grad in zip(slots, grads, strict=True):
                if grad is not None:
                    ops.unravel(before, slot.offset, slot.shape, slot.dtype).add_(grad)
            if complete and self.scale != 1.0:
                before.mul_(self.scale)
        if complete:
            for callback in self.on_complete:
                callback(bucket)
            self._ready[bucket] = True
            self._start_ready()

    def finish(self) -> list[Any]:
        """Send what was not used as zeros, wait for everything, and return one result for each bucket."""
        for callback in self.on_finish:
            callback()
        # Sessions know the tape and the tape knows them; without this their buffers would live until the cycle collector comes.
        self.on_finish.clear()
        self.on_complete.clear()
        for bucket in range(self._next, -1, -1):
            if self._ready[bucket]:
                continue
            incomplete = self._sums[bucket]
            if incomplete is None:
                self._sums[bucket] = self._ravel(bucket, [None] * len(self.layout.buckets[bucket].leaves), 1.0)
            elif self.scale != 1.0:
                incomplete.mul_(self.scale)
            self._ready[bucket] = True
        self._start_ready()
        self._settle(0)
        return self._results

    def _ravel(self, bucket: int, grads: Sequence[Tensor | None], scale: float) -> Tensor:
        slot = self.layout.buckets[bucket]
        offsets = [self.layout.leaves[i].offset for i in slot.leaves]
        return ops.ravel(grads, offsets, slot.padded_numel, dtype=slot.dtype, device=self.layout.device, scale=scale)

    def _start_ready(self) -> None:
        while self._next >= 0 and self._ready[self._next]:
            bucket, self._next = self._next, self._next - 1
            buffer, self._sums[bucket] = self._sums[bucket], None
            if not self.sinks:
                self._results[bucket] = buffer
                continue
            self._in_flight.append((bucket, self.sinks[0].start(buffer, self.layout, bucket)))
            self._settle(_MAX_IN_FLIGHT)

    def _settle(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            bucket, pending = self._in_flight.pop(0)
            for sink in self.sinks[1:]:
                pending = sink.start(pending.wait(), self.layout, bucket)
            self._results[bucket] = pending.wait()


class _BucketNode(torch.autograd.Function):
    """Views forward, the tape backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        anchor: Tensor, tape: Tape, bucket: int, views: list[Tensor]
    ) -> tuple[Tensor, ...]:
        del anchor, tape, bucket
        return tuple(view.detach() for view in views)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.tape, ctx.bucket, _ = inputs
        ctx.set_materialize_grads(False)
        # Integer leaves of a bucket (buffers of a model, say) are views without a gradient.
        ctx.mark_non_differentiable(*(view for view in output if not (view.is_floating_point() or view.is_complex())))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:  # pyrefly: ignore[bad-override]
        ctx.tape.contribute(ctx.bucket, grads)
        return None, None, None, None
