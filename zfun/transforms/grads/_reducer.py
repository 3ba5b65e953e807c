"""The bucket node, and the tape that collects what the nodes receive.

[Note: the bucket node]
Between the flat buffers and the user's loss stands one autograd node for each bucket. Forward, it gives views of the (gathered) buffer.
Backward, autograd runs it when the gradients of all its views are complete; it copies them into one communication buffer and hands
that to the tape. So reduction starts inside backward, bucket by bucket, and the same
node serves every stage: what becomes of the buffer is up to the sinks that ``data_parallel``, ``shard_grads`` and ``offload`` put on the
tape.

The tape starts the collectives in one order, from the last bucket of the layout to the first, whatever the order in which nodes fire: a
bucket that is ready early waits for those before it, and one that this rank never used is sent as zeros at the end. So ranks may skip
leaves, and nothing hangs. Nor do gathers and reductions wait for each other across ranks: a rank waits for a reduction inside backward
only if all ranks use their parameters in the planned order (they vote on it), else not before it has started all its gathers.

A bucket may be opened more than once in a forward pass (it was gathered, released and gathered again): its gradient is the sum over its
nodes, in the order in which they fire, leaf by leaf in the dtype in which they come, as autograd adds them within a node. They are cast and
the mean is taken once, when the last has fired, so that one node or three give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import Group
from zfun.errors import ZfunError
from zfun.layout import Layout, LeafSlot

__all__ = ["MAX_IN_FLIGHT", "Handle", "Sink", "Tape", "check_unwritten", "is_bucket_view"]

# Reductions in flight: one that runs while the next bucket is filled.
MAX_IN_FLIGHT = 2

# Before everything but the accumulation of gradients.
_FIRST = 2**63 - 1


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
        dtypes: of the gradient buffers, one for each bucket.
        group: the ranks that they are going to be summed over, if any: it says where buffers are best made.
        tables: one for each bucket, for the addresses of gradients; from call to call the same, if they are to be of use.
    """

    def __init__(
        self,
        layout: Layout,
        sinks: Sequence[Sink],
        dtypes: Sequence[torch.dtype],
        group: Group | None = None,
        tables: Sequence[ops.AddressTable] | None = None,
    ) -> None:
        self.group = group
        self._tables = tables
        self.layout = layout
        self.sinks = tuple(sinks)
        self.dtypes = tuple(dtypes)
        self.anchors: list[Tensor] = []
        self.scale = 1.0
        self.on_complete: list[Callable[[int], None]] = []
        self.on_finish: list[Callable[[], None]] = []
        self.on_end: list[Callable[[], None]] = []
        self.on_error: list[Callable[[], Any]] = []
        # Whether parameters are gathered in backward, and whether this rank used them in another order than planned.
        self.gathers = False
        self.unused: list[str] = []  # leaves that got no gradient on this rank
        self.strayed = False
        # The same of all ranks; None where they have not voted.
        self.any_strayed: bool | None = None
        # Whether a pass has left the vote to the loss.
        self.must_vote = False
        self.max_in_flight: int | None = MAX_IN_FLIGHT
        count = len(layout.buckets)
        self._opened = [0] * count
        self._fired = [0] * count
        self._nodes: list[list[Any]] = [[] for _ in range(count)]
        # Buckets that the loss has used on this rank, and whose nodes will not run all the same.
        self._silent: frozenset[int] = frozenset()
        self._sums: list[list[Tensor | None] | None] = [None] * count
        self._ready: list[Tensor | None] = [None] * count
        self._next = count - 1
        self._in_flight: list[tuple[int, Handle]] = []
        self._results: list[Any] = [None] * count

    def open(self, bucket: int, views: Sequence[Tensor]) -> list[Tensor]:
        """Put a node behind the views of a bucket, which nobody else has; what it returns is what the loss may use."""
        anchor = torch.empty(0, device=self.layout.device, requires_grad=True)
        self.anchors.append(anchor)
        self._opened[bucket] += 1
        outputs = list(_BucketNode.apply(anchor, self, bucket, list(views)))
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None:
            # Autograd runs what is ready in the reverse of the order in which it was made, and nodes of whole parameters are made first of
            # all: left to that, every gradient would be complete before the first was reduced.
            node._set_sequence_nr(_FIRST)
            self._nodes[bucket].append(node)
        return outputs

    def look_ahead(self) -> None:
        """Find out, as backward begins, which buckets will get no gradient though the loss has used them, and send those in their turn.

        That is nothing that a rank has strayed by: it was gathered alike. Yet others wait for such a bucket in the middle of backward,
        before they start gathers that this rank needs.
        """
        runs = torch._C._will_engine_execute_node
        self._silent = frozenset(bucket for bucket, nodes in enumerate(self._nodes) if nodes and not any(map(runs, nodes)))
        self._start_ready()

    def note_strayed(self, any_strayed: bool) -> None:
        """Note the outcome of a vote: whether any rank has strayed."""
        self.any_strayed = any_strayed or bool(self.any_strayed)
        if self.any_strayed:
            # A rank may need gathers that others start only after a reduction that this rank would wait for.
            self.max_in_flight = None

    def contribute(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a bucket's leaves from one of its nodes."""
        self._fired[bucket] += 1
        before = self._sums[bucket]
        self._sums[bucket] = list(grads) if before is None else [_sum(x, y) for x, y in zip(before, grads, strict=True)]
        if self._fired[bucket] == self._opened[bucket]:
            self._make_room()
            self._ravel(bucket)
            for callback in self.on_complete:
                callback(bucket)
            self._start_ready()

    def finish(self) -> list[Any]:
        """Send what was not used as zeros, wait for everything, and return one result for each bucket."""
        for callback in self.on_finish:
            callback()
        while self._next >= 0:
            if self._ready[self._next] is None:
                self._make_room()
                self._ravel(self._next)
            self._start_ready()
        self._settle(0)
        for callback in self.on_end:
            callback()
        self._forget()
        return self._results

    def abandon(self) -> None:
        """Wait for what has been started, because an error ends this call: the other ranks take part in it, and read what it sends."""
        for wait in [*self.on_error, *(handle.wait for _, handle in self._in_flight)]:
            with contextlib.suppress(ZfunError):
                wait()
        self._in_flight.clear()
        self._forget()

    def _forget(self) -> None:
        # Sessions know the tape and the tape knows them; without this their buffers would live until the cycle collector comes.
        for callbacks in (self.on_complete, self.on_finish, self.on_end):
            callbacks.clear()
        self.on_error.clear()
        self._nodes.clear()

    def _make_room(self) -> None:
        """Wait until the bucket that is filled next is one of those that may be in flight."""
        if self.max_in_flight is not None:
            self._settle(self.max_in_flight - 1)

    def _ravel(self, bucket: int) -> None:
        slot, (leaves, offsets) = self.layout.buckets[bucket], _places(self.layout, bucket)
        sums, self._sums[bucket] = self._sums[bucket], None
        grads = [None] * len(leaves) if sums is None else [_rounded(x, leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]
        self.unused += [leaf.path for x, leaf in zip(grads, leaves, strict=True) if x is None]
        dtype, device = self.dtypes[bucket], self.layout.device
        table = None if sums is None or self._tables is None else self._tables[bucket]
        scale = 1.0 if sums is None else self.scale
        # What is going to be sent is written where the others read it.
        group = self.group
        out = (
            torch.empty(slot.padded_numel, dtype=dtype, device=device) if group is None else group.buffer(slot.padded_numel, dtype, device)
        )
        ops.ravel_into(out, grads, offsets, scale=scale, table=table)
        # A table keeps the list, not what was in it.
        grads.clear()
        self._ready[bucket] = out

    def _start_ready(self) -> None:
        while self._next >= 0 and (self._ready[self._next] is not None or self._next in self._silent):
            bucket, self._next = self._next, self._next - 1
            if self._ready[bucket] is None:
                self._ravel(bucket)
            buffer, self._ready[bucket] = self._ready[bucket], None
            if not self.sinks:
                self._results[bucket] = buffer
                continue
            self._in_flight.append((bucket, self.sinks[0].start(buffer, self.layout, bucket)))
            # What has been written in few bits is not held while others are waited for.
            del buffer
            # What is sent before others have come to it is not waited for here: they may need this rank's gathers first.
            if self.max_in_flight is not None and bucket not in self._silent:
                self._settle(self.max_in_flight)

    def _settle(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            bucket, pending = self._in_flight.pop(0)
            for sink in self.sinks[1:]:
                pending = sink.start(pending.wait(), self.layout, bucket)
            self._results[bucket] = pending.wait()


@functools.lru_cache(maxsize=4096)
def _places(layout: Layout, bucket: int) -> tuple[tuple[LeafSlot, ...], tuple[int, ...]]:
    """The leaves of a bucket, and where each begins in it."""
    slots = tuple(layout.leaves[i] for i in layout.buckets[bucket].leaves)
    return slots, tuple(slot.offset for slot in slots)


def check_unwritten(views: Sequence[Tensor], slots: Sequence[LeafSlot]) -> None:
    """Refuse a loss that has written to its parameters: they may be the memory of other ranks.

    Raises:
        ZfunError: names the leaf.
    """
    for view, slot in zip(views, slots, strict=True):
        if view._version:
            raise ZfunError(
                f"a loss must not change its parameters in place; leaf {slot.path!r} was changed; clone() it in the loss, return what is "
                "to be kept as aux, and load the parameters anew: they may have the change",
                leaf=slot.path,
            )


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else x + y


def _rounded(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Round a gradient to a leaf's dtype where it was computed with in a wider one, as autograd does when the cast is its own."""
    if grad is None or grad.dtype == dtype or torch.promote_types(grad.dtype, dtype) == dtype:
        return grad
    return grad.to(dtype)


class _BucketNode(torch.autograd.Function):
    """Views forward, the tape backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, anchor: Tensor, tape: Tape, bucket: int, views: list[Tensor]
    ) -> tuple[Tensor, ...]:
        # Not in a setup_context(), for which the signature of this function would be looked up at every call.
        del anchor
        ctx.tape, ctx.bucket = tape, bucket
        ctx.set_materialize_grads(False)
        # Integer leaves (buffers of a model, say) are views without a gradient; they lie in buckets of their own.
        if not (views[0].is_floating_point() or views[0].is_complex()):
            ctx.mark_non_differentiable(*views)
        return tuple(views)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:  # pyrefly: ignore[bad-override]
        ctx.tape.contribute(ctx.bucket, grads)
        return None, None, None, None


def is_bucket_view(node: Any) -> bool:
    """Whether a node of autograd's graph is the one behind the views of a bucket."""
    return node.name() == f"{_BucketNode.__name__}Backward"
