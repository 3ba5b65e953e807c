"""The gradient function as data: a loss, and the options of backward."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import AllReduce, Collective, Group, Stream, Work, is_checked, sum_group
from zfun.compression import Codec
from zfun.errors import LeafError, OptionError, PlacementError, ZfunError
from zfun.flat import Flat, flats, unravel_buffers
from zfun.layout import DEFAULT_BUCKET_BYTES, Layout, layout_of, unique_leaves
from zfun.placement import P, Placement, R, S
from zfun.transforms._notes import noting
from zfun.transforms._watched import watched
from zfun.transforms.call._buckets import tree_of, views_of
from zfun.transforms.call._call import BoundParams, LossCall
from zfun.transforms.call._executor import Executor, WholeParams, check_recomputed
from zfun.transforms.call._hooks import CommHook, SumHook
from zfun.transforms.call._reducer import GradReducer
from zfun.transforms.grads import _pullback
from zfun.transforms.grads._halves import backward_of_inputs
from zfun.transforms.grads._tape import Tape
from zfun.transforms.grads._value import (
    NO_AUX,
    WeightedMean,
    ZfunGradient,
    parse,
    reciprocal,
    scalar_on,
)
from zfun.transforms.values._agreement import check_agreement
from zfun.typing import Loss


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call of a gradient function between forward and backward; see [Note: open calls].

    Attributes:
        params: of the call.
        layout: of the parameters.
        group: the ranks over which gradients are summed, if any.
        executor: holds everything that forward has kept for backward.
        tables: the addresses of gradients, by bucket.
        is_first: whether no earlier call with this layout has ended.
    """

    params: tree.Tree
    layout: Layout
    group: Group | None
    executor: Executor
    tables: list[ops.AddressTable]
    is_first: bool


