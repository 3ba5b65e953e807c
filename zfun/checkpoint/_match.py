"""Compare what a state wants with what a checkpoint has, before anything is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from zfun.checkpoint import _parts
from zfun.checkpoint.format._manifest import LeafEntry, Manifest
from zfun.checkpoint.format._plain import decode, real_dtype
from zfun.collectives import Group
from zfun.errors import AliasChanged, SpecMismatch
from zfun.flat import Flat
from zfun.placement import P, R

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Match:
    """For each leaf of a state the leaf of the checkpoint that fills it.

    Attributes:
        leaves: by key of the state; a key that is not here keeps its value.
        values: the plain values, by key of the state.
    """

    leaves: dict[str, LeafEntry]
    values: dict[str, Any]


def is_exact(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether every number of one dtype is a number of another.

    Example:
        >>> is_exact(torch.bfloat16, torch.float32), is_exact(torch.float32, torch.bfloat16)
        (True, False)
    """
    if old == new:
        return True
    if not (old.is_floating_point and new.is_floating_point):
        return False
    wide, narrow = torch.finfo(new), torch.finfo(old)
    return (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
    )


def match(
    parts: Sequence[_parts.Part],
    manifest: Manifest,
    group: Group,
    *,
    cast: bool = False,
    reset: Callable[[str], bool] | None = None,
    elsewhere: Set[str] = frozenset(),
) -> Match:
    """Find the leaf of the checkpoint for each leaf of a state; see :func:`zfun.load`.

    Leaves of the checkpoint that other ranks take are ``elsewhere``.

    Raises:
        SpecMismatch: lists all differences, with the nearest names.
        AliasChanged: ties differ.
    """
    for part in parts:
        _parts.check_part(part)
    matcher = _Matcher(parts, manifest, group, cast, reset or (lambda key: False))
    for part in parts:
        matcher.add(part)
    matcher.check_ties()
    matcher.finish(elsewhere)
    return matcher.found


