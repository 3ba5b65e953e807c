"""Optimizers that multiply by a number, and steps whose kernels can do that for them."""

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

    Attributes:
        run: ``run(grads, state, params, donate, scale) -> (params, state)``.
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
    ) -> tuple[Tree, State]:
        return self.run(grads, state, params, donate, scale)


def is_scaling(optimizer: Optimizer) -> bool:
    """Whether the kernels of an optimizer multiply the gradients by a number."""
    return isinstance(optimizer.apply, ScalingApply)
