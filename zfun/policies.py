"""Policies: which results :func:`zfun.remat` keeps for backward, as predicates over operations.

A policy is a function ``(op, result) -> bool``: ``op`` is the ``torch`` operation (``torch.ops.aten.mm.default``, say), ``result`` the
:class:`Result` that describes what it computed. What it answers ``True`` for is kept, and everything else is computed again.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

__all__ = ["Policy", "Result", "attention", "either", "everything", "matmuls", "named", "names", "nothing", "unbatched_matmuls"]

# Not a global that a call could leave behind: a context variable ends with its block, and every thread has its own.
_name: contextvars.ContextVar[str | None] = contextvars.ContextVar("zfun_policies_name", default=None)


class Result(NamedTuple):
    """What a policy is told of a result.

    Attributes:
        shape: of the first tensor of the result.
        dtype: its dtype.
        device: where it lives.
        num_bytes: of all tensors of the result.
        name: what :func:`named` calls the part of the code that computed it; ``None`` outside of one.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    name: str | None


Policy: TypeAlias = Callable[[Any, Result], bool]


def nothing(op: Any, result: Result) -> bool:
    """Keep no result: everything is computed again from the inputs. The least memory, and one more forward pass.

    Example:
        >>> nothing(torch.ops.aten.mm.default, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None))
        False
    """
    return False


def everything(op: Any, result: Result) -> bool:
    """Keep what autograd keeps, and compute nothing again.

    With a store this is activation offload: what autograd keeps lives in the store.

    Example:
        >>> everything(torch.ops.aten.mm.default, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None))
        True
    """
    return True


_UNBATCHED = frozenset({"aten::mm", "aten::addmm", "aten::linear", "aten::mv", "aten::addmv", "aten::_scaled_mm", "aten::_int_mm"})
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::matmul", "aten::dot", "aten::vdot"})
_CONVOLUTIONS = frozenset({"aten::convolution", "aten::mkldnn_convolution", "aten::cudnn_convolution"})


def _of(op: Any) -> str:
    return getattr(getattr(op, "_schema", None), "name", str(op))


def matmuls(op: Any, result: Result) -> bool:
    """Keep the results of matrix products, batched ones too, and of convolutions; compute again what is cheap.

    Example:
        >>> cpu, size = torch.device("cpu"), torch.Size([2, 2])
        >>> [matmuls(op, Result(size, torch.float32, cpu, 16, None)) for op in (torch.ops.aten.bmm.default, torch.ops.aten.tanh.default)]
        [True, False]
    """
    return _of(op) in _UNBATCHED | _BATCHED | _CONVOLUTIONS


def unbatched_matmuls(op: Any, result: Result) -> bool:
    """Keep the results of matrix products without a batch dim: those of linear layers, not the scores of attention.

    Example:
        >>> cpu, size = torch.device("cpu"), torch.Size([2, 2])
        >>> aten = torch.ops.aten
        >>> [unbatched_matmuls(op.default, Result(size, torch.float32, cpu, 16, None)) for op in (aten.mm, aten.bmm)]
        [True, False]
    """
    return _of(op) in _UNBATCHED | _CONVOLUTIONS


def attention(op: Any, result: Result) -> bool:
    """Keep the results of fused attention, which costs much to compute and little to keep.

    Example:
        >>> op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        >>> attention(op, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None))
        True
    """
    return _of(op).startswith("aten::_scaled_dot_product_")


def names(*chosen: str) -> Policy:
    """Keep what is computed under certain names; see :func:`named`.

    Args:
        chosen: the names.

    Returns:
        A policy.

    Example:
        >>> policy = names("scores")
        >>> [policy(None, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, name)) for name in ("scores", None)]
        [True, False]
    """
    return lambda op, result: result.name in chosen


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the results of a part of a block a name that policies see.

    A region has the name, not a tensor: to keep a result spares computing it again only if the operation that made it knows.

    Args:
        name: any; an inner one counts.

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


def either(*policies: Policy) -> Policy:
    """Keep what any of several policies keeps.

    Example:
        >>> policy = either(unbatched_matmuls, attention)
        >>> policy(torch.ops.aten.mm.default, Result(torch.Size([2]), torch.float32, torch.device("cpu"), 8, None))
        True
    """
    return lambda op, result: any(policy(op, result) for policy in policies)


def described(tensors: list[torch.Tensor]) -> Result:
    """Describe a result, with the name of the part of the code that runs."""
    first = tensors[0]
    return Result(first.shape, first.dtype, first.device, sum(x.numel() * x.element_size() for x in tensors), _name.get())
