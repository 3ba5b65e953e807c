"""Optimizers that say how to step, and leave the steps to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from zfun.errors import OptionError

__all__ = ["Described", "refuse"]


class Described(torch.optim.Optimizer):
    """Parameter groups with their options; the engine of ``initialize`` steps.

    Attributes:
        kind: the type of the optimizer in a configuration.
        is_attached: whether an engine steps.
    """

    kind: ClassVar[str]
    is_attached = False

    def step(  # pyrefly: ignore[bad-override]
        self, closure: Callable[[], Any] | None = None
    ) -> None:
        """Refuse, because the parameters of the module are no longer the state.

        Raises:
            OptionError: always, before ``initialize``.
        """
        if not self.is_attached:
            raise OptionError(
                f"{type(self).__name__} steps inside of an engine; got step() without one; pass "
                "the optimizer to deepspeed.initialize(), and call engine.step()"
            )


def refuse(name: str, option: str, value: Any, wanted: Any, remedy: str) -> None:
    """Refuse an option that the kernels do not have."""
    if value != wanted:
        raise OptionError(f"{name} has {option}={wanted!r} only; got {value!r}; {remedy}")
