"""Batches: trees whose nodes may also be mappings, dataclasses and subclasses of list and tuple.

Parameters are trees of registered classes only, because ranks compare their structure. A batch
comes from a user's data loader, and may be a ``BatchEncoding`` or a dataclass that no tree knows.
The functions here open such a node and rebuild a node of the same class, so that no class is
registered in a registry that other libraries share. A :class:`zfun.Flat` in a batch is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, OptionError
from zfun.flat import Flat
from zfun.options import integer, takes

_T = TypeVar("_T")


class MicroBatches(list[_T]):
    """A list of batches, one for each micro-batch, which :func:`zfun.accumulate` does not split.

    Example:
        >>> import torch, zfun as zf
        >>> vg = zf.accumulate(zf.value_and_grad(lambda params, x: (params["w"] * x).mean()), 2)
        >>> batches = zf.transforms.MicroBatches([torch.ones(3), torch.ones(5)])
        >>> vg({"w": torch.tensor(2.0)}, batches)
        (tensor(2.), {'w': tensor(1.)})
    """


class _Node(NamedTuple):
    """A node that optree does not know: names and values of the children, and the way back."""

    names: Sequence[str]
    children: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]


class Parts(NamedTuple):
    """A batch in parts: paths and values of the leaves, and the way back."""

    paths: list[str]
    leaves: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


@takes()
def map_batch(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf of a batch; nodes keep their classes.

    Args:
        fn: a function of a leaf: a tensor, or any value that is no container.
        batch: a tree, in which mappings, dataclasses and subclasses of list and tuple are nodes
            too.

    Returns:
        A batch like the given one; nodes in which ``fn`` changed no leaf are the same objects, so
        that a list or dict which a function fills stays that of its caller.

    Example:
        >>> import collections
        >>> map_batch(lambda x: 2 * x, [collections.UserDict(a=1), (2, None)])
        [{'a': 2}, (4, None)]
    """
    return _mapped(fn, batch)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind not in (list, tuple, dict):
        parts = open_batch(value)
        return parts.rebuild([fn(leaf) for leaf in parts.leaves])
    children = list(value.values() if kind is dict else value)
    new = [_mapped(fn, child) for child in children]
    if all(x is y for x, y in zip(new, children, strict=True)):
        return value
    return dict(zip(value, new, strict=True)) if kind is dict else kind(new)


@takes(count=integer(1))
def split_batch(batch: Any, count: int) -> list[Any]:
    """Split a batch in micro-batches; see :func:`zfun.accumulate` for the rules.

    Args:
        batch: a batch, or a list of micro-batches.
        count: how many micro-batches.

    Returns:
        The micro-batches.

    Raises:
        OptionError: the batch cannot be split evenly, or has no tensors.
        LeafError: a leaf holds arrays that cannot be split.

    Example:
        >>> import torch
        >>> split_batch({"x": torch.arange(4), "scale": 3.0}, 2)
        [{'x': tensor([0, 1]), 'scale': 3.0}, {'x': tensor([2, 3]), 'scale': 3.0}]
    """
    if isinstance(batch, MicroBatches):
        if len(batch) != count:
            raise OptionError(
                f"MicroBatches has one batch for each of num_micro_batches; got {len(batch)} for "
                f"{count}; pass {count}, or set num_micro_batches={len(batch)}"
            )
        return list(batch)
    if count == 1:
        return [batch]
    if _is_list_of_batches(batch, count):
        return list(batch)
    parts = open_batch(batch)
    columns = _columns(parts, batch, count)
    return [parts.rebuild([column[i] for column in columns]) for i in range(count)]


def _is_list_of_batches(batch: Any, count: int) -> bool:
    """Whether a list has ``count`` entries, all containers of tensors with one structure."""
    if type(batch) is not list or len(batch) != count:
        return False
    parts = [open_batch(entry) for entry in batch]
    return all(
        type(entry) is type(batch[0])
        and part.paths == parts[0].paths
        and part.paths != ["."]
        and any(isinstance(leaf, Tensor) for leaf in part.leaves)
        for entry, part in zip(batch, parts, strict=True)
    )


def _columns(parts: Parts, batch: Any, count: int) -> list[Sequence[Any]]:
    """Return the pieces of every leaf."""
    first: tuple[str, int] | None = None
    columns: list[Sequence[Any]] = []
    for path, leaf in zip(parts.paths, parts.leaves, strict=True):
        if not isinstance(leaf, Tensor):
            _check_whole(path, leaf)
            columns.append([leaf] * count)
            continue
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise OptionError(
                f"accumulate() splits the first dim of every tensor of a batch in {count}; batch "
                f"leaf {path!r} has shape {tuple(leaf.shape)}; use a batch size that {count} "
                "divides, and Python numbers for scalars",
                leaf=path,
            )
        first = first or (path, leaf.shape[0])
        if leaf.shape[0] != first[1]:
            raise OptionError(
                "accumulate() splits the first dim of every tensor of a batch, the batch size; "
                f"batch leaf {path!r} has shape {tuple(leaf.shape)}, and leaf {first[0]!r} has "
                f"{first[1]} rows; split the batch yourself, and pass "
                "zf.transforms.MicroBatches([...])",
                leaf=path,
            )
        columns.append(leaf.chunk(count))
    if first is None:
        raise OptionError(
            f"accumulate() splits the tensors of a batch in {count}; got {type(batch).__name__} "
            "without tensors; make tensors of the values (return_tensors='pt' of a tokenizer), or "
            "register the class with zf.tree.register()"
        )
    return columns


