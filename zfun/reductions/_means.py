"""The mean of metrics over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, tree
from zfun.errors import OptionError, SpecMismatch
from zfun.options import ITERABLE, takes


@takes(metrics=ITERABLE)
def mean_metrics(
    metrics: Iterable[tuple[tree.Tree, float | Tensor]], group: collectives.Group
) -> tree.Tree:
    """Return the weighted mean of trees of metrics, over micro-batches and ranks.

    One all-gather, of sums in float64 that are added in rank order, so the result has the same bits
    on every rank.

    Args:
        metrics: pairs of a tree of numbers and tensors, and a weight, such as the number of
            examples: one pair for each batch of this rank. Ranks may have different numbers of
            batches, but at least one; a rank without data passes one with weight 0, whose values
            do not count. A value is a mean over the batch, or a sum with weight 1.
        group: the ranks; all must call.

    Returns:
        A tree like one of ``metrics``, of float64 tensors.

    Raises:
        OptionError: there are no metrics, or all weights of all ranks are 0.
        SpecMismatch: trees differ in structure or shapes.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     batches = [({"accuracy": 1.0 - group.rank}, 3), ({"accuracy": 0.5}, 1)]
        ...     return mean_metrics(batches, group)["accuracy"].item()
        >>> zf.simulate(2, main)
        [0.5, 0.5]
    """
    pairs = [*metrics]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and _is_number(pair[1])):
            raise OptionError(
                "mean_metrics() takes pairs of metrics and a weight; got "
                f"{type(pair).__name__}; write mean_metrics([(metrics, num_examples)], group)"
            )
    found = [(tree.flatten(values), float(weight)) for values, weight in pairs]
    if not found:
        raise OptionError(
            "mean_metrics() takes at least one pair of metrics and weight from each rank; got "
            "none; pass the metrics of any batch with weight 0"
        )
    (first, spec), _ = found[0]
    shapes = [torch.as_tensor(value).shape for value in first]
    tensors = (value for value in first if isinstance(value, Tensor))
    device = next((x.device for x in tensors), torch.device("cpu"))
    total = torch.zeros(
        sum(shape.numel() for shape in shapes) + 1, dtype=torch.float64, device=device
    )
    for (values, its), weight in found:
        if its != spec or [torch.as_tensor(value).shape for value in values] != shapes:
            raise SpecMismatch(
                f"metrics of all batches have one structure; got {its} after {spec}, or other "
                "shapes; return the same metrics for every batch"
            )
        if weight:
            parts = [torch.as_tensor(x, device=device).detach().double().view(-1) for x in values]
            total += weight * torch.cat([*parts, total.new_ones(1)])
    *sums, weight = (
        # On the host, because a rank without data may have numbers where others have tensors.
        collectives.gather_values(total.cpu(), collectives.sum_group(group), "metrics")
        .sum(0)
        .to(device)
        .split([*(shape.numel() for shape in shapes), 1])
    )
    if not float(weight):
        raise OptionError(
            "metrics have a weight above 0 on some rank; got 0 on all; pass the number of examples"
        )
    means = (part.view(shape) / weight for part, shape in zip(sums, shapes, strict=True))
    return tree.unflatten(spec, means)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)
