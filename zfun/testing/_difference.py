"""The first difference between the runs of a case and the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zfun.parallel import Cut
from zfun.testing._case import CaseTrace
from zfun.testing._laws import same_bits
from zfun.testing._plain import Leaves, PlainStep


class Difference(NamedTuple):
    """The first step in which a rank differs.

    Attributes:
        step: the step.
        kind: ``"gradients"``, ``"parameters"``, ``"loss"``, ``"ranks"``, ``"copies"`` or
            ``"padding"``.
        rank: the first rank that differs.
        ranks: all ranks that differ.
        leaves: the places of the leaves that differ, in tree order.
        trace: the run of that rank.
        text: a message about padding, or the axis along which copies differ.
    """

    step: int
    kind: str
    rank: int
    ranks: list[int]
    leaves: list[int]
    trace: CaseTrace
    text: str = ""


class Failure(NamedTuple):
    """An error that a case raised, in place of a difference."""

    error: Exception
    step: int = 0


def compare(
    plain: Sequence[PlainStep], traces: Sequence[CaseTrace], tolerance: float
) -> Difference | None:
    """Return the first difference, if there is one."""
    for step in range(len(traces[0].steps)):
        copies = _differing_copies(step, traces)
        if copies is not None:
            return copies
        found = [_difference_at(step, plain[step], trace, tolerance) for trace in traces]
        ranks = [rank for rank, one in enumerate(found) if one is not None]
        if ranks:
            first = found[ranks[0]]
            assert first is not None
            kind, leaves = first
            return Difference(step, kind, ranks[0], ranks, leaves, traces[ranks[0]])
        for rank, trace in enumerate(traces):
            mine, other = trace.steps[step].params, traces[0].steps[step].params
            if not same_bits(mine, other):
                leaves = [i for i, pair in enumerate(zip(mine, other)) if not same_bits(*pair)]  # noqa: B905
                return Difference(step, "ranks", rank, [rank], leaves, trace)
    for rank, trace in enumerate(traces):
        if trace.padding:
            last = len(trace.steps) - 1
            leaves = list(range(len(plain[0].before)))
            return Difference(last, "padding", rank, [rank], leaves, trace, trace.padding)
    return None


def _differing_copies(step: int, traces: Sequence[CaseTrace]) -> Difference | None:
    """Return the first model axis whose ranks hold other values of a leaf that they share."""
    places = [trace.mesh for trace in traces if trace.mesh is not None]
    for index, axis in enumerate(places[0].axes if places else ()):
        ranks_of: dict[Any, list[int]] = {}
        for rank, place in enumerate(places):
            others = tuple(x for name, x in place.coordinates.items() if name != axis)
            for path in place.leaves[step]:
                # A slot has the first path of tied leaves.
                spread = place.spreads.get(path)
                if spread is not None and not isinstance(spread[index], Cut):
                    ranks_of.setdefault((path, others), []).append(rank)
        wrong: dict[int, list[int]] = {}
        for (path, _), ranks in ranks_of.items():
            first = places[ranks[0]].leaves[step][path]
            bad = [r for r in ranks if not same_bits(places[r].leaves[step][path], first)]
            if bad:
                leaf = places[0].paths.index(path)
                wrong.setdefault(leaf, [ranks[0], *bad])
        if wrong:
            leaves = sorted(wrong)
            ranks = wrong[leaves[0]]
            return Difference(step, "copies", ranks[1], ranks, leaves, traces[ranks[1]], axis)
    return None


def _difference_at(
    step: int, right: PlainStep, trace: CaseTrace, tolerance: float
) -> tuple[str, list[int]] | None:
    seen = trace.steps[step]
    changes = [after - before for after, before in zip(right.after, right.before, strict=True)]
    least = [1e-6 * float(torch.linalg.vector_norm(x)) for x in right.before]
    in_params = _differing(seen.params, right.after, scales(changes, least), tolerance)
    in_grads: list[int] = []
    if seen.grads is not None:
        floors: list[float] = []
        if trace.mesh is not None and tolerance:
            # These are differences of parameters, which round to the dtype of the parameters.
            floors = [
                torch.finfo(x.dtype).eps * float(torch.linalg.vector_norm(y)) / tolerance
                for x, y in zip(seen.params, right.before, strict=True)
            ]
        in_grads = _differing(seen.grads, right.grads, scales(right.grads, floors), tolerance)
    if in_grads:
        return "gradients", in_grads
    if in_params:
        return "parameters", in_params
    if not abs(seen.loss - right.loss) <= tolerance * max(abs(right.loss), 1.0):
        return "loss", []
    return None


def scales(values: Leaves, least: Sequence[float] = ()) -> list[float]:
    """Return the size of each leaf that errors are compared with.

    A tenth of the norm over all leaves is the least, because a leaf whose gradient is zero in exact
    arithmetic has nothing but rounding errors.
    """
    norms = [float(torch.linalg.vector_norm(x)) for x in values]
    whole = sum(norm * norm for norm in norms) ** 0.5
    floors = least or [0.0] * len(norms)
    return [max(norm, 0.1 * whole, floor) for norm, floor in zip(norms, floors, strict=True)]


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the norm of the difference; infinity for other shapes."""
    if found.shape != right.shape:
        return float("inf")
    return float(torch.linalg.vector_norm(found.to(right.dtype) - right))


def _differing(found: Leaves, right: Leaves, sizes: Sequence[float], tolerance: float) -> list[int]:
    return [
        index
        for index, (x, y, size) in enumerate(zip(found, right, sizes, strict=True))
        if not error_of(x, y) <= tolerance * size
    ]
