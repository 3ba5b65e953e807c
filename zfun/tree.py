"""Pytrees; the only module that imports optree.

A tree is anything that optree flattens: nested dicts, lists, tuples, namedtuples, and classes that
users register, globally or in the namespace ``"zfun"``. ``None`` is an empty subtree, so a tree
with holes (see :func:`partition`) needs no special case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import optree
import torch.utils._pytree as torch_pytree

from zfun.options import FUNCTION, ITERABLE, OF_LEAVES, instance, takes

NAMESPACE = "zfun"
Tree: TypeAlias = Any
Spec: TypeAlias = optree.PyTreeSpec
_FIELDS: tuple[type[Any], ...] = (optree.NamedTupleEntry, optree.StructSequenceEntry)
_IsLeaf: TypeAlias = Callable[[Any], bool] | None

# Buckets should follow the order of use, which is usually the insertion order of dicts and not the
# order of sorted keys. The setting applies to zfun's namespace only. The variable keeps the context
# open, because the context ends when the object is collected.
_insertion_order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_insertion_order.__enter__()


SPEC = instance(optree.PyTreeSpec, "the structure of a tree", "zf.tree.structure(params)")


@takes(is_leaf=FUNCTION | None)
def flatten(tree: Tree, is_leaf: _IsLeaf = None) -> tuple[list[Any], Spec]:
    """Split a tree into leaves and structure.

    Args:
        tree: any pytree.
        is_leaf: a predicate that stops the descent.

    Returns:
        The leaves in insertion order, and the structure.

    Example:
        >>> flatten({"b": 1, "a": (2, None)})[0]
        [1, 2]
    """
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


@takes(spec=SPEC, leaves=ITERABLE)
def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """Build a tree from a structure and leaves: the inverse of :func:`flatten`.

    Example:
        >>> values, spec = flatten({"b": 1, "a": 2})
        >>> unflatten(spec, [v * 10 for v in values])
        {'b': 10, 'a': 20}
    """
    return optree.tree_unflatten(spec, leaves)


@takes(is_leaf=FUNCTION | None)
def leaves(tree: Tree, is_leaf: _IsLeaf = None) -> list[Any]:
    """Return the leaves of a tree in insertion order."""
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


@takes(is_leaf=FUNCTION | None)
def structure(tree: Tree, is_leaf: _IsLeaf = None) -> Spec:
    """Return the structure of a tree, without leaves."""
    return optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE)


@takes(spec=SPEC)
def leaves_like(spec: Spec, tree: Tree) -> list[Any] | None:
    """Return the leaves of a tree in the order of a structure, for any insertion order of dicts.

    Returns:
        The leaves; ``None`` if the tree has another structure.

    Example:
        >>> leaves_like(structure({"b": 0, "a": 0}), {"a": 1, "b": 2})
        [2, 1]
    """
    found, actual = flatten(tree)
    if actual == spec:
        return found
    if len(found) != spec.num_leaves:
        return None
    try:
        found = spec.flatten_up_to(tree)
    except ValueError:
        return None
    # Both sides have equally many leaves, so a node in one place means a missing leaf in another.
    return (
        found
        if all(structure(leaf).num_nodes == 1 and structure(leaf).num_leaves == 1 for leaf in found)
        else None
    )


@takes(spec=SPEC)
def subtrees(spec: Spec, tree: Tree) -> list[Any] | None:
    """Return the parts of a tree at the leaves of a structure; ``None`` for a hole.

    Returns:
        One part per leaf of the structure; ``None`` if the tree has another structure.

    Example:
        >>> subtrees(structure({"a": 0, "b": 0}), {"a": None, "b": (1, 2)})
        [None, (1, 2)]
    """
    try:
        return spec.flatten_up_to(tree)
    except (TypeError, ValueError):
        return None


@takes(is_leaf=FUNCTION | None)
def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: _IsLeaf = None) -> Tree:
    """Apply ``fn`` to every leaf of a tree, together with the leaves at the same place in the rest.

    Example:
        >>> map(lambda x, y: x + y, {"a": 1}, {"a": 2})
        {'a': 3}
    """
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


@takes(is_leaf=FUNCTION | None)
def paths(tree: Tree, is_leaf: _IsLeaf = None) -> list[str]:
    """Return the path of every leaf, in the order of :func:`leaves`.

    Returns:
        Dotted paths of keys, of the names of fields (namedtuples and dataclasses), and of indices
        (lists and tuples); a tree that is a single leaf has the path ``"."``.

    Example:
        >>> from typing import NamedTuple
        >>> class Block(NamedTuple):
        ...     w: int
        ...     b: int
        >>> paths({"h": [Block(1, 2)], "out": 3})
        ['h.0.w', 'h.0.b', 'out']
    """
    found = optree.tree_paths(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    if any(type(entry) is int for path in found for entry in path):
        # Accessors tell fields of a namedtuple from indices of a list, but take longer.
        accessors = optree.tree_accessors(tree, is_leaf=is_leaf, namespace=NAMESPACE)
        found = [tuple(_name(entry) for entry in accessor) for accessor in accessors]
    return [".".join(map(str, path)) or "." for path in found]


def _name(entry: Any) -> Any:
    return entry.field if isinstance(entry, _FIELDS) else entry.entry


@takes(cls=instance(type, "a class", "Node"))
def register(
    cls: type,
    to_children: Callable[[Any], tuple[Iterable[Any], Any]],
    from_children: Callable[[Any, Iterable[Any]], Any],
) -> None:
    """Make a class a tree node, for zfun and for ``torch.func``.

    Args:
        cls: the class. If every child of a dataclass is one of the fields, paths have the names
            of these fields, else indices.
        to_children: a function from a node to (children, hashable static data).
        from_children: a function from (static data, children) to a node.
    """

    def flatten_with_names(node: Any) -> tuple[Any, ...]:
        children, static = to_children(node)
        children = tuple(children)
        return children, static, _fields_of(node, children)

    optree.register_pytree_node(
        cls,
        flatten_with_names if dataclasses.is_dataclass(cls) else to_children,
        from_children,
        namespace=NAMESPACE,
    )

    def flatten_for_torch(node: Any) -> tuple[list[Any], Any]:
        children, static = to_children(node)
        return list(children), static

    torch_pytree.register_pytree_node(
        cls, flatten_for_torch, lambda children, static: from_children(static, children)
    )


def _fields_of(node: Any, children: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return the name of the field that holds each child; ``None`` if a child lies elsewhere."""
    names = [field.name for field in dataclasses.fields(node)]
    found: list[str] = []
    for child in children:
        name = next((name for name in names if getattr(node, name, None) is child), None)
        if name is None:
            return None
        names.remove(name)
        found.append(name)
    return tuple(found)


