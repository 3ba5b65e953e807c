"""The bucket node, and the reducer that collects the gradients that the nodes receive.

[Note: the bucket node]
Between the flat buffers and the user's loss stands one autograd node for
each bucket. Forward, the node gives views of the (gathered) buffer. Backward, autograd runs the
node when the gradients of all views are complete, and the reducer copies the gradients into one
communication buffer. So reduction starts inside backward, bucket by bucket, and the same node
serves every stage: the hooks that ``shard_grads``, ``replicate_grads`` and ``offload`` put on
the reducer decide where the buffer goes.

The reducer starts the collectives in one order, from the last bucket of the layout to the first,
whatever the order in which nodes fire: a bucket that is ready early waits for the buckets before,
and a bucket that this rank never used is sent as zeros at the end. So ranks may skip leaves, and
no rank hangs.

A bucket may be opened more than once in a forward pass, when the bucket is released and regathered.
The gradient is then the sum over the nodes in the order of backward, leaf by leaf in the dtype of
autograd, as autograd adds gradients within a node. The reducer casts and averages once, after the
last node, so that one node or three give the same bits.

[Note: reads in backward]
Backward runs code of the loss again: a recomputed block, or a custom function that calls a module
again and differentiates with respect to a tensor that forward has saved. What this code reads must
be an output of the same node. So the node of a gathered bucket saves its outputs, without their
memory, and ``reopen`` gives these outputs to other views.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import Group, sum_group
from zfun.errors import ZfunError
from zfun.layout import BucketSlot, Layout, LeafSlot
from zfun.transforms.call._hooks import CommHook, Handle

# Reductions in flight: one that runs while the next bucket is filled.
MAX_IN_FLIGHT = 2

# Before everything but the accumulation of gradients.
_FIRST = 2**63 - 1

# Whether autograd takes hooks of saved tensors, as it does outside of torch.func.
_takes_hooks: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # pyrefly: ignore[missing-attribute]

Receive: TypeAlias = Callable[[int, Sequence[Tensor | None]], None]


class GradReducer:
    """Collects the gradients of one call of a gradient function, and reduces bucket by bucket.

    Args:
        layout: of the parameters.
        hooks: the steps that each bucket goes through, in order.
        dtypes: of the gradient buffers, one for each bucket.
        group: the ranks over which the gradients are summed, if any; allocates the buffers.
        tables: one for each bucket, for the addresses of gradients; pass the same from call to
            call.

    Attributes:
        anchors: the tensors to differentiate with respect to, one for each node.
        scale: returns the factor of all gradients; called when the first bucket is complete.
        unused: paths of the leaves that got no gradient on this rank in the last backward pass.
        on_unused: called with the index of a bucket of which a leaf got none, before the hooks.
        onto: buffers to which the gradients are added in place of new ones, one for each bucket.
        max_in_flight: how many reductions may be in flight; ``None`` for any number.
        late: buckets whose nodes may run any number of times; complete at the end only.
    """

    def __init__(
        self,
        layout: Layout,
        hooks: Sequence[CommHook],
        dtypes: Sequence[torch.dtype],
        group: Group | None = None,
        tables: Sequence[ops.AddressTable] | None = None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.dtypes = tuple(dtypes)
        self.anchors: list[Tensor] = []
        self.scale: Callable[[], float | Tensor] = lambda: 1.0
        self.late: set[int] = set()
        self.unused: list[str] = []
        self.on_unused: Callable[[int], None] | None = None
        self.onto: Sequence[Tensor] | None = None
        # One rank waits for nobody, so a bucket goes through all hooks as soon as it is complete.
        is_alone = group is None or sum_group(group).size == 1
        self.max_in_flight: int | None = 0 if is_alone else MAX_IN_FLIGHT
        self._hooks = tuple(hooks)
        self._tables = tables
        count = len(layout.buckets)
        self._opened = [0] * count
        self._nodes: list[list[weakref.ref[Any]]] = [[] for _ in range(count)]
        self._in_flight: list[tuple[int, Handle]] = []
        self._begin()

    def _begin(self) -> None:
        """Begin a backward pass."""
        count = len(self.layout.buckets)
        self._left_out: list[str] = []
        self._fired = [0] * count
        # Buckets that the loss has used on this rank, but whose nodes will not run.
        self._silent: frozenset[int] | None = None
        self._sums: list[list[Tensor | None] | None] = [None] * count
        self._ready: list[Tensor | None] = [None] * count
        self._next = count - 1
        self._results: list[Any] = [None] * count

    def open(
        self, bucket: int, views: Sequence[Tensor], receive: Receive, *, again: bool
    ) -> list[Tensor]:
        """Put a node behind the views of a bucket; nobody else may hold these views.

        Args:
            bucket: index of the bucket.
            views: the leaves of the bucket.
            receive: called with the bucket and the gradients when the node fires.
            again: whether :meth:`reopen` may be called; see [Note: reads in backward].

        Returns:
            The views that the loss may use.
        """
        anchor = torch.empty(0, device=self.layout.device, requires_grad=True)
        self.anchors.append(anchor)
        self._opened[bucket] += 1
        if again := again and _takes_hooks():
            torch._C._autograd._push_saved_tensors_default_hooks(id, _next_view)
        try:
            outputs = list(_BucketNode.apply(anchor, receive, bucket, list(views), again))
        finally:
            if again:
                torch._C._autograd._pop_saved_tensors_default_hooks()
        node = outputs[0].grad_fn
        if node is not None:
            # Autograd runs ready nodes from the last made to the first. The nodes of whole
            # parameters are made first of all, so every gradient would be complete before the
            # first was reduced.
            node._set_sequence_nr(_FIRST)
            # Weak, because the node has the call, which ends with the graph.
            self._nodes[bucket].append(weakref.ref(node))
        return outputs

    def reopen(self, bucket: int, views: Sequence[Tensor]) -> list[Tensor] | None:
        """Return views as the outputs of the first node of a bucket, unless the node is gone."""
        node: Any = self._nodes[bucket][0]() if self._nodes and self._nodes[bucket] else None
        if node is None:
            return None
        token = _reopened.set(list(reversed(views)))
        try:
            return list(node.saved_tensors) or None
        except RuntimeError:  # The node has run, and autograd has freed what it saved.
            return None
        finally:
            _reopened.reset(token)

    def add_onto(self, buffers: Sequence[Any]) -> bool:
        """Add the gradients to these buffers, if they stay where backward puts them."""
        if self._hooks or any(
            not isinstance(x, Tensor) or x.dtype is not dtype
            for x, dtype in zip(buffers, self.dtypes, strict=True)
        ):
            return False
        self.onto = buffers
        return True

    def find_silent(self) -> None:
        """As backward begins, find the used buckets that get no gradient.

        Such a bucket was gathered as planned, so this rank has not diverged. Other ranks wait for
        the bucket in the middle of backward, and then start gathers that this rank needs. So the
        reducer sends the bucket in turn, and not at the end.
        """
        if self._silent is not None:
            return
        self._silent = frozenset(
            b
            for b, nodes in enumerate(self._nodes)
            if nodes and b not in self.late and not any(map(_runs, nodes))
        )
        self.start_ready()

    def will_run(self) -> bool:
        """Whether the backward pass that autograd runs gives gradients to any bucket."""
        return bool(self.late) or any(map(_runs, itertools.chain(*self._nodes)))

    def running(self) -> list[bool]:
        """Whether the backward pass that autograd runs gives gradients to each node."""
        return list(map(_runs, itertools.chain(*self._nodes)))

    def add(self, bucket: int, grads: Sequence[Tensor | None]) -> bool:
        """Add the gradients of one of a bucket's nodes; return whether the bucket is complete."""
        if bucket > self._next or self._ready[bucket] is not None:
            path = self.layout.leaves[self.layout.buckets[bucket].leaves[0]].path
            raise ZfunError(
                "a custom function of the loss returns gradients, and runs no backward() over "
                f"parameters; got gradients of the bucket of leaf {path!r} after these were "
                "complete; let its backward pass return what torch.autograd.grad() gives",
                leaf=path,
            )
        self._fired[bucket] += 1
        before = self._sums[bucket]
        self._sums[bucket] = (
            list(grads)
            if before is None
            else [_sum(x, y) for x, y in zip(before, grads, strict=True)]
        )
        if self._fired[bucket] < self._opened[bucket] or bucket in self.late:
            return False
        self._fill(bucket)
        return True

    def start_ready(self) -> None:
        """Start the reductions whose turn has come."""
        silent = self._silent or frozenset()
        while self._next >= 0 and (self._ready[self._next] is not None or self._next in silent):
            bucket, self._next = self._next, self._next - 1
            if self._ready[bucket] is None:
                self._ravel(bucket)
            buffer, self._ready[bucket] = self._ready[bucket], None
            if not self._hooks:
                self._results[bucket] = buffer
                continue
            self._in_flight.append((bucket, self._hooks[0].start(buffer, self.layout, bucket)))
            # Free the buffer before the wait below, because a codec has encoded the values.
            del buffer
            # Do not wait for the reduction of a silent bucket: other ranks may reach this point
            # only after gathers that this rank has not started.
            if self.max_in_flight is not None and bucket not in silent:
                self._settle(self.max_in_flight)

    def finish(self, *, again: bool = False) -> list[Any]:
        """Send unused buckets as zeros, wait, and return one result for each bucket.

        Args:
            again: whether another backward pass may come.
        """
        while self._next >= 0:
            if self._ready[self._next] is None:
                self._fill(self._next)
            self.start_ready()
        self._settle(0)
        results, self.unused = self._results, self._left_out
        if again:
            self._begin()
        else:
            self._nodes.clear()
        return results

    def abandon(self) -> None:
        """Wait for the reductions in flight, because an error ends this call.

        The other ranks take part in these reductions, and read the buffers that this rank sends.
        """
        for _, handle in self._in_flight:
            with contextlib.suppress(ZfunError):
                handle.wait()
        self._in_flight.clear()
        self._nodes.clear()

    def _fill(self, bucket: int) -> None:
        """Wait until one more reduction may be in flight, and copy the gradients of a bucket."""
        if self.max_in_flight is not None:
            self._settle(max(0, self.max_in_flight - 1))
        self._ravel(bucket)

    def _ravel(self, bucket: int) -> None:
        slot, (leaves, offsets) = self.layout.buckets[bucket], _leaves_of(self.layout, bucket)
        sums, self._sums[bucket] = self._sums[bucket], None
        grads = (
            [None] * len(leaves)
            if sums is None
            else [
                x
                if x is None or (x.dtype is leaf.dtype and not x.is_sparse)
                else _rounded(x, leaf.dtype)
                for x, leaf in zip(sums, leaves, strict=True)
            ]
        )
        unused = [leaf.path for x, leaf in zip(grads, leaves, strict=True) if x is None]
        self._left_out += unused
        if unused and self.on_unused is not None:
            self.on_unused(bucket)
        out = self._buffer(slot, bucket) if self.onto is None else self.onto[bucket]
        ops.ravel_into(
            out,
            grads,
            offsets,
            scale=1.0 if sums is None else self.scale(),
            table=None if sums is None or self._tables is None else self._tables[bucket],
            adds=self.onto is not None,
        )
        # A table keeps the list, but must not keep the gradients.
        grads.clear()
        self._ready[bucket] = out

    def _buffer(self, slot: BucketSlot, bucket: int) -> Tensor:
        numel, dtype, device = slot.padded_numel, self.dtypes[bucket], self.layout.device
        # The group may allocate a symmetric buffer, which other ranks can read.
        make = None if self.group is None else self.group.allocate
        if make is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return make(numel, dtype, device)

    def _settle(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            bucket, pending = self._in_flight.pop(0)
            for hook in self._hooks[1:]:
                pending = hook.start(pending.wait(), self.layout, bucket)
            self._results[bucket] = pending.wait()


@functools.lru_cache(maxsize=4096)
def _leaves_of(layout: Layout, bucket: int) -> tuple[tuple[LeafSlot, ...], tuple[int, ...]]:
    """The leaves of a bucket, and the offset of each."""
    slots = tuple(layout.leaves[i] for i in layout.buckets[bucket].leaves)
    return slots, tuple(slot.offset for slot in slots)


def _runs(ref: weakref.ref[Any]) -> bool:
    """Whether the backward pass that autograd runs comes to a node."""
    node = ref()
    return node is not None and torch._C._will_engine_execute_node(node)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return x if y is None else y
    # torch adds a sparse gradient to a dense one only.
    return y + x if x.is_sparse else x + y


def _rounded(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a gradient of a wider dtype to the dtype of the leaf, like the cast of autograd.

    A sparse gradient, such as that of ``nn.Embedding(sparse=True)``, becomes dense.
    """
    grad = grad.to_dense() if grad.is_sparse else grad
    return grad if torch.promote_types(grad.dtype, dtype) == dtype else grad.to(dtype)


_reopened: ContextVar[list[Tensor]] = ContextVar("zfun_reopened")


def _next_view(packed: int) -> Tensor:
    """Return the view that a saved output of a bucket node becomes."""
    del packed
    return _reopened.get().pop()


class _BucketNode(torch.autograd.Function):
    """Views forward, the executor of the call backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, anchor: Tensor, receive: Receive, bucket: int, views: list[Tensor], again: bool
    ) -> tuple[Tensor, ...]:
        # No setup_context(), because torch would look up the signature at every call.
        del anchor
        ctx.receive, ctx.bucket = receive, bucket
        ctx.set_materialize_grads(False)
        # Integer leaves (buffers of a model, say) have no gradient, and buckets of their own.
        if not (views[0].is_floating_point() or views[0].is_complex()):
            ctx.mark_non_differentiable(*views)
        elif again:
            ctx.save_for_backward(*views)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        # No once_differentiable(), because the context takes longer than the question.
        if torch.is_grad_enabled():
            with torch.no_grad():
                ctx.receive(ctx.bucket, grads)
        else:
            ctx.receive(ctx.bucket, grads)
        return None, None, None, None, None


def is_bucket_view(node: Any) -> bool:
    """Whether a node of autograd's graph is the one behind the views of a bucket."""
    return node.name() == f"{_BucketNode.__name__}Backward"
