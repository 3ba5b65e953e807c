"""Operations on a tensor that ask for no values, or change none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zfun.transforms.call._lazy import METADATA


def accessors(*names: str) -> set[Any]:
    """Return the getters and setters of attributes of a tensor."""
    found = [getattr(torch.Tensor, name) for name in names]
    return {getattr(x, way) for x in found for way in ("__get__", "__set__", "__delete__")}


# Queries and marks that need no values.
NO_VALUES = (
    METADATA
    | accessors("grad", "_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad")
    | accessors("grad_fn", "_version", "itemsize", "nbytes", "retains_grad")
    | {
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_shared,
        torch.Tensor.stride,
        torch.Tensor.type,
    }
)
_CASTS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "float", "half", "bfloat16")
)


def changes_nothing(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operation is a cast of a parameter that keeps device and dtype, or pads nothing.

    A layout of memory, such as ``channels_last``, is that of the buffer.
    """
    if func is torch.nn.functional.pad:
        return not any(args[1] if len(args) > 1 else kwargs["pad"])
    if func not in _CASTS:
        return False
    kwargs = {name: x for name, x in kwargs.items() if name != "memory_format"}
    with torch._C.DisableTorchFunctionSubclass():
        param = args[0]
        probe = torch.empty(0, dtype=param.dtype, device=param.device)
        if kwargs.get("copy"):
            return False
        found = func(probe, *args[1:], **kwargs)
        return found.dtype == probe.dtype and found.device == probe.device
