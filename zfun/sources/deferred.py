"""Leaves whose values are made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError
from zfun.options import DEVICE, takes


@dataclass(frozen=True, eq=False, slots=True)
class Deferred:
    """A leaf of a tree whose values are made when asked for.

    Leaves are tied where one ``Deferred`` stands at several places of a tree.

    Attributes:
        path: the name of the leaf, for messages.
        spec: a ``meta`` tensor with the shape and the dtype of the leaf.
        make: ``make()`` returns a new tensor with this shape and dtype, the same on every rank.
        device: the device of the state that is made from the leaf.

    Example:
        >>> leaf = Deferred("w", torch.empty(2, device="meta"), lambda: torch.ones(2))
        >>> leaf.shape, leaf.load()
        (torch.Size([2]), tensor([1., 1.]))
    """

    path: str
    spec: Tensor
    make: Callable[[], Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def shape(self) -> torch.Size:
        """The shape of the leaf."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the leaf."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.spec.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self.spec.numel()

    def load(self) -> Tensor:
        """Make the values.

        Returns:
            A tensor of the shape and the dtype of ``spec``.

        Raises:
            LeafError: ``make`` has returned another shape or dtype, or no values.
        """
        with torch.no_grad():
            made = self.make()
        got = (
            f"{type(made).__name__}"
            if not isinstance(made, Tensor)
            else f"{made.dtype} {tuple(made.shape)}{' on meta' if made.is_meta else ''}"
        )
        if not isinstance(made, Tensor) or made.is_meta or made.layout != torch.strided:
            raise LeafError(
                f"a deferred leaf is made as a dense tensor with values; leaf {self.path!r} was "
                f"made as {got}; return a tensor such as torch.empty(spec.shape, "
                "dtype=spec.dtype, device='cpu')",
                leaf=self.path,
            )
        if made.shape != self.shape or made.dtype != self.dtype:
            raise LeafError(
                f"a deferred leaf is made with its shape and dtype; leaf {self.path!r} is "
                f"{self.dtype} {tuple(self.shape)} and was made as {got}; return a tensor of "
                "spec.shape and spec.dtype",
                leaf=self.path,
            )
        return made.detach().resolve_conj().resolve_neg()

    def __repr__(self) -> str:
        return f"Deferred({self.path}, {self.dtype} {tuple(self.shape)})"


def spec_of(leaf: Any) -> Any:
    """Return the leaf as functions of ``(path, leaf)`` get it: of a deferred leaf the ``spec``.

    Example:
        >>> spec_of(Deferred("w", torch.empty(2, device="meta"), lambda: torch.ones(2)))
        tensor(..., device='meta', size=(2,))
    """
    return leaf.spec if isinstance(leaf, Deferred) else leaf


def memory_of(leaf: Any) -> Hashable:
    """Return a value that is equal for tied leaves, which are one view of one memory.

    Example:
        >>> w = torch.ones(2)
        >>> memory_of(w) == memory_of(w.detach()), memory_of(w) == memory_of(w.clone())
        (True, False)
    """
    if isinstance(leaf, Deferred):
        return id(leaf)
    if not leaf.numel():
        # All tensors without elements have address 0.
        return id(leaf)
    # The storage, not the address, because fake tensors have no address.
    storage = leaf.untyped_storage()._cdata
    return storage, leaf.storage_offset(), tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype


def once(
    params: tree.Tree, label: str, kinds: type | tuple[type, ...] = Tensor
) -> tuple[dict[Hashable, tuple[Any, list[str]]], Callable[[Mapping[Hashable, Any]], tree.Tree]]:
    """Return each leaf once, with all paths of tied ones, and a function that makes a tree again.

    Args:
        params: a tree.
        label: the caller's name, for messages.
        kinds: the types of leaves.

    Returns:
        Leaves and paths by :func:`memory_of`, and ``tree_of(values)``, which puts the value of each
        memory in the places of its leaves.

    Raises:
        LeafError: a leaf of another type.

    Example:
        >>> w = torch.ones(2)
        >>> leaves, tree_of = once({"a": w, "b": w.detach()}, "main()")
        >>> [paths for _, paths in leaves.values()], tree_of(dict.fromkeys(leaves, 0))
        ([['a', 'b']], {'a': 0, 'b': 0})
    """
    leaves, spec = tree.flatten(params)
    found: dict[Hashable, tuple[Any, list[str]]] = {}
    for path, leaf in zip(tree.paths(params), leaves, strict=True):
        if not isinstance(leaf, kinds):
            raise LeafError(
                f"{label} takes a tree of tensors; leaf {path!r} is {type(leaf).__name__}; pass a "
                "meta tensor of its shape and dtype, such as those of zf.functional(module).params",
                leaf=path,
            )
        found.setdefault(memory_of(leaf), (leaf, []))[1].append(path)
    keys = [memory_of(leaf) for leaf in leaves]
    return found, lambda values: tree.unflatten(spec, [values[key] for key in keys])


@takes(device=DEVICE)
def initialised(
    params: tree.Tree,
    initialise: Callable[[str, Tensor], Tensor],
    *,
    device: torch.device | str = "cpu",
) -> tree.Tree:
    """Return a tree whose leaves a function makes, one at a time, from their paths and shapes.

    Args:
        params: a tree of tensors, of which shapes and dtypes count, such as the parameters of a
            module that was built under ``torch.device("meta")``. Tied tensors stay tied.
        initialise: ``initialise(path, spec)`` returns the values of a leaf. ``spec`` is a ``meta``
            tensor. Ranks call in an order that depends on the buckets, so draw random numbers
            from a generator that is seeded by the path.
        device: the device of the state. The values may be on any device.

    Returns:
        The tree with a :class:`Deferred` in place of each tensor.

    Raises:
        LeafError: a leaf of ``params`` is no tensor.

    Example:
        >>> import zfun as zf
        >>> with torch.device("meta"):
        ...     apply = zf.functional(torch.nn.Linear(2, 3))
        >>> make = lambda path, spec: torch.full(spec.shape, 1.0 if path == "weight" else 0.0)
        >>> params = zf.sources.initialised(apply.params, make)
        >>> zf.simulate(2, lambda group: zf.unshard(zf.shard(params, group)))[0]["bias"]
        tensor([0., 0., 0.])
    """
    place = torch.device(device)

    def deferred(leaf: Any, path: str) -> Deferred:
        spec = leaf if leaf.is_meta else torch.empty_like(leaf, device="meta")
        return Deferred(path, spec, lambda: initialise(path, spec), place)

    leaves, tree_of = once(params, "initialised()")
    return tree_of({key: deferred(leaf, paths[0]) for key, (leaf, paths) in leaves.items()})
