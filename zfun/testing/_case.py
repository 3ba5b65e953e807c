"""One case of a law: a composition on simulated ranks, its run, and simpler cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zfun import tree
from zfun.collectives import Group, simulate
from zfun.errors import OptionError
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.recipes import Zero
from zfun.testing._compositions import Composition
from zfun.testing._laws import assert_padding
from zfun.testing._plain import Leaves, PlainProblem, mapped
from zfun.testing._train import compose, scalar_of, whole_grads, whole_params
from zfun.transforms import split_batch

_SHARDED = ("shard_grads",), ("shard_optimizer",)
STANDARD = (
    Composition(),
    Composition(optimizer=("shard_optimizer",)),
    Composition((), *_SHARDED, donate=True, flat=True),
    Composition(("shard_params",), *_SHARDED),
    Composition(("shard_params",), *_SHARDED, donate=True, remat=True),
    Composition(grads=("replicate_grads",), optimizer=("offload",), flat=True),
    Composition(
        ("shard_params", "offload"), ("shard_grads", "offload"), ("shard_optimizer", "offload")
    ),
)


class Seams(NamedTuple):
    """The parts of a run that a user may replace.

    Attributes:
        make: a whole loop, instead of a composition.
        wrap_group: the group that collectives go through.
    """

    make: Callable[[Group], Zero] | None = None
    wrap_group: Callable[[Group], Group] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A composition, or None for the user's own loop, and the numbers of a run."""

    composition: Composition | None
    size: int
    num_steps: int
    num_micro_batches: int = 1
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __str__(self) -> str:
        parts = ["make(group)" if self.composition is None else _shown(self.composition)]
        parts.append(f"on {_count(self.size, 'rank')}")
        if self.num_micro_batches > 1:
            parts.append(f"with num_micro_batches={self.num_micro_batches}")
        if self.bucket_bytes != DEFAULT_BUCKET_BYTES:
            parts.append(f"with bucket_bytes={self.bucket_bytes}")
        return f"{' '.join(parts)}, {_count(self.num_steps, 'step')}"


def _shown(composition: Composition) -> str:
    given = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(composition)
        if (value := getattr(composition, field.name)) != field.default
    ]
    return f"Composition({', '.join(given)})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


class Observed(NamedTuple):
    """One step of a rank.

    Attributes:
        loss: the loss.
        grads: the whole gradients; None where a loop does not show them.
        params: the whole parameters after the step.
    """

    loss: float
    grads: Leaves | None
    params: Leaves


class CaseTrace(NamedTuple):
    """The steps of a rank, and a message about padding that is not zero."""

    steps: list[Observed]
    padding: str


def feasible(problem: PlainProblem, case: Case) -> bool:
    """Return whether the batch can be split for a case."""
    try:
        for batch in problem.batches:
            for part in problem.split(batch, case.size):
                split_batch(part, case.num_micro_batches)
    except OptionError:
        return False
    return True


def run(problem: PlainProblem, case: Case, seams: Seams) -> list[CaseTrace]:
    """Train on simulated ranks; return the trace of each rank."""
    batches = [problem.split(batch, case.size) for batch in problem.batches[: case.num_steps]]

    def main(group: Group) -> CaseTrace:
        group = group if seams.wrap_group is None else seams.wrap_group(group)
        own = [step[group.rank] for step in batches]
        if case.composition is None:
            assert seams.make is not None
            return _run_made(problem, seams.make(group), own)
        return _run_composition(problem, case, case.composition, group, own)

    return simulate(case.size, main)


def _run_made(problem: PlainProblem, zero: Zero, batches: Sequence[Any]) -> CaseTrace:
    trained = set(problem.paths)
    whole = tree.combine(problem.params, *problem.frozen)
    state = zero.init(mapped(torch.clone, whole))
    steps = []
    for batch in batches:
        state, info = zero.step(state, batch)
        params, _ = tree.partition(zero.params(state), lambda path, leaf: path in trained)
        steps.append(Observed(float(info.loss), None, _copies(params)))
    return CaseTrace(steps, "")


def _run_composition(
    problem: PlainProblem,
    case: Case,
    composition: Composition,
    group: Group,
    batches: Sequence[Any],
) -> CaseTrace:
    program = compose(
        composition,
        group,
        problem.loss_fn,
        problem.rule,
        num_micro_batches=case.num_micro_batches,
        bucket_bytes=case.bucket_bytes,
        transform=problem.transform,
    )
    value, state = program.init(mapped(torch.clone, problem.params))
    steps = []
    for batch in batches:
        loss, grads = program.gradient(value, batch)
        seen = float(scalar_of(loss)), _copies(whole_grads(grads))
        value, state = program.update(grads, state, value)
        steps.append(Observed(*seen, _copies(whole_params(value))))
    try:
        assert_padding((value, state))
    except AssertionError as error:
        return CaseTrace(steps, str(error))
    return CaseTrace(steps, "")


def _copies(value: tree.Tree) -> Leaves:
    return [leaf.detach().clone() for leaf in tree.leaves(value)]


def simpler(case: Case, failed_at: int) -> Iterator[Case]:
    """Yield simpler cases, the simplest first: fewer steps, ranks, micro-batches, transforms."""
    if failed_at + 1 < case.num_steps:
        yield dataclasses.replace(case, num_steps=failed_at + 1)
    for size in range(1, case.size):
        yield dataclasses.replace(case, size=size)
    for count in range(1, case.num_micro_batches):
        yield dataclasses.replace(case, num_micro_batches=count)
    if case.bucket_bytes != DEFAULT_BUCKET_BYTES:
        yield dataclasses.replace(case, bucket_bytes=DEFAULT_BUCKET_BYTES)
    if case.composition is not None:
        for composition in _simpler_compositions(case.composition):
            yield dataclasses.replace(case, composition=composition)


def _simpler_compositions(composition: Composition) -> Iterator[Composition]:
    changes: list[dict[str, Any]] = [
        {flag: False} for flag in ("donate", "remat", "flat") if getattr(composition, flag)
    ]
    changes += [
        {field: tuple(other for other in getattr(composition, field) if other != name)}
        for field in ("loss", "grads", "optimizer")
        for name in getattr(composition, field)
    ]
    for change in changes:
        try:
            yield dataclasses.replace(composition, **change)
        except OptionError:
            continue
