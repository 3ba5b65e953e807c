"""Plans: memory, traffic and operations of a step, before the step.

[Note: plans]
A plan is read off the very ``init`` and ``step`` that train, run on tensors without numbers:
:class:`Meter` follows the storages, a recorder the collectives, a counter the matrix products. So a
plan holds for every option and every optimizer. The same observers around a real step on simulated
ranks must find the same numbers, and a test compares the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zfun import ops, tree
from zfun.collectives import (
    Group,
    NotLeftYet,
    global_ranks,
    group_with_board,
    record,
)
from zfun.collectives import mesh as named_mesh
from zfun.errors import OptionError
from zfun.options import ANY, BOOL, DEVICE, FUNCTION, GROUP, instance, integer, takes
from zfun.parallel import Pipeline
from zfun.parallel.schedules import activations_in_flight, bubble
from zfun.planner._abstract import abstract
from zfun.planner._buffers import MARK
from zfun.planner._kernels import AttentionCounter
from zfun.planner._meter import Meter
from zfun.planner._parts import Instant, Live
from zfun.planner.plans._flops import FlopCounter, Flops, Touched
from zfun.planner.plans._folded import (
    AlikeBoard,
    Ranks,
    StepCounts,
    StepPiece,
    are_alike,
    folded,
    joined,
    pieces_of,
    renamed,
    sources,
)
from zfun.planner.plans._kept import bytes_by_path, num_leaves
from zfun.planner.plans._record import InPipeline, Moved, Plan, sent_by
from zfun.transforms import split_batch

_MESH = instance(Mapping, "the size of each axis, by name", "{'pp': 2, 'dp': 4}")
GROUP_OR_SIZE = integer(1, example="8") | GROUP


@takes(group=GROUP, device=DEVICE)
class Observer:
    """A context that reads a :class:`Plan` off steps, planned ones or real ones of simulated ranks.

    Args:
        group: the rank's group.
        device: where the loss is computed; bytes elsewhere count as host memory.

    Attributes:
        group: the group to train with.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     observer = zf.planner.Observer(group)
        ...     loss = lambda params, x: (params["w"] * x).sum()
        ...     z = zf.zero(1, loss, zf.optim.adamw(0.1), observer.group)
        ...     with observer:
        ...         state = z.init({"w": torch.ones(4096)})
        ...         observer.begin(state)
        ...         state, _ = z.step(state, torch.ones(4096))
        ...         return observer.plan(state).bytes_sent("grads")
        >>> zf.simulate(2, main)
        [8192, 8192]
    """

    def __init__(self, group: Group, device: torch.device | str = "cpu") -> None:
        self.meter = Meter(device)
        self.group = record(self.meter.watch(group))
        self._flops, self._attention = FlopCounter(), AttentionCounter()
        self._counts: list[StepCounts] = []
        self._course: list[Instant] = []

    def __enter__(self) -> Observer:
        self.meter.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.meter.__exit__(exc_type, exc_val, exc_tb)

    def begin(self, state: Any) -> None:
        """Begin the description here, with the state that the next step takes."""
        self.meter.name_state(state)
        self.group.clear()
        for counter in (self._flops, self._attention):
            counter.begin()
            if counter not in self.meter.listeners:
                self.meter.listeners.append(counter)
        self.meter.begin()
        self._counts = [self._count()]

    def cut(self, *_: Any) -> None:
        """Cut the description here; see [Note: folded plans]."""
        self.meter.mark()
        self._counts.append(self._count())

    def pieces(self) -> list[StepPiece]:
        """Return the pieces of the described step."""
        return pieces_of(self._course, self._counts, self.group.log)

    def plan(self, state: Any) -> Plan:
        """Return the description since the beginning, with the state that the step returned."""
        # Naming the state reads stores, which is no part of the step.
        sent, flops = sent_by(self.group.log), self._flops.flops()
        moved, touched = Moved(**self.meter.crossed), self._flops.touched()
        self._counts.append(self._count())
        self.meter.name_state(state)
        self._course = self.meter.course()
        return Plan(
            tuple(instant for instant in self._course if instant.what != MARK),
            self.group.size,
            self.group.rank,
            bytes_by_path(state),
            sent,
            moved,
            flops,
            touched,
            self._attention.counts(),
            num_leaves(state),
        )

    def _count(self) -> StepCounts:
        numbers = *self._flops.flops(), *self._flops.touched(), *Moved(**self.meter.crossed)
        return StepCounts(len(self.group.log), numbers, self._attention.counts())


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no cycles: a search of all objects frees buffers at moments that depend on chance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _present(device: torch.device | str) -> torch.device:
    """Return the device, or ``meta`` for one that is not here, even if torch is built for it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    known = {"cpu", "meta"} | ({found.type} if found is not None else set())
    return torch.device(device if torch.device(device).type in known else "meta")


