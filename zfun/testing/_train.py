"""Training under a composition of transforms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zfun import stores, transforms, tree
from zfun.collectives import Group
from zfun.flat import Flat, unravel
from zfun.layout import DEFAULT_BUCKET_BYTES, LabelFn
from zfun.optim import Optimizer, as_optimizer
from zfun.options import FUNCTION, takes
from zfun.placement import R
from zfun.stores import HostStore
from zfun.testing._compositions import BATCHES, COMPOSITION, Composition
from zfun.typing import Gradient, Loss


class Run(NamedTuple):
    """The result of :func:`train`.

    Attributes:
        params: the final parameters, whole.
        losses: the loss of each step.
        stores: the stores of ``"params"``, ``"grads"`` and ``"state"``.
        final: the final parameters and optimizer state, as held by this rank.
    """

    params: tree.Tree
    losses: tuple[float, ...]
    stores: dict[str, HostStore]
    final: tuple[Any, Any]


class Program(NamedTuple):
    """A composed loop.

    Attributes:
        init: ``init(params)`` returns parameters and optimizer state as held by this rank.
        gradient: ``gradient(value, batch)`` returns the loss and the gradients.
        update: ``update(grads, state, value)`` returns parameters and state.
        stores: the stores of ``"params"``, ``"grads"`` and ``"state"``.
    """

    init: Callable[[tree.Tree], tuple[Any, Any]]
    gradient: Gradient
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    stores: dict[str, HostStore]


def compose(
    composition: Composition,
    group: Group,
    loss_fn: Loss,
    optimizer: Any,
    *,
    num_micro_batches: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    transform: Callable[[Gradient], Gradient] | None = None,
) -> Program:
    """Compose the transforms; ``transform`` goes around the gradient function, outermost."""
    kept = {name: stores.host() for name in ("params", "grads", "state")}
    rule = _rule(composition, group, optimizer, kept["state"], bucket_bytes)
    if transform is not None and not {"shard_grads", "replicate_grads"} & set(composition.grads):
        # A transform gets sums, because a rank's own term says nothing of the norm of the sum.
        parts = () if "accumulate" in composition.grads else ("accumulate",)
        grads = (*composition.grads, *(parts if num_micro_batches > 1 else ()), "replicate_grads")
        composition = dataclasses.replace(composition, grads=grads)
    loss = _loss(composition, group, loss_fn, kept["params"])
    gradient = _gradient(composition, group, loss, kept["grads"], num_micro_batches, bucket_bytes)
    gradient = gradient if transform is None else transform(gradient)

    def init(params: tree.Tree) -> tuple[Any, Any]:
        value: Any = _placed(composition, group, params, bucket_bytes, rule.labels)
        state = rule.init(value)
        if "offload" in composition.loss:
            value = transforms.offload_params(value, kept["params"])
        return value, state

    def update(grads: Any, state: Any, value: Any) -> tuple[Any, Any]:
        return transforms.apply(rule, grads, state, value, donate=composition.donate)

    return Program(init, gradient, update, kept)


@takes(composition=COMPOSITION, loss_fn=FUNCTION, batches=BATCHES)
def train(
    composition: Composition,
    group: Group,
    loss_fn: Loss,
    optimizer: Any,
    params: tree.Tree,
    batches: Sequence[Sequence[Any]],
    *,
    num_micro_batches: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Run:
    """Train for a few steps under one composition of transforms, in the usual loop.

    Args:
        composition: the transforms.
        group: the ranks.
        loss_fn: ``(params, batch) -> scalar``, or with aux, or :func:`zfun.weighted_mean`.
        optimizer: an optimizer, or an ``(init, update)`` pair.
        params: a tree of tensors, equal on all ranks, which stays unchanged.
        batches: ``batches[step][rank]``.
        num_micro_batches: number of micro-batches per batch.
        bucket_bytes: the most bytes of a bucket.

    Returns:
        The parameters, losses and stores of this rank.

    Example:
        >>> import torch, zfun as zf
        >>> from zfun.testing import Composition
        >>> def main(group):
        ...     loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        ...     batches = [[torch.zeros(2), torch.ones(2)]]
        ...     stage = Composition(grads=("shard_grads",))
        ...     params = {"w": torch.ones(2)}
        ...     return train(stage, group, loss_fn, zf.optim.sgd(0.5), params, batches)
        >>> run = zf.simulate(2, main)[0]
        >>> run.losses, run.params
        ((1.0,), {'w': tensor([0.5000, 0.5000])})
    """
    program = compose(
        composition,
        group,
        loss_fn,
        optimizer,
        num_micro_batches=num_micro_batches,
        bucket_bytes=bucket_bytes,
    )
    value, state = program.init(params)
    losses = []
    for step in batches:
        loss, grads = program.gradient(value, step[group.rank])
        losses.append(float(scalar_of(loss)))
        value, state = program.update(grads, state, value)
    return Run(whole_params(value), tuple(losses), program.stores, (value, state))


def scalar_of(value: Any) -> Tensor:
    """Return the loss alone, as a tensor, of any value that a loss function may return."""
    loss = value[0] if type(value) is tuple else value
    return loss.mean if isinstance(loss, transforms.WeightedMean) else loss


def whole_params(value: Any) -> tree.Tree:
    """Return the whole tree of parameters in any placement."""
    return transforms.unshard(value) if isinstance(value, Flat) else value


def whole_grads(grads: Any) -> tree.Tree:
    """Return the whole tree of gradients in any placement; every rank must call."""
    if not isinstance(grads, Flat):
        return grads
    # The name of the sum in the update, so that a group treats both alike.
    return unravel(transforms.redistribute(stores.resident(grads), R, grads.group, name="grads"))


def _placed(
    composition: Composition,
    group: Group,
    params: tree.Tree,
    bucket_bytes: int,
    labels: LabelFn | None,
) -> Any:
    if not (composition.flat or composition.loss):
        return params
    return (transforms.shard if "shard_params" in composition.loss else transforms.replicate)(
        params, group, bucket_bytes=bucket_bytes, labels=labels
    )


def _loss(composition: Composition, group: Group, loss: Loss, store: HostStore) -> Loss:
    if composition.remat:
        # Hide remat() inside a function, because remat() around a whole loss warns.
        again = transforms.remat(loss)
        loss = lambda params, batch: again(params, batch)  # noqa: PLW0108
    for name in composition.loss:
        loss = (
            transforms.shard_params(loss, group)
            if name == "shard_params"
            else transforms.offload_loss(loss, store)
        )
    return loss


def _gradient(
    composition: Composition,
    group: Group,
    loss: Loss,
    store: HostStore,
    num_micro_batches: int,
    bucket_bytes: int,
) -> Gradient:
    steps: dict[str, Callable[[Gradient], Gradient]] = {
        "shard_grads": lambda vg: transforms.shard_grads(vg, group),
        "replicate_grads": lambda vg: transforms.replicate_grads(vg, group),
        "offload": lambda vg: transforms.offload_grads(vg, store),
        "accumulate": lambda vg: transforms.accumulate(vg, num_micro_batches),
    }
    names = list(composition.grads)
    if num_micro_batches > 1 and "accumulate" not in names:
        names.append("accumulate")
    vg: Gradient = transforms.data_parallel(
        transforms.value_and_grad(loss), group, bucket_bytes=bucket_bytes
    )
    for name in names:
        vg = steps[name](vg)
    return vg


def _rule(
    composition: Composition, group: Group, optimizer: Any, store: HostStore, bucket_bytes: int
) -> Optimizer:
    rule = as_optimizer(optimizer)
    for name in composition.optimizer:
        rule = (
            transforms.shard_optimizer(rule, group, bucket_bytes=bucket_bytes)
            if name == "shard_optimizer"
            else transforms.offload_optimizer(rule, store)
        )
    return rule
