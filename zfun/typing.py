"""The function types of zfun, which transforms take and return."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Gradient", "Loss"]


class Loss(Protocol):
    """A loss as a pure function: ``(params, batch) -> scalar`` or ``(scalar, aux)``."""

    def __call__(self, params: Any, batch: Any, /) -> Any:
        """Compute the loss."""
        ...


class Gradient(Protocol):
    """``(params, batch) -> (loss, grads)``, or ``((loss, aux), grads)`` if the loss returns aux."""

    def __call__(self, params: Any, batch: Any, /) -> tuple[Any, Any]:
        """Compute the loss and its gradients."""
        ...
