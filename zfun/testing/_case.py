"""One case of a law: a composition or a mesh of simulated ranks, its run, and simpler cases."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, NamedMesh, global_ranks, mesh, simulate, single_group
from zfun.errors import OptionError
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.optim import Optimizer, sgd
from zfun.parallel import Cut, Held, model_axes
from zfun.recipes import Zero, zero
from zfun.testing._compositions import Composition
from zfun.testing._laws import assert_padding
from zfun.testing._plain import Leaves, PlainProblem, mapped
from zfun.testing._train import compose, scalar_of, whole_grads, whole_params
from zfun.transforms import split_batch, unshard
from zfun.typing import Loss

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
        loss_over: the loss of a mesh.
    """

    make: Callable[[Group], Zero] | None = None
    wrap_group: Callable[[Group], Group] | None = None
    loss_over: Callable[[NamedMesh], Loss] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A composition, or None for the user's own loop or a stage over a mesh, and numbers of a run.

    Attributes:
        composition: the transforms.
        size: the number of ranks that have a batch.
        num_steps: of the run.
        num_micro_batches: of a rank's batch.
        bucket_bytes: the most bytes of a bucket.
        mesh: names and sizes of the axes, for a loss over model axes.
        data: the axes along which batches differ.
        stage: of ZeRO, over the mesh.
    """

    composition: Composition | None
    size: int
    num_steps: int
    num_micro_batches: int = 1
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    mesh: tuple[tuple[str, int], ...] = ()
    data: tuple[str, ...] = ()
    stage: int = 0

    @property
    def model_axes(self) -> dict[str, int]:
        """The axes of more than one rank that share a batch, with their sizes."""
        return {name: n for name, n in self.mesh if n > 1 and name not in self.data}

    def resized(self, axis: str, count: int) -> Case:
        """Return the case with another size of an axis."""
        sizes = dict(self.mesh) | {axis: count}
        size = math.prod(sizes[name] for name in self.data)
        return dataclasses.replace(self, mesh=tuple(sizes.items()), size=size)

    def __str__(self) -> str:
        if self.mesh:
            shape = ", ".join(f"{name}={count}" for name, count in self.mesh)
            return f"stage {self.stage} over the mesh {shape}, {_count(self.num_steps, 'step')}"
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


class MeshTrace(NamedTuple):
    """The leaves that a rank of a mesh held.

    Attributes:
        coordinates: of the rank, by axis.
        axes: the names of the model axes.
        paths: of all leaves.
        spreads: how each leaf of the rank lies over each model axis, by path.
        leaves: of the rank, by path, after each step.
    """

    coordinates: Mapping[str, int]
    axes: Sequence[str]
    paths: Sequence[str]
    spreads: Mapping[str, tuple[Cut | Held | None, ...]]
    leaves: Sequence[Mapping[str, Tensor]]


class CaseTrace(NamedTuple):
    """The steps of a rank.

    Attributes:
        steps: what each step gave.
        padding: a message about padding that is not zero.
        mesh: the leaves of the rank, in a mesh.
    """

    steps: list[Observed]
    padding: str
    mesh: MeshTrace | None = None


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
        if case.mesh:
            assert seams.loss_over is not None
            return _run_over_mesh(problem, case, seams.loss_over, group, batches)
        group = group if seams.wrap_group is None else seams.wrap_group(group)
        own = [step[group.rank] for step in batches]
        if case.composition is None:
            assert seams.make is not None
            return _run_made(problem, seams.make(group), own)
        return _run_composition(problem, case, case.composition, group, own)

    return simulate(math.prod(dict(case.mesh).values()) if case.mesh else case.size, main)


def names_of_model_axes(named: NamedMesh, loss: Loss) -> list[str]:
    """Return the names of the axes that a loss knows, in its order."""
    ranks = {name: (named[name], global_ranks(named[name])) for name in named.names}

    def name_of(group: Group) -> str:
        same = [name for name, (one, _) in ranks.items() if one is group]
        # The group of an axis may be wrapped, as zf.record() does.
        alike = [name for name, (_, known) in ranks.items() if known == global_ranks(group)]
        if not same + alike:
            raise OptionError(
                f"a loss over a mesh is cut over axes of this mesh; got {group!r}; let make(mesh) "
                "pass mesh['tp'] and the like"
            )
        return (same + alike)[0]

    return [name_of(axis.group) for axis in model_axes(loss)]


def _run_over_mesh(
    problem: PlainProblem,
    case: Case,
    loss_over: Callable[[NamedMesh], Loss],
    group: Group,
    batches: Sequence[Sequence[Any]],
) -> CaseTrace:
    """Train by ``zf.zero`` over the data axes of a mesh."""
    named, trained = mesh(group, **dict(case.mesh)), set(problem.paths)
    data = named[case.data] if case.data else single_group()
    own = [step[data.rank] for step in batches]
    whole = tree.combine(problem.params, *problem.frozen)
    chosen = (lambda path, leaf: path in trained) if problem.frozen else None

    def begun(rule: Optimizer) -> tuple[Loss, Zero, Any]:
        loss = loss_over(named)
        made = zero(case.stage, loss, rule, data, trainable=chosen)
        return loss, made, made.init(mapped(torch.clone, whole))

    def seen(made: Zero, state: Any) -> Leaves:
        return _copies(tree.partition(made.params(state), lambda path, leaf: path in trained)[0])

    # A step of plain descent shows the gradients.
    _, descent, state = begun(sgd(1.0))
    state, _ = descent.step(state, own[0])
    pairs = zip(tree.leaves(problem.params), seen(descent, state), strict=True)
    grads = [before - after for before, after in pairs]

    loss, made, state = begun(problem.rule)
    steps: list[Observed] = []
    leaves: list[Mapping[str, Tensor]] = []
    for index, batch in enumerate(own):
        state, info = made.step(state, batch)
        steps.append(Observed(float(info.loss), None if index else grads, seen(made, state)))
        local = unshard(state.params)
        leaves.append(dict(zip(tree.paths(local), _copies(local), strict=True)))
    spreads = {slot.path: slot.spread for slot in state.params.layout.leaves}
    axes = names_of_model_axes(named, loss)
    return CaseTrace(steps, "", MeshTrace(named.coordinates, axes, problem.paths, spreads, leaves))


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
    if case.mesh:
        for name, count in case.mesh:
            for smaller in range(1, count):
                if count % smaller == 0:
                    yield case.resized(name, smaller)
        for stage in range(case.stage):
            yield dataclasses.replace(case, stage=stage)
        return
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
