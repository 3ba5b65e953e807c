"""A loss made of stages, which lie on the ranks of an axis.

[Note: pipelines]
:func:`pipeline` returns a loss that runs its micro-batches by a schedule. It has no gradient by
autograd, because a rank computes a part of it. A step of :func:`zfun.zero` therefore asks
:meth:`Pipeline.gradients`, and gives it what ``Zero.vjp`` is: a function that runs a stage on this
rank's parameters, in whatever placement, precision and store, and returns the way back. The sums of
gradients over micro-batches are those of :func:`zfun.accumulate`, in the order of the micro-batches
and with the same divisions, so a pipeline changes no bit.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import (
    AllReduce,
    Collective,
    Group,
    LeafRecord,
    Stream,
    check_same,
    gather_json,
    sum_group,
)
from zfun.errors import LeafError, OptionError
from zfun.flat import Flat
from zfun.layout import LeafSlot
from zfun.options import FUNCTION, GROUP, NAMES, TEXT, each, integer, takes
from zfun.parallel import _pipeline_run, schedules
from zfun.parallel._cuts import ModelAxis, ParallelLoss, as_stage, axes_inside, model_axes
from zfun.parallel._local import Spread
from zfun.parallel._pipeline_messages import Channel, pair_groups
from zfun.parallel._pipeline_tied import TiedLeaves, group_of, tied
from zfun.placement import Cut, Held
from zfun.transforms import WeightedMean, open_batch, scale_grads, split_batch
from zfun.transforms.grads._accumulate import times
from zfun.transforms.grads._value import reciprocal


class Pipeline(ParallelLoss):
    """The loss that :func:`pipeline` returns; see [Note: pipelines].

    Attributes:
        num_micro_batches: of a step.
        schedule: the actions of each rank.
        stages: those of this rank, by number.
        actions: those of this rank, with messages. A plan leaves out some that are like others.
        watch: a function that is called before each action, and with ``None`` after the last one.
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        axis: Group,
        schedule: schedules.Schedule,
        num_micro_batches: int,
        leaves: Sequence[Sequence[str]] | None,
    ) -> None:
        super().__init__(
            _refuse_call,
            [
                ModelAxis(axis, lambda path, leaf: Held(self._ranks_with(path))),
                *axes_inside(stages, functools.partial(self._spread_inside, stages)),
            ],
        )
        self.num_micro_batches = num_micro_batches
        self.schedule = schedule
        self._axis = axis
        self._named = leaves
        # Thousands of paths are found at once, and globs one by one.
        self._leaves = None if leaves is None else [_paths_and_globs(names) for names in leaves]
        self._rank_of = schedules.ranks_of_stages(schedule)
        self.stages = {
            stage: _pipeline_run.StageFunction(
                as_stage(fn, is_last=stage == len(stages) - 1),
                _picker(stage, leaves),
                _pipeline_run.takes_batch(stage, fn),
                is_first=stage == 0,
                is_last=stage == len(stages) - 1,
            )
            for stage, fn in enumerate(stages)
            if self._rank_of[stage] == axis.rank
        }
        self.actions = schedules.with_messages(schedule)[axis.rank]
        self.watch: Callable[[schedules.Action | None], object] | None = None
        # Made in the first step, because all ranks take part.
        self._channels: dict[tuple[int, str], Channel] = {}
        self._loss: Channel | None = None
        self._is_agreed = False
        # Of the ranks that hold a tied leaf.
        self._groups: dict[tuple[int, ...], Group] = {}

    def gradients(
        self,
        start: _pipeline_run.StartVjp,
        batch: Any,
        group: Group,
        slots: tuple[LeafSlot, ...],
        spreads: Mapping[str, Spread] | None,
        device: torch.device,
        loss_scale: float | Tensor,
        deliver: Callable[[Flat], Flat],
    ) -> tuple[Any, Any, Any]:
        """Run the schedule; every rank must call, with a batch that is equal along the axis.

        Args:
            start: runs the first half of a stage on this rank's parameters.
            batch: of these data ranks.
            group: the data ranks.
            slots: the leaves of this rank.
            spreads: how all leaves of the logical tree are spread, by path, if it is known.
            device: of the parameters.
            loss_scale: the factor of the loss in backward.
            deliver: sums gradients over the data ranks.

        Returns:
            The loss over all ranks and micro-batches, the gradients of this rank's leaves, and the
            second results of the loss (``None`` on ranks without the last stage).
        """
        batches = split_batch(batch, self.num_micro_batches)
        if not self._is_agreed:
            self._agree(batches, sum_group(group))
        if self._loss is None:
            self._connect(device)
        tied_leaves = self._tied_leaves(slots, spreads)
        sums = sum_group(group)
        results = _pipeline_run.PipelineStep(
            self.stages,
            len(self._rank_of),
            self._channels,
            start,
            batches,
            sums,
            loss_scale,
        ).run(self.actions, self.watch)
        loss = self._shared_loss(results, sums)
        grads, count = results.grads, self.num_micro_batches
        if count > 1 and isinstance(loss, WeightedMean):
            grads = times(grads, reciprocal(loss.weight))
        elif count > 1:
            grads = scale_grads(grads, 1.0 / count)
        auxes = [results.auxes[k] for k in sorted(results.auxes)]
        aux = auxes[0] if len(auxes) == count == 1 else auxes or None
        if tied_leaves.count:
            # The data ranks first: their sum may round by the place in a bucket, and copies of a
            # leaf lie in different places.
            grads = tied_leaves.sum(deliver(grads))
        return loss, grads, aux

    def forward(
        self, run: Callable[..., Any], batches: Sequence[Any], device: torch.device
    ) -> list[Any]:
        """Run the stages without backward, and return what the last one gives on its rank.

        Args:
            run: ``(stage, x, batch) -> out``, in place of the functions of the stages.
            batches: any number of micro-batches.
            device: where activations arrive.
        """
        if self._loss is None:
            self._connect(device)
        return _pipeline_run.forward_only(
            sorted(self.stages), len(self._rank_of), self._channels, run, batches
        )

    def _shared_loss(self, results: _pipeline_run.Results, sums: Group) -> Any:
        """Average the losses over micro-batches and data ranks, and send the mean to all stages."""
        assert self._loss is not None
        value: Any = None
        micro = range(self.num_micro_batches)
        if results.losses:
            # A plan runs some of the micro-batches only.
            mine = torch.stack([results.losses.get(k, results.losses[0]) for k in micro])
            call = Collective(AllReduce(), "loss", "loss", Stream.CONTROL)
            losses = sums.start(call, mine).wait()
            if results.weights:
                given = [results.weights.get(k, results.weights[0]) for k in micro]
                weights = torch.stack(given).to(losses.dtype)
                value = {"total": losses.sum(), "weight": weights.sum()}
            else:
                value = {"total": (losses * (1.0 / sums.size)).sum() / len(micro), "weight": None}
        if self._axis.rank == self._rank_of[-1]:
            for work in self._loss.send(value, "loss", "loss", lambda path: False):
                work.wait()
        else:
            value = self._loss.receive("loss", "loss")()
        total, weight = value["total"], value["weight"]
        return total if weight is None else WeightedMean(total, weight)

    def _agree(self, batches: Sequence[Any], sums: Group) -> None:
        """Refuse ranks with other schedules or batches before they wait for each other."""
        text = schedules.write_csv(self.schedule)
        plan = {
            "schedule": f"one of {len(self._rank_of)} stages and {self.num_micro_batches} "
            f"micro-batches, checksum {zlib.crc32(text.encode()):08x}",
            "leaves": self._named,
        }
        records = [LeafRecord.of_option(name, value) for name, value in plan.items()]
        for group in (self._axis, sums):
            if group.size > 1:
                check_same(records, group, "plan of a pipeline", kind="option")
        # In the first step only, which is where a sampler by global ranks shows.
        records = [
            LeafRecord(f"{path} of micro-batch {k}", "a tensor", str(ops.fingerprint(leaf)))
            for k, parts in enumerate(map(open_batch, batches))
            for path, leaf in zip(parts.paths, parts.leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta
        ]
        check_same(records, self._axis, "batch along the axis of a pipeline", kind="tensor")
        self._is_agreed = True

    def _connect(self, device: torch.device) -> None:
        """Make the channels of this rank, over groups of two ranks."""
        axis, rank_of = self._axis, self._rank_of
        ends = [*itertools.pairwise(rank_of)]
        groups = pair_groups(axis, sorted({(min(x), max(x)) for x in ends if x[0] != x[1]}))
        for stage, (first, second) in enumerate(ends):
            if first == second or axis.rank not in (first, second):
                continue
            group = groups[second if axis.rank == first else first]
            # The lower rank is rank 0 of the two.
            there = Channel(group, int(first > second), "activations", device)
            back = Channel(group, int(second > first), "cotangents", device)
            self._channels |= {
                (stage, "SEND_F"): there,
                (stage + 1, "RECV_F"): there,
                (stage + 1, "SEND_B"): back,
                (stage, "RECV_B"): back,
            }
        self._loss = Channel(axis, rank_of[-1], "loss", device)

    def _tied_leaves(
        self, slots: Sequence[LeafSlot], spreads: Mapping[str, Spread] | None
    ) -> TiedLeaves:
        """Return the tied leaves of this rank, and make groups that all ranks know to be needed."""
        known = [slot.spread for slot in slots] if spreads is None else [*spreads.values()]
        wanted = {kind.ranks for kind in map(tied, known) if kind is not None}
        if spreads is None:
            # A state that another loop has made: each rank knows its own leaves only.
            sides = gather_json(sorted(wanted), self._axis, "tied leaves")
            wanted = {tuple(ranks) for side in sides for ranks in side}
        for ranks in sorted(wanted - self._groups.keys()):
            self._groups[ranks] = group_of(self._axis, [ranks])
        return TiedLeaves(slots, self._groups)

    def _ranks_with(self, path: str) -> tuple[int, ...]:
        return tuple(sorted({self._rank_of[stage] for stage in self._stages_with(path)}))

    def _spread_inside(
        self, stages: Sequence[Callable[..., Any]], group: Group, path: str, leaf: Any
    ) -> Cut | Held | None:
        """Return how the stages that use a leaf spread it over a model axis of theirs."""
        inside = path if self._leaves is not None else path.partition(".")[2] or "."
        found = []
        for stage in self._stages_with(path):
            rules = [x.rule for x in model_axes(stages[stage]) if x.group is group]
            found.append(rules[0](inside, leaf) if rules else None)
        if len(set(found)) > 1:
            raise OptionError(
                f"stages that use one leaf spread it over an axis in one way; got {found} for "
                f"leaf {path!r}; give it one style in all of them",
                leaf=path,
            )
        return found[0]

    def _stages_with(self, path: str) -> list[int]:
        """Return the stages that use a leaf."""
        count = len(self._rank_of)
        if self._leaves is None:
            name = path.split(".", maxsplit=1)[0]
            stages = [int(name)] if name.isdecimal() and int(name) < count else []
        else:
            stages = [
                stage
                for stage, (paths, globs) in enumerate(self._leaves)
                if path in paths or any(fnmatch.fnmatchcase(path, glob) for glob in globs)
            ]
        if not stages:
            raise LeafError(
                "every leaf belongs to a stage of a pipeline; got leaf "
                f"{path!r} of none of {count} stages; "
                + (
                    "pass a list of one tree for each stage, or leaves= with the paths of each"
                    if self._leaves is None
                    else "add its path to leaves="
                ),
                leaf=path,
            )
        return stages


@takes(
    stages=each(FUNCTION, "a sequence of functions", "[first, last]", least=1),
    axis=GROUP,
    schedule=TEXT | schedules.ACTIONS,
    num_micro_batches=integer(1),
    leaves=each(NAMES, "a sequence of lists of paths", "[['embed.*'], ['head.*']]") | None,
)
def pipeline(
    stages: Sequence[Callable[..., Any]],
    axis: Group,
    schedule: str | schedules.Schedule = "1f1b",
    *,
    num_micro_batches: int,
    leaves: Sequence[Sequence[str]] | None = None,
) -> Pipeline:
    """Return a loss whose stages lie on the ranks of an axis, for :func:`zfun.zero`.

    A step cuts the batch in micro-batches, which go through the stages one after the other. It has
    the bits of a step of ``zf.zero`` over the data axes alone with ``num_micro_batches``.

    Args:
        stages: functions ``(params, x) -> x``. The first one gets the micro-batch as ``x``, and the
            last one returns the loss, as a loss of :func:`zfun.zero` does. A function of three
            arguments, ``(params, x, batch)``, gets the micro-batch too; a third argument with a
            default must have the name ``batch`` for that. What a stage returns is a
            tensor, or tuples, lists and dicts of tensors. A stage may be a loss of
            :func:`zfun.tensor_parallel` over another axis of the mesh, and all stages may be losses
            of :func:`zfun.parallel.expert_parallel`, whose ranks have batches of their own.
        axis: the ranks of the pipeline, such as ``mesh["pp"]``; they get the same batches. Stage s
            lies on rank ``s % axis.size``, unless the schedule says otherwise.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"zero_bubble"``, or the actions of each rank, as
            :mod:`zfun.parallel.schedules` makes and reads them. ``"1f1b"`` with several stages on a
            rank is the interleaved schedule.
        num_micro_batches: a divisor of the batch size; see :func:`zfun.accumulate`.
        leaves: for each stage the globs of the paths of its leaves. A stage gets the parameters of
            its rank, with holes (``None``) for those of others, and a leaf of several stages, such
            as a tied embedding, gets the sum of their gradients. By default the parameters are a
            list with one tree for each stage (or a dict with the keys ``"0"``, ``"1"``, ...), and
            each stage gets its own tree.

    Returns:
        The loss. ``step`` of :func:`zfun.zero` returns its value on all ranks, and the second
        result of the last stage on the rank of that stage.

    Raises:
        OptionError: stages that do not fit the axis or the schedule; an expert axis of some only.
        LeafError: from ``init``, for a leaf of no stage.
        SpecMismatch: from ``step``, for ranks with other plans or batches, or a stage whose results
            change their shapes.

    Example:
        >>> import zfun as zf
        >>> first = lambda params, x: params["w"] * x
        >>> last = lambda params, x: (params["w"] * x).mean()
        >>> def main(group):
        ...     mesh = zf.mesh(group, pp=2, dp=1)
        ...     loss = zf.pipeline([first, last], mesh["pp"], num_micro_batches=2)
        ...     return [str(action) for action in loss.schedule[group.rank]]
        >>> zf.simulate(2, main)
        [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]

    After Huang et al., "GPipe" (2019), and Narayanan et al., "PipeDream" (2019).
    """
    made = _schedule_of(schedule, len(stages), axis, num_micro_batches)
    if leaves is not None and len(leaves) != len(stages):
        raise OptionError(
            f"leaves has the paths of each stage; got {len(leaves)} lists for {len(stages)} "
            "stages; pass one list for each"
        )
    return Pipeline(list(stages), axis, made, num_micro_batches, leaves)


def _schedule_of(
    schedule: str | Sequence[Sequence[schedules.Action]],
    num_stages: int,
    axis: Group,
    num_micro_batches: int,
) -> schedules.Schedule:
    """Return the actions of each rank, which fit the stages and the axis."""
    if isinstance(schedule, str):
        if schedule not in schedules.BY_NAME:
            raise OptionError(
                f"schedule is one of {', '.join(map(repr, schedules.BY_NAME))}, or the actions of "
                f"each rank; got {schedule!r}; zfun.parallel.schedules makes others"
            )
        if num_stages % axis.size:
            raise OptionError(
                f"each rank of a pipeline has equally many stages; got {num_stages} stages for "
                f"{axis.size} ranks; cut the model in a multiple of {axis.size}"
            )
        return schedules.BY_NAME[schedule](axis.size, num_micro_batches, num_stages // axis.size)
    schedules.check_schedule(schedule)
    made = tuple(tuple(actions) for actions in schedule)
    found = {
        "ranks": (len(made), axis.size),
        "stages": (len(schedules.ranks_of_stages(made)), num_stages),
        "micro-batches": (
            1 + max(action.micro_batch for actions in made for action in actions),
            num_micro_batches,
        ),
    }
    for name, (got, wanted) in found.items():
        if got != wanted:
            raise OptionError(
                f"a schedule is one of the {name} of its pipeline; got one of {got} {name} for a "
                f"pipeline of {wanted}; make it for {wanted}"
            )
    return made


def _picker(stage: int, leaves: Any) -> Callable[[Any], Any]:
    """Return the function from the parameters of a rank to those of a stage."""

    def own(params: Any) -> Any:
        if isinstance(params, Mapping):
            return params[str(stage)] if str(stage) in params else params[stage]
        return params[stage]

    return own if leaves is None else lambda params: params


def _paths_and_globs(names: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    globs = [name for name in names if any(x in name for x in "*?[")]
    return frozenset(names), globs


def _refuse_call(params: Any, batch: Any) -> NoReturn:
    del params, batch
    raise OptionError(
        "a pipeline computes its loss in step() of zf.zero(), with the other ranks of its axis; "
        "got a call of the loss alone; pass it to zf.zero() as loss_fn"
    )
