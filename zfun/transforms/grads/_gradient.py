"""Gradient functions: from a loss to gradients, and transforms of gradient functions."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import (
    AllReduce,
    Collective,
    Group,
    Stream,
    Work,
    axis_of,
    is_checked,
    mesh_of,
)
from zfun.compression import Codec, check_codec
from zfun.errors import LeafError, OptionError, PlacementError, ZfunError, checked_options
from zfun.flat import Flat, flats, ravel_buckets, unravel_buffers
from zfun.layout import DEFAULT_BUCKET_BYTES, Layout, layout_of, unique_leaves
from zfun.placement import P, Placement, R, S
from zfun.transforms._cast import CastLoss
from zfun.transforms._notes import noting
from zfun.transforms._watched import watched
from zfun.transforms.grads._executor import Executor, WholeParams
from zfun.transforms.grads._hooks import CommHook, SumHook
from zfun.transforms.grads._reducer import GradReducer
from zfun.transforms.grads._value import NO_AUX, WeightedMean, parse
from zfun.transforms.params._buckets import tree_of, views_of
from zfun.transforms.params._call import BoundParams, LossCall
from zfun.transforms.remat import warn_of_whole_loss
from zfun.transforms.values._redistribute import check_agreement
from zfun.typing import Gradient, Loss

__all__ = [
    "GradientFunction",
    "data_parallel",
    "scale_loss",
    "value_and_grad",
]


@dataclass(frozen=True)
class GradientFunction:
    """A gradient function as data, so that transforms can change the backward pass.

    Attributes:
        loss: the function to differentiate.
        group: the ranks over which gradients are partial sums; ``None`` for gradients of this rank
            alone.
        reduce: ``"mean"`` or ``"sum"`` over the ranks.
        bucket_bytes: where buckets close, for parameters that are not flat yet.
        placement: of the gradients; ``None`` for gradients of this rank alone.
        over: the ranks that share sharded gradients: ``group`` or the inner axis.
        hooks: the steps of each complete bucket of gradients.
        reduce_dtype: of flat gradients; ``None`` for that of the parameters, but float32 for half
            types.
        loss_scale: the factor of the loss in backward.
        codec: of the partial sums; ``None`` sends exact values.
    """

    loss: Loss
    group: Group | None = None
    reduce: str = "mean"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    placement: Placement | None = None
    over: Group | None = None
    hooks: tuple[CommHook, ...] = ()
    reduce_dtype: torch.dtype | None = None
    loss_scale: float = 1.0
    codec: Codec | None = None
    _agreed: set[Layout] = dataclasses.field(default_factory=set, compare=False, repr=False)
    _tables: dict[Layout, list[ops.AddressTable]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def __call__(self, params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        """Return the loss and the gradients."""
        layout, group = self._layout(params)
        # Simulated ranks may share one gradient function, so a running call owns the tables.
        tables = self._tables.pop(layout, None)
        if tables is None:
            tables = [ops.AddressTable() for _ in layout.buckets]
        hooks = watched(self._hooks(params), layout)
        executor = Executor(
            GradReducer(
                layout, hooks, _grad_dtypes(layout, group, self.reduce_dtype), group, tables
            )
        )
        try:
            with torch.enable_grad(), noting("forward"):
                value, total, weight, aux = parse(self.loss(_open(params, layout, executor), batch))
            executor.loss = self._start_loss(total.detach(), weight)
            executor.begin_backward(total, self._scale_of(executor.loss, weight))
            with noting("backward"):
                executor.backward(total, self.loss_scale)
            results = executor.finish()
        except Exception:
            executor.abandon()
            raise
        self._tables[layout] = tables
        unused = executor.reducer.unused
        if self.group is not None and is_checked(self.group) and unused:
            warnings.warn(
                f"rank {self.group.rank}: the loss does not depend on {', '.join(unused)}; such "
                "leaves have zero gradients; freeze them if that is meant",
                stacklevel=2,
            )
        value = self._value(executor.loss.wait(), weight)
        return (value if aux is NO_AUX else (value, aux)), self._wrap(
            params, results, layout, group
        )

    def _layout(self, params: tree.Tree) -> tuple[Layout, Group | None]:
        if isinstance(params, Flat):
            if params.placement is P:
                raise PlacementError(
                    "parameters are whole or sharded; got a Flat with placement P; "
                    "redistribute() it to R or S first"
                )
            if self.group is not None and mesh_of(params.group) is not self.group:
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
        if self.group is None and isinstance(params, Flat) and params.placement is S:
            hooks = (SumHook(params.group, S), *hooks)
        return hooks

    def _start_loss(self, total: Tensor, weight: Tensor | None) -> Work:
        """Start one all-reduce of the loss and, if there is one, of the weight."""
        parts = torch.stack([total] if weight is None else [total, weight])
        if self.group is None:
            return Work.done(parts)
        if weight is not None and self.reduce != "mean":
            raise OptionError(
                "weighted_mean() is a mean; got data_parallel(reduce='sum'); use reduce='mean', "
                "or return the sum itself as the loss"
            )
        return self.group.start(Collective(AllReduce(), "loss", "loss", Stream.CONTROL), parts)

    def _value(self, summed: Tensor, weight: Tensor | None) -> Any:
        """Return the loss for the caller."""
        return (
            summed[0] * self._rank_scale if weight is None else WeightedMean(summed[0], summed[1])
        )

    @property
    def _rank_scale(self) -> float:
        return 1.0 / self.group.size if self.group is not None and self.reduce == "mean" else 1.0

    def _scale_of(self, summed: Work, weight: Tensor | None) -> Callable[[], float]:
        """Return a function that gives the factor of all gradients."""
        if weight is None or ops.is_abstract(weight):
            return lambda: self._rank_scale
        # A mean over no tokens has the gradient 0. The host reads the weight once, when the first
        # bucket is complete, because the device computes backward meanwhile.
        return functools.cache(lambda: 1.0 / (float(summed.wait()[1]) or 1.0))

    def _wrap(
        self, params: tree.Tree, results: list[Any], layout: Layout, group: Group | None
    ) -> Any:
        if group is None:
            return unravel_buffers(results, layout)
        placement = self.placement
        if placement is None:
            placement = S if isinstance(params, Flat) and params.placement is S else R
        over = self.over or group if placement is S else group
        return Flat(results, placement, layout, over, codec=self.codec if placement is P else None)


def _open(params: tree.Tree, layout: Layout, executor: Executor) -> tree.Tree:
    """Put bucket nodes behind whole parameters; bind sharded ones to the call."""
    if isinstance(params, Flat) and params.placement is S:
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


def _grad_dtypes(
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


def value_and_grad(loss: Loss) -> GradientFunction:
    """Return a function that computes a loss and the gradients.

    Args:
        loss: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`weighted_mean`.

    Returns:
        ``(params, batch) -> (loss, grads)``, or ``((loss, aux), grads)``. For a tree of tensors the
        gradients are a tree of the same structure, zero where the loss does not depend on a leaf;
        for a ``Flat``, a ``Flat``. The loss comes back detached. For higher derivatives use
        ``torch.func`` on the loss.

    Raises:
        LeafError: from the returned function, for an integer leaf.

    Example:
        >>> import zfun as zf
        >>> vg = zf.value_and_grad(lambda params, batch: (params["w"] * batch).sum())
        >>> vg({"w": torch.tensor([1.0, 2.0])}, torch.tensor(3.0))
        (tensor(9.), {'w': tensor([3., 3.])})
    """
    warn_of_whole_loss(loss.loss if isinstance(loss, CastLoss) else loss)
    return GradientFunction(loss)


@checked_options
def data_parallel(
    vg: Gradient,
    group: Group,
    *,
    reduce: str = "mean",
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    compression: Codec | None = None,
) -> Gradient:
    """Let every rank have a batch: gradients become partial sums over the ranks (``-> P``).

    The ranks send only the loss. :func:`replicate_grads`, :func:`shard_grads` or :func:`apply` sums
    the gradients.

    Args:
        vg: a gradient function.
        group: all the ranks that have a batch: a group, or a whole mesh.
        reduce: ``"mean"`` divides by the number of ranks (here, and nowhere else); ``"sum"`` does
            not. A loss that returns :func:`weighted_mean` is divided by the weight over all ranks
            instead.
        reduce_dtype: the dtype of the gradients, also on the wire, in the sums over the ranks and
            over micro-batches. By default the dtype of the parameters, but float32 for half types,
            whose sums would lose bits.
        bucket_bytes: where buckets close, for parameters that are not flat yet.
        compression: the codec of the later sum, such as :func:`zfun.compression.int4`; by default
            the sum sends exact values. A ``Flat`` with placement ``P`` carries the codec;
            ``zf.tree.map`` drops the codec.

    Returns:
        A gradient function. The loss is the loss of all ranks together; the gradients are a
        ``Flat`` with placement ``P``.

    Raises:
        PlacementError: an axis of a mesh, or gradients that are partial already.
        SpecMismatch: from the returned function, at the first call on a tree of tensors, where
            ranks hold different parameters.

    Example:
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: params["w"] * batch
        >>> def main(group):
        ...     vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
        ...     loss, grads = vg({"w": torch.tensor(2.0)}, torch.tensor(float(group.rank)))
        ...     return loss, grads.placement, zf.unshard(grads)
        >>> zf.simulate(2, main)[0]
        (tensor(1.), P, {'w': tensor(0.5000)})
    """
    _check_parallel(vg, group, reduce, reduce_dtype)
    check_codec(compression, "data_parallel()")
    if isinstance(vg, GradientFunction):
        return dataclasses.replace(
            vg,
            group=group,
            reduce=reduce,
            reduce_dtype=reduce_dtype,
            bucket_bytes=bucket_bytes,
            placement=P,
            codec=compression,
            _agreed=set(),
        )

    def parallel(params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        value, grads = vg(params, batch)
        loss, aux = value if type(value) is tuple else (value, NO_AUX)
        scale = 1.0 / group.size if reduce == "mean" else 1.0
        if isinstance(loss, WeightedMean) or flats(grads):
            raise PlacementError(
                "data_parallel() takes gradients that are this rank's own; got ones that are "
                "flat or weighted already; put it directly around value_and_grad()"
            )
        pending = group.start(
            Collective(AllReduce(), "loss", "loss", Stream.CONTROL),
            loss.detach().reshape(1).contiguous(),
        )
        layout = layout_of(grads, group.size, bucket_bytes)
        buffers = ravel_buckets(
            grads, layout, scale=scale, dtypes=_grad_dtypes(layout, group, reduce_dtype)
        )
        flat = Flat(buffers, P, layout, group, codec=compression)
        loss = pending.wait()[0] * scale
        return (loss if aux is NO_AUX else (loss, aux)), flat

    return parallel


def _check_parallel(
    vg: Gradient, group: Group, reduce: str, reduce_dtype: torch.dtype | None
) -> None:
    if axis_of(group):
        raise PlacementError(
            f"data_parallel() takes all the ranks that have a batch; got the {axis_of(group)} "
            "axis of a mesh; pass the mesh itself"
        )
    if reduce not in ("mean", "sum"):
        raise OptionError(f"reduce must be 'mean' or 'sum'; got {reduce!r}")
    if not (reduce_dtype is None or reduce_dtype.is_floating_point):
        raise OptionError(
            f"reduce_dtype must be a floating dtype; got {reduce_dtype}; torch.float32 is usual"
        )
    if isinstance(vg, GradientFunction) and vg.group is not None:
        raise PlacementError(
            "data_parallel() takes gradients that are this rank's own; got ones with placement "
            f"{vg.placement!r}; apply it once, and before shard_grads()"
        )


def scale_loss(vg: Gradient, scale: float) -> Gradient:
    """Multiply the loss by a number in backward, so that float16 gradients do not underflow.

    The returned loss is not scaled; the gradients are ``scale`` times as large. The caller divides
    the sum over the ranks by the same number. :class:`zfun.optim.LossScale` adapts the scale from
    step to step, and :func:`zfun.zero` does all of this.

    Args:
        vg: a gradient function made by zfun; for micro-batches put :func:`accumulate` around the
            result.
        scale: the number; a power of two changes no bit of gradients that do not underflow.

    Returns:
        A gradient function.

    Raises:
        OptionError: ``vg`` is not made by :func:`value_and_grad`, :func:`data_parallel`,
            :func:`shard_grads` or :func:`zfun.offload`.

    Example:
        >>> import zfun as zf
        >>> vg = zf.value_and_grad(lambda params, batch: (params["w"] * batch).sum())
        >>> zf.scale_loss(vg, 1024.0)({"w": torch.tensor(1.0)}, torch.tensor(3.0))
        (tensor(3.), {'w': tensor(3072.)})
    """
    if not isinstance(vg, GradientFunction):
        raise OptionError(
            "scale_loss() takes a gradient function that it can look into; got "
            f"{type(vg).__name__}; put it inside of accumulate(), around value_and_grad(), "
            "data_parallel() or shard_grads()"
        )
    return dataclasses.replace(vg, loss_scale=vg.loss_scale * scale)
