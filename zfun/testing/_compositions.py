"""A composition of transforms as data, and the loop that runs any of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zfun import stores, tree
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.layout import DEFAULT_BUCKET_BYTES, LabelFn
from zfun.optim import Optimizer, as_optimizer
from zfun.stores import HostStore
from zfun.transforms import (
    WeightedMean,
    accumulate,
    apply,
    data_parallel,
    offload_grads,
    offload_loss,
    offload_optimizer,
    offload_params,
    remat,
    replicate,
    replicate_grads,
    shard,
    shard_grads,
    shard_optimizer,
    shard_params,
    unshard,
    value_and_grad,
)
from zfun.typing import Gradient, Loss

__all__ = ["Composition", "Run", "all_compositions", "train"]


@dataclass(frozen=True, slots=True)
class Composition:
    """The transforms around a loss, a gradient function and an optimizer, each from the inside out.

    Attributes:
        loss: a subset of ``"shard_params"`` and ``"offload"``, in any order.
        grads: the transforms around ``data_parallel``: ``"shard_grads"`` or ``"replicate_grads"``,
            ``"offload"`` and ``"accumulate"``, in any order. With micro-batches and no
            ``"accumulate"`` here, :func:`train` adds ``"accumulate"`` outermost.
        optimizer: a subset of ``"shard_optimizer"`` and ``"offload"``, in any order.
        flat: whether unsharded parameters are flat; sharded and offloaded parameters always are.
        donate: whether each step reuses the buffers of the previous one; needs flat parameters.
        remat: whether backward recomputes the loss.

    Example:
        >>> Composition(grads=("shard_grads",), optimizer=("shard_optimizer", "offload")).flat
        False
    """

    loss: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    flat: bool = False
    donate: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        for field, known in _KNOWN.items():
            named = getattr(self, field)
            if len(set(named)) < len(named) or not set(named) <= set(known):
                raise OptionError(
                    f"a composition names each transform once; {field} takes {', '.join(known)}; "
                    f"got {named}"
                )
        if self.donate and not (self.flat or self.loss):
            raise OptionError(
                "donate=True takes over flat buffers; got parameters as a tree; use flat=True"
            )

    @property
    def reduces_first(self) -> bool:
        """Whether every micro-batch is reduced separately, which rounds differently."""
        order = [name for name in self.grads if name != "offload"]
        return bool(order) and order[0] != "accumulate"


_KNOWN = {
    "loss": ("shard_params", "offload"),
    "grads": ("shard_grads", "offload", "accumulate", "replicate_grads"),
    "optimizer": ("shard_optimizer", "offload"),
}


def all_compositions(*, num_micro_batches: int = 1) -> list[Composition]:
    """Return all ordered subsets of the transforms, without ``remat`` and ``replicate_grads``.

    Args:
        num_micro_batches: with more than one, ``"accumulate"`` takes every place.

    Returns:
        The compositions; the first one has no transform.

    Example:
        >>> len(all_compositions()), all_compositions()[0]
        (275, Composition(loss=(), grads=(), optimizer=(), flat=False, donate=False, remat=False))
    """
    around = (
        ("shard_grads", "offload")
        if num_micro_batches == 1
        else ("shard_grads", "offload", "accumulate")
    )
    gradients = [
        names
        for names in _ordered_subsets(around)
        if num_micro_batches == 1 or "accumulate" in names
    ]
    return [
        Composition(loss, grads, optimizer, flat, donate)
        for loss, grads, optimizer in itertools.product(
            _ordered_subsets(_KNOWN["loss"]), gradients, _ordered_subsets(_KNOWN["optimizer"])
        )
        for flat, donate in (
            ((False, False), (True, False), (True, True))
            if not loss
            else ((True, False), (True, True))
        )
    ]


def _ordered_subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(names) + 1):
        yield from itertools.permutations(names, count)


class Run(NamedTuple):
    """The result of :func:`train`.

    Attributes:
        params: the final parameters, whole.
        losses: one per step.
        stores: the stores of ``"params"``, ``"grads"`` and ``"state"``.
        final: the final parameters and optimizer state, as held by this rank.
    """

    params: tree.Tree
    losses: tuple[float, ...]
    stores: dict[str, HostStore]
    final: tuple[Any, Any]


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
        bucket_bytes: size in bytes at which a bucket closes.

    Returns:
        The parameters, losses and stores of this rank.

    Example:
        >>> import torch, zfun as zf
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
    kept = {name: stores.host() for name in ("params", "grads", "state")}
    rule = _rule(composition, group, optimizer, kept["state"], bucket_bytes)
    value: Any = _placed(composition, group, params, bucket_bytes, rule.labels)
    gradient = _gradient(
        composition,
        group,
        _loss(composition, group, loss_fn, kept["params"]),
        kept["grads"],
        num_micro_batches,
        bucket_bytes,
    )
    state = rule.init(value)
    if "offload" in composition.loss:
        value = offload_params(value, kept["params"])
    losses = []
    for step in batches:
        found, grads = gradient(value, step[group.rank])
        loss = found[0] if type(found) is tuple else found
        losses.append(float(loss.mean if isinstance(loss, WeightedMean) else loss))
        value, state = apply(rule, grads, state, value, donate=composition.donate)
    return Run(
        unshard(value) if isinstance(value, Flat) else value, tuple(losses), kept, (value, state)
    )


def _placed(
    composition: Composition,
    group: Group,
    params: tree.Tree,
    bucket_bytes: int,
    labels: LabelFn | None,
) -> Any:
    if not (composition.flat or composition.loss):
        return params
    return (shard if "shard_params" in composition.loss else replicate)(
        params, group, bucket_bytes=bucket_bytes, labels=labels
    )


def _loss(composition: Composition, group: Group, loss: Loss, store: HostStore) -> Loss:
    if composition.remat:
        # Hide remat() inside a function, because remat() around a whole loss warns.
        again = remat(loss)
        loss = lambda params, batch: again(params, batch)  # noqa: PLW0108
    for name in composition.loss:
        loss = shard_params(loss, group) if name == "shard_params" else offload_loss(loss, store)
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
        "shard_grads": lambda vg: shard_grads(vg, group),
        "replicate_grads": lambda vg: replicate_grads(vg, group),
        "offload": lambda vg: offload_grads(vg, store),
        "accumulate": lambda vg: accumulate(vg, num_micro_batches),
    }
    names = list(composition.grads)
    if num_micro_batches > 1 and "accumulate" not in names:
        names.append("accumulate")
    vg: Gradient = data_parallel(value_and_grad(loss), group, bucket_bytes=bucket_bytes)
    for name in names:
        vg = steps[name](vg)
    return vg


def _rule(
    composition: Composition, group: Group, optimizer: Any, store: HostStore, bucket_bytes: int
) -> Optimizer:
    rule = as_optimizer(optimizer)
    for name in composition.optimizer:
        rule = (
            shard_optimizer(rule, group, bucket_bytes=bucket_bytes)
            if name == "shard_optimizer"
            else offload_optimizer(rule, store)
        )
    return rule
