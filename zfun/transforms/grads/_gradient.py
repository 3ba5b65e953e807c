"""Gradient functions: from a loss to gradients, and transforms of gradient functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import AllReduce, Collective, Group, Stream, axis_of, sum_group
from zfun.compression import CODEC, Codec
from zfun.errors import OptionError, PlacementError
from zfun.flat import Flat, flats, ravel_buckets
from zfun.layout import DEFAULT_BUCKET_BYTES, layout_of
from zfun.options import ANY, FLOATING, FUNCTION, GROUP, TENSOR, integer, number, one_of, takes
from zfun.placement import P
from zfun.transforms._cast import CastLoss
from zfun.transforms.grads import _value
from zfun.transforms.grads._gradient_function import GradientFunction, grad_dtypes
from zfun.transforms.grads._pullback import Pullback
from zfun.transforms.remat import warn_of_whole_loss
from zfun.typing import Gradient, Loss


@takes(loss=FUNCTION)
def value_and_grad(loss: Loss) -> GradientFunction:
    """Return a function that computes a loss and the gradients.

    Args:
        loss: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`weighted_mean`.

    Returns:
        ``(params, batch) -> (loss, grads)``, or ``((loss, aux), grads)``. For a tree of tensors the
        gradients are a tree of the same structure, zero where the loss does not depend on a leaf;
        for a ``Flat``, a ``Flat``. (:func:`zfun.apply` steps such a leaf, and :func:`zfun.zero`
        by default does not.) The loss comes back detached. For higher derivatives use
        ``torch.func`` on the loss.

    Raises:
        LeafError: from the returned function, for an integer leaf.

    Example:
        >>> import zfun as zf
        >>> vg = zf.value_and_grad(lambda params, batch: (params["w"] * batch).sum())
        >>> vg({"w": torch.tensor([1.0, 2.0])}, torch.tensor(3.0))
        (tensor(9.), {'w': tensor([3., 3.])})
    """
    _value.check_loss(loss, "value_and_grad()")
    warn_of_whole_loss(loss.loss if isinstance(loss, CastLoss) else loss)
    return GradientFunction(loss)


@takes(fn=FUNCTION, params=ANY, batch=ANY)
def vjp(fn: Callable[[Any, Any], Any], params: tree.Tree, batch: Any) -> tuple[Any, Pullback]:
    """Run a function of parameters, and return the outputs and the way back to gradients.

    :func:`value_and_grad` in two halves, for a loss that is computed outside of ``fn``: cotangents
    of the outputs become gradients of the parameters. The parameters are whole or sharded, in
    memory or in a store, as the transforms around ``fn`` say. A gradient function in place of
    ``fn`` says where the gradients go: ``vjp(shard_grads(data_parallel(value_and_grad(fn), group),
    group), params, batch)`` sums each bucket of gradients over the ranks inside of the pullback and
    keeps this rank's shard. Inside of :func:`accumulate` the outputs and the cotangents are lists,
    one entry for each micro-batch.

    A pullback that is not needed may be dropped. Every rank must pull and drop the same calls.

    Args:
        fn: ``(params, batch) -> any tree``, a plain function, one made by :func:`shard_params`,
            :func:`cast` or :func:`zfun.offload`, or a gradient function of such a function.
        params: a tree of tensors, or a ``Flat``.
        batch: passed to ``fn``. Tensors that require a gradient keep it; see
            :meth:`Pullback.with_inputs <zfun.transforms.Pullback.with_inputs>`.

    Returns:
        The outputs without a graph, and a :class:`zfun.transforms.Pullback`: a function from
        cotangents, a tree like the outputs, to gradients like those of the gradient function.

    Raises:
        CollectiveMismatch: on all ranks, if another rank pulls an earlier call at this point.

    Example:
        >>> import zfun as zf
        >>> forward = lambda params, x: {"y": params["w"] * x, "rows": len(x)}
        >>> out, pullback = zf.vjp(forward, {"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0]))
        >>> out
        {'y': tensor([2., 6.]), 'rows': 2}
        >>> pullback({"y": torch.tensor([1.0, 10.0])})
        {'w': tensor(31.)}

    After ``jax.vjp``.
    """
    vg = fn if isinstance(fn, _value.ZfunGradient) else GradientFunction(fn)
    return vg.vjp(params, batch)


@takes(
    vg=FUNCTION,
    group=GROUP,
    reduce=one_of("mean", "sum"),
    reduce_dtype=FLOATING | None,
    bucket_bytes=integer(1),
    compression=CODEC | None,
)
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
        bucket_bytes: the most bytes of a bucket, for parameters that are not flat yet.
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
    _value.check_gradient(vg, "data_parallel()")
    _check_parallel(vg, group)
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

    scale = 1.0 / group.size if reduce == "mean" else 1.0

    def partial(grads: tree.Tree, *, weighted: bool = False) -> Flat:
        if weighted or flats(grads):
            raise PlacementError(
                "data_parallel() takes gradients that are this rank's own; got ones that are "
                "flat or weighted already; put it directly around value_and_grad()"
            )
        layout = layout_of(grads, group.size, bucket_bytes)
        buffers = ravel_buckets(
            grads, layout, scale=scale, dtypes=grad_dtypes(layout, group, reduce_dtype)
        )
        return Flat(buffers, P, layout, group, codec=compression)

    def parallel(params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        value, grads = vg(params, batch)
        loss, aux = value if type(value) is tuple else (value, _value.NO_AUX)
        flat = partial(grads, weighted=isinstance(loss, _value.WeightedMean))
        pending = group.start(
            Collective(AllReduce(), "loss", "loss", Stream.CONTROL),
            loss.detach().reshape(1).contiguous(),
        )
        loss = pending.wait()[0] * scale
        return (loss if aux is _value.NO_AUX else (loss, aux)), flat

    def forward(params: tree.Tree, batch: Any) -> tuple[Any, Pullback]:
        out, pullback = _value.start_vjp(vg, params, batch)
        return out, pullback.then(partial)

    return _value.ComposedGradient(parallel, forward)


def _check_parallel(vg: Gradient, group: Group) -> None:
    if sum_group(group) is not group:
        raise PlacementError(
            f"data_parallel() takes all the ranks that have a batch; got the {axis_of(group)} "
            "axis of a mesh; pass the mesh itself"
        )
    if isinstance(vg, GradientFunction) and vg.group is not None:
        raise PlacementError(
            "data_parallel() takes gradients that are this rank's own; got ones with placement "
            f"{vg.placement!r}; apply it once, and before shard_grads()"
        )


@takes(vg=FUNCTION, scale=number(above=0, example="1024.0") | TENSOR)
def scale_loss(vg: Gradient, scale: float | Tensor) -> Gradient:
    """Multiply the loss by a number in backward, so that float16 gradients do not underflow.

    The returned loss is not scaled; the gradients are ``scale`` times as large. The caller divides
    the sum over the ranks by the same number. :class:`zfun.optim.LossScale` adapts the scale from
    step to step, and :func:`zfun.zero` does all of this.

    Args:
        vg: a gradient function made by zfun; for micro-batches put :func:`accumulate` around the
            result.
        scale: the number, or a 0-dim tensor on the device of the loss; a power of two changes no
            bit of gradients that do not underflow.

    Returns:
        A gradient function.

    Raises:
        OptionError: ``vg`` is not made by :func:`value_and_grad`, :func:`data_parallel`,
            :func:`shard_grads` or :func:`zfun.offload`.

    Example:
        >>> import zfun as zf
        >>> vg = zf.value_and_grad(lambda params, batch: (params["w"] * batch).sum())
        >>> zf.transforms.scale_loss(vg, 1024.0)({"w": torch.tensor(1.0)}, torch.tensor(3.0))
        (tensor(3.), {'w': tensor(3072.)})
    """
    if not isinstance(vg, GradientFunction):
        raise OptionError(
            "scale_loss() takes a gradient function that it can look into; got "
            f"{type(vg).__name__}; put it inside of accumulate(), around value_and_grad(), "
            "data_parallel() or shard_grads()"
        )
    return dataclasses.replace(vg, loss_scale=vg.loss_scale * scale)
