"""The function types of zfun: what each transform takes and returns."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Gradient", "Loss"]


class Loss(Protocol):
    """``(params, batch) -> scalar`` or ``(scalar, aux)``: what is trained, as a pure function."""

    def __call__(self, params: Any, batch: Any, /) -> Any:
        """Compute the loss."""
        ...


class Gradient(Protocol):
    """``(params, batch) -> (loss, grads)``, or ``((loss, aux), grads)`` where the loss returns aux."""

    def __call__(self, params: Any, batch: Any, /) -> tuple[Any, Any]:
        """Compute the loss and its gradients."""
        ...
