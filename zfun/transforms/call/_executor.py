"""The executor of one call of a gradient function.

[Note: one call]
The phases of a call are methods of the executor, in this order: ``attach`` the parameters of
the loss; the loss runs; ``begin_backward``; ``contribute`` each time a bucket node fires;
``finish``. An error, or a pullback that is dropped, ends the call with ``abandon`` instead. The
executor owns the ``GradReducer``, and tells the attached parameters when a bucket's gradients are
complete, because a gathered bucket is released then.

The host does not wait for a device between forward and backward: the divergence check of stage 3
gathers numbers of the hosts, and the weight of a weighted mean stays on the device. The weight of
CPU ranks is read when the first bucket of gradients is complete.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.errors import ZfunError
from zfun.layout import LeafSlot
from zfun.transforms.call._reducer import GradReducer
from zfun.transforms.call._written import check_unwritten


class CallParams(Protocol):
    """The parameters of a call, in the form that the loss receives."""

    @property
    def diverged(self) -> bool | None:
        """Whether any rank left the schedule; ``None`` for parameters that are not gathered."""
        ...

    def diverge(self) -> None:
        """Some rank begins backward at other outputs."""
        ...

    def outdate(self, paths: Collection[str]) -> None:
        """Code has written these leaves since forward."""
        ...

    def leave_views(self) -> None:
        """From the end of forward on, the graph alone keeps the views."""
        ...

    def begin_backward(self) -> None:
        """Forward has ended."""
        ...

    def complete(self, bucket: int) -> None:
        """All gradients of a bucket have been copied out."""
        ...

    def finish_backward(self) -> None:
        """Backward has ended on this rank; reductions may be in flight."""
        ...

    def end(self, *, again: bool = False) -> None:
        """All gradients are reduced; another backward pass may come."""
        ...

    def abandon(self) -> None:
        """An error ends the call."""
        ...


class WholeParams:
    """Parameters that every rank holds whole: the loss must not write to the views."""

    diverged: bool | None = None

    def __init__(
        self, views: Sequence[Sequence[Tensor]], slots: Sequence[Sequence[LeafSlot]]
    ) -> None:
        self._views: Sequence[Sequence[Any]] = views
        self._slots = slots
        self._old = set[str]()

    def leave_views(self) -> None:
        """Look at the views, which have the graph's first nodes, and let go of them."""
        self.end()
        self._views = [[*map(_LeftView, views)] for views in self._views]

    def diverge(self) -> None:
        """Nothing is gathered."""

    def outdate(self, paths: Collection[str]) -> None:
        """Let autograd refuse these leaves where backward needs them, as it compares versions."""
        self._old.update(paths)
        for views, slots in zip(self._views, self._slots, strict=True):
            for view, slot in zip(views, slots, strict=True):
                if slot.path in paths and (left := view.own()) is not None:
                    torch.autograd.graph.increment_version(left)

    def begin_backward(self) -> None:
        """Nothing was gathered."""

    def complete(self, bucket: int) -> None:
        """Nothing is released."""

    def finish_backward(self) -> None:
        """Nothing is in flight."""

    def end(self, *, again: bool = False) -> None:
        """Check that the loss has not written to the parameters."""
        del again
        for views, slots in zip(self._views, self._slots, strict=True):
            if self._old:
                pairs = zip(views, slots, strict=True)
                new = [(x, slot) for x, slot in pairs if slot.path not in self._old]
                views, slots = [x for x, _ in new], [slot for _, slot in new]
            check_unwritten(views, slots)

    def abandon(self) -> None:
        """Nothing is in flight."""


class _LeftView:
    """A view that the graph or the caller keeps; nobody writes to a view that is gone."""

    __slots__ = ("own",)

    def __init__(self, view: Tensor) -> None:
        self.own = weakref.ref(view)

    @property
    def _version(self) -> int:
        view = self.own()
        return 0 if view is None else view._version


