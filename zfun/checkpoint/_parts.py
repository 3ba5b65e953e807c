"""The logical leaves of a state, whatever its composition.

[Note: logical leaves]
A state is a tree of flats, tensors, handles of stores, and plain values. Its *parts* are these; a
part has a path in the tree, and a tensor in a part has a *key*: the path of the part joined with
the path of the leaf in the part. So ``params`` as a flat with the leaf ``h.0.w``, and ``params`` as
a tree of tensors, both have the key ``params.h.0.w``.

Two types of state depend on the precision, and so are seen through. The inner state of
``with_master`` has the keys of the state without master weights. The fields of a loss scale are
optional, and so are the steps that leaves have missed, which are one text. A key of a master weight
is linked to the key of the parameter, because with master weights the exact value of a parameter is
its master weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import collectives, tree
from zfun.checkpoint.format._order import StoredCut, simplified
from zfun.collectives import Group, model_groups, single_group, sum_group, whole_group
from zfun.errors import CheckpointError, SpecMismatch
from zfun.flat import Flat, flats
from zfun.layout import logical_path
from zfun.optim import LossScaleState, MasterState, MissedSteps
from zfun.placement import Cut, P, R, is_first
from zfun.sources.deferred import memory_of
from zfun.stores import Stored


@dataclass(frozen=True, slots=True)
class Part:
    """One flat, tensor, handle, deferred leaf or plain value of a state.

    Attributes:
        path: the path in the state.
        value: the part.
        is_optional: whether a checkpoint may be without the part.
        master: for master weights, the path of the tree of master weights; else empty.
        absent: the plain value where a checkpoint is without the part; ``None`` keeps ``value``.
        check: raises if a plain value of a checkpoint is none of this part.
    """

    path: str
    value: Any
    is_optional: bool = False
    master: str = ""
    absent: str | None = None
    check: Callable[[Any], object] | None = None


def join(prefix: str, path: str) -> str:
    """Join paths; ``"."`` is the path of a tree that is one leaf.

    Example:
        >>> join("params", "h.0.w"), join("params", "."), join(".", "w")
        ('params.h.0.w', 'params', 'w')
    """
    if path == ".":
        return prefix
    return path if prefix == "." else f"{prefix}.{path}"


def _is_node(value: Any) -> bool:
    return isinstance(value, (Flat, MasterState, LossScaleState))


def _has_counts(value: Any) -> bool:
    # A ZeroState, which later modules define.
    return isinstance(value, tuple) and hasattr(value, "num_skipped")


def _with_numbers(value: Any) -> Any:
    """Read the counts of a state that its device keeps; those of other states are numbers."""
    if not _has_counts(value):
        return value
    return value._replace(num_skipped=int(value.num_skipped), num_applied=int(value.num_applied))


def map_parts(
    fn: Callable[[Part], Any], state: tree.Tree, prefix: str = ".", like: Part | None = None
) -> tree.Tree:
    """Apply ``fn`` to every part of a state; the parts inherit the marks of ``like``."""
    like = like or Part("", None)
    state = tree.map(_with_numbers, state, is_leaf=lambda x: _is_node(x) or _has_counts(x))
    leaves, spec = tree.flatten(state, is_leaf=_is_node)
    found: list[Any] = []
    for path, leaf in zip(tree.paths(state, is_leaf=_is_node), leaves, strict=True):
        here = join(prefix, path)
        if isinstance(leaf, MasterState):
            master = join(here, "master")
            found.append(
                MasterState(
                    map_parts(fn, leaf.master, master, Part("", None, like.is_optional, master)),
                    map_parts(fn, leaf.inner, here, like),
                )
            )
        elif isinstance(leaf, LossScaleState):
            held = (
                fn(Part(join(here, name), x, True, like.master))
                for name, x in leaf._asdict().items()
            )
            found.append(LossScaleState(*held))
        elif isinstance(leaf, MissedSteps):
            none = MissedSteps().to_text()
            part = Part(here, leaf.to_text(), True, absent=none, check=MissedSteps.from_text)
            text = fn(part)
            found.append(MissedSteps.from_text(text or none))
        else:
            found.append(fn(Part(here, leaf, like.is_optional, like.master)))
    return tree.unflatten(spec, found)


def parts_of(state: tree.Tree) -> list[Part]:
    """Return the parts of a state."""
    found: list[Part] = []
    map_parts(found.append, state)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a truth value."""
    return isinstance(value, (bool, int, float, str))


