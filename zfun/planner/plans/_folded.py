"""Plans of long pipelines: what a rank does again and again is run a few times, and repeated.

[Note: folded plans]
A rank of a pipeline repeats blocks of actions: forward passes at the begin, pairs of a forward and
a backward pass, backward passes at the end. From the third repetition on, blocks of one kind make
and free the same bytes and send the same messages. So a *folded* plan runs three of each, cuts the
course of the step at the actions, and puts the pieces together for the whole list. Ranks whose
stages have leaves of the same shapes, and functions of one place in the source, differ by the
number of repetitions only, so one of them is run for all. A test compares folded plans with others.
"""

from __future__ import annotations

import collections
import functools
import operator
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from zfun import tree
from zfun.collectives import NotLeftYet, Record, ShapeBoard
from zfun.parallel import Pipeline
from zfun.parallel.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from zfun.placement import Held
from zfun.planner._buffers import MARK
from zfun.planner._parts import PLACES, Bytes, Instant
from zfun.sources.deferred import memory_of, spec_of
from zfun.transforms import open_batch

KEPT = 3

Levels: TypeAlias = tuple[int, ...]
"""Bytes in each place by category, or other numbers, in a fixed order."""


class ActionRun(NamedTuple):
    """A block of actions that a rank repeats, and how often."""

    block: tuple[tuple[int, str], ...]
    count: int


