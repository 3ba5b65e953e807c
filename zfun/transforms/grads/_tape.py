"""A call whose outputs keep their graph, for backward passes that the caller runs.

[Note: tapes]
:func:`zfun.vjp` cuts the graph at the outputs, and a pullback runs backward. A *tape* leaves the
graph whole: the caller differentiates any scalar of the outputs, or of tensors that hooks have
caught inside of the function, by ``backward()`` of torch, in one graph with other functions. The
first node of the call that autograd runs begins the backward pass of the call, and the end of
autograd's pass ends it: then the tape delivers the gradients. With ``retain_graph=True`` a tape
delivers gradients again and again. A pass that reaches no bucket node, such as the gradient of
outputs with respect to inputs, delivers nothing.

The graph keeps the tape alive, and the caller has weak references. So a call whose outputs are
dropped ends at once: the tape waits for the gathers under way, which all ranks have started, and
frees the buckets.

A checkpoint with ``use_reentrant=True`` runs a backward pass inside of backward, so bucket nodes
run several times. Such a block reads parameters without gradients in forward; the buckets that a
call has read so are *late*, and are complete at the end of the pass only. A bucket whose node runs
in any other pass inside of the pass is late from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from zfun.errors import ZfunError
from zfun.transforms._batches import open_batch
from zfun.transforms.call._executor import Executor


class Tape:
    """A call between forward and backward, or between two backward passes; see [Note: tapes].

    Args:
        number: of the call, among the calls of the group.
        start: begins backward: compares the ranks' calls, and sends the weight of the loss.
        end: ends backward, and returns the gradients.

    Attributes:
        deliver: called with the gradients of each pass.
        check: called with the tape before each pass; may refuse it.
        hooked: the paths of leaves whose gradients in a pass ``hook`` changes.
        hook: called with a path and a gradient.
        shown: the leaves by path that are memory of the caller, who may write the frozen ones.
        weight: of the loss of the next pass, as for a :class:`zfun.transforms.Pullback`.
        number: as above.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[Tape], None],
        end: Callable[[Tape, bool], Any],
    ) -> None:
        self.number = number
        self.deliver: Callable[[Any], None] = lambda grads: None
        self.check: Callable[[Tape], None] = lambda tape: None
        self.hooked: Set[str] = frozenset()
        self.hook: Callable[[str, Tensor], Tensor] = lambda path, grad: grad
        self.shown: Mapping[str, Tensor] = {}
        self.weight: float | Tensor | None = None
        self.is_running = False
        self._start, self._end = start, end
        self._executor: Executor | None = None
        self._keeps_graph = False
        # Autograd's number of the pass that runs.
        self._task = -1
        self._dropped: Any = None
        # Weak, because the graph of the outputs keeps this object.
        self._outputs: list[weakref.ref[Tensor]] = []

    def open(self, executor: Executor) -> None:
        """Take the executor of the call, before the function runs."""
        self._executor = executor
        # The executor must not keep the tape, whose end tells that the graph is gone.
        executor.tape = weakref.ref(self)
        self._dropped = weakref.finalize(self, executor.abandon)
        self._dropped.atexit = False

    def watch(self, out: Any) -> None:
        """Let the backward pass begin where autograd reaches an output."""
        for root in open_batch(out).leaves:
            if isinstance(root, Tensor) and root.grad_fn is not None:
                self._outputs.append(weakref.ref(root))
                root.grad_fn.register_prehook(lambda grads: self.begin())

    def begins(self) -> bytes:
        """Say which outputs and bucket nodes the pass that autograd runs reaches."""
        assert self._executor is not None
        outputs = [output() for output in self._outputs]
        nodes = [None if output is None else output.grad_fn for output in outputs]
        reached = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
        return bytes([*reached, *self._executor.reducer.running()])

    @property
    def anchors(self) -> Sequence[Tensor]:
        """The tensors before the bucket nodes; a pass to these alone gives all gradients."""
        return () if self._executor is None else self._executor.reducer.anchors

    def mark_late(self, paths: Iterable[str]) -> None:
        """Know the leaves that the call has read without gradients; see [Note: tapes]."""
        if self._executor is not None:
            reducer = self._executor.reducer
            bucket_of = {slot.path: slot.bucket for slot in reducer.layout.leaves}
            reducer.late |= {bucket_of[path] for path in paths if path in bucket_of}

    def outdate(self, paths: Collection[str]) -> None:
        """Refuse passes that need values of frozen leaves which the caller has written."""
        for path in self.shown.keys() & set(paths):
            # Autograd compares the version with that of forward.
            torch.autograd.graph.increment_version(self.shown[path])
        if self._executor is not None:
            self._executor.outdate(paths)

    def begin(self, *, at_bucket: bool = False) -> None:
        """Begin a backward pass, unless it runs already or reaches no bucket node."""
        executor = self._executor
        if self.is_running or (executor is None and not at_bucket):
            return
        if executor is None:
            raise ZfunError(
                "backward takes outputs of calls since the last step; got outputs of an earlier "
                "call, whose parameters are gone; call the function again"
            )
        if not at_bucket and not executor.reducer.will_run():
            return
        self.check(self)
        self.is_running, self._task = True, torch._C._current_graph_task_id()
        self._keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self._start(self)
        if not (at_bucket and executor.reducer.late):
            # A late bucket may run in a pass inside of the pass, which ends before.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def receive(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a bucket from one of the nodes."""
        self.begin(at_bucket=True)
        assert self._executor is not None
        if self.hooked:
            layout = self._executor.reducer.layout
            paths = [layout.leaves[i].path for i in layout.buckets[bucket].leaves]
            grads = [
                grad if grad is None or path not in self.hooked else self.hook(path, grad)
                for path, grad in zip(paths, grads, strict=True)
            ]
        if torch._C._current_graph_task_id() != self._task:
            self._executor.reducer.late.add(bucket)
        self._executor.contribute(bucket, grads)

    def finish(self) -> None:
        """End the backward pass that runs, if one does, and deliver the gradients."""
        if not self.is_running:
            return
        self.is_running = False
        keeps = self._keeps_graph
        try:
            grads = self._end(self, keeps)
        except BaseException:
            self.close()
            raise
        if not keeps:
            self._executor = None
            self._dropped.detach()
        self.deliver(grads)

    def close(self) -> None:
        """Drop the call; backward through its outputs raises from now on."""
        self.is_running, self._executor = False, None
        self._dropped()
