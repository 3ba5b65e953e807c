"""Micro-batches: call a gradient function several times, and average the results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.errors import OptionError, checked_options
from zfun.flat import Flat
from zfun.transforms.grads._value import NO_AUX, WeightedMean
from zfun.typing import Gradient

__all__ = ["accumulate"]


@checked_options
def accumulate(vg: Gradient, num_micro_batches: int) -> Gradient:
    """Split each batch in micro-batches, and average the losses and the gradients.

    ``accumulate(shard_grads(vg))`` reduces every micro-batch and keeps a shard;
    ``shard_grads(accumulate(vg))`` keeps whole gradients and reduces once. The results
    differ by rounding only.

    Args:
        vg: a gradient function.
        num_micro_batches: a divisor of the first dim of every tensor of the batch.

    Returns:
        A gradient function. Aux values are returned as a list, one for each micro-batch.

    Raises:
        OptionError: from the returned function, for a batch that cannot be split evenly.

    Example:
        >>> import zfun as zf
        >>> loss = lambda params, batch: (params["w"] * batch).mean()
        >>> vg = zf.accumulate(zf.value_and_grad(loss), 2)
        >>> vg({"w": torch.tensor(1.0)}, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        (tensor(2.5000), {'w': tensor(2.5000)})
    """
    if num_micro_batches < 1:
        raise OptionError(f"num_micro_batches must be at least 1; got {num_micro_batches}")

    def accumulated(params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        losses: list[Any] = []
        auxes: list[Any] = []
        total: Any = None
        weights: list[Tensor] = []
        for index, micro in enumerate(_split(batch, num_micro_batches)):
            value, grads = vg(params, micro)
            loss, aux = value if type(value) is tuple else (value, NO_AUX)
            if aux is not NO_AUX:
                auxes.append(aux)
            losses.append(loss)
            if isinstance(loss, WeightedMean):
                weights.append(loss.weight)
                grads = _scaled(grads, float(loss.weight))
            total = grads if index == 0 else _added(total, grads, owned=index > 1)
            # Free these gradients before the next micro-batch makes new ones.
            del grads
        if weights:
            result: Any = WeightedMean(
                torch.stack([loss.total for loss in losses]).sum(), torch.stack(weights).sum()
            )
            total = _scaled(total, 1.0 / (float(result.weight) or 1.0))
        else:
            result = torch.stack(losses).sum() / num_micro_batches
            total = _scaled(total, 1.0 / num_micro_batches)
        return ((result, auxes) if auxes else result), total

    return accumulated


def _split(batch: Any, count: int) -> list[Any]:
    leaves, spec = tree.flatten(batch)
    columns = []
    for path, leaf in zip(tree.paths(batch), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * count)
        elif leaf.ndim == 0 or leaf.shape[0] % count:
            raise OptionError(
                f"accumulate() splits the first dim of every tensor of a batch in {count}; batch "
                f"leaf {path!r} has shape {tuple(leaf.shape)}; use a batch size that {count} "
                "divides",
                leaf=path,
            )
        else:
            columns.append(list(leaf.chunk(count)))
    return [tree.unflatten(spec, [column[i] for column in columns]) for i in range(count)]


def _scaled(grads: tree.Tree, factor: float) -> tree.Tree:
    """Scale gradients; flat ones in place, because nobody else holds the buffers."""
    if factor == 1.0:
        return grads
    if isinstance(grads, Flat):
        return _map_buffers(lambda x: x.mul_(factor), grads)
    return tree.map(lambda x: x * factor, grads)


def _added(total: tree.Tree, grads: tree.Tree, *, owned: bool) -> tree.Tree:
    if isinstance(total, Flat):
        return _map_buffers(lambda x, y: x.add_(y), total, grads)
    return tree.map(lambda x, y: x.add_(y) if owned else x + y, total, grads)


def _map_buffers(fn: Any, first: Flat, *rest: Flat) -> Flat:
    """Apply a function to the buffers of flats; results go to the store of the first flat."""
    out = []
    for buffers in zip(first.buffers, *(flat.buffers for flat in rest), strict=True):
        store = buffers[0].store if isinstance(buffers[0], stores.Stored) else None
        device = store.device if store is not None else first.layout.device
        result = fn(*(stores.fetch(buffer, device) for buffer in buffers))
        out.append(store.put(result, "grads") if store is not None else result)
    return first.with_buffers(out)