def runs_of(actions: Sequence[Action]) -> list[ActionRun]:
    """Return actions as blocks and their repetitions.

    Example:
        >>> letters = [Action(0, kind, 0) for kind in "FFFBFBFBB"]
        >>> [("".join(kind for _, kind in run.block), run.count) for run in runs_of(letters)]
        [('F', 3), ('BF', 2), ('B', 2)]
    """
    kinds = [(action.stage, action.kind) for action in actions]
    found: list[ActionRun] = []
    begin = 0
    while begin < len(kinds):
        best = 1, 1
        for period in range(1, (len(kinds) - begin) // 2 + 1):
            block = kinds[begin : begin + period]
            count = 1
            while kinds[begin + count * period : begin + (count + 1) * period] == block:
                count += 1
            if count > 1 and count * period > best[0] * best[1]:
                best = period, count
        period, count = best
        found.append(ActionRun(tuple(kinds[begin : begin + period]), count))
        begin += period * count
    return found


def runs_like(actions: Sequence[Action], runs: Sequence[ActionRun]) -> list[ActionRun] | None:
    """Return actions as the blocks of another stage, each once at least; ``None`` if they are not.

    Example:
        >>> make = lambda stage, kinds: [Action(stage, kind, 0) for kind in kinds]
        >>> runs = runs_like(make(2, "FBFBB"), runs_of(make(1, "FFFBFBFBB")))
        >>> [("".join(kind for _, kind in run.block), run.count) for run in runs]
        [('F', 1), ('BF', 1), ('B', 2)]
    """
    kinds = [(action.stage, action.kind) for action in actions]
    found: list[ActionRun] = []
    begin = 0
    for run in runs:
        wanted = [kind for _, kind in run.block]
        end = begin + len(wanted)
        block, count = tuple(kinds[begin:end]), 0
        while [kind for _, kind in kinds[begin:end]] == wanted:
            begin, end, count = end, end + len(wanted), count + 1
        if not count:
            return None
        found.append(ActionRun(block, count))
    return found if begin == len(kinds) else None


def folded(actions: Sequence[Action], kept: int = KEPT) -> tuple[Action, ...] | None:
    """Return the actions with at most ``kept`` repetitions of a block, renumbered.

    Returns ``None`` where this is no step, because passes are missing or come in another order.
    """
    if _renumbered((action.stage, action.kind) for action in actions) != tuple(actions):
        return None
    kinds = (part for block, count in runs_of(actions) for part in block * min(count, kept))
    made = _renumbered(kinds)
    open_calls: collections.Counter[tuple[int, int]] = collections.Counter()
    for stage, kind, k in made:
        open_calls[stage, k] += {FORWARD: 2, BACKWARD: -2, INPUTS: -1, WEIGHTS: -1}.get(kind, 0)
        if open_calls[stage, k] < 0:
            return None
    return None if any(open_calls.values()) else made


def _renumbered(kinds: Iterable[tuple[int, str]]) -> tuple[Action, ...]:
    """Return actions whose micro-batches come in order."""
    numbers: collections.Counter[tuple[int, str]] = collections.Counter()
    made = []
    for stage, kind in kinds:
        made.append(Action(stage, kind, numbers[stage, kind]))
        numbers[stage, kind] += 1
    return tuple(made)


def sources(runs: Sequence[ActionRun], shorter: Sequence[ActionRun]) -> Iterator[int]:
    """Yield for each action of some runs the place of the action that stands for it in others."""
    begin = 0
    for (block, count), (_, short) in zip(runs, shorter, strict=True):
        kept = min(short, KEPT)
        for number in range(count):
            first = begin + min(number, kept - 1) * len(block)
            yield from range(first, first + len(block))
        begin += kept * len(block)


class StepCounts(NamedTuple):
    """The counts of an observer at one moment.

    Attributes:
        num_records: the collectives so far.
        numbers: operations, and bytes that move.
        attention: the calls of each kernel.
    """

    num_records: int
    numbers: tuple[int, ...]
    attention: tuple[tuple[str, int], ...]


class StepPiece(NamedTuple):
    """A part of a step: what it adds to that before.

    Attributes:
        instants: the moments, with the bytes above those at the begin.
        change: the bytes at the end above those at the begin.
        records: the collectives.
        numbers: as in :class:`StepCounts`.
        attention: as in :class:`StepCounts`.
    """

    instants: tuple[tuple[str, Levels], ...]
    change: Levels
    records: tuple[Record, ...]
    numbers: Levels
    attention: collections.Counter[str]


def pieces_of(
    course: Sequence[Instant], counts: Sequence[StepCounts], log: Sequence[Record]
) -> Any:
    """Cut a step at its marks.

    Args:
        course: the moments, with the marks among them.
        counts: at the begin, at each mark, and at the end.
        log: the collectives.
    """
    found: list[StepPiece] = []
    level = end = (0,) * (len(PLACES) * len(Bytes._fields))
    instants: list[tuple[str, Levels]] = []
    for place, instant in enumerate(course):
        now = tuple(n for part in instant[1:] for n in part)
        if instant.what != MARK:
            instants.append((instant.what, _minus(now, level)))
        is_last = place == len(course) - 1
        if instant.what == MARK or is_last:
            end = now
            before, after = counts[len(found)], counts[len(found) + 1]
            found.append(
                StepPiece(
                    tuple(instants),
                    _minus(end, level),
                    tuple(log[before.num_records : after.num_records]),
                    _minus(after.numbers, before.numbers),
                    collections.Counter(dict(after.attention))
                    - collections.Counter(dict(before.attention)),
                )
            )
            level = end
            instants = []
    return found


def joined(pieces: Iterable[StepPiece]) -> tuple[tuple[Instant, ...], StepPiece]:
    """Return the moments of pieces in a row, and the sum of the rest."""
    level: Levels = (0,) * (len(PLACES) * len(Bytes._fields))
    width = len(Bytes._fields)
    # Most moments change one place, if any.
    places = functools.lru_cache(len(PLACES))(lambda now: Bytes(*now))
    instants: list[Instant] = []
    records: list[Record] = []
    numbers: Levels | None = None
    attention: collections.Counter[str] = collections.Counter()
    for piece in pieces:
        for what, above in piece.instants:
            now = _plus(level, above)
            parts = (now[i : i + width] for i in range(0, len(now), width))
            instants.append(Instant(what, *map(places, parts)))
        level = _plus(level, piece.change)
        records += piece.records
        numbers = piece.numbers if numbers is None else _plus(numbers, piece.numbers)
        attention.update(piece.attention)
    return tuple(instants), StepPiece((), level, tuple(records), numbers or (), attention)


def renamed(pieces: Iterable[StepPiece], paths: Mapping[str, str]) -> list[StepPiece]:
    """Return pieces of a step whose buckets have the names of other leaves.

    Example:
        >>> what = "all_gather of params bucket 0: 1.a … 1.b (2 leaves) in backward"
        >>> piece = StepPiece(((what, ()),), (), (), (), collections.Counter())
        >>> renamed([piece], {"1.a": "2.a", "1.b": "2.b"})[0].instants[0][0]
        'all_gather of params bucket 0: 2.a … 2.b (2 leaves) in backward'
    """
    longest = sorted(paths, key=len, reverse=True)
    path = re.compile(f"(?<= )({'|'.join(map(re.escape, longest))})(?= |$)")

    @functools.cache
    def named(what: str) -> str:
        head, colon, tail = what.partition(":")
        return head + colon + path.sub(lambda found: paths[found[0]], tail)

    return [
        piece._replace(instants=tuple((named(what), above) for what, above in piece.instants))
        for piece in pieces
    ]


def _plus(one: Levels, other: Levels) -> Levels:
    return tuple(map(operator.add, one, other))


def _minus(one: Levels, other: Levels) -> Levels:
    return tuple(map(operator.sub, one, other))


class Ranks:
    """The ranks of a pipeline, of which alike ones are run once.

    Args:
        losses: the loss of each rank, by global rank.
        params: the logical tree.
        trainable: which leaves are trained, by path and leaf; ``None`` for all.

    Attributes:
        losses: as given.
        runs: the actions of each rank, as blocks and repetitions.
        paths: the paths of a rank's leaves.
        shown_by: the rank that is run for each rank.
    """

    def __init__(
        self,
        losses: Mapping[int, Pipeline],
        params: tree.Tree,
        trainable: Callable[[str, Any], bool] | None,
    ) -> None:
        self.losses = losses
        self._kinds: dict[int, Hashable] = {}
        self.paths: dict[int, tuple[str, ...]] = {}
        for rank, loss in losses.items():
            self._kinds[rank], self.paths[rank] = _kind_of(rank, loss, params, trainable)
        self.runs = {rank: runs_of(loss.actions) for rank, loss in losses.items()}
        self.shown_by: dict[int, int] = {}
        # Those with the fewest blocks and the most repetitions first, and of these the last, which
        # needs no other one of its kind for cotangents.
        for rank in sorted(losses, key=lambda rank: (*_extent(self.runs[rank]), -rank)):
            shown = (one for one in self.alike(rank) if self.shown_by.get(one) == one)
            self.shown_by[rank] = next((one for one in shown if self._runs_as(rank, one)), rank)

    def _runs_as(self, rank: int, shown: int) -> bool:
        """Whether a rank's actions are those of another one, with no block that the other lacks."""
        runs = runs_like(self.losses[rank].actions, self.runs[shown])
        if runs is None or any(
            min(run.count, KEPT) > other.count
            for run, other in zip(runs, self.runs[shown], strict=True)
        ):
            return False
        self.runs[rank] = runs
        return True

    def alike(self, rank: int) -> list[int]:
        """Return the ranks whose messages have the forms of a rank's."""
        return [other for other, kind in self._kinds.items() if kind == self._kinds[rank]]

    def to_run(self, missing: NotLeftYet) -> int:
        """Return which rank to run for a value, of those whose values are alike."""
        if missing.key[0] == "loss":
            return missing.rank
        # Activations come from the first stage, cotangents from the last one.
        found = self.alike(missing.rank)
        stage_of = lambda rank: min(self.losses[rank].stages)
        return (min if missing.key[0] == "activations" else max)(found, key=stage_of)


class AlikeBoard(ShapeBoard):
    """A board on which a rank finds what a rank like another one has left."""

    ranks: Ranks | None = None

    def find(self, rank: int, key: Any) -> Any:
        found = super().find(rank, key)
        if found is not None or self.ranks is None or key[0] == "loss":
            return found
        others = self.ranks.alike(rank)
        return next(
            (x for (owner, k), x in self.values.items() if owner in others and k[0] == key[0]), None
        )


def _extent(runs: Sequence[ActionRun]) -> tuple[int, int]:
    return len(runs), -sum(min(count, KEPT) for _, count in runs)


def _kind_of(
    rank: int,
    loss: Pipeline,
    params: tree.Tree,
    trainable: Callable[[str, Any], bool] | None,
) -> tuple[Hashable, tuple[str, ...]]:
    """Return all that the steps of two ranks must have in common, and the paths of the leaves."""
    pipe, *others = loss.model_axes
    places = collections.Counter(map(memory_of, tree.leaves(params)))
    leaves: list[Hashable] = []
    names: dict[str, int] = {}
    own: list[str] = []
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        held = pipe.rule(path, leaf)
        assert isinstance(held, Held)
        if pipe.group.rank not in held.ranks:
            continue
        own.append(path)
        # A plan counts bytes by the first part of a path.
        place = names.setdefault(path.split(".")[0], len(names))
        is_trained = trainable is None or bool(trainable(path, spec_of(leaf)))
        # The messages of tied leaves depend on the ranks that hold these.
        tied = rank if len(held.ranks) > 1 or places[memory_of(leaf)] > 1 else None
        rules = (axis.rule(path, leaf) for axis in others)
        leaves.append((place, tuple(leaf.shape), leaf.dtype, tied, is_trained, *rules))
    stages = [(stage.is_first, stage.is_last, _code_of(stage.fn)) for stage in loss.stages.values()]
    return (*leaves, *stages), tuple(own)


def _code_of(fn: Any) -> Hashable:
    """Return the place of a function in the source, below the transforms around it.

    The plain values of its closure belong to it: flags that a factory of stages was given.
    """
    while (inner := getattr(fn, "__wrapped__", None) or getattr(fn, "func", None)) is not None:
        fn = inner
    cells = [_content_of(cell) for cell in getattr(fn, "__closure__", None) or ()]
    plain = tuple(x for x in cells if isinstance(x, (bool, int, float, str)))
    return getattr(fn, "__code__", None) or id(fn), plain


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def are_alike(micro_batches: Sequence[Any]) -> bool:
    """Whether micro-batches have one form, so that one of them stands for all."""
    forms = {
        tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in open_batch(one).leaves
        )
        for one in micro_batches
    }
    return len(forms) == 1
