"""Policies: which results :func:`zfun.remat` keeps for backward, as predicates over operations.

A policy is a function ``(op, result) -> bool``. ``op`` is the ``torch`` operation, such as
``torch.ops.aten.mm.default``, and ``result`` is a :class:`Result` that describes the tensors of the
operation. ``remat`` keeps a result if the policy returns ``True``, and recomputes all others.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from zfun.options import FUNCTION, takes

__all__ = [
    "Policy",
    "Result",
    "attention",
    "either",
    "everything",
    "matmuls",
    "named",
    "names",
    "nothing",
    "unbatched_matmuls",
]

# A context variable and not a global, because every thread has a separate value.
_name: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "zfun_policies_name", default=None
)


class Result(NamedTuple):
    """The description of a result that a policy receives.

    Attributes:
        shape: shape of the first tensor of the result.
        dtype: dtype of the first tensor.
        device: device of the first tensor.
        num_bytes: bytes of all tensors of the result.
        name: the name that :func:`named` gave to this part of the code; ``None`` without a name.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    name: str | None


Policy: TypeAlias = Callable[[Any, Result], bool]


def nothing(op: Any, result: Result) -> bool:
    """Keep no result: recompute everything from the inputs.

    This policy needs the least memory and one more forward pass.

    Example:
        >>> result = Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None)
        >>> nothing(torch.ops.aten.mm.default, result)
        False
    """
    return False


def everything(op: Any, result: Result) -> bool:
    """Keep everything that autograd keeps, and recompute nothing.

    With a store this policy is activation offload, because the store then holds the activations.

    Example:
        >>> result = Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None)
        >>> everything(torch.ops.aten.mm.default, result)
        True
    """
    return True


_UNBATCHED = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::mv",
        "aten::addmv",
        "aten::_scaled_mm",
        "aten::_int_mm",
    }
)
_BATCHED = frozenset(
    {"aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::matmul", "aten::dot", "aten::vdot"}
)
_CONVOLUTIONS = frozenset(
    {"aten::convolution", "aten::mkldnn_convolution", "aten::cudnn_convolution"}
)


def _of(op: Any) -> str:
    return getattr(getattr(op, "_schema", None), "name", str(op))


def matmuls(op: Any, result: Result) -> bool:
    """Keep the results of matrix products, including batched ones, and of convolutions.

    Example:
        >>> aten = torch.ops.aten
        >>> result = Result(torch.Size([2, 2]), torch.float32, torch.device("cpu"), 16, None)
        >>> [matmuls(op.default, result) for op in (aten.bmm, aten.tanh)]
        [True, False]
    """
    return _of(op) in _UNBATCHED | _BATCHED | _CONVOLUTIONS


def unbatched_matmuls(op: Any, result: Result) -> bool:
    """Keep matrix products without a batch dim: results of linear layers, not attention scores.

    Example:
        >>> aten = torch.ops.aten
        >>> result = Result(torch.Size([2, 2]), torch.float32, torch.device("cpu"), 16, None)
        >>> [unbatched_matmuls(op.default, result) for op in (aten.mm, aten.bmm)]
        [True, False]
    """
    return _of(op) in _UNBATCHED | _CONVOLUTIONS


def attention(op: Any, result: Result) -> bool:
    """Keep the results of fused attention, which are slow to compute and small to keep.

    Example:
        >>> op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        >>> attention(op, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None))
        True
    """
    return _of(op).startswith("aten::_scaled_dot_product_")


@takes()
def names(*chosen: str) -> Policy:
    """Keep the results of parts of the code that have one of some names; see :func:`named`.

    Args:
        chosen: the names.

    Returns:
        A policy.

    Example:
        >>> policy = names("scores")
        >>> size, cpu = torch.Size([2]), torch.device("cpu")
        >>> results = [Result(size, torch.float32, cpu, 8, name) for name in ("scores", None)]
        >>> [policy(None, result) for result in results]
        [True, False]
    """
    return lambda op, result: result.name in chosen


@takes()
@contextmanager
def named(name: str) -> Iterator[None]:
    """Name a part of a block, so that policies see the name.

    The name belongs to the code and not to a tensor, because keeping a result saves work only if
    the operation that computes the result is skipped.

    Args:
        name: any string; the innermost name counts.

    Example:
        >>> import zfun as zf
        >>> def block(w, x):
        ...     with zf.policies.named("project"):
        ...         x = x @ w
        ...     return torch.tanh(x)
        >>> zf.remat(block, policy=zf.policies.names("project"))(torch.eye(2), torch.zeros(2))
        tensor([0., 0.])
    """
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


@takes(policies=FUNCTION)
def either(*policies: Policy) -> Policy:
    """Keep a result if any of several policies keeps the result.

    Example:
        >>> policy = either(unbatched_matmuls, attention)
        >>> result = Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None)
        >>> policy(torch.ops.aten.mm.default, result)
        True
    """
    return lambda op, result: any(policy(op, result) for policy in policies)


def described(tensors: list[torch.Tensor]) -> Result:
    """Describe a result, including the current name."""
    first = tensors[0]
    return Result(
        first.shape,
        first.dtype,
        first.device,
        sum(x.numel() * x.element_size() for x in tensors),
        _name.get(),
    )