def check_part(part: Part) -> None:
    """Refuse a part that no checkpoint can hold."""
    if not isinstance(part.value, (Flat, Tensor, Stored)) and not is_plain(part.value):
        raise CheckpointError(
            "a state is made of flats, tensors, numbers and text; got "
            f"{type(part.value).__name__} at {part.path!r}; pass generators as rng=, a data loader "
            "as loader=, and other values as data=",
            leaf=part.path,
        )


@functools.cache
def _alone() -> Group:
    """Return one group for all states without flats, so that a save finds the one before."""
    return single_group()


def group_of(state: tree.Tree, group: Group | None) -> Group:
    """Return all ranks that share a state: the whole mesh, if there is one."""
    found = [_everyone(flat.group) for flat in flats(state)]
    if group is None:
        group = found[0] if found else _alone()
    for other in found:
        if other is not _everyone(group):
            raise SpecMismatch(
                "a state is shared by one group of ranks, or by axes of one mesh; got values "
                f"over {other!r} and over {_everyone(group)!r}; save them under two paths"
            )
    return _everyone(group)


def is_over_model_axes(state: tree.Tree) -> bool:
    """Whether ranks along a model axis hold other leaves."""
    return any(model_groups(flat.group) for flat in flats(state))


def _everyone(group: Group) -> Group:
    found = whole_group(group)
    if found is None:
        raise CheckpointError(
            "the ranks of a run over model axes save together, and find each other through their "
            f"mesh; got {group!r} beside {', '.join(map(repr, model_groups(group)))}; make all "
            "axes by one zf.mesh(group, dp=..., tp=...)"
        )
    return found


class PartSlot(NamedTuple):
    """One logical leaf in a part.

    Attributes:
        key: the path in the state.
        shape: the shape of the logical leaf.
        dtype: the dtype.
        numel: the number of real elements that this rank's part of the leaf has.
        bucket: of a flat, the bucket.
        offset: of a flat, the first element in the whole bucket.
        first: the place of the part in the leaf; see [Note: stored order].
        is_all: whether the part is all of the leaf.
        cuts: how the leaf is stored.
        is_shared: whether another rank of a model axis writes the part.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    bucket: int = 0
    offset: int = 0
    first: int = 0
    is_all: bool = True
    cuts: tuple[StoredCut, ...] = ()
    is_shared: bool = False


def slots_of(part: Part) -> list[PartSlot]:
    """Return the logical leaves of any part but a plain value."""
    value = part.value
    if not isinstance(value, Flat):
        numel = value.shape.numel() * (2 if value.dtype.is_complex else 1)
        return [PartSlot(part.path, tuple(value.shape), value.dtype, numel)]
    found = []
    axes = model_groups(value.group)
    ranks = [axis.rank for axis in axes]
    for slot in value.layout.leaves:
        dtype = value.buffers[slot.bucket].dtype
        dtype = dtype.to_complex() if slot.dtype.is_complex else dtype
        shape, index, cuts = [*slot.shape], 0, list[StoredCut]()
        for axis, kind in zip(axes, slot.spread, strict=False):
            if isinstance(kind, Cut):
                shape[kind.dim] *= axis.size
                index = index * axis.size + axis.rank
                cuts.append(StoredCut(kind.dim, axis.size, kind.parts))
        found.append(
            PartSlot(
                join(part.path, logical_path(slot)),
                tuple(shape),
                dtype,
                slot.numel,
                slot.bucket,
                slot.offset,
                index * slot.numel,
                tuple(shape) == slot.shape,
                simplified(cuts),
                not is_first(slot.spread, ranks),
            )
        )
    return found


def ties_of(parts: Sequence[Part]) -> dict[str, str]:
    """Return the keys that share the tensor of another key, and that key."""
    ties: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for part in parts:
        value = part.value
        if isinstance(value, Flat):
            layout = value.layout
            for path, position in zip(layout.paths, layout.positions, strict=True):
                first = logical_path(layout.leaves[position])
                if path != first:
                    ties[join(part.path, path)] = join(part.path, first)
        elif isinstance(value, (Tensor, Stored)):
            place = memory_of(value) if isinstance(value, Tensor) else id(value)
            first = seen.setdefault(place, part.path)
            if first != part.path:
                ties[part.path] = first
    return ties


class PartSpan(NamedTuple):
    """A range of a leaf, in a buffer of this rank; lengths are in elements.

    Attributes:
        slot: the leaf.
        start: where the range begins in the buffer.
        first: the first element of the range in the leaf, in stored order.
        numel: the length.
        by_rank: whether the value is this rank's own.
    """

    slot: PartSlot
    start: int
    first: int
    numel: int
    by_rank: bool = False


def share_of(low: int, high: int, group: Group) -> tuple[int, int]:
    """Return this rank's share of a range that all ranks of a group hold."""
    numel = high - low
    return low + numel * group.rank // group.size, low + numel * (group.rank + 1) // group.size


