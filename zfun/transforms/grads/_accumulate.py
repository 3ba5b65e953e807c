"""Micro-batches: call a gradient function several times, and average the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.flat import Flat, check_same_layout
from zfun.options import ANY, BOOL, FUNCTION, integer, number, takes
from zfun.transforms._batches import split_batch
from zfun.transforms.grads import _value
from zfun.transforms.grads._pullback import Pullback, Pulled
from zfun.typing import Gradient


@takes(vg=FUNCTION, num_micro_batches=integer(1))
def accumulate(vg: Gradient, num_micro_batches: int) -> Gradient:
    """Split each batch in micro-batches, and average the losses and the gradients.

    ``accumulate(shard_grads(vg))`` reduces every micro-batch and keeps a shard;
    ``shard_grads(accumulate(vg))`` keeps whole gradients and reduces once. The results
    differ by rounding only.

    A batch is a tree of tensors whose first dims are equal: each micro-batch gets an equal part of
    every tensor. Mappings (``BatchEncoding``), dataclasses, and subclasses of list and tuple are
    nodes of the tree, and every micro-batch is of the same class. Numbers, strings, a
    :class:`zfun.Flat` and other leaves without arrays go to every micro-batch whole.

    A plain list of ``num_micro_batches`` containers of one class with the same paths is a list of
    micro-batches, and is not split; they may have other shapes. A tuple, and a list of tensors such
    as ``[x, y]``, is always one batch. :class:`zfun.transforms.MicroBatches` is a list of
    micro-batches of any kind.

    Args:
        vg: a gradient function.
        num_micro_batches: a divisor of the first dim of every tensor of the batch. With 1, the
            batch is passed on as given.

    Returns:
        A gradient function. Aux values are returned as a list, one for each micro-batch.

    Raises:
        OptionError: from the returned function, for a batch that cannot be split evenly, or that
            has no tensors.
        LeafError: from the returned function, for a leaf that holds arrays which zfun cannot split.

    Example:
        >>> import zfun as zf
        >>> loss = lambda params, batch: (params["w"] * batch).mean()
        >>> vg = zf.accumulate(zf.value_and_grad(loss), 2)
        >>> vg({"w": torch.tensor(1.0)}, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        (tensor(2.5000), {'w': tensor(2.5000)})
    """
    _value.check_gradient(vg, "accumulate()")

    def accumulated(params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        losses: list[Any] = []
        auxes: list[Any] = []
        total: Any = None
        weights: list[Tensor] = []
        for index, micro in enumerate(split_batch(batch, num_micro_batches)):
            value, grads = vg(params, micro)
            loss, aux = value if type(value) is tuple else (value, _value.NO_AUX)
            if aux is not _value.NO_AUX:
                auxes.append(aux)
            losses.append(loss)
            if isinstance(loss, _value.WeightedMean):
                weights.append(loss.weight)
                grads = times(grads, loss.weight)
            total = add_grads(total, grads, owned=index > 1)
            # Free these gradients before the next micro-batch makes new ones.
            del grads
        if weights:
            result: Any = _value.WeightedMean(
                torch.stack([loss.total for loss in losses]).sum(), torch.stack(weights).sum()
            )
            total = times(total, _value.reciprocal(result.weight))
        else:
            result = torch.stack(losses).sum() / num_micro_batches
            total = scale_grads(total, 1.0 / num_micro_batches)
        return ((result, auxes) if auxes else result), total

    def forward(params: tree.Tree, batch: Any) -> tuple[Any, Pullback]:
        """Run all forward passes; the outputs and the cotangents are lists."""
        calls = [
            _value.start_vjp(vg, params, micro) for micro in split_batch(batch, num_micro_batches)
        ]
        pullbacks = [pullback for _, pullback in calls]
        close = functools.partial(_close_all, pullbacks)
        return [out for out, _ in calls], Pullback(functools.partial(_pull_all, pullbacks), close)

    return _value.ComposedGradient(accumulated, forward)


def _pull_all(
    pullbacks: Sequence[Pullback], cotangents: Any, weight: Any, inputs: Sequence[Tensor]
) -> Callable[[], Pulled]:
    """Average the gradients of micro-batches."""
    count = len(pullbacks)
    if not isinstance(cotangents, (list, tuple)) or len(cotangents) != count:
        got = f"{len(cotangents)} entries" if isinstance(cotangents, (list, tuple)) else ""
        raise OptionError(
            f"cotangents of accumulate() are a list, one entry for each of {count} micro-batches; "
            f"got {type(cotangents).__name__} {got}".rstrip()
            + "; pass a list like the outputs"
        )
    if weight is not None or inputs:
        raise OptionError(
            "micro-batches have weights and inputs of their own; got weight= or inputs for all of "
            f"{count}; call vjp() for each micro-batch, and add with zf.transforms.add_grads()"
        )
    runs = [
        pullback.checked(cotangent, None, ())
        for pullback, cotangent in zip(pullbacks, cotangents, strict=True)
    ]

    def run() -> Pulled:
        total: Any = None
        for index, one in enumerate(runs):
            total = add_grads(total, one()[0], owned=index > 1)
        return scale_grads(total, 1.0 / count), []

    return run


def _close_all(pullbacks: Sequence[Pullback]) -> None:
    for pullback in pullbacks:
        pullback.close()


@takes(grads=ANY, factor=number())
def scale_grads(grads: tree.Tree, factor: float) -> tree.Tree:
    """Multiply gradients with a number; those of a ``Flat`` in place.

    Args:
        grads: a tree of tensors, or a ``Flat`` whose buffers nobody else uses, also in a store.
        factor: the number.

    Returns:
        The gradients.

    Example:
        >>> scale_grads({"w": torch.tensor([1.0, 2.0])}, 0.5)
        {'w': tensor([0.5000, 1.0000])}
    """
    _check_tensors(grads)
    if factor == 1.0:
        return grads
    if isinstance(grads, Flat):
        return _map_buffers(lambda x: x.mul_(factor), grads)
    return tree.map(lambda x: x * factor, grads)


@takes(total=ANY, grads=ANY, owned=BOOL)
def add_grads(total: tree.Tree, grads: tree.Tree, *, owned: bool = True) -> tree.Tree:
    """Add gradients to a sum, in the sum's own buffers.

    ``scale_grads(total, 1 / n)`` of the sum of ``n`` is the mean of :func:`accumulate`, bit by bit.

    Args:
        total: the sum; ``None`` at the beginning.
        grads: like ``total``.
        owned: whether tensors of a tree may be overwritten; those of a ``Flat`` always are.

    Returns:
        The sum.

    Raises:
        PlacementError: flats of two placements or groups.
        SpecMismatch: values of two types or layouts.

    Example:
        >>> grads = {"w": torch.tensor([1.0, 2.0])}
        >>> add_grads(add_grads(None, grads), {"w": torch.tensor([10.0, 10.0])})
        {'w': tensor([11., 12.])}
    """
    _check_tensors(grads)
    if total is None:
        return grads
    _check_tensors(total)
    if isinstance(total, Flat) != isinstance(grads, Flat):
        raise SpecMismatch(
            "a sum and the gradients to add are of one type; got "
            f"{type(total).__name__} and {type(grads).__name__}; add gradients of one function"
        )
    if isinstance(total, Flat):
        if (total.placement, total.group) != (grads.placement, grads.group):
            raise PlacementError(
                f"a sum and the gradients to add have one placement and one group; got {total!r} "
                f"and {grads!r}; add gradients of one function, or redistribute() them first"
            )
        check_same_layout(total, grads, "a sum and the gradients to add")
        # A leaf that one of the two uses is used.
        unused = dict.fromkeys(path for path in total.missed if path in grads.missed)
        return _map_buffers(lambda x, y: x.add_(y), total, grads).with_missed(unused)
    return tree.map(lambda x, y: x.add_(y) if owned else x + y, total, grads)


def times(grads: tree.Tree, factor: float | Tensor) -> tree.Tree:
    """Multiply gradients; those of a flat by a number on their device, without a wait for it."""
    if (
        isinstance(factor, Tensor)
        and factor.device.type != "cpu"
        and isinstance(grads, Flat)
        and all(x.device == factor.device for x in grads.buffers)
    ):
        for buffer in grads.buffers:
            ops.scale_into(buffer, buffer, factor)
        return grads
    return scale_grads(grads, float(factor))


def _check_tensors(grads: Any) -> None:
    """Raise :class:`SpecMismatch` if a value is neither a ``Flat`` nor a tree of tensors."""
    if isinstance(grads, Flat):
        return
    for path, leaf in zip(tree.paths(grads), tree.leaves(grads), strict=True):
        if not isinstance(leaf, Tensor):
            raise SpecMismatch(
                f"gradients are a Flat or a tree of tensors; leaf {path!r} is of type "
                f"{type(leaf).__name__}; pass the gradients that a pullback or value_and_grad() "
                "returned",
                leaf=path,
            )


def _map_buffers(fn: Any, first: Flat, *rest: Flat) -> Flat:
    """Apply a function to the buffers of flats; results go to the store of the first flat.

    Buffers that the function changes in place stay one flat, because a second flat of the same
    buffers would keep them when the first is donated.
    """
    out = []
    for buffers in zip(first.buffers, *(flat.buffers for flat in rest), strict=True):
        store = buffers[0].store if isinstance(buffers[0], stores.Stored) else None
        device = store.device if store is not None else first.layout.device
        result = fn(*(stores.fetch(buffer, device) for buffer in buffers))
        out.append(store.put(result, "grads") if store is not None else result)
    is_same = all(new is old for new, old in zip(out, first.buffers, strict=True))
    return first if is_same else first.with_buffers(out)
