"""The function types of zfun, which transforms take and return."""

from __future__ import annotations

from typing import Any, Protocol

from typing_extensions import TypeVar

# A type checker takes Any where a loss without annotations does not say.
Params = TypeVar("Params", bound=Any, default=Any)
Aux = TypeVar("Aux", bound=Any, default=Any)


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
