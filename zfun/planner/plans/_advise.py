"""Advice: the fastest composition that fits a machine.

[Note: the search]
Every composition has a bound on its time and its memory ([Note: bounds]), which costs microseconds.
The compositions are planned in the order of their least times, except those whose least memory
exceeds the machine. The search ends when the fastest plan that fits is no slower than the least
time of the next composition. So no composition is left out without a proof: its bound. A plan that
lies below its own bound is a fault, after which every composition is planned.

A model whose loss is made for a mesh has few compositions, of which all are planned whose state
alone is not too much.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, abstract_group
from zfun.errors import OptionError
from zfun.options import BOOL, instance, takes
from zfun.planner._parts import peaks_of
from zfun.planner.plans._bounds import Bound, Bounds
from zfun.planner.plans._hardware import HARDWARE, Forecast, Hardware, StepWork
from zfun.planner.plans._meshes import MeshCandidate, MeshModel, stages_of
from zfun.planner.plans._plan import GROUP_OR_SIZE, plan
from zfun.planner.plans._record import Plan
from zfun.planner.plans._space import Candidate, Model, candidates
from zfun.tables import html_table, in_bytes, in_columns
from zfun.transforms import UntoldUse, map_batch, told_order

_MOST_DOUBLINGS = 4
# Rounding of sums of times.
_CLOSE = 1e-9


class Rung(NamedTuple):
    """One composition that was planned.

    Attributes:
        composition: the choices: a :class:`Candidate` or a :class:`MeshCandidate`.
        why: the reason to plan the composition.
        plan: the plan of a step; along a pipeline that of the stage that needs most.
        forecast: the time of a step; along a pipeline that of the slowest stage.
        excess: the bytes beyond each memory of the machine.
    """

    composition: Any
    why: str
    plan: Plan
    forecast: Forecast
    excess: dict[str, float]

    @property
    def verdict(self) -> str:
        """The words ``fits``, or the bytes that are missing."""
        return _verdict(self.excess)


@dataclass(frozen=True)
class Advice:
    """The fastest composition that fits, and why, made by :func:`advise`; ``print`` shows tables.

    Attributes:
        rungs: the compositions that were planned, in that order.
        best: the one that fits with the shortest step, or ``None``.
        bounds: of all compositions, the shortest least time first.
        hints: steps that need no plan.
        model: the model.
        hardware: the machine.
        group: the ranks.
    """

    rungs: tuple[Rung, ...]
    best: Rung | None
    bounds: tuple[Bound, ...]
    hints: tuple[str, ...]
    model: Model | MeshModel
    hardware: Hardware
    group: Group

    @functools.cached_property
    def batch_factor(self) -> int:
        """A batch of so many times as many rows fits too, up to 16; found by plans when asked."""
        factor = 1
        for doubling in range(1, _MOST_DOUBLINGS + 1 if self.best else 1):
            assert self.best is not None
            if self._longer(self.best.composition, 2**doubling).excess:
                break
            factor = 2**doubling
        return factor

    def frontier(self) -> tuple[Bound, ...]:
        """Return the compositions that no other beats in both time and memory of the device.

        Returns:
            Bounds, the shortest step first.
        """
        found: list[Bound] = []
        for bound in sorted(self.bounds, key=lambda one: (one.forecast.at_most_s, one.device)):
            if math.isinf(bound.forecast.at_most_s):
                # Its state alone was too much, so nothing was planned.
                break
            if not found or bound.device < found[-1].device:
                found.append(bound)
        return tuple(found)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of planned compositions, the header first."""
        header = ("planned", "device", "host", "disk", "s", "bottleneck", "verdict", "because")
        return [header, *map(self._row, self.rungs)]

    def frontier_rows(self) -> list[tuple[str, ...]]:
        """Return the table of the frontier, the header first: what each needs at the least."""
        header = ("frontier", "device", "host", "disk", "s", "verdict")
        return [
            header,
            *(
                (
                    f"{self._mark(one.composition)}{one.composition}",
                    *map(in_bytes, one[3:]),
                    f"{one.forecast.at_most_s:.3g}",
                    _verdict(one.excess(self.hardware)) if not self._fits(one) else "fits",
                )
                for one in self.frontier()
            ),
        ]

    def reasons(self) -> list[tuple[str, ...]]:
        """Return the table of the best composition's neighbours, the header first.

        A neighbour makes one choice in another way. Each row says why the best is better.
        """
        header = ("one other choice", "s", "why not")
        return [header, *self._neighbours()]

    def draw(self) -> Any:
        """Draw all compositions by memory and time, with the frontier, the limit and the best.

        Returns:
            A matplotlib figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is missing; ``pip install zfun[demo]``.
        """
        from zfun.planner.plans._picture import draw_frontier

        best = None
        if self.best is not None:
            held = self.best.plan.peak.device.total
            best = held, self.best.forecast.at_most_s, str(self.best.composition)
        points = [(one.device, one.forecast.at_most_s) for one in self.bounds]
        front = [(one.device, one.forecast.at_most_s) for one in self.frontier()]
        return draw_frontier(points, front, best, self.hardware.device_bytes)

    def _longer(self, composition: Any, factor: int) -> Rung:
        """Plan a composition with a longer batch."""
        if isinstance(composition, MeshCandidate):
            assert isinstance(self.model, MeshModel)
            batch = _longer(self.model.batch(dict(composition.sizes)), factor)
            plan = composition.plan(self.model, batch)
            return _rung_of_mesh(composition, "", plan, self.hardware)
        assert isinstance(self.model, Model)
        batch = _longer(self.model.batch, factor)
        bounds = Bounds(self.model, self.group)
        return _tried(composition, "", bounds, batch, self.hardware, self.group)

    def _mark(self, composition: Any) -> str:
        return "* " if self.best is not None and composition == self.best.composition else ""

    def _fits(self, bound: Bound) -> bool:
        return any(rung.composition == bound.composition and not rung.excess for rung in self.rungs)

    def _neighbours(self) -> Iterator[tuple[str, ...]]:
        if self.best is None:
            return
        chosen, best_s = self.best.composition, self.best.forecast.at_most_s
        planned = {rung.composition: rung for rung in self.rungs}
        for bound in self.bounds:
            if sum(a != b for a, b in zip(chosen, bound.composition, strict=True)) != 1:
                continue
            rung, time = planned.get(bound.composition), bound.forecast.at_most_s
            excess = bound.excess(self.hardware) if rung is None else rung.excess
            if excess:
                why = _verdict(excess)
            else:
                factor = f"{time / best_s:.3g} times the time" if best_s else "the same time"
                why = f"{'' if rung else 'at least '}{factor}"
            yield str(bound.composition), f"{time:.3g}", why

    def _row(self, rung: Rung) -> tuple[str, ...]:
        found, time = rung.plan, rung.forecast
        return (
            f"{self._mark(rung.composition)}{rung.composition}",
            *map(in_bytes, peaks_of(found)),
            f"{time.at_most_s:.3g}",
            time.bottleneck,
            rung.verdict,
            rung.why,
        )

    def __str__(self) -> str:
        chosen = f"take {self.best.composition}" if self.best else "no composition fits"
        tables = [self.rows(), self.frontier_rows(), *([self.reasons()] if self.best else [])]
        counted = f"{len(self.bounds):,} compositions, {len(self.rungs)} planned: {chosen}"
        return "\n\n".join([*map(in_columns, tables), "\n".join([counted, *self.hints])])

    def _repr_html_(self) -> str:
        caption = str(self.best.composition) if self.best else "none fits"
        tables = {caption: self.rows(), "frontier": self.frontier_rows()}
        if self.best:
            tables["why"] = self.reasons()
        return "".join(html_table(name, rows[0], rows[1:]) for name, rows in tables.items())


