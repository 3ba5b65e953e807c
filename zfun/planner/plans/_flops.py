"""Floating-point operations of a step, by phase."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch

__all__ = ["FlopCounter", "Flops"]


class Flops(NamedTuple):
    """Floating-point operations of matrix products, convolutions and attention, of one rank.

    Attributes:
        forward: of the loss.
        backward: of the gradients.
        recomputed: of the loss again, in backward.
        update: of all else, such as an optimizer that multiplies matrices.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        """The sum over the phases."""
        return sum(self)


@final
class FlopCounter:
    """A count of the operations that a :class:`Meter` sees, with the formulae of torch."""

    def __init__(self) -> None:
        self._formulae = _formulae()
        self._counts = dict.fromkeys(Flops._fields, 0)

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation."""
        formula = self._formulae.get(func.overloadpacket)
        if formula is not None:
            self._counts[_phase()] += formula(*args, **kwargs, out_val=out)

    def begin(self) -> None:
        """Count from here on."""
        self._counts = dict.fromkeys(Flops._fields, 0)

    def flops(self) -> Flops:
        """Return the operations since the beginning."""
        return Flops(**self._counts)


def _phase() -> str:
    if torch._C._current_graph_task_id() != -1:
        return "recomputed" if torch.is_grad_enabled() else "backward"
    return "forward" if torch.is_grad_enabled() else "update"


def _formulae() -> Mapping[Any, Callable[..., int]]:
    # Imported here, because the module imports a compiler for devices.
    known = dict(importlib.import_module("torch.utils.flop_counter").flop_registry)
    aten = torch.ops.aten
    # On the CPU, attention has the operands of flash attention, and names of its own.
    known.setdefault(
        aten._scaled_dot_product_flash_attention_for_cpu,
        known[aten._scaled_dot_product_flash_attention],
    )
    known.setdefault(
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        known[aten._scaled_dot_product_flash_attention_backward],
    )
    return known
