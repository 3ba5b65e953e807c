"""Values with shapes and no numbers, and the code of a real step that runs on them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import ops, tree
from zfun.planner._kernels import kernels_of
from zfun.planner._shapes import Shapes
from zfun.sources.deferred import Deferred, memory_of
from zfun.transforms import map_batch


@contextlib.contextmanager
def abstract(
    device: torch.device | str = "cpu", *, metered: bool = False
) -> Iterator[Callable[[tree.Tree], tree.Tree]]:
    """Compute shapes only, as a context; yields the function that takes the numbers out of a tree.

    Code that reads a number which is not known (whether a norm is finite, whether two tensors are
    equal) reads 1 or True. Counts and scales that start as Python numbers stay known.

    Args:
        device: where the tensors are said to be; ``"meta"`` stands for any accelerator.
        metered: code runs under a :class:`Meter` only, which answers for unknown numbers too.

    Example:
        >>> with abstract() as fake:
        ...     x = fake({"x": torch.ones(3)})["x"] + 1
        ...     bool(torch.isfinite(x).all()), x.shape
        (True, torch.Size([3]))
    """
    answers = contextlib.nullcontext() if metered else _Answers()
    kernels = kernels_of(torch.device(device))
    with ops.fake_mode(allow_non_fake_inputs=True), answers, kernels, _taken_for_real():
        made: dict[Any, Tensor] = {}

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Deferred):
                shape, stride, dtype = leaf.shape, leaf.spec.stride(), leaf.dtype
            elif isinstance(leaf, Tensor):
                shape, stride, dtype = leaf.shape, leaf.stride(), leaf.dtype
            else:
                return leaf
            # Tied leaves stay tied.
            place = memory_of(leaf)
            if place not in made:
                made[place] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            return made[place]

        yield lambda value: map_batch(lambda leaf: tree.map(fake, leaf), value)


@contextlib.contextmanager
def _taken_for_real() -> Iterator[None]:
    """Let models of transformers take the branches of real tensors, not those of a tracer."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(module, "is_fake_tensor", None)
    if asked is None:
        yield
        return
    module.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        module.is_fake_tensor = asked


class _Answers(TorchDispatchMode):
    """Answers questions about numbers that fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes = Shapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._shapes(func, args, kwargs or {})
