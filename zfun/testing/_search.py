"""The search for a difference, the smallest case that has one, and the message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zfun.errors import NotElementwiseError, ZfunError
from zfun.testing._case import Case, Seams, feasible, run, simpler
from zfun.testing._causes import cause_by_axis, likely_cause
from zfun.testing._difference import Difference, Failure, compare, error_of
from zfun.testing._evidence import Evidence
from zfun.testing._plain import PlainProblem, PlainStep

_MOST_RUNS = 60


@dataclass(frozen=True)
class Search:
    """The search for a difference, and for the smallest case that has one."""

    problem: PlainProblem
    exact: PlainProblem
    plain: Sequence[PlainStep]
    seams: Seams
    tolerance: float

    def find(self, case: Case) -> Difference | Failure | None:
        try:
            traces = run(self.problem, case, self.seams)
        except Exception as error:
            # A function of a mesh may not know a smaller mesh, which must not hide the difference.
            if not case.mesh and not isinstance(error, ZfunError):
                raise
            return Failure(error, getattr(error, "step", None) or 0)
        return compare(self.plain, traces, self.tolerance)

    def shrink(self, case: Case, found: Difference | Failure) -> tuple[Case, Difference | Failure]:
        """Take the first simpler case that fails too, until none does."""
        left = _MOST_RUNS
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for candidate in simpler(
                case, case.num_steps if isinstance(found, Failure) else found.step
            ):
                left -= 1
                if left < 0:
                    return case, found
                if not feasible(self.problem, candidate):
                    continue
                other = self.find(candidate)
                # An error stays an error: another one would hide the first.
                if other is not None and _is_alike(other, found):
                    case, found, is_smaller = candidate, other, True
                    break
        return case, found

    def message(self, case: Case, found: Difference | Failure) -> str:
        if isinstance(found, Failure):
            return self._of_error(case, found)
        evidence = Evidence(self.exact, case, self.plain, found, self.tolerance)
        cause = cause_by_axis(evidence) if case.model_axes else likely_cause(evidence)
        return (
            f"{_rule(evidence)}\n"
            f"  smallest case that fails: {case}\n"
            f"  {_where(evidence)}\n"
            f"  likely cause: {cause}{self._without(case)}"
        )

    def _of_error(self, case: Case, found: Failure) -> str:
        first = f"training on ranks is training in one process; {case} raised"
        text = f"{first} {type(found.error).__name__}: {found.error}"
        leaf = getattr(found.error, "leaf", None)
        if not isinstance(found.error, NotElementwiseError):
            return f"{text}{f' (leaf {leaf!r})' if leaf else ''}{self._without(case)}"
        # Without the probe the update shows which leaf the optimizer gets wrong.
        unprobed = self.problem.rule._replace(by_leaf=True, parts=())
        bold = replace(self, problem=replace(self.problem, rule=unprobed))
        other = bold.find(case)
        named = other.leaves[:1] if isinstance(other, Difference) else [0]
        where = ", ".join(repr(self.problem.paths[i]) for i in named)
        return (
            f"{text}\n  first leaf that comes out wrong: {where}\n"
            "  likely cause: an optimizer that mixes elements; compute each element from the "
            "elements at the same place, or sum over the ranks"
        )

    def _without(self, case: Case) -> str:
        """Say which of the user's parts the case passes without."""
        parts = []
        if self.seams.wrap_group is not None:
            bare = replace(self, seams=self.seams._replace(wrap_group=None))
            parts += ["wrap_group"] if bare.find(case) is None else []
        return "".join(f"\n  without {part} the case passes" for part in parts)


def _rule(evidence: Evidence) -> str:
    difference, right = evidence.difference, evidence.right
    words = {
        "gradients": "the gradient of leaf {} differs",
        "parameters": "leaf {} differs after the update",
        "ranks": "leaf {} differs between the ranks",
        "loss": "the loss differs",
        "copies": f"the copies of leaf {{}} differ along axis {difference.text!r}",
        "padding": "leaf {} and the others of the bucket have padding that is not zero",
    }[difference.kind].format(repr(evidence.path))
    rest = len(difference.leaves) - 1
    others = f" (and {rest} of {len(right.before) - 1} others)" if rest > 0 else ""
    return (
        f"training on ranks is training in one process; in step {difference.step} {words}{others}"
    )


def _where(evidence: Evidence) -> str:
    """Return the size of the error, the elements and the ranks."""
    difference, right, seen = evidence.difference, evidence.right, evidence.seen
    ranks = difference.ranks
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    losses = f"the loss is {seen.loss:.9g} and should be {right.loss:.9g}"
    if not difference.leaves:
        return f"{losses} (on {named})"
    place = difference.leaves[0]
    if difference.kind == "gradients" and seen.grads is not None:
        found, wanted, size = seen.grads[place], right.grads[place], right.grads[place]
    else:
        found, wanted = seen.params[place], right.after[place]
        size = wanted - right.before[place]
    if found.shape != wanted.shape:
        return f"its shape is {tuple(found.shape)} and should be {tuple(wanted.shape)}"
    norm = float(torch.linalg.vector_norm(size))
    what = "a gradient" if difference.kind == "gradients" else "a change"
    bad = torch.nonzero(
        ~((found - wanted).abs() <= evidence.tolerance * size.abs().max()).reshape(-1)
    ).flatten()
    elements = f"; elements {int(bad[0])} to {int(bad[-1])} of {found.numel()}" if len(bad) else ""
    return (
        f"the error is {error_of(found, wanted):.3g} of {what} of norm {norm:.3g}{elements}, on "
        f"{named}; {losses}"
    )


def _is_alike(other: Difference | Failure | None, found: Difference | Failure) -> bool:
    """Whether both are differences, or errors of one type."""
    if isinstance(other, Failure) and isinstance(found, Failure):
        return type(other.error) is type(found.error)
    return type(other) is type(found)
