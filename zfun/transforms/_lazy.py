"""Lazy leaves: what a loss receives in place of parameters that are not gathered yet."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import PlacementError

__all__ = ["LazyLeaf", "is_loading", "loading", "materialise"]

_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("zfun_transforms_loading", default=False)


class LazyLeaf(torch.Tensor):
    """A parameter that is gathered when it is first used.

    It has the true shape, dtype and device, and no data. Any operation on it runs on the gathered tensor instead; to ask for its metadata
    gathers nothing.
    """

    _load: Callable[[], Tensor]
    _path: str

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool, path: str, load: Callable[[], Tensor]
    ) -> Self:
        leaf = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        leaf._load = load
        leaf._path = path
        return leaf

    def recast(self, dtype: torch.dtype) -> LazyLeaf:
        """Return a lazy leaf of another dtype, which gathers this one and casts it when it is first used, once."""
        made: list[Tensor] = []

        def load() -> Tensor:
            if not made:
                made.append(self._load().to(dtype))
            return made[0]

        return LazyLeaf(tuple(self.shape), dtype, self.device, self.requires_grad, self._path, load)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyLeaf({self._path}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces this function too. What it cannot trace (a collective) would be its error and not say what to do; nor can it
            # trace the errors of zfun.
            raise TypeError("compiled code needs whole tensors: call zf.gather() on the subtree first, outside the compiled function")
        return func(*_loaded(args), **(_loaded(kwargs) if kwargs else {}))

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types, kwargs
        paths = [leaf._path for leaf in tree.leaves(args) if isinstance(leaf, LazyLeaf)]
        raise PlacementError(
            f"compiled code and torch.func transforms need whole tensors; {func} got the lazy leaves {paths}; "
            "call zf.gather() on the subtree first, outside the compiled or transformed function",
            leaf=paths[0] if paths else None,
        )


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


# What is known without the data. Everything else gathers.
_METADATA = frozenset(
    [
        _getter(name)
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "requires_grad",
            "is_leaf",
            "is_cuda",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "grad",
        )
    ]
    + [
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)


def _loaded(value: Any) -> Any:
    """Replace lazy leaves in the arguments of an operation, which torch nests in lists, tuples and dicts only."""
    if isinstance(value, LazyLeaf):
        return _load(value)
    if type(value) is tuple:
        return tuple(_loaded(item) for item in value)
    if type(value) is list:
        return [_loaded(item) for item in value]
    if type(value) is dict:
        return {key: _loaded(item) for key, item in value.items()}
    return value


def materialise(subtree: tree.Tree) -> tree.Tree:
    """Replace the lazy leaves of a tree by the gathered tensors."""
    return tree.map(lambda leaf: _load(leaf) if isinstance(leaf, LazyLeaf) else leaf, subtree)


def is_loading() -> bool:
    """Whether what runs now makes a parameter ready, and is no operation of the loss."""
    return _loading.get()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """The context of what makes parameters ready for the loss."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def _load(leaf: LazyLeaf) -> Tensor:
    with loading():
        return leaf._load()