@takes(
    model=instance(
        (Model, MeshModel), "a zf.planner.Model", "zf.planner.Model(loss_fn, params, batch)"
    ),
    hardware=HARDWARE,
    group=GROUP_OR_SIZE,
    lossy=BOOL,
)
def advise(
    model: Model | MeshModel, hardware: Hardware, group: Group | int, *, lossy: bool = True
) -> Advice:
    """Find the fastest composition that fits a machine; see [Note: the search].

    Args:
        model: the loss, the parameters and a batch. Later calls with the same model are faster. A
            :class:`MeshModel` makes its loss for a mesh, and then the mesh is chosen too.
        hardware: rates and sizes; ``device_bytes`` at least should be given. ``ranks_per_host``
            adds meshes of two data axes to the search for a :class:`Model`.
        group: the ranks, as in :func:`plan`.
        lossy: whether messages may be rounded to int8.

    Returns:
        The best, the compositions that were planned, and the bounds of all.

    Raises:
        OptionError: the hardware has no limit, so everything fits; or, for a :class:`MeshModel`, no
            rates or another number of ranks than a mesh.

    Example:
        >>> empty = lambda *shape: torch.empty(shape, device="meta")
        >>> loss = lambda p, x: torch.tanh(x @ p["up"] @ p["down"]).sum()
        >>> params = {"up": empty(256, 1024), "down": empty(1024, 256)}
        >>> machine = Hardware(flops_per_s=1e12, network=1e9, host_link=1e9, device_bytes=9e6)
        >>> found = advise(Model(loss, params, empty(8, 256)), machine, 4)
        >>> found.best.plan.peak.device.total <= 9e6
        True
    """
    ranks = abstract_group(group) if isinstance(group, (int, Integral)) else group
    if isinstance(model, MeshModel):
        return _of_meshes(model, hardware, ranks)
    if min(hardware.device_bytes, hardware.host_bytes, hardware.disk_bytes) == float("inf"):
        raise OptionError(
            "advise() compares the memory of a step with that of a machine; got hardware without "
            "limits; pass zf.planner.Hardware(..., device_bytes=80e9)"
        )
    hints = ["lower the defaults of generation, such as the width of a beam"]
    found = _search(model, hardware, ranks, model.precision, lossy)
    if found[1] is None and model.precision is None:
        narrow = _search(model, hardware, ranks, torch.bfloat16, lossy)
        found = (*found[0], *narrow[0]), narrow[1], (*found[2], *narrow[2])
    if found[1] is None:
        hints.append("add ranks, because the shards of the state shrink with their number")
    else:
        hints.append("raise the batch, if batch_factor is above 1: so many times as many rows fit")
        hints.append("tune bucket_bytes, prefetch and reuse_distance by measured steps")
    if found[1] is not None and found[1].composition.compressed:
        hints.append("int8 rounds messages; advise(..., lossy=False) leaves these out")
    return Advice(*found, tuple(hints), model, hardware, ranks)