@takes(
    recipe=FUNCTION,
    params=ANY,
    batch=ANY,
    group=GROUP_OR_SIZE | None,
    mesh=_MESH | None,
    steps=integer(1),
    device=DEVICE,
    fold=BOOL,
)
def plan(
    recipe: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    steps: int = 2,
    device: torch.device | str = "cpu",
    fold: bool = False,
) -> Plan:
    """Plan a step: memory, traffic and operations of a rank, with no data, ranks or device.

    The step itself runs, on tensors without numbers, so that all options, optimizers and losses are
    covered. A number that the step reads is taken for 1, a condition for true.

    Args:
        recipe: ``recipe(group)`` returns :func:`zfun.zero`'s three functions, or any object with
            ``init(params) -> state`` and ``step(state, batch) -> (state, info)``.
            ``state.opt_state`` counts as the optimizer's, the rest of the state as parameters. With
            ``mesh`` it is called as ``recipe(mesh)``, with the mesh of :func:`zfun.mesh`.
        params: a tree of tensors, of which shapes and dtypes count; ``meta`` tensors and deferred
            leaves will do.
        batch: the batch of a rank, of which only shapes and dtypes count.
        group: the number of ranks, whose first rank is described, or a group, of which only the
            size and the rank count: :func:`zfun.collectives.abstract_group` makes any rank. By
            default all ranks of ``mesh``.
        mesh: the size of each axis, the slowest first, such as ``{"pp": 2, "dp": 8, "tp": 4}``. All
            ranks along a pipeline are planned, because their shapes depend on each other.
        steps: the number of steps to take, of which the last is described. The first step learns
            the order of use; from the second on they are alike.
        device: where the loss is computed, which chooses the kernels of attention. ``"meta"`` and a
            device that this machine lacks stand for an accelerator with CUDA's kernels, whose bytes
            are told from those of host memory, where stores keep theirs.
        fold: run equal blocks of a pipeline's schedule three times and repeat what they do, and run
            one of several stages that have leaves of the same shapes and a function of one place in
            the source. Long pipelines are planned in a fraction of the time. Schedules with several
            stages on a rank are not folded.

    Returns:
        The plan.

    Raises:
        OptionError: no such rank, or no step.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> recipe = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group, bucket_bytes=1)
        >>> found = zf.plan(recipe, params, torch.empty(8, 64), 8)
        >>> found.bytes_sent("params"), found.bytes_sent("grads"), found.flops.forward
        (43008, 28672, 131072)
        >>> found.steady.device.params, found.steady.device.moments, found.largest.gathered
        (4096, 8192, 32768)

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020).
    """
    return planned(recipe, params, batch, group, steps, device, meshed=Meshed(mesh, fold))


class Meshed(NamedTuple):
    """The axes of a plan, and whether it is folded."""

    mesh: Mapping[str, int] | None
    fold: bool = False


