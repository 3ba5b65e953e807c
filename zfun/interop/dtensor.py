"""DTensors in and out: parameters that FSDP2, HSDP or tensor parallelism has placed.

A ``DTensor`` has one placement for each axis of a mesh, and cuts each leaf along a dimension. A
:class:`zfun.Flat` cuts flat buckets of many leaves. So a leaf goes through whole values, one leaf
or one bucket at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zfun import tree
from zfun.errors import LeafError, OptionError, SpecMismatch
from zfun.flat import Flat
from zfun.interop._named import named, whole_by_bucket
from zfun.options import NAMES, takes
from zfun.sources import Deferred


@takes(keep=NAMES)
def from_dtensor(params: tree.Tree, keep: Sequence[str] = ()) -> tree.Tree:
    """Return a tree whose DTensors are leaves for ``zero.init`` and :func:`zfun.shard`.

    Each DTensor becomes a deferred leaf, which is made whole when its bucket is filled and dropped
    afterwards. Making a leaf is a collective of the leaf's mesh, so all ranks of the mesh take
    part, with ``init="check"``.

    Args:
        params: a tree of DTensors and tensors, such as ``dict(module.named_parameters())``.
        keep: names of mesh axes along which the leaves stay cut, such as ``("tp",)``. Each rank
            then gives its own part, so shard over a group of the other axes:
            ``zf.process_group(mesh, axis="dp")``.

    Returns:
        The tree with deferred leaves. Plain tensors stay, and tied leaves stay tied.

    Raises:
        OptionError: a mesh has no axis of this name.
        LeafError: along a kept axis a leaf is neither whole nor cut in chunks of ``torch.chunk``.

    Example:
        >>> import torch
        >>> from_dtensor({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """
    made: dict[int, Deferred] = {}

    def deferred(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in made:
            held = _held(path, leaf, keep)
            spec = torch.empty(_shape_of(leaf, held), dtype=leaf.dtype, device="meta")
            whole = lambda: leaf.redistribute(placements=held).to_local()
            made[id(leaf)] = Deferred(path, spec, whole, leaf.device)
        return made[id(leaf)]

    leaves, spec = tree.flatten(params)
    return tree.unflatten(spec, list(map(deferred, tree.paths(params), leaves)))


@takes(keep=NAMES)
def to_dtensor(value: Flat | tree.Tree, like: tree.Tree, keep: Sequence[str] = ()) -> tree.Tree:
    """Return whole or sharded parameters as DTensors (``R``, ``S`` -> the placements of ``like``).

    A :class:`zfun.Flat` is gathered bucket by bucket, and each rank keeps its part of each leaf.

    Args:
        value: a ``Flat``, such as ``state.params``, or a tree of whole tensors.
        like: a tree of the same structure, whose DTensors give mesh and placements. A leaf that is
            a plain tensor there stays whole.
        keep: as for :func:`from_dtensor`: the axes along which each leaf of ``value`` is a part.

    Returns:
        The tree of new DTensors. Tied leaves are one DTensor. All ranks call.

    Raises:
        SpecMismatch: ``value`` has other leaves, shapes or dtypes than ``like``.
        OptionError: a mesh has no axis of this name.
        LeafError: along a kept axis a leaf is neither whole nor cut in chunks of ``torch.chunk``.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> group = zf.process_group()
        >>> to_dtensor(zf.shard({"w": torch.ones(2)}, group), {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    targets, spec = tree.flatten(like)
    paths = tree.paths(like)
    found = value.layout.paths if isinstance(value, Flat) else tuple(tree.paths(value))
    if tuple(paths) != found:
        odd = sorted(set(paths) ^ set(found)) or ["the order"]
        raise SpecMismatch(
            f"the leaves of the value must be those of like; got other leaves at {odd[:4]}; pass "
            "the tree that from_dtensor() was given",
            leaf=odd[0],
        )
    by_path = dict(zip(paths, targets, strict=True))
    held = {
        path: _held(path, leaf, keep) for path, leaf in by_path.items() if isinstance(leaf, DTensor)
    }
    placed: dict[str, Any] = {}
    for part in whole_by_bucket(value) if isinstance(value, Flat) else [named(value)]:
        # Tied leaves of a value are one tensor, and become one DTensor.
        made: dict[int, Any] = {}
        for path, whole in part.items():
            _check_leaf(path, whole, by_path[path], held.get(path))
            if id(whole) not in made:
                made[id(whole)] = _place(whole, by_path[path], held.get(path))
            placed[path] = made[id(whole)]
    return tree.unflatten(spec, [placed[path] for path in paths])


def _held(path: str, leaf: DTensor, keep: Sequence[str]) -> list[Placement]:
    """Return the placements of a leaf that is whole along all axes but the kept ones."""
    names = leaf.device_mesh.mesh_dim_names or ()
    for name in keep:
        if name not in names:
            raise OptionError(
                f"keep names axes of the mesh of every leaf; got {name!r}, and the mesh of leaf "
                f"{path!r} has {', '.join(names) or 'no named axes'}",
                leaf=path,
            )
    held: list[Placement] = [
        placement if index < len(names) and names[index] in keep else Replicate()
        for index, placement in enumerate(leaf.placements)
    ]
    for placement in held:
        if type(placement) not in (Shard, Replicate):
            raise LeafError(
                f"a leaf is cut in chunks along an axis that is kept; leaf {path!r} has "
                f"{placement}; redistribute() the leaf to Shard or Replicate first",
                leaf=path,
            )
    return held


def _shape_of(leaf: DTensor, held: Sequence[Placement]) -> tuple[int, ...]:
    """Return the shape of this rank's part along the kept axes, cut as ``torch.chunk`` does."""
    shape = list(leaf.shape)
    place = leaf.device_mesh.get_coordinate()
    if place is None:
        raise LeafError("the ranks of a mesh hold its leaves; this process is not on the mesh")
    for axis, placement in enumerate(held):
        if isinstance(placement, Shard):
            numel = shape[placement.dim]
            chunk = -(-numel // leaf.device_mesh.size(axis))
            shape[placement.dim] = min(max(numel - place[axis] * chunk, 0), chunk)
    return tuple(shape)


def _check_leaf(path: str, whole: Any, like: Any, held: Sequence[Placement] | None) -> None:
    shape = tuple(like.shape) if held is None else _shape_of(like, held)
    if not isinstance(whole, Tensor) or tuple(whole.shape) != shape or whole.dtype != like.dtype:
        got = f"{whole.dtype} {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"{whole!r}"
        raise SpecMismatch(
            f"the leaves of the value have the shapes and dtypes of like; leaf {path!r} is {got}, "
            f"not {like.dtype} {shape}; pass the same keep to from_dtensor() and to_dtensor()",
            leaf=path,
        )


def _place(whole: Tensor, like: Any, held: Sequence[Placement] | None) -> Tensor:
    if held is None:
        return whole
    with torch.no_grad():
        placed = DTensor.from_local(
            whole, like.device_mesh, held, shape=like.shape, stride=like.stride()
        )
        return placed.redistribute(placements=like.placements)