def _search(
    model: Model, hardware: Hardware, group: Group, precision: Any, lossy: bool
) -> tuple[tuple[Rung, ...], Rung | None, tuple[Bound, ...]]:
    bound_of = Bounds(model, group)
    space = candidates(model, group.size, hardware.ranks_per_host, precision, lossy)
    bounds = [bound_of(choice, hardware) for choice in space]
    bounds.sort(key=lambda one: (one.forecast.at_most_s, _num_choices(one.composition)))
    rungs: list[Rung] = []
    best: Rung | None = None
    for bound in bounds:
        least_s = bound.forecast.at_most_s
        if best is not None and best.forecast.at_most_s <= least_s * (1 + _CLOSE):
            break
        if bound.excess(hardware):
            continue
        why = "the shortest least time of those left"
        rung = _tried(bound.composition, why, bound_of, model.batch, hardware, group)
        rungs.append(rung)
        if not _is_true(bound, rung):
            why = "the bounds are wrong for this model"
            choices = (one.composition for one in bounds)
            rungs = [_tried(one, why, bound_of, model.batch, hardware, group) for one in choices]
            best = _fastest(rungs)
            break
        best = _fastest(rungs)
    return tuple(rungs), best, tuple(bounds)


def _fastest(rungs: list[Rung]) -> Rung | None:
    fitting = (rung for rung in rungs if not rung.excess)
    return min(fitting, key=lambda rung: rung.forecast.at_most_s, default=None)