class _Matcher:
    """The state of one comparison."""

    def __init__(
        self,
        parts: Sequence[_parts.Part],
        manifest: Manifest,
        group: Group,
        cast: bool,
        reset: Callable[[str], bool],
    ) -> None:
        self.manifest, self.group, self.cast, self.reset = manifest, group, cast, reset
        self.found = Match({}, {})
        self.entries: dict[str, list[LeafEntry]] = {}
        for leaf in manifest.leaves:
            self.entries.setdefault(leaf.key, []).append(leaf)
        self.ties = _parts.ties_of(parts)
        self.masters = _parts.masters_of(parts)
        self.param_of = {master: key for key, master in self.masters.items()}
        self.wanted: set[str] = set()
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.problems: list[tuple[str, str]] = []

    def add(self, part: _parts.Part) -> None:
        """Find what fills a part."""
        if _parts.is_plain(part.value):
            self._match_value(part, self.found.values)
            return
        for slot in _parts.slots_of(part):
            entry = self._match_leaf(part, slot)
            if entry is not None:
                self.found.leaves[slot.key] = entry

    # Values.

    def _match_value(self, part: _parts.Part, values: dict[str, Any]) -> None:
        own = self.manifest.rank_values
        mine = own[self.group.rank] if len(own) == self.group.size else {}
        known = {**self.manifest.values, **mine}
        self.used.add(part.path)
        if self.reset(part.path):
            return
        if part.path not in known:
            if any(part.path in each for each in own):
                self._by_rank(part.path)
            elif part.absent is not None:
                values[part.path] = part.absent
            elif not part.is_optional:
                self.missing.append(part.path)
            return
        value = decode(known[part.path])
        numbers = isinstance(value, (int, float)) and isinstance(part.value, (int, float))
        if type(value) is not type(part.value) and not (numbers and not isinstance(value, bool)):
            self._problem(
                part.path, f"is {type(value).__name__} and is wanted as {type(part.value).__name__}"
            )
            return
        if part.check is not None:
            part.check(value)
        values[part.path] = value

    # Leaves.

    def _match_leaf(self, part: _parts.Part, slot: _parts.PartSlot) -> LeafEntry | None:
        key = slot.key
        here = self._resolved(key)
        self.wanted.add(key)
        if self.reset(key):
            self.used.add(here)
            return None
        chosen = self._source(slot)
        if chosen is None:
            if not part.is_optional:
                self.missing.append(key)
            return None
        source, may_round = chosen
        found = self._chosen(part, slot, source)
        return found if found is not None and self._fits(slot, found, may_round) else None

    def _resolved(self, key: str) -> str:
        return self.manifest.ties.get(key, key)

    def _source(self, slot: _parts.PartSlot) -> tuple[str, bool] | None:
        """Return the key of the checkpoint that gives this leaf, if there is one.

        With the key comes whether the value may be rounded, because the exact value is kept
        elsewhere.
        """
        key = self._resolved(slot.key)
        kept = self.manifest.masters.get(key)
        if kept is not None and slot.key not in self.masters:
            # The checkpoint has a master weight, and this state has none.
            exact = self.entries[kept][0].element
            if is_exact(exact, real_dtype(slot.dtype)):
                self.used |= {key, kept}
                return kept, False
        if slot.key in self.masters and kept is not None and key in self.entries:
            same = self.entries[key][0].element == real_dtype(slot.dtype)
            self.used.add(key)
            return (key if same else kept), True
        if key in self.entries:
            self.used.add(key)
            return key, slot.key in self.masters
        param = self.param_of.get(slot.key)
        if param is not None and self._resolved(param) in self.entries:
            self.used.add(self._resolved(param))
            return self._resolved(param), False
        return None

    def _chosen(self, part: _parts.Part, slot: _parts.PartSlot, source: str) -> LeafEntry | None:
        """Return the leaf for this rank, which matters for values that are kept by rank."""
        found = self.entries[source]
        flat = part.value if isinstance(part.value, Flat) else None
        if found[0].rank is None:
            if flat is not None and flat.placement is P:
                self._problem(slot.key, "is shared by all ranks, and is wanted as a term by rank")
                return None
            return found[0]
        if len(found) == self.group.size and (flat is None or flat.placement in (P, R)):
            return found[self.group.rank]
        if flat is not None and flat.placement is R:
            return found[self.group.rank % len(found)]
        self._by_rank(slot.key)
        return None

    def _by_rank(self, key: str) -> None:
        self._problem(
            key,
            f"belongs to each of {self.manifest.ranks} ranks, and here are {self.group.size}; "
            "load on as many, or let reset= keep the new value",
        )

    def _fits(self, slot: _parts.PartSlot, entry: LeafEntry, may_round: bool) -> bool:
        if entry.shape != slot.shape or entry.dtype.is_complex != slot.dtype.is_complex:
            self._problem(
                slot.key,
                f"has shape {entry.shape} of {entry.dtype}, and is wanted as {slot.shape} of "
                f"{slot.dtype}",
            )
            return False
        wanted = real_dtype(slot.dtype)
        both_float = entry.element.is_floating_point and wanted.is_floating_point
        if is_exact(entry.element, wanted) or (both_float and (may_round or self.cast)):
            return True
        remedy = "; cast=True rounds" if both_float else ""
        self._problem(slot.key, f"has {entry.dtype}, and is wanted as {slot.dtype}{remedy}")
        return False

    # The end.

    def check_ties(self) -> None:
        theirs = self.manifest.ties
        wanted = {**{key: key for key in self.wanted}, **self.ties}
        for alias, first in self.ties.items():
            if self.reset(alias) or alias not in {**theirs, **self.entries}:
                continue
            self.used.add(alias)
            if self._resolved(alias) != self._resolved(first):
                raise AliasChanged(
                    f"leaves that are tied must be tied in the checkpoint; {alias!r} and {first!r} "
                    "are one tensor here and two there; load into a tree without the tie",
                    leaf=alias,
                )
        for alias, first in theirs.items():
            if alias in wanted and first in wanted and wanted[alias] != wanted[first]:
                raise AliasChanged(
                    f"leaves that were tied must stay tied; {alias!r} and {first!r} are one tensor "
                    "in the checkpoint and two here; tie them again",
                    leaf=alias,
                )

    def _problem(self, key: str, text: str) -> None:
        self.problems.append((key, f"{key} {text}"))

    def finish(self, elsewhere: Set[str]) -> None:
        masters = self.manifest.masters
        elsewhere = elsewhere | {
            masters[key] for key in map(self._resolved, elsewhere) if key in masters
        }
        known = {**self.entries, **self.manifest.values}
        for own in self.manifest.rank_values[:1]:
            known |= own
        optional = set(self.manifest.optional)
        extra = [
            key
            for key in known
            if key not in self.used | elsewhere and key not in optional and not self.reset(key)
        ]
        if self.cast:
            lost = set(self.manifest.masters.values())
            extra = [key for key in extra if key not in lost]
        if not (self.missing or extra or self.problems):
            return
        said = [text for _, text in self.problems]
        for key in self.missing:
            near = difflib.get_close_matches(key, extra, n=1)
            said.append(f"{key} is missing{f' (did you mean {near[0]}?)' if near else ''}")
        said += [f"{key} is only in the checkpoint" for key in extra]
        more = f" (and {len(said) - _SHOWN} more)" if len(said) > _SHOWN else ""
        first = (*(key for key, _ in self.problems), *self.missing, *extra)[0]
        raise SpecMismatch(
            f"a checkpoint has the leaves of the state; {'; '.join(said[:_SHOWN])}{more}; load "
            "into a state of the same model and optimizer, or name leaves that keep their new "
            "value with reset=",
            leaf=first,
            rank=self.group.rank,
        )