@dataclass(frozen=True, eq=False)
class GradientFunction(ZfunGradient):
    """A gradient function as data, so that transforms can change the backward pass.

    Attributes:
        loss: the function to differentiate.
        group: the ranks over which gradients are partial sums; ``None`` for gradients of this rank
            alone.
        reduce: ``"mean"`` or ``"sum"`` over the ranks.
        bucket_bytes: the most bytes of a bucket, for parameters that are not flat yet.
        placement: of the gradients; ``None`` for gradients of this rank alone.
        over: the ranks that share sharded gradients: ``group`` or the inner axis.
        hooks: the steps of each complete bucket of gradients.
        reduce_dtype: of flat gradients; ``None`` for that of the parameters, but float32 for half
            types.
        loss_scale: the factor of the loss in backward.
        codec: of the partial sums; ``None`` sends exact values.
        on_unused: if given, the gradients name the leaves that got none on this rank
            (``Flat.missed``), and this is called with the index of a bucket that holds such a leaf,
            before the hooks take the bucket.
        is_planned: whether a plan that all ranks share says in which order they make and pull
            calls, as in a pipeline; see [Note: open calls].
    """

    loss: Loss
    group: Group | None = None
    reduce: str = "mean"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    placement: Placement | None = None
    over: Group | None = None
    hooks: tuple[CommHook, ...] = ()
    reduce_dtype: torch.dtype | None = None
    loss_scale: float | Tensor = 1.0
    codec: Codec | None = None
    on_unused: Callable[[int], None] | None = None
    is_planned: bool = False
    _agreed: set[Layout] = dataclasses.field(default_factory=set, compare=False, repr=False)
    _tables: dict[Layout, list[ops.AddressTable]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @ops.uncompiled
    def __call__(self, params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        """Return the loss and the gradients."""
        out, call = self._forward(params, batch)
        executor = call.executor
        try:
            with torch.enable_grad():
                value, total, weight, aux = parse(out)
            executor.loss = loss = self._start_loss(total.detach(), weight, self.group)
            seed = _pullback.seed_of(total, self.loss_scale)
            grads, _ = self._backward(call, [total], [seed], self._scale_of(loss, weight))
        except Exception:
            executor.abandon()
            raise
        value = self._value(loss.wait(), weight)
        return (value if aux is NO_AUX else (value, aux)), grads

    @ops.uncompiled
    def vjp(self, params: tree.Tree, batch: Any) -> tuple[Any, _pullback.Pullback]:
        """Return the outputs of the function, and the pullback; see :func:`zfun.vjp`."""
        number = _pullback.start_forward(self._numbering(params))
        out, call = self._forward(params, batch)
        try:
            outputs = _pullback.Outputs(out)
            values = outputs.values()
        except Exception:
            call.executor.abandon()
            raise
        # A name here would keep the graph alive.
        del out

        def pull(
            cotangents: Any, weight: Any, inputs: Sequence[Tensor]
        ) -> Callable[[], _pullback.Pulled]:
            if isinstance(params, Flat):
                params.life.check()
            seeds = outputs.seeds(cotangents, self.loss_scale)
            return lambda: self._pull(call, number, outputs.roots, seeds, weight, inputs)

        def halve(
            cotangents: Any, weight: Any, inputs: Sequence[Tensor], views: Sequence[_pullback.View]
        ) -> tuple[list[Tensor | None], Callable[[], Any]]:
            seeds = outputs.seeds(cotangents, self.loss_scale)
            found, second = backward_of_inputs(
                outputs.roots, seeds, inputs, [view for _, view in views]
            )

            def rest() -> Any:
                # From the leaves on, as in one pass.
                leaves = [leaf for leaf, _ in views]
                return self._pull(call, number, leaves, second(), weight, ())[0]

            return found, rest

        def onto(total: Flat) -> bool:
            is_alike = total.group is call.group and total.placement is self.placement
            is_alike = is_alike and total.layout == call.layout
            return is_alike and call.executor.reducer.add_onto(total.buffers)

        return values, _pullback.Pullback(pull, call.executor.abandon, outputs.paths, halve, onto)

    def record(self, params: tree.Tree, batch: Any, recipe: int = 0) -> tuple[Any, Tape]:
        """Return the outputs of the function with their graph, and the tape; see [Note: tapes].

        ``recipe`` is the number of the recipe, if its ranks may make other calls than each other.
        """
        found: list[OpenCall] = []

        def start(tape: Tape) -> None:
            if isinstance(params, Flat):
                params.life.check()
            call = found[0]
            scale = self._start_backward(call, tape.number, tape.weight, tape.begins())
            call.executor.begin_backward((), scale)

        tape = Tape(
            recipe
            if recipe and not _is_sharded(params)
            else _pullback.start_forward(self._numbering(params)),
            start,
            lambda tape, again: self._finish(found[0], again=again),
        )
        out, call = self._forward(params, batch, tape)
        found.append(call)
        tape.watch(out)
        return out, tape

    def _pull(
        self,
        call: OpenCall,
        number: int,
        roots: Sequence[Any],
        seeds: Sequence[Tensor | None],
        weight: Any,
        inputs: Sequence[Tensor],
    ) -> _pullback.Pulled:
        """Run backward from outputs of any kind."""
        executor = call.executor
        try:
            begins = bytes(seed is not None for seed in seeds)
            scale = self._start_backward(call, number, weight, begins)
            used = [
                (root, seed) for root, seed in zip(roots, seeds, strict=True) if seed is not None
            ]
            return self._backward(
                call,
                [root for root, _ in used],
                [seed for _, seed in used],
                scale,
                inputs,
            )
        except Exception:
            executor.abandon()
            raise

    def _numbering(self, params: tree.Tree) -> Group | None:
        """Return the ranks that compare the numbers of their calls."""
        if self.is_planned and not _is_sharded(params):
            return None
        return self.group or (params.group if isinstance(params, Flat) else None)

    def _start_backward(
        self, call: OpenCall, number: int, weight: Any, begins: bytes
    ) -> Callable[[], float | Tensor]:
        """Check that all ranks pull this call, send the weight, and return the factor."""
        summed = Work.done(torch.zeros(1))
        if weight is not None:
            weight = scalar_on(call.layout.device, weight, torch.float64).reshape(())
        if not _pullback.start_backward(self._numbering(call.params), number, begins):
            call.executor.diverge()
        if weight is not None:
            group = self.group
            if group is None and _is_sharded(call.params):
                # The gradients are summed over these ranks; see _hooks().
                group = sum_group(call.params.group)
            zero = torch.zeros_like(weight)
            call.executor.loss = summed = self._start_loss(zero, weight, group)
        return self._scale_of(summed, weight)

    def _forward(
        self, params: tree.Tree, batch: Any, tape: Tape | None = None
    ) -> tuple[Any, OpenCall]:
        """Run the function; the executor stays open for backward."""
        if torch.is_inference_mode_enabled():
            raise ZfunError(
                "a gradient takes autograd, which torch.inference_mode() turns off; got a call in "
                "inference mode; take the step outside, or call the loss alone"
            )
        layout, group = self._layout(params)
        # Threads may share one gradient function, so an open call owns the tables.
        tables = self._tables.pop(layout, None)
        is_first = tables is None
        if tables is None:
            tables = [ops.AddressTable() for _ in layout.buckets]
        hooks = watched(self._hooks(params), layout)
        dtypes = grad_dtypes(layout, group, self.reduce_dtype)
        executor = Executor(GradReducer(layout, hooks, dtypes, group, tables))
        executor.reducer.on_unused = self.on_unused
        if tape is not None:
            tape.open(executor)
        try:
            with torch.enable_grad(), noting("forward"):
                out = self.loss(_open(params, layout, executor), batch)
            if tape is not None:
                executor.leave_views()
        except Exception:
            executor.abandon()
            raise
        return out, OpenCall(params, layout, group, executor, tables, is_first)

    def _backward(
        self,
        call: OpenCall,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        scale: Callable[[], float | Tensor],
        inputs: Sequence[Tensor] = (),
    ) -> _pullback.Pulled:
        """Run backward and reduce the gradients."""
        executor = call.executor
        executor.begin_backward(roots, scale)
        with noting("backward"):
            found = executor.backward(roots, seeds, inputs)
        grads = self._finish(call)
        if call.is_first and executor.reducer.unused:
            check_recomputed(roots, executor.reducer.unused)
        return grads, found

    def _finish(self, call: OpenCall, *, again: bool = False) -> Any:
        """Wait for the gradients, and return them."""
        results = call.executor.finish(again=again)
        if not again:
            self._tables[call.layout] = call.tables
        unused = call.executor.reducer.unused
        if self.group is not None and is_checked(self.group) and unused:
            warnings.warn(
                f"rank {self.group.rank}: the loss does not depend on {', '.join(unused)}; such "
                "leaves have zero gradients; freeze them if that is meant",
                stacklevel=2,
            )
        grads = self._wrap(call.params, results, call.layout, call.group)
        if unused and self.on_unused is not None and isinstance(grads, Flat):
            grads = grads.with_missed(dict.fromkeys(unused))
        return grads

    def _layout(self, params: tree.Tree) -> tuple[Layout, Group | None]:
        if isinstance(params, Flat):
            if params.placement is P:
                raise PlacementError(
                    "parameters are whole or sharded; got a Flat with placement P; "
                    "redistribute() it to R or S first"
                )
            if self.group is not None and sum_group(params.group) is not self.group:
                raise PlacementError(
                    "parameters and gradients must be of one group; got two; pass the same group "
                    "to shard() and data_parallel(), or the inner axis of a mesh and that mesh"
                )
            return _check_trainable(params.layout), self.group or params.group
        if flats(params):
            raise PlacementError(
                "parameters are one Flat or a tree of tensors; got a Flat inside a tree; shard "
                "the whole tree at once"
            )
        if self.group is None:
            return _check_trainable(layout_of(params, 1, self.bucket_bytes)), None
        try:
            layout = layout_of(params, self.group.size, self.bucket_bytes)
        except ZfunError:
            if not self._agreed:
                # Tell the other ranks, whose trees may be valid.
                check_agreement(params, self.group, bucket_bytes=self.bucket_bytes)
            raise
        if layout not in self._agreed:
            check_agreement(params, self.group, bucket_bytes=self.bucket_bytes)
            self._agreed.add(layout)
        return _check_trainable(layout), self.group

    def _hooks(self, params: tree.Tree) -> tuple[CommHook, ...]:
        hooks = self.hooks
        # The derivative of a gather is a reduce-scatter: without a transform that says otherwise,
        # sharded parameters have sharded gradients.
        if self.group is None and _is_sharded(params):
            hooks = (SumHook(params.group, S), *hooks)
        return hooks

    def _start_loss(self, total: Tensor, weight: Tensor | None, group: Group | None) -> Work:
        """Start one all-reduce of the loss and, if there is one, of the weight."""
        parts = torch.stack([total] if weight is None else [total, weight])
        if group is None:
            return Work.done(parts)
        if weight is not None and self.reduce != "mean":
            raise OptionError(
                "weighted_mean() is a mean; got data_parallel(reduce='sum'); use reduce='mean', "
                "or return the sum itself as the loss"
            )
        return group.start(Collective(AllReduce(), "loss", "loss", Stream.CONTROL), parts)

    def _value(self, summed: Tensor, weight: Tensor | None) -> Any:
        """Return the loss for the caller."""
        return (
            summed[0] * self._rank_scale if weight is None else WeightedMean(summed[0], summed[1])
        )

    @property
    def _rank_scale(self) -> float:
        return 1.0 / self.group.size if self.group is not None and self.reduce == "mean" else 1.0

    def _scale_of(self, summed: Work, weight: Tensor | None) -> Callable[[], float | Tensor]:
        """Return a function that gives the factor of all gradients."""
        if weight is None:
            return lambda: self._rank_scale

        # Needed when the first bucket is complete, because backward computes meanwhile.
        def factor() -> float | Tensor:
            parts = summed.wait()
            return self._rank_scale if ops.is_abstract(parts) else reciprocal(parts[1])

        return functools.cache(factor)

    def _wrap(
        self, params: tree.Tree, results: list[Any], layout: Layout, group: Group | None
    ) -> Any:
        if group is None:
            return unravel_buffers(results, layout)
        placement = self.placement
        if placement is None:
            placement = S if _is_sharded(params) else R
        over = self.over or group if placement is S else group
        return Flat(results, placement, layout, over, codec=self.codec if placement is P else None)


def _is_sharded(params: tree.Tree) -> bool:
    return isinstance(params, Flat) and params.placement is S


def _open(params: tree.Tree, layout: Layout, executor: Executor) -> tree.Tree:
    """Put bucket nodes behind whole parameters; bind sharded ones to the call."""
    if _is_sharded(params):
        return BoundParams(params, LossCall(executor))
    if isinstance(params, Flat):
        buffers = stores.resident(params).buffers
        slots = [[layout.leaves[i] for i in bucket.leaves] for bucket in layout.buckets]
        views = [views_of(buffer, leaves) for buffer, leaves in zip(buffers, slots, strict=True)]
        executor.attach(WholeParams(views, slots))
    else:
        leaves = [leaf.detach() for leaf in unique_leaves(params, layout)]
        views = [[leaves[i] for i in bucket.leaves] for bucket in layout.buckets]
    return tree_of(layout, (executor.open(bucket, x) for bucket, x in enumerate(views)))


def grad_dtypes(
    layout: Layout, group: Group | None, chosen: torch.dtype | None
) -> list[torch.dtype]:
    """The dtypes of the buffers of gradients; without a group, those of the leaves."""
    if group is None:
        return [bucket.dtype for bucket in layout.buckets]
    if chosen is None:
        return [ops.wide(bucket.dtype) for bucket in layout.buckets]
    for slot in layout.leaves:
        if slot.dtype.is_complex and chosen is torch.bfloat16:
            raise LeafError(
                "there are no complex numbers in bfloat16; got reduce_dtype=torch.bfloat16 for "
                f"leaf {slot.path!r}, which is {slot.dtype}; use torch.float32",
                leaf=slot.path,
            )
    return [chosen] * len(layout.buckets)


def _check_trainable(layout: Layout) -> Layout:
    for slot in layout.leaves:
        if not (slot.dtype.is_floating_point or slot.dtype.is_complex):
            raise LeafError(
                f"a trainable leaf must be floating or complex; leaf {slot.path!r} is "
                f"{slot.dtype}; split the tree with zf.partition() and close over the rest",
                leaf=slot.path,
            )
    return layout