def _of_meshes(model: MeshModel, hardware: Hardware, group: Group) -> Advice:
    """Choose a mesh, a stage and whether blocks are recomputed."""
    choices = [*model.candidates()]
    wrong = next((one for one in choices if one.num_ranks != group.size), None)
    if wrong is not None:
        raise OptionError(
            f"the meshes of a model have the ranks of the group; got {wrong} for {group.size} "
            f"ranks; pass meshes=zf.planner.mesh_sizes({group.size}, ...)"
        )
    if math.isinf(hardware.flops_per_s):
        raise OptionError(
            "advice on meshes compares the times of steps; got hardware without rates; pass those "
            "that zfun hw-bench measures"
        )
    one = abstract_group(1)
    # The state of one rank, of which the ranks of a mesh have parts.
    alone = Model(_no_loss, model.params, (), model.optimizer, precision=model.precision)
    state = Bounds(alone, one).state(model.precision)
    rungs: list[Rung] = []
    bounds: list[Bound] = []
    for choice in choices:
        cut, shards = choice.num_ranks // choice.num_shards, choice.num_shards
        held = state.params // (shards if choice.stage == 3 else 1)
        held += (state.masters + state.moments) // (shards if choice.stage else 1)
        if held // cut > hardware.device_bytes:
            bounds.append(Bound(choice, _NO_WORK, _NEVER, held // cut, 0, 0))
            continue
        rungs.append(_tried_mesh(choice, "every mesh is tried", model, hardware))
        if rungs[-1].excess and model.recomputed is not None:
            again = choice._replace(recomputed=True)
            why = "its mesh needs too much without"
            rungs.append(_tried_mesh(again, why, model, hardware))
    for rung in rungs:
        peaks = peaks_of(rung.plan)
        bounds.append(Bound(rung.composition, rung.plan.work, rung.forecast, *peaks))
    bounds.sort(key=lambda one: one.forecast.at_most_s)
    best = _fastest(rungs)
    hint = "raise the batch, if batch_factor is above 1: so many times as many rows fit"
    if best is None:
        hint = "add ranks, because the parts of the state shrink with their number"
    return Advice(tuple(rungs), best, tuple(bounds), (hint,), model, hardware, group)


# Of a composition that is not planned.
_NO_WORK = StepWork(0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0)
_NEVER = Forecast(math.inf, math.inf, math.inf, math.inf)


def _no_loss(params: Any, batch: Any) -> Any:
    raise AssertionError("a state is made without a step")


def _tried_mesh(choice: MeshCandidate, why: str, model: MeshModel, hardware: Hardware) -> Rung:
    if choice not in model.known:
        model.known[choice] = choice.plan(model, model.batch(dict(choice.sizes)))
    return _rung_of_mesh(choice, why, model.known[choice], hardware)


def _rung_of_mesh(choice: MeshCandidate, why: str, found: Plan, hardware: Hardware) -> Rung:
    stages = tuple(stages_of(found))
    fullest = max(stages, key=lambda one: one.peak.device.total)
    slowest = max((one.on(hardware) for one in stages), key=lambda time: time.at_most_s)
    excess: dict[str, float] = {}
    for one in stages:
        for place, n in one.excess(hardware).items():
            excess[place] = max(n, excess.get(place, 0))
    full = dataclasses.replace(fullest, stages=stages if len(stages) > 1 else ())
    return Rung(choice, why, full, slowest, excess)


def _is_true(bound: Bound, rung: Rung) -> bool:
    """Whether a plan needs at least as much as its bound says."""
    is_slower = rung.forecast.at_most_s >= bound.forecast.at_most_s * (1 - _CLOSE)
    return is_slower and all(
        peak >= least for peak, least in zip(peaks_of(rung.plan), bound[3:], strict=True)
    )


def _num_choices(choice: Candidate) -> tuple[int, int]:
    """Order compositions of the same time: the plainest first."""
    plain = Candidate(choice.stage, precision=choice.precision)
    return sum(a != b for a, b in zip(choice, plain, strict=True)), choice.stage


def _tried(
    composition: Candidate,
    why: str,
    bounds: Bounds,
    batch: Any,
    hardware: Hardware,
    group: Group,
) -> Rung:
    model = bounds.model
    key = "plan", composition, group.size, group.rank
    found = model.known.get(key) if batch is model.batch else None
    if found is None:
        make = functools.partial(composition.of, model)
        # All steps are like the first, because the order of use is known already.
        token = told_order.set(bounds.order(composition))
        try:
            found = plan(make, model.params, batch, group, steps=1, device="meta")
        except UntoldUse:
            # Leaves that are not trained, or a loss that is another one for another batch.
            told_order.set(None)
            found = plan(make, model.params, batch, group, steps=2, device="meta")
        finally:
            told_order.reset(token)
        if batch is model.batch:
            model.known[key] = found
    return Rung(composition, why, found, found.on(hardware), found.excess(hardware))


def _verdict(excess: dict[str, float]) -> str:
    if not excess:
        return "fits"
    return ", ".join(f"{in_bytes(int(n))} too much: {place}" for place, n in excess.items())


def _longer(batch: Any, factor: int) -> Any:
    def repeat(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return leaf
        return torch.empty((factor * len(leaf), *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return map_batch(lambda leaf: tree.map(repeat, leaf), batch)