def _check_whole(path: str, leaf: Any) -> None:
    """Refuse a leaf that every micro-batch would get whole, although the leaf holds arrays."""
    inside: Iterable[Any] = ()
    if isinstance(leaf, (set, frozenset)):
        inside = leaf
    elif not isinstance(leaf, (Flat, type, torch.nn.Module)):
        inside = getattr(leaf, "__dict__", {}).values()
    is_array = hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0)
    if is_array or any(isinstance(value, Tensor) for value in inside):
        raise LeafError(
            "accumulate() splits tensors, and passes every other leaf of a batch whole; batch "
            f"leaf {path!r} is {type(leaf).__name__}, which holds arrays; make tensors of the "
            "arrays, or register the class with zf.tree.register()",
            leaf=path,
        )


def open_batch(batch: Any) -> Parts:
    """Take a batch apart, down to the leaves."""
    nodes, spec = tree.flatten(batch, is_leaf=_is_opened)
    names = tree.paths(batch, is_leaf=_is_opened)
    paths: list[str] = []
    leaves: list[Any] = []
    inner: list[tuple[_Node, list[Parts]] | None] = []
    for name, value in zip(names, nodes, strict=True):
        node = _node(value)
        if node is None:
            paths.append(name)
            leaves.append(value)
            inner.append(None)
            continue
        parts = [open_batch(child) for child in node.children]
        for child, part in zip(node.names, parts, strict=True):
            paths += [".".join(x for x in (name, child, path) if x != ".") for path in part.paths]
            leaves += part.leaves
        inner.append((node, parts))
    if len(inner) == 1 and inner[0] is None and nodes[0] is batch:
        return Parts(paths, leaves, lambda new: new[0])

    def rebuild(new: Sequence[Any]) -> Any:
        if all(x is y for x, y in zip(new, leaves, strict=True)):
            return batch
        values = iter(new)
        take = lambda count: [next(values) for _ in range(count)]
        return tree.unflatten(
            spec,
            [
                next(values)
                if found is None
                else found[0].rebuild([part.rebuild(take(len(part.leaves))) for part in found[1]])
                for found in inner
            ],
        )

    return Parts(paths, leaves, rebuild)


def _is_opened(value: Any) -> bool:
    """Whether optree must not look into a node: a flat, and a namedtuple of any class."""
    return isinstance(value, Flat) or (isinstance(value, tuple) and hasattr(value, "_make"))


def _node(value: Any) -> _Node | None:
    """Open a value that optree left alone; ``None`` for a leaf."""
    if isinstance(value, (Tensor, Flat, type, torch.Size)):
        return None
    if isinstance(value, Mapping):
        keys = list(value.keys())  # a TensorDict iterates over rows
        return _Node(
            [str(key) for key in keys],
            [value[key] for key in keys],
            lambda new: _mapping_like(value, dict(zip(keys, new, strict=True))),
        )
    if dataclasses.is_dataclass(value):
        names = [x.name for x in dataclasses.fields(value) if hasattr(value, x.name)]
        return _Node(
            names,
            [getattr(value, name) for name in names],
            lambda new: _dataclass_like(value, dict(zip(names, new, strict=True))),
        )
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or [str(i) for i in range(len(value))]
        return _Node(names, list(value), lambda new: _sequence_like(value, new))
    return None


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class; ``dict`` and ``UserDict`` copy their attributes too."""
    try:
        if isinstance(value, (dict, UserDict)):
            new = copy.copy(value)
            for key, item in items.items():
                new[key] = item
            return new
        make: Callable[..., Any] = type(value)
        if (old := getattr(value, "batch_size", None)) is None:
            return make(items)
        # A TensorDict has the first sizes of its tensors, as many as it had before.
        shapes = {tuple(x.shape[: len(old)]) for x in items.values() if hasattr(x, "shape")}
        return make(items, batch_size=shapes.pop() if len(shapes) == 1 else old)
    except Exception as error:  # the user's class runs here and may raise anything
        raise LeafError(
            "a mapping in a batch is rebuilt as type(batch)(dict); got "
            f"{type(value).__name__}, which raised {type(error).__name__}: {error}; pass a dict, "
            "or register the class with zf.tree.register()"
        ) from error


def _dataclass_like(value: Any, fields: dict[str, Any]) -> Any:
    """Return a copy with other fields, also of a frozen class; ``__init__`` does not run again."""
    new = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(new, name, field)
    return new


def _sequence_like(value: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the same class; ``__init__`` and ``__new__`` do not run again."""
    if isinstance(value, tuple):
        new = tuple.__new__(type(value), items)
        getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return new
    new = copy.copy(value)
    new[:] = items
    return new