@takes(predicate=OF_LEAVES)
def partition(tree: Tree, predicate: Callable[[str, Any], bool]) -> tuple[Tree, Tree]:
    """Split a tree in two by a predicate; :func:`combine` joins the parts.

    Both parts have the structure of the whole, with ``None`` in place of a leaf of the other part.
    Frozen leaves thereby form a separate tree, which no gradient and no optimizer sees.

    Args:
        tree: any pytree.
        predicate: ``predicate(path, leaf)``.

    Returns:
        The tree of the leaves for which the predicate holds, and the tree of the other leaves.

    Example:
        >>> trainable, frozen = partition({"w": 1, "scale": 2}, lambda path, leaf: path == "w")
        >>> trainable, frozen
        ({'w': 1, 'scale': None}, {'w': None, 'scale': 2})
        >>> combine(trainable, frozen)
        {'w': 1, 'scale': 2}
    """
    values, spec = flatten(tree)
    chosen = [bool(predicate(path, leaf)) for path, leaf in zip(paths(tree), values, strict=True)]
    inside = [leaf if keep else None for leaf, keep in zip(values, chosen, strict=True)]
    outside = [None if keep else leaf for leaf, keep in zip(values, chosen, strict=True)]
    return unflatten(spec, inside), unflatten(spec, outside)


def combine(*parts: Tree) -> Tree:
    """Fill the holes (``None``) of a tree from the other trees: the inverse of :func:`partition`.

    Args:
        parts: trees with the same structure, ``None`` counted as a leaf.

    Returns:
        A tree with the first leaf that is not ``None`` at each place.

    Example:
        >>> combine({"w": 1, "scale": None}, {"w": None, "scale": 2})
        {'w': 1, 'scale': 2}
    """
    if len(parts) == 1:
        return parts[0]

    def first(*candidates: Any) -> Any:
        return next((leaf for leaf in candidates if leaf is not None), None)

    return optree.tree_map(first, *parts, none_is_leaf=True, namespace=NAMESPACE)