def owned_range(flat: Flat, bucket: int) -> tuple[int, int]:
    """Return the range of a whole bucket that this rank writes.

    Ranks that hold the same elements share the writing: all ranks under ``R``, and replicas under
    ``S``.
    """
    low, high = flat.span(bucket)
    holders = None
    if flat.placement is not P:
        holders = (sum_group if flat.placement is R else collectives.replica_group)(flat.group)
    return (low, high) if holders is None else share_of(low, high, holders)


def spans_of(
    part: Part, slots: Sequence[PartSlot], bucket: int, within: tuple[int, int]
) -> Iterator[PartSpan]:
    """Yield the parts of a flat's leaves that lie in a range of a whole bucket."""
    base, _ = part.value.span(bucket)
    for index in part.value.layout.buckets[bucket].leaves:
        slot = slots[index]
        start = max(within[0], slot.offset)
        stop = min(within[1], slot.offset + slot.numel)
        if start < stop:
            first = slot.first + start - slot.offset
            yield PartSpan(slot, start - base, first, stop - start)


def masters_of(parts: Sequence[Part]) -> dict[str, str]:
    """Return for each parameter with a master weight the key of the master weight.

    The master weights of a state at ``opt_state.master`` are those of the parameters beside it:
    the part of the state, other than the optimizer's, that has all of these leaves.
    """
    found: dict[str, str] = {}
    keys = {slot.key for part in parts if not is_plain(part.value) for slot in slots_of(part)}
    groups: dict[str, list[str]] = {}
    for part in parts:
        if part.master and not is_plain(part.value):
            for slot in slots_of(part):
                path = slot.key[len(part.master) + 1 :] or "."
                groups.setdefault(part.master, []).append(path)
    for master, paths in groups.items():
        params = _params_beside(master.split(".")[:-1], paths, keys)
        if params is not None:
            found |= {join(params, path): join(master, path) for path in paths}
    return found


def _params_beside(where: Sequence[str], paths: Sequence[str], keys: set[str]) -> str | None:
    """Return the prefix of the parameters that have these paths: nearest to the optimizer state."""
    for depth in reversed(range(len(where))):
        above = ".".join(where[:depth])
        rest = [
            key[len(above) :].lstrip(".")
            for key in keys
            if not above or key.startswith(above + ".")
        ]
        names = dict.fromkeys(key.split(".")[0] for key in rest)
        for name in sorted(names, key=lambda name: (name != "params", name)):
            prefix = f"{above}.{name}".lstrip(".")
            if name != where[depth] and all(join(prefix, path) in keys for path in paths):
                return prefix
    return None