class Executor:
    """Runs one call of a gradient function, forward and backward; see [Note: one call].

    Attributes:
        reducer: collects and reduces the gradients.
        loss: the started sum of the loss over the ranks, or ``None``.
        tape: of a call whose backward passes the caller runs; see [Note: tapes].
    """

    def __init__(self, reducer: GradReducer) -> None:
        self.reducer = reducer
        self.loss: Work | None = None
        self.tape: Callable[[], Any] | None = None
        self._params: list[CallParams] = []

    def diverge(self) -> None:
        """Some rank begins backward at other outputs."""
        for params in self._params:
            params.diverge()

    def outdate(self, paths: Collection[str]) -> None:
        """Code has written these leaves since forward."""
        for params in self._params:
            params.outdate(paths)

    def attach(self, params: CallParams) -> None:
        """Let parameters take part in this call: once for each sharded loss that is called."""
        self._params.append(params)

    def leave_views(self) -> None:
        """Forward has ended: keep no view, so that the call ends with the graph."""
        for params in self._params:
            params.leave_views()

    def open(self, bucket: int, views: Sequence[Tensor], *, again: bool = False) -> list[Tensor]:
        """Put a bucket node behind views; return the views that the loss may use."""
        tape = None if self.tape is None else self.tape()
        receive = self.contribute if tape is None else tape.receive
        return self.reducer.open(bucket, views, receive, again=again)

    def begin_backward(self, roots: Sequence[Tensor], scale: Callable[[], float | Tensor]) -> None:
        """Backward begins at these outputs; gradients will be multiplied with a factor."""
        self.reducer.scale = scale
        found = [params.diverged for params in self._params if params.diverged is not None]
        if any(found):
            # Do not wait for reductions inside backward: other ranks may start gathers that this
            # rank needs only after a reduction that this rank has not started.
            self.reducer.max_in_flight = None
        for params in self._params:
            params.begin_backward()
        if found and self.tape is not None:
            self.reducer.find_silent()
        elif found:
            # The first node that autograd runs is the node of one of the roots.
            for root in roots:
                if root.grad_fn is not None:
                    root.grad_fn.register_prehook(lambda grads: self.reducer.find_silent())

    def backward(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Run backward, and return the gradients of inputs.

        Args:
            roots: the outputs.
            seeds: the gradients of the outputs.
            inputs: other tensors than parameters.
        """
        live = [pair for pair in zip(roots, seeds, strict=True) if pair[0].requires_grad]
        anchors = self.reducer.anchors
        if not live or not (anchors or inputs):
            return [None] * len(inputs)
        found = torch.autograd.grad(
            [root for root, _ in live],
            [*anchors, *inputs],
            [seed for _, seed in live],
            allow_unused=True,
        )
        return list(found[len(anchors) :])

    def contribute(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a bucket from one of the nodes."""
        if self.reducer.add(bucket, grads):
            for params in self._params:
                params.complete(bucket)
            self.reducer.start_ready()

    def finish(self, *, again: bool = False) -> list[Any]:
        """Wait for all gradients, and return one result for each bucket.

        Args:
            again: whether the graph is kept for another backward pass.
        """
        for params in self._params:
            params.finish_backward()
        results = self.reducer.finish(again=again)
        for params in self._params:
            params.end(again=again)
        if not again:
            # The parameters refer to this object: a cycle that would keep the buffers alive.
            self._params.clear()
        return results

    def abandon(self) -> None:
        """Wait for everything that has been started, because an error ends this call.

        The other ranks take part in the collectives, and read the buffers that this rank sends.
        """
        for params in self._params:
            params.abandon()
        if self.loss is not None:
            with contextlib.suppress(ZfunError):
                self.loss.wait()
        self.reducer.abandon()
        self._params.clear()


def check_recomputed(roots: Sequence[Tensor], unused: Sequence[str]) -> None:
    """Refuse a reentrant checkpoint, which ``torch.autograd.grad`` skips without an error.

    ``unused`` has the paths of the leaves without a gradient.
    """
    todo = [root.grad_fn for root in roots]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ZfunError(
                "torch.autograd.grad skips a checkpoint with use_reentrant=True whose input "
                "depends on no trained leaf; got such a checkpoint and no gradient of "
                f"{unused[0]!r} and {len(unused) - 1} other leaves; pass use_reentrant=False, or "
                "freeze the leaves",
                leaf=unused[0],
            )
        following = {node for node, _ in node.next_functions} - seen
        seen |= following
        todo += following
