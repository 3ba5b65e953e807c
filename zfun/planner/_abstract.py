"""Values with shapes and no numbers, and the code of a real step that runs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import ops, tree

__all__ = ["abstract"]


@contextlib.contextmanager
def abstract(device: torch.device | str = "cpu") -> Iterator[Callable[[tree.Tree], tree.Tree]]:
    """Compute shapes only, as a context; yields the function that takes the numbers out of a tree.

    Code that reads a number which is not known (whether a norm is finite, whether two tensors are
    equal) reads 1 or True. Counts and scales that start as Python numbers stay known.

    Args:
        device: where the tensors are said to be; ``"meta"`` stands for any accelerator.

    Example:
        >>> with abstract() as fake:
        ...     x = fake({"x": torch.ones(3)})["x"] + 1
        ...     bool(torch.isfinite(x).all()), x.shape
        (True, torch.Size([3]))
    """
    with ops.fake_mode(allow_non_fake_inputs=True), _Answers():
        made: dict[Any, Tensor] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape, stride, dtype = leaf.shape, leaf.stride(), leaf.dtype
            # Tied leaves stay tied. Tensors without elements share no storage.
            if leaf.numel():
                storage = leaf.untyped_storage()._cdata
                place: Any = storage, leaf.storage_offset(), shape, stride, dtype
            else:
                place = id(leaf)
            if place not in made:
                made[place] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            return made[place]

        yield lambda value: tree.map(fake, value)


class _Answers(TorchDispatchMode):
    """Answers questions about numbers that fake tensors do not have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                return True
            dtype = args[0].dtype
            return dtype is torch.bool or (1.0 if dtype.is_floating_point else 1)
