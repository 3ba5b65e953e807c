"""Compositions of transforms as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zfun.errors import OptionError
from zfun.options import ANY, TEXT, each, instance, takes

_NAMED = each(TEXT, "a tuple of names of transforms", "('offload',)")


@takes(loss=_NAMED, grads=_NAMED, optimizer=_NAMED)
@dataclass(frozen=True, slots=True)
class Composition:
    """The transforms around a loss, a gradient function and an optimizer, each from the inside out.

    Attributes:
        loss: a subset of ``"shard_params"`` and ``"offload"``, in any order.
        grads: the transforms around ``data_parallel``: ``"shard_grads"`` or ``"replicate_grads"``,
            ``"offload"`` and ``"accumulate"``, in any order. With micro-batches and no
            ``"accumulate"`` here, :func:`zfun.testing.train` adds ``"accumulate"`` outermost.
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


COMPOSITION = instance(Composition, "a composition", "Composition()")
BATCHES = each(
    each(ANY, "a sequence of batches", "[batch]", least=1),
    "a sequence of steps, each with a batch for every rank",
    "[[batch] * group.size]",
    least=1,
)


@takes()
def all_compositions(*, num_micro_batches: int = 1) -> list[Composition]:
    """Return all ordered subsets of the transforms, without ``remat`` and ``replicate_grads``.

    Args:
        num_micro_batches: with more than one, every composition has ``"accumulate"``, at every
            position.

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