# Optimizers are probed with a few numbers, for which compiled kernels would be loaded for long.
@ops.use("reference")
def planned(
    recipe: Callable[[Any], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int | None,
    steps: int,
    device: torch.device | str,
    watch: Callable[[Meter], object] | None = None,
    meshed: Meshed | None = None,
) -> Plan:
    """Plan a step, as :func:`plan` does; ``watch`` is called with the meter."""
    device = _present(device)
    mesh, fold = (None, False) if meshed is None else meshed
    size, rank = _size_and_rank(group, mesh)
    board = AlikeBoard()

    def made(number: int) -> tuple[Observer, Any, tuple[tuple[str, int], ...]]:
        observer = Observer(group_with_board(size, number, board), device)
        if watch is not None:
            watch(observer.meter)
        if mesh is None:
            return observer, recipe(observer.group), ()
        axes = named_mesh(observer.group, **mesh)
        return observer, recipe(axes), tuple(axes.sizes.items())

    ranks: Ranks | None = None
    if fold:
        ranks = board.ranks = _foldable(lambda number: made(number)[1], rank, params, batch)
    plans: dict[int, Plan] = {}
    pieces: dict[int, list[StepPiece]] = {}
    wanted = [rank] if ranks is None else sorted({*ranks.shown_by.values()})
    # Ranks that are not done, and what each of them waits for.
    waiting: dict[int, NotLeftYet | None] = {}
    while left := [number for number in wanted if number not in plans]:
        if waiting.keys().isdisjoint(left):
            waiting[left[0]] = None
        # The last one first, because the others wait for it, if only indirectly. Ranks that nobody
        # wants run until they have left what another one waits for.
        able = [one for one in reversed(waiting) if board.lets_go_on(waiting[one])]
        number = max(able, key=left.__contains__)
        # Outside of the context, because optimizers are probed with numbers.
        observer, run, sizes = made(number)
        try:
            plan = _plan_of(run, observer, params, batch, steps, device, is_folded=bool(ranks))
        except NotLeftYet as missing:
            waiting[number] = missing.with_traceback(None)
            if ranks is None and missing.rank not in wanted:
                wanted.append(missing.rank)
            other = missing.rank if ranks is None else ranks.to_run(missing)
            waiting |= {} if other in plans else {other: waiting.get(other)}
            continue
        del waiting[number]
        loss = _pipeline_of(run)
        share = None if loss is None else _share_of(loss)
        plans[number] = dataclasses.replace(plan, mesh=sizes, pipeline=share)
        if ranks is not None:
            pieces[number] = observer.pieces()
    if ranks is not None:
        plans = {
            number: _unfolded(number, ranks, plans[shown], pieces[shown])
            for number, shown in ranks.shown_by.items()
        }
    stages = tuple(plans[number] for number in sorted(plans)) if len(plans) > 1 else ()
    return dataclasses.replace(plans[rank], stages=stages)


def _foldable(made: Callable[[int], Any], rank: int, params: tree.Tree, batch: Any) -> Ranks | None:
    """Return the ranks of a pipeline of which actions can be left out, if there is one."""
    run = made(rank)
    loss = _pipeline_of(run)
    if loss is None or not are_alike(split_batch(batch, loss.num_micro_batches)):
        return None
    losses = {number: made(number) for number in global_ranks(loss.model_axes[0].group)}
    found = {number: _pipeline_of(run) for number, run in losses.items()}
    pipelines = {number: one for number, one in found.items() if one is not None}
    if any(len(one.stages) > 1 or folded(one.actions) is None for one in pipelines.values()):
        return None
    return Ranks(pipelines, params, run.options.trainable)


def _plan_of(
    run: Any,
    observer: Observer,
    params: Any,
    batch: Any,
    steps: int,
    device: torch.device,
    *,
    is_folded: bool,
) -> Plan:
    loss = _pipeline_of(run) if is_folded else None
    shorter = None if loss is None else folded(loss.actions)
    if loss is not None:
        # The steps before know each block, and nothing else counts there.
        loss.actions = folded(loss.actions, 1) or shorter or loss.actions
    with _without_collector(), abstract(device, metered=True) as fake:
        start, data = fake(params), fake(batch)
        with observer:
            state = run.init(start)
            del start
            for _ in range(steps - 1):
                state = run.step(state, data)[0]
            if loss is not None and shorter is not None:
                loss.actions, loss.watch = shorter, observer.cut
            observer.begin(state)
            after = run.step(state, data)
            return observer.plan(after[0])


def _unfolded(number: int, ranks: Ranks, shown: Plan, pieces: Sequence[StepPiece]) -> Plan:
    """Return the plan of a rank, from the pieces of the step of one that is like it."""
    places = [*sources(ranks.runs[number], ranks.runs[shown.rank])]
    paths = dict(zip(ranks.paths[shown.rank], ranks.paths[number], strict=True))
    first, *middle, last = renamed(pieces, paths)
    instants, total = joined([first, *(middle[place] for place in places), last])
    names = {path.split(".")[0]: other.split(".")[0] for path, other in paths.items()}
    flops, touched, moved = (total.numbers[i : i + 4] for i in (0, 4, 8))
    loss = ranks.losses[number]
    return dataclasses.replace(
        shown,
        rank=number,
        instants=instants,
        by_path=tuple(row._replace(path=names.get(row.path, row.path)) for row in shown.by_path),
        sent=sent_by(total.records),
        moved=Moved(*moved),
        flops=Flops(*flops),
        touched=Touched(*touched),
        attention=tuple(total.attention.items()),
        pipeline=_share_of(loss),
    )


def _pipeline_of(run: Any) -> Pipeline | None:
    loss = getattr(getattr(run, "options", None), "loss_fn", None)
    return loss if isinstance(loss, Pipeline) else None


def _share_of(loss: Pipeline) -> InPipeline:
    return InPipeline(
        loss.num_micro_batches,
        activations_in_flight(loss.schedule)[loss.model_axes[0].group.rank],
        bubble(loss.schedule),
    )


def _size_and_rank(group: Group | int | None, mesh: Mapping[str, int] | None) -> tuple[int, int]:
    """Return the number of ranks, and the rank to plan."""
    if group is None and mesh is None:
        raise OptionError(
            "a plan is one of some ranks; got neither group nor mesh; pass the number of ranks, or "
            "mesh={'pp': 2, 'dp': 4}"
        )
    if group is None:
        # An axis of the size -1 takes the rest, of which nothing is known.
        return max(1, math.prod((mesh or {}).values())), 0
    if isinstance(group, Group):
        return group.size, group.rank
    return int(group), 0


@takes(
    recipe=FUNCTION,
    params=ANY,
    batch=ANY,
    group=GROUP_OR_SIZE,
    steps=integer(1),
    device=DEVICE,
)
def live_bytes(
    recipe: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int,
    *,
    steps: int = 2,
    device: torch.device | str = "cpu",
) -> Live:
    """Find the bytes that a rank holds at every moment of a step: the memory of :func:`plan`.

    Args:
        recipe: as in :func:`plan`.
        params: as in :func:`plan`.
        batch: as in :func:`plan`.
        group: as in :func:`plan`.
        steps: as in :func:`plan`.
        device: as in :func:`plan`.

    Returns:
        The bytes, by category and place.

    Raises:
        OptionError: no such rank, or no step.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> recipe = lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group, bucket_bytes=1)
        >>> found = zf.planner.live_bytes(recipe, params, torch.empty(8, 64), 8)
        >>> found.steady.device.params, found.peak.what, found.largest.gathered
        (4096, 'reduce_scatter of grads bucket 0: a in backward', 32768)
    """
    return Live(plan(recipe, params, batch, group, steps=steps, device=device).instants)
