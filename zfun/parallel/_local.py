"""From the logical tree to the leaves of this rank, and back; see [Note: model axes]."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group, LeafRecord, broadcast, check_same, gather_json, gather_values
from zfun.errors import OptionError, ZfunError
from zfun.layout import Layout, LeafSlot, split_by_label
from zfun.parallel._cuts import ModelAxis
from zfun.placement import Cut, Held
from zfun.sources import Deferred
from zfun.sources.deferred import memory_of, spec_of

Spread: TypeAlias = tuple[Cut | Held | None, ...]


class LocalTree:
    """How the leaves of a logical tree are spread over model axes; it keeps no leaf.

    Args:
        params: the logical tree, of tensors and deferred leaves, equal on all ranks.
        axes: the model axes.
        compared_as: the dtype to which floating values are rounded before they are compared.
        role: ``role(path, leaf)`` says to which part of a state a logical leaf belongs. Leaves that
            share memory are tied within one part, as in a run without model axes.

    Attributes:
        spreads: how each leaf of the logical tree is spread, by path.
        specs: meta tensors for the leaves of the logical tree, by path.
        roles: the role of each leaf of the logical tree, by path.
        device: of the leaves.

    Raises:
        LeafError: an axis cannot divide a leaf.
        OptionError: tied leaves are spread in two ways.
    """

    def __init__(
        self,
        params: tree.Tree,
        axes: Sequence[ModelAxis],
        compared_as: torch.dtype | None = None,
        role: Callable[[str, Any], Hashable] = lambda path, leaf: None,
    ) -> None:
        self._axes = tuple(axes)
        self._compared_as = compared_as
        self._digests: dict[str, int] = {}
        leaves, self.spec = tree.flatten(params)
        self.paths = tree.paths(params)
        specs = dict(zip(self.paths, map(spec_of, leaves), strict=True))
        self._own = [_spread(path, spec, axes) for path, spec in specs.items()]
        self.roles = {path: role(path, spec) for path, spec in specs.items()}
        # Views of one element, because a plan counts the memory of meta tensors.
        one = {
            dtype: torch.empty((), dtype=dtype, device="meta")
            for dtype in {spec.dtype for spec in specs.values()}
        }
        self.specs = {path: one[spec.dtype].expand(spec.shape) for path, spec in specs.items()}
        keys = [
            (memory_of(leaf), its) for leaf, its in zip(leaves, self.roles.values(), strict=True)
        ]
        self.spreads = _together(self.paths, keys, self._own)
        firsts: dict[Hashable, str] = {}
        self._first = {
            path: firsts.setdefault(key, path) for path, key in zip(self.paths, keys, strict=True)
        }
        self.device = leaves[0].device if leaves else torch.device("cpu")

    def parts(self, params: tree.Tree) -> tree.Tree:
        """Return the tree of this rank, with holes (``None``) for the leaves of other ranks.

        Args:
            params: the logical tree.
        """
        made: dict[str, Any] = {}
        found = [
            self._part(path, leaf, spread, made) if self._is_held(spread) else None
            for path, leaf, spread in zip(self.paths, tree.leaves(params), self._own, strict=True)
        ]
        return tree.unflatten(self.spec, found)

    def _is_held(self, spread: Spread) -> bool:
        pairs = zip(self._axes, spread, strict=True)
        return all(axis.group.rank in x.ranks for axis, x in pairs if isinstance(x, Held))

    def _part(self, path: str, leaf: Any, spread: Spread, made: dict[str, Any]) -> Any:
        """Return this rank's part of a leaf; tied leaves, which have one first, stay one leaf."""
        key = self._first[path]
        if key in made:
            return made[key]
        if isinstance(leaf, Deferred):
            spec = self._cut(leaf.spec, spread)
            part: Any = Deferred(
                leaf.path,
                spec,
                lambda: self._cut(self._seen(path, leaf.load()), spread),
                leaf.device,
            )
        else:
            part = self._cut(self._seen(path, leaf.detach()), spread)
        made[key] = part
        return part

    def _seen(self, path: str, whole: Tensor) -> Tensor:
        """Remember a digest of a leaf that other ranks of a model axis need as well."""
        if not ops.is_abstract(whole) and not whole.is_meta:
            self._digests[path] = ops.fingerprint(whole, self._compared_as)
        return whole

    def _cut(self, leaf: Tensor, spread: Spread) -> Tensor:
        for axis, x in zip(self._axes, spread, strict=True):
            if isinstance(x, Cut):
                leaf = x.piece(leaf, axis.group.rank, axis.group.size)
        return leaf

    def check(self, first: Callable[[], None]) -> None:
        """Compare the values of the logical leaves along each model axis.

        Args:
            first: compares the ranks of the data axes; an error of one of these ends all ranks.

        Raises:
            SpecMismatch: ranks of an axis have cut their leaves from different values.
        """
        error: Exception | None = None
        try:
            first()
        except Exception as found:  # noqa: BLE001, the user's code makes leaves
            error = found
        for index, axis in enumerate(self._axes):
            if axis.group.size > 1:
                records = [
                    LeafRecord(path, "a leaf", str(self._digests.get(path, "")))
                    for path, spread in self.spreads.items()
                    if not isinstance(spread[index], Held) and self._is_held(spread)
                ]
                told = "" if error is None else f"not made ({type(error).__name__}: {error})"
                try:
                    check_same(
                        [LeafRecord("(values)", told), *records], axis.group, "logical parameters"
                    )
                except ZfunError as found:
                    # Ranks along the other axes still wait for this one.
                    error = error or found
        if error is not None:
            raise error

    def placed(self, layout: Layout, *, is_coded: bool = False) -> Layout:
        """Return a layout of this rank's leaves whose slots say how these are spread.

        Args:
            layout: of these leaves.
            is_coded: whether messages are rounded block by block. Leaves that ranks of an axis
                share get buckets of their own then, because they stay equal only if they lie in
                blocks beside equal leaves.
        """
        placed = dataclasses.replace(layout, leaves=tuple(map(self._placed, layout.leaves)))
        return split_by_label(placed, self._is_shared) if is_coded else placed

    def _is_shared(self, path: str, leaf: Any) -> Hashable:
        return tuple(kind is None for kind in self.spreads[path])

    def _placed(self, slot: LeafSlot) -> LeafSlot:
        spread = self.spreads[slot.path]
        is_cut = any(isinstance(kind, Cut) for kind in spread)
        whole = tuple(self.specs[slot.path].shape) if is_cut else ()
        return dataclasses.replace(slot, spread=spread, whole=whole)

    def asks(self, rule: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        """Return a rule for leaves of this rank, from one for logical leaves."""
        # Without the leaves themselves, because layouts are kept by their rules.
        return functools.partial(_asked, rule, self._first, self.specs)

    def selects(self, select: Callable[[str, Any], bool]) -> Callable[[str, Any], bool]:
        """Return a choice of local leaves, from one of logical leaves; tied ones come together."""
        ties: dict[str, list[str]] = {}
        for path, first in self._first.items():
            ties.setdefault(first, []).append(path)

        def chosen(path: str, leaf: Any) -> bool:
            whole = leaf.new_empty(self.specs[path].shape)
            return any(select(name, whole) for name in ties[self._first[path]])

        return chosen

    def logical(
        self, local: tree.Tree, select: Callable[[str, Any], bool] = lambda path, leaf: True
    ) -> tree.Tree:
        """Return the logical tree of values of this rank; every rank must call.

        Args:
            local: the values of some or all leaves, with holes for the others; alike on all ranks.
            select: of the values that are there, which logical leaves to return.
        """
        pairs = zip(tree.paths(local), tree.leaves(local), strict=True)
        present = {self._first[path]: leaf for path, leaf in pairs}
        for index, axis in reversed([*enumerate(self._axes)]):
            kinds = {
                path: self.spreads[path][index] for path in dict.fromkeys(self._first.values())
            }
            for path, kind in kinds.items():
                if isinstance(kind, Cut) and path in present:
                    pieces = gather_values(
                        present[path].contiguous(), axis.group, f"pieces of {path}"
                    )
                    present[path] = kind.whole(pieces.unbind(0))
            held = [path for path, kind in kinds.items() if isinstance(kind, Held)]
            if held:
                present |= self._exchanged({path: present.get(path) for path in held}, axis.group)
        found = [(path, present.get(first)) for path, first in self._first.items()]
        is_wanted = lambda path, x: x is not None and select(path, x.to("meta"))
        return tree.unflatten(self.spec, [x if is_wanted(path, x) else None for path, x in found])

    def _exchanged(self, held: Mapping[str, Tensor | None], group: Group) -> dict[str, Tensor]:
        """Send each leaf that some ranks of an axis hold to all of them."""
        own = {
            path: [[*x.shape], str(x.dtype).removeprefix("torch.")]
            for path, x in held.items()
            if x is not None
        }
        sides = gather_json(own, group, "held leaves")
        found: dict[str, Tensor] = {}
        for path, leaf in held.items():
            holder = next((rank for rank, side in enumerate(sides) if path in side), None)
            if holder is None:
                continue  # not selected
            shape, dtype = sides[holder][path]
            mine = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            mine = mine if leaf is None else leaf.contiguous()
            found[path] = broadcast(mine, group, holder, name="params", part=path)
        return found


def _asked(
    rule: Callable[[str, Any], Any],
    firsts: Mapping[str, str],
    specs: Mapping[str, Tensor],
    path: str,
    leaf: Any,
) -> Any:
    return rule(firsts[path], specs[firsts[path]])


def _spread(path: str, leaf: Any, axes: Sequence[ModelAxis]) -> Spread:
    """Return how a leaf is spread over each axis, from the first to the last."""
    found: list[Cut | Held | None] = []
    for axis in axes:
        kind = axis.rule(path, leaf)
        if isinstance(kind, Cut):
            kind.check(path, leaf.shape, axis.group.size)
            shape = kind.local_shape(leaf.shape, axis.group.size)
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
        elif isinstance(kind, Held) and not set(kind.ranks) <= set(range(axis.group.size)):
            raise OptionError(
                f"ranks of an axis hold a leaf; got ranks {kind.ranks} for leaf {path!r} on an "
                f"axis of {axis.group.size}; name ranks of the axis",
                leaf=path,
            )
        found.append(kind)
    return tuple(found)


def _together(
    paths: Sequence[str], keys: Sequence[Hashable], own: Sequence[Spread]
) -> dict[str, Spread]:
    """Return the spread of each leaf by path, where tied leaves, which have one key, are one."""
    ties: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        ties.setdefault(key, []).append(index)
    found: dict[int, Spread] = {}
    for members in ties.values():
        kinds = [
            _joined([own[index][axis] for index in members], [paths[index] for index in members])
            for axis in range(len(own[members[0]]))
        ]
        found |= dict.fromkeys(members, tuple(kinds))
    return {path: found[index] for index, path in enumerate(paths)}


def _joined(kinds: Sequence[Cut | Held | None], paths: Sequence[str]) -> Cut | Held | None:
    """Return how tied leaves are spread over an axis."""
    if all(isinstance(kind, Held) for kind in kinds):
        ranks = {rank for kind in kinds if isinstance(kind, Held) for rank in kind.ranks}
        return Held(tuple(sorted(ranks)), paths[0] if len(paths) > 1 else "")
    if len(set(kinds)) > 1:
        raise OptionError(
            f"tied leaves are spread over an axis in one way; got {kinds} for "
            f"{', '.join(map(repr, paths))}; give them one style, or untie them",
            leaf=paths[0],
        )
    return kinds[0]
