"""Optimizers that multiply by a number, and steps whose kernels do that, or leave out a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zfun.optim._base import Optimizer, State, UpdateFn
from zfun.tree import Tree


@dataclass(frozen=True, slots=True)
class FactorUpdate:
    """The update of an optimizer that multiplies by one number, and has no state of its own.

    Attributes:
        run: the update.
        factor: ``factor(grads, state)``: the number.
    """

    run: UpdateFn
    factor: Callable[[Tree, State], Tensor | float]

    def __call__(self, grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return self.run(grads, state, params)


@dataclass(frozen=True, slots=True)
class ScalingApply:
    """``apply`` of an optimizer whose kernels multiply the gradients by a number first.

    The kernels write nothing, and no count grows, where ``taken`` is False: a 0-dim truth value,
    which may lie on a device.

    Attributes:
        run: ``run(grads, state, params, donate, scale, taken) -> (params, state)``.
    """

    run: Callable[..., tuple[Tree, State]]

    def __call__(
        self,
        grads: Tree,
        state: State,
        params: Tree,
        *,
        donate: bool = False,
        scale: Tensor | float | None = None,
        taken: Tensor | None = None,
    ) -> tuple[Tree, State]:
        return self.run(grads, state, params, donate, scale, taken)


def is_scaling(optimizer: Optimizer) -> bool:
    """Whether the kernels of an optimizer multiply the gradients by a number."""
    return isinstance(optimizer.apply, ScalingApply)


def deciding_on_host(optimizer: Optimizer) -> Optimizer | None:
    """Return a part whose steps the host alone can leave out; ``None`` if there is none."""
    if is_scaling(optimizer):
        return None
    if optimizer.name == "chain":
        *before, last = optimizer.parts
        others = (part for part in before if not isinstance(part.update, FactorUpdate))
        return next(others, None) or deciding_on_host(last)
    inner = next(filter(None, map(deciding_on_host, optimizer.parts)), None)
    return inner or (None if optimizer.name == "with_master" else optimizer)
