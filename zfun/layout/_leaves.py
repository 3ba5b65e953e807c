"""The tensors of a tree: which are leaves, which are tied, and one for each slot of a layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import AliasChanged, LeafError, SpecMismatch
from zfun.layout._slots import LAYOUT, Layout
from zfun.options import takes
from zfun.sources.deferred import Deferred, memory_of, spec_of


def check_leaf(path: str, leaf: object) -> None:
    """Refuse a leaf that is no dense tensor with elements of its own."""
    leaf = spec_of(leaf)
    if not isinstance(leaf, Tensor):
        raise _no_tensor(path, leaf)
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise LeafError(
            f"every leaf must be a dense tensor; leaf {path!r} is {leaf.layout}; convert it with "
            "to_dense()",
            leaf=path,
        )
    if leaf.numel() > 1 and not leaf.is_contiguous() and _repeats(leaf):
        raise LeafError(
            f"a leaf must own each of its elements; leaf {path!r} shows an element twice, as after "
            f"expand() or unfold() (strides {tuple(leaf.stride())}); call clone() on it first",
            leaf=path,
        )


def _repeats(view: Tensor) -> bool:
    """Whether a view shows an element of its storage more than once."""
    last = 0
    for stride, dim in sorted(zip(view.stride(), view.shape, strict=True)):
        if dim == 1:
            continue
        if stride <= last:
            # The steps along this dim are shorter than the dims before it. Only a count can tell.
            return stride == 0 or _overlap([view])
        last += (dim - 1) * stride
    return False


def _no_tensor(path: str, leaf: object) -> LeafError:
    remedy = (
        "apply = zf.functional(module) makes a function of its parameters; pass apply.params, and "
        "call apply(params, x) in the loss"
        if isinstance(leaf, torch.nn.Module)
        else "keep other values in the batch or in a closure"
    )
    return LeafError(
        f"every leaf must be a tensor; leaf {path!r} is {type(leaf).__name__}; {remedy}", leaf=path
    )


def alias_sets(
    paths: Sequence[str], values: Sequence[Tensor | Deferred]
) -> tuple[list[int], list[int]]:
    """Group leaves that are the same view of the same memory; raise for partial overlaps."""
    seen: dict[object, int] = {}
    firsts: list[int] = []
    positions: list[int] = []
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i, leaf in enumerate(values):
        key = memory_of(leaf) if leaf.numel() else i
        slot = seen.setdefault(key, len(firsts))
        if slot == len(firsts):
            firsts.append(i)
            if leaf.numel() and isinstance(leaf, Tensor):
                start = int(leaf.storage_offset()) * leaf.element_size()
                last = int(
                    sum(
                        (dim - 1) * stride
                        for dim, stride in zip(leaf.shape, leaf.stride(), strict=True)
                    )
                )
                spans.setdefault(leaf.untyped_storage()._cdata, []).append(
                    (start, start + (last + 1) * leaf.element_size(), i)
                )
        positions.append(slot)
    for pieces in spans.values():
        pieces.sort()
        for (_, end, a), (start, _, b) in itertools.pairwise(pieces):
            if start < end and _overlap([spec_of(values[i]) for _, _, i in pieces]):
                raise LeafError(
                    f"leaves may be tied (one view) or apart, not overlap; {paths[a]!r} and "
                    f"{paths[b]!r} share part of their memory; clone() one of them, or tie them "
                    "in the loss function",
                    leaf=paths[b],
                )
    return firsts, positions


def _overlap(views: Sequence[Tensor]) -> bool:
    """Whether views of one storage share an element; columns of a matrix share none."""
    if len({view.dtype for view in views}) > 1:
        return True
    first = min(view.storage_offset() for view in views)
    last = max(
        view.storage_offset()
        + sum((d - 1) * s for d, s in zip(view.shape, view.stride(), strict=True))
        for view in views
    )
    counts = torch.zeros(last - first + 1, dtype=torch.int32)
    for view in views:
        counts.as_strided(view.shape, view.stride(), view.storage_offset() - first).add_(1)
    return bool((counts > 1).any())


@takes(layout=LAYOUT)
def unique_leaves(params: tree.Tree, layout: Layout, *, any_dtype: bool = False) -> list[Tensor]:
    """Return one tensor for each slot of a layout.

    Args:
        params: a tree that fits the layout.
        layout: the layout.
        any_dtype: accept other dtypes, because gradients and optimizer states may be wider than
            parameters.

    Returns:
        The tensors in the order of ``layout.leaves``.

    Raises:
        SpecMismatch: the tree has another structure, or a leaf another shape or dtype.
        LeafError: a leaf is not a tensor.
        AliasChanged: leaves that are tied in the layout are now different tensors.

    Example:
        >>> from zfun.layout import layout_of
        >>> w = torch.ones(2)
        >>> layout = layout_of({"in": w, "out": w})
        >>> len(unique_leaves({"in": w, "out": w}, layout))
        1
    """
    values = tree.leaves_like(layout.spec, params)
    if values is None:
        now, then = set(tree.paths(params)), set(layout.paths)
        raise SpecMismatch(
            "a tree must keep the structure that it was laid out with; missing "
            f"{sorted(then - now)}, unexpected {sorted(now - then)}; lay the new tree out with "
            "shard() or replicate()"
        )
    chosen: list[Tensor | None] = [None] * len(layout.leaves)
    for path, leaf, position in zip(layout.paths, values, layout.positions, strict=True):
        slot = layout.leaves[position]
        first = chosen[position]
        if first is None:
            if not isinstance(spec_of(leaf), Tensor):
                raise _no_tensor(path, leaf)
            if tuple(leaf.shape) != slot.shape or not (any_dtype or leaf.dtype == slot.dtype):
                raise SpecMismatch(
                    f"a leaf must keep its shape and dtype; leaf {path!r} was laid out as "
                    f"{slot.dtype} {slot.shape} and is now {leaf.dtype} {tuple(leaf.shape)}; lay "
                    "the new tree out with shard() or replicate()",
                    leaf=path,
                )
            chosen[position] = leaf
        elif leaf is not first and (
            not isinstance(leaf, Tensor) or memory_of(leaf) != memory_of(first)
        ):
            raise AliasChanged(
                f"tied leaves must stay tied; {slot.path!r} and {path!r} shared one tensor and "
                "are now two; tie them again, or shard the new tree",
                leaf=path,
            )
    return [leaf for leaf in chosen if leaf is not None]
