"""Floating-point operations of a step, by phase, and the bytes that the loss reads and writes."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor


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


class Touched(NamedTuple):
    """The work of a loss beside its floating-point operations, of one rank.

    Attributes:
        forward_bytes: bytes that the operations of the loss that autograd records read and write.
        forward_ops: the number of these operations; views are none.
        recomputed_bytes: the same of the loss again, in backward.
        recomputed_ops: the number of these.
    """

    forward_bytes: int = 0
    forward_ops: int = 0
    recomputed_bytes: int = 0
    recomputed_ops: int = 0

    @property
    def num_bytes(self) -> int:
        """All bytes, where backward touches twice as many as the forward pass."""
        return 3 * self.forward_bytes + self.recomputed_bytes

    @property
    def num_ops(self) -> int:
        """All operations, where backward takes twice as many as the forward pass."""
        return 3 * self.forward_ops + self.recomputed_ops


@final
class FlopCounter:
    """A count of the operations that a :class:`Meter` sees, with the formulae of torch."""

    def __init__(self) -> None:
        self._formulae = _formulae()
        self.begin()

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation."""
        phase = _phase()
        formula = self._formulae.get(func.overloadpacket)
        if formula is not None:
            self._counts[phase] += formula(*args, **kwargs, out_val=out)
        # Autograd records the operations of the loss, and none of the collectives beside.
        if phase in self._touched and _computes(func) and _is_recorded(args):
            self._touched[phase][0] += _bytes_of(out) + _bytes_of(args)
            self._touched[phase][1] += 1

    def begin(self) -> None:
        """Count from here on."""
        self._counts = dict.fromkeys(Flops._fields, 0)
        self._touched = {"forward": [0, 0], "recomputed": [0, 0]}

    def flops(self) -> Flops:
        """Return the operations since the beginning."""
        return Flops(**self._counts)

    def touched(self) -> Touched:
        """Return the bytes that the loss has read and written since the beginning."""
        return Touched(*self._touched["forward"], *self._touched["recomputed"])


@functools.cache
def _computes(func: Any) -> bool:
    """Whether an operation writes a result; a view and an allocation do not."""
    if func is torch.ops.aten._unsafe_view.default or "empty" in func.overloadpacket.__name__:
        return False
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is None or alias.is_write for alias in aliases)


def _is_recorded(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(map(_is_recorded, value))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.dtype.itemsize
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


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
    return {
        op: _with_all_heads(formula) if "scaled_dot_product" in op.__name__ else formula
        for op, formula in known.items()
    }


def _with_all_heads(formula: Callable[..., int]) -> Callable[..., int]:
    """Give keys and values the heads of the queries; torch before 2.13 counts no groups."""

    def count(*args: Any, **kwargs: Any) -> int:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in args]
        of_heads = [isinstance(x, tuple) and len(x) == 4 for x in shapes]
        heads = max(x[1] for x in itertools.compress(shapes, of_heads))
        shapes = [
            (x[0], heads, *x[2:]) if has_heads else x
            for x, has_heads in zip(shapes, of_heads, strict=True)
        ]
        return formula(*shapes, **kwargs)

    return count
