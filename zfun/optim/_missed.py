"""Leaves that take no part in a step, and leaves that have missed steps.

[Note: missed steps]
A step leaves a leaf that no rank used as it is: the parameter, the moments, and the number of its
steps. The gradients name such leaves (``Flat.missed``). An element-wise rule steps the runs of
elements that have missed equally many steps, and gives each run its own number of steps for the
bias correction; schedules count the steps of the training. Any other rule steps every leaf, and
then the leaves that were not used get their old values back (``sparing``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from zfun import tree
from zfun.errors import CorruptCheckpoint
from zfun.flat import Flat, leaf_spans
from zfun.layout import LeafSlot, logical_path
from zfun.tree import Tree

_Update: TypeAlias = Callable[[Tree, Any, Tree], tuple[Tree, Any]]
_Pieces: TypeAlias = list[tuple[int, int, int, Tensor]]


@dataclass(frozen=True)
class MissedSteps:
    """How many steps each leaf has missed, because no rank used the leaf.

    Attributes:
        counts: for the leaves that have missed a step; of tied leaves by the first path, because
            ranks of a model axis may have them under others.

    Example:
        >>> MissedSteps({"head": 2}).after(["branch", "head"])
        MissedSteps(counts={'branch': 1, 'head': 3})
    """

    counts: Mapping[str, int] = field(default_factory=dict)

    def of(self, leaves: Sequence[LeafSlot]) -> dict[str, int]:
        """Return the numbers of leaves of this rank, by their paths on this rank."""
        firsts = {x.path: logical_path(x) for x in leaves} if self.counts else {}
        return {path: self.counts[x] for path, x in firsts.items() if x in self.counts}

    def after(self, unused: Sequence[str]) -> MissedSteps:
        """Return the numbers after a step that does not use some leaves, by their first paths."""
        if not unused:
            return self
        more = {path: self.counts.get(path, 0) + 1 for path in unused}
        return MissedSteps(dict(sorted({**self.counts, **more}.items())))

    def to_text(self) -> str:
        """Write the numbers as text, for a checkpoint."""
        return json.dumps(self.counts)

    @classmethod
    def from_text(cls, text: str) -> MissedSteps:
        """Read the text of :meth:`to_text`."""
        try:
            counts = json.loads(text)
        except (ValueError, RecursionError):
            counts = None
        if not isinstance(counts, dict) or any(
            type(x) is not int or x < 0 for x in counts.values()
        ):
            raise CorruptCheckpoint(
                "the steps that leaves have missed are numbers by path; got "
                f"{text[:60]!r}; load another checkpoint"
            )
        return cls(counts)


def passed_on(value: Tree, grads: Tree) -> Tree:
    """Return values made of gradients, with the missed steps that the gradients name."""
    if isinstance(value, Flat) and isinstance(grads, Flat):
        # Values made of a state may name those of an earlier step.
        return value.with_missed(grads.missed)
    return value


class StepRun(NamedTuple):
    """Elements ``[start, stop)`` of a buffer, of leaves that have missed equally many steps."""

    start: int
    stop: int
    missed: int


def runs_of(params: Tree, grads: Tree) -> list[list[StepRun]] | None:
    """Return the runs to step in each buffer; ``None`` where all leaves take every step."""
    if not (isinstance(params, Flat) and isinstance(grads, Flat) and grads.missed):
        return None
    spans = leaf_spans(params)
    found: list[list[StepRun]] = []
    for bucket in params.layout.buckets:
        runs: list[StepRun] = []
        is_open = False
        for leaf in bucket.leaves:
            span = spans[leaf]
            missed = grads.missed.get(span.path, 0)
            if span.start == span.stop:
                continue
            if missed is None:
                is_open = False
            elif is_open and runs[-1].missed == missed:
                runs[-1] = runs[-1]._replace(stop=span.stop)
            else:
                runs.append(StepRun(span.start, span.stop, missed))
                is_open = True
        found.append(runs)
    return found


def sparing(update: _Update) -> _Update:
    """Let an update leave the state of unused leaves as it is, and return zeros for them."""

    def spared(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        updates, after = update(grads, state, params)
        unused = _unused(grads)
        if not unused:
            return updates, after
        zeros = [
            (bucket, start, stop, piece.new_zeros(()))
            for bucket, start, stop, piece in _pieces(updates, unused, copy=False)
        ]
        return _with(updates, zeros), _restored(after, _kept(state, unused, copy=False))

    return spared


def sparing_apply(apply: Callable[..., tuple[Tree, Any]]) -> Callable[..., tuple[Tree, Any]]:
    """Let a step leave unused leaves and their state as they are."""

    def spared(grads: Tree, state: Any, params: Tree, *, donate: bool = False) -> tuple[Tree, Any]:
        unused = _unused(grads)
        if not unused:
            return apply(grads, state, params, donate=donate)
        before = _pieces(params, unused, copy=donate), _kept(state, unused, copy=donate)
        new, after = apply(grads, state, params, donate=donate)
        # In place, because the memory of parameters may be shared with other ranks.
        for bucket, start, stop, piece in before[0]:
            new.buffers[bucket][start:stop].copy_(piece)
        return new, _restored(after, before[1])

    return spared


def _unused(grads: Tree) -> frozenset[str]:
    """Return the paths of the leaves without a gradient."""
    if not isinstance(grads, Flat) or None not in grads.missed.values():
        return frozenset()
    missed = grads.missed
    return frozenset(x.path for x in grads.layout.leaves if missed.get(x.path, 0) is None)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Flat)


def _kept(state: Any, unused: frozenset[str], *, copy: bool) -> list[_Pieces]:
    return [_pieces(x, unused, copy=copy) for x in tree.leaves(state, is_leaf=_is_flat)]


def _pieces(value: Any, unused: frozenset[str], *, copy: bool) -> _Pieces:
    """Return bucket, start, stop and elements of each unused leaf in a flat."""
    if not isinstance(value, Flat):
        return []
    found: _Pieces = []
    for span in leaf_spans(value):
        if span.path in unused and span.start < span.stop:
            piece = value.buffers[span.bucket].detach()[span.start : span.stop]
            found.append((span.bucket, span.start, span.stop, piece.clone() if copy else piece))
    return found


def _with(value: Any, pieces: _Pieces) -> Any:
    """Return a flat with some elements replaced, in new buffers where there are any."""
    if not pieces:
        return value
    buffers = list(value.buffers)
    for bucket in {bucket for bucket, *_ in pieces}:
        # The rule may return the gradients as its state, and others read the gradients.
        buffers[bucket] = buffers[bucket].detach().clone()
    for bucket, start, stop, piece in pieces:
        buffers[bucket][start:stop].copy_(piece)
    return value.with_buffers(buffers)


def _restored(state: Any, before: list[_Pieces]) -> Any:
    leaves, spec = tree.flatten(state, is_leaf=_is_flat)
    return tree.unflatten(
        spec, [_with(leaf, pieces) for leaf, pieces in zip(leaves, before, strict=True)]
    )
