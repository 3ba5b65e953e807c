"""What a step of an optimizer makes, found by taking it on tensors without numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import ops, tree
from zfun.collectives import abstract_group
from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.optim import LossScale, MuonState, Optimizer, State, TorchState, as_optimizer, with_master
from zfun.placement import R, S
from zfun.recipes import policy_of

__all__ = ["Change", "is_scaled", "rehearse", "rehearsed"]

# States of optimizers that cut buffers for themselves.
_CUTTING = (MuonState, TorchState)


class Change(NamedTuple):
    """A buffer that a step makes, or lets go of again.

    Attributes:
        kind: ``"params"`` for new parameters, ``"state"`` for a part of the new state, ``"work"`` for what is let go of by the end.
        nbytes: below 0 where it is let go of.
        bucket: of new parameters; -1 for all else.
    """

    kind: str
    nbytes: int
    bucket: int = -1


def is_scaled(precision: Any) -> bool:
    """Whether gradients are divided by a loss scale; one of 1 is left out."""
    rule = policy_of(precision).loss_scale
    return isinstance(rule, LossScale) and float(rule.init().scale) != 1.0


def rehearsed(optimizer: Any, precision: Any, layout: Layout, size: int, *, donate: bool, first_step: bool) -> tuple[int, list[Change]]:
    """Return the bytes of the state, and what a step makes beside it."""
    rule, policy = as_optimizer(optimizer), policy_of(precision)
    if rule.placement is not None or rule.partial is not None:
        got = "sums the terms of gradients by itself, leaf by leaf" if rule.placement is None else f"computes in {rule.placement!r}"
        raise OptionError(
            f"the live bytes of a step are known for optimizers that leave placements to the stage; got one that {got}; use another one of "
            "zf.optim"
        )
    rule = rule if policy.master is None else with_master(rule, policy.master)
    group = abstract_group(size)
    with ops.fake_mode(allow_non_fake_inputs=True):

        def flat(dtypes: Iterable[torch.dtype]) -> Flat:
            pairs = zip(layout.buckets, dtypes, strict=True)
            buffers = [torch.empty(bucket.padded_numel // size, dtype=dtype, device=layout.device) for bucket, dtype in pairs]
            return Flat(buffers, S if size > 1 else R, layout, group)

        params = flat(bucket.dtype for bucket in layout.buckets)
        state = rule.init(params)
        parts = tree.leaves(state, is_leaf=lambda x: isinstance(x, _CUTTING))
        cutting = [type(part).__name__ for part in parts if isinstance(part, _CUTTING)]
        if cutting:
            raise OptionError(
                f"the live bytes of a step are known for optimizers that work on flat buffers; got one with a {cutting[0]}, which cuts "
                "them into pieces or leaves first; use another one of zf.optim"
            )
        sent = [policy.reduce or ops.wide(bucket.dtype) for bucket in layout.buckets]
        grads = flat(map(ops.wide, sent) if is_scaled(precision) else sent)
        if not first_step:
            # A rule may keep its state in other dtypes than it began with.
            _, state = rule.apply(grads, state, params)
            parts = tree.leaves(state)
        changes = rehearse(rule, params, grads, state, donate=donate)
    return sum(part.nbytes for part in parts if isinstance(part, Tensor) and part.ndim), changes


def rehearse(optimizer: Optimizer, params: Flat, grads: Flat, state: State, *, donate: bool) -> list[Change]:
    """Take a step on abstract tensors, and note the buffers that it makes.

    Args:
        optimizer: what takes the step.
        params: abstract parameters; so are the others.
        grads: gradients.
        state: what ``init`` made of the parameters.
        donate: whether the step takes over parameters and state.

    Returns:
        What is made and let go of, in order, where it is as long as a buffer of the parameters.

    Example:
        >>> from zfun import ops
        >>> from zfun.collectives import abstract_group
        >>> from zfun.layout import layout_of
        >>> from zfun.optim import chain, clip_by_global_norm, sgd
        >>> from zfun.placement import R
        >>> import torch
        >>> clipped = chain(clip_by_global_norm(1.0), sgd(0.1))
        >>> with ops.fake_mode():
        ...     layout, group = layout_of({"w": torch.empty(64)}), abstract_group(1)
        ...     params, grads = (Flat([torch.empty(64)], R, layout, group) for _ in range(2))
        ...     changes = rehearse(clipped, params, grads, clipped.init(params), donate=True)
        >>> [f"{change.kind} {change.nbytes:+}" for change in changes]
        ['work +256', 'work -256']
    """
    with _Meter([buffer.numel() for buffer in params.buffers]) as meter:
        new, after = optimizer.apply(grads, state, params, donate=donate)
    kinds = {_key(leaf): ("state", -1) for leaf in tree.leaves(after) if isinstance(leaf, Tensor)}
    kinds |= {_key(buffer): ("params", bucket) for bucket, buffer in enumerate(new.buffers)}
    meter.finish()
    left = {id(made): kinds.get(key, ("work", -1)) for key, made in meter.now.items()}
    changes = []
    for made, sign in meter.events:
        kind, bucket = left.get(id(made), ("work", -1))
        changes.append(Change(kind, sign * made.nbytes, bucket))
    return [*changes, *(Change("work", -made.nbytes) for made in meter.now.values() if left[id(made)][0] == "work")]


@dataclass(eq=False, slots=True)
class _Made:
    storage: StorageWeakRef
    nbytes: int


class _Meter(TorchDispatchMode):
    """Follows the buffers that operations make, as long as they live."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._lengths = frozenset(lengths)
        self.now: dict[int, _Made] = {}
        self.events: list[tuple[_Made, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.finish()
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree.leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim() == 1 and leaf.numel() in self._lengths and _key(leaf) not in given | self.now.keys():
                storage = leaf.untyped_storage()
                made = self.now[_key(leaf)] = _Made(StorageWeakRef(storage), storage.nbytes())
                self.events.append((made, 1))
        return out

    def finish(self) -> None:
        """Note what has been let go of."""
        for key, made in list(self.now.items()):
            if made.storage.expired():
                del self.now[key]
                self.events.append((made, -1))


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
