"""A step that differs, beside the same step of the plain loop, as causes are looked for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun.layout import layout_of
from zfun.testing._case import Case, Observed
from zfun.testing._difference import Difference, error_of, scales
from zfun.testing._plain import Leaves, PlainProblem, PlainStep, gradient_of, transformed, updated
from zfun.transforms import split_batch


@dataclass(frozen=True, eq=False)
class Evidence:
    """The step that differs.

    Attributes:
        problem: the training problem.
        case: the smallest case that fails.
        plain: the steps of the plain loop.
        difference: the first difference.
        tolerance: of the comparison.
    """

    problem: PlainProblem
    case: Case
    plain: Sequence[PlainStep]
    difference: Difference
    tolerance: float

    @property
    def right(self) -> PlainStep:
        return self.plain[self.difference.step]

    @property
    def seen(self) -> Observed:
        return self.difference.trace.steps[self.difference.step]

    @property
    def path(self) -> str:
        return self.problem.paths[self.difference.leaves[0]] if self.difference.leaves else ""

    @functools.cached_property
    def by_rank(self) -> list[Leaves]:
        """The gradient of each rank's batch."""
        parts = self.problem.split(self.right.batch, self.case.size)
        return [gradient_of(self.problem, self.right.before, part)[1] for part in parts]

    @functools.cached_property
    def parts(self) -> list[tuple[float, Leaves]]:
        """The loss and the gradient of each rank's micro-batches."""
        count = self.case.num_micro_batches
        whole = self.problem.split(self.right.batch, self.case.size)
        parts = [micro for part in whole for micro in split_batch(part, count)]
        found = [gradient_of(self.problem, self.right.before, part) for part in parts]
        return [(float(loss), grads) for loss, grads in found]

    def change_of(self, raw: Leaves) -> Tensor:
        """Return the vector of :meth:`changes` that gradients of autograd would give."""
        before = [x.clone() for x in self.right.before]
        loss = torch.tensor(self.right.loss, dtype=torch.float64)
        grads = transformed(self.problem, before, self.right.batch, loss, raw)
        if self.seen.grads is not None and self.difference.kind == "gradients":
            return self.vector(grads)
        after, _ = updated(self.problem, before, self.right.state, grads)
        return self.vector(after) - self.vector(before)

    def reproduced_by(self, raw: Leaves) -> bool:
        """Whether gradients that are wrong in a known way explain the step."""
        before = [x.clone() for x in self.right.before]
        loss = torch.tensor(self.right.loss, dtype=torch.float64)
        grads = transformed(self.problem, before, self.right.batch, loss, raw)
        if self.seen.grads is not None:
            return self._explains(self.seen.grads, grads, self.right.grads)
        after, _ = updated(self.problem, before, self.right.state, grads)
        return self.moved_to(after)

    def moved_to(self, after: Leaves) -> bool:
        """Whether the parameters after the step are those, and not the plain loop's."""
        return self._explains(self.seen.params, after, self.right.after)

    def _explains(self, found: Leaves, guess: Leaves, right: Leaves) -> bool:
        changes = guess
        if right is self.right.after:
            # The guess may be that nothing changes, so the right change says how much counts.
            changes = [x - y for x, y in zip(right, self.right.before, strict=True)]
        sizes = scales(changes, [1e-12] * len(guess))
        for x, y, size in zip(found, guess, sizes, strict=True):
            if not error_of(x, y) <= 4 * self.tolerance * size:
                return False
        errors = [sum(map(error_of, found, other)) for other in (guess, right)]
        return 4 * errors[0] < errors[1] and errors[1] > self.tolerance * max(sizes)

    def changes(self) -> tuple[Tensor, Tensor]:
        """Return the gradients, or else the changes, that were found and are right, as vectors."""
        if self.difference.kind == "gradients" and self.seen.grads is not None:
            return self.vector(self.seen.grads), self.vector(self.right.grads)
        start = self.vector(self.right.before)
        return self.vector(self.seen.params) - start, self.vector(self.right.after) - start

    def leaf_of(self) -> tuple[Tensor, Tensor]:
        """Return the gradient or change of the first wrong leaf, and the right one."""
        place = self.difference.leaves[0]
        if self.difference.kind == "gradients" and self.seen.grads is not None:
            return self.seen.grads[place], self.right.grads[place]
        start = self.right.before[place]
        return self.seen.params[place] - start, self.right.after[place] - start

    def vector(self, leaves: Leaves) -> Tensor:
        """Return the elements of all leaves, tied ones once."""
        places = sorted(set(self.problem.first))
        return torch.cat([_real(leaves[i]).reshape(-1).double() for i in places])

    def wrong(self) -> Tensor:
        """Return which elements of the vector are wrong."""
        found, right = self.changes()
        largest = float(right.abs().max()) if right.numel() else 0.0
        return ~((found - right).abs() <= 10 * self.tolerance * max(largest, 1e-30))

    def numels(self) -> list[int]:
        places = sorted(set(self.problem.first))
        return [_real(self.right.before[i]).numel() for i in places]

    def owners(self) -> Iterator[Tensor]:
        """Yield the ways to cut the vector: for each element the rank that owns the element."""
        size, numels = self.case.size, self.numels()
        layout = layout_of(self.problem.params, size, self.case.bucket_bytes)
        places = sorted(set(self.problem.first))
        slots = [layout.leaves[layout.positions[place]] for place in places]
        yield torch.cat(
            [
                (slot.offset + torch.arange(slot.numel))
                // (layout.buckets[slot.bucket].padded_numel // size)
                for slot in slots
            ]
        )
        yield torch.cat([torch.arange(n) // max(1, -(-n // size)) for n in numels])
        yield torch.arange(sum(numels)) // max(1, -(-sum(numels) // size))


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
