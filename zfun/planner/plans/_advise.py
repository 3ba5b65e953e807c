"""Advice: the fastest composition that fits a machine.

[Note: the ladder]
The rungs follow the usual advice for a model that runs out of memory: recompute, then shard more,
then offload more, then lower the defaults, the precision, and use a disk. Each rung costs speed, so
the climb ends at the first rung that fits. Then faster variants of that rung are tried, and larger
batches.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import optim, stores, tree
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.options import ANY, FUNCTION, instance, one_of, takes
from zfun.planner.plans._hardware import HARDWARE, Forecast, Hardware
from zfun.planner.plans._plan import GROUP_OR_SIZE, plan
from zfun.planner.plans._record import Plan
from zfun.recipes import Precision, zero
from zfun.tables import html_table, in_bytes, in_columns
from zfun.transforms import ScheduleOptions, map_batch
from zfun.typing import Loss

__all__ = ["Advice", "Candidate", "Model", "Rung", "advise"]

_MOST_DOUBLINGS = 4


@takes(
    loss=FUNCTION,
    params=ANY,
    batch=ANY,
    optimizer=ANY,
    recomputed=FUNCTION | None,
    precision=instance(Precision, "a zf.Precision", "zf.Precision(...)")
    | one_of(torch.bfloat16, torch.float16)
    | None,
)
@dataclass(frozen=True)
class Model:
    """A model to be trained, for :func:`advise`.

    Attributes:
        loss: the loss.
        params: a tree of tensors; ``meta`` tensors will do.
        batch: the batch of a rank.
        optimizer: the optimizer.
        recomputed: the same loss with recomputed blocks, if there is one.
        precision: of all compositions; by default mixed precision is a rung of the ladder.
    """

    loss: Loss
    params: tree.Tree
    batch: Any
    optimizer: Any = dataclasses.field(default_factory=lambda: optim.adamw(1e-4))
    recomputed: Loss | None = None
    precision: torch.dtype | Precision | None = None


class Candidate(NamedTuple):
    """The choices of a rung.

    Attributes:
        stage: of :func:`zfun.zero`.
        recomputed: whether blocks are recomputed.
        offloaded: the parts in a store.
        on_disk: whether the store is a disk, not host memory.
        lean: whether buckets are small, and nothing is gathered ahead.
        precision: mixed precision.
    """

    stage: int
    recomputed: bool = False
    offloaded: tuple[str, ...] = ()
    on_disk: bool = False
    lean: bool = False
    precision: torch.dtype | Precision | None = None

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}"]
        if self.recomputed:
            words.append("recomputed")
        if self.offloaded:
            place = "on disk" if self.on_disk else "in host memory"
            words.append(f"{' and '.join(self.offloaded)} {place}")
        if self.lean:
            words.append("small buckets")
        if self.precision is not None:
            words.append("mixed precision")
        return ", ".join(words)

    def of(self, model: Model, group: Group) -> Any:
        """Return the functions of a model under these choices."""
        loss = model.recomputed if self.recomputed and model.recomputed else model.loss
        # An abstract tensor is not written, so that any directory will do.
        store: Any = stores.nvme(tempfile.gettempdir()) if self.on_disk else stores.host(pin=False)
        lean = self.lean and self.stage == 3
        return zero(
            self.stage,
            loss,
            model.optimizer,
            group,
            precision=self.precision,
            offload=stores.Offload(**dict.fromkeys(self.offloaded, store)),
            schedule=ScheduleOptions(prefetch=0) if lean else ScheduleOptions(),
            bucket_bytes=2**20 if self.lean else DEFAULT_BUCKET_BYTES,
        )


class Rung(NamedTuple):
    """One composition that was tried.

    Attributes:
        composition: the choices.
        why: the reason to try the composition.
        plan: the plan of a step.
        forecast: the time of a step.
        excess: the bytes beyond each memory of the machine.
    """

    composition: Candidate
    why: str
    plan: Plan
    forecast: Forecast
    excess: dict[str, float]

    @property
    def verdict(self) -> str:
        """The words ``fits``, or the bytes that are missing."""
        if not self.excess:
            return "fits"
        return ", ".join(
            f"{in_bytes(int(n))} too much: {place}" for place, n in self.excess.items()
        )


@dataclass(frozen=True)
class Advice:
    """The compositions that :func:`advise` has tried; ``print`` shows a table.

    Attributes:
        rungs: in the order in which these were tried.
        best: the one that fits with the shortest step, or ``None``.
        batch_factor: a batch of so many times as many rows fits too.
        hints: steps that need no plan.
    """

    rungs: tuple[Rung, ...]
    best: Rung | None
    batch_factor: int
    hints: tuple[str, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table, the header first.

        Example:
            >>> Advice((), None, 1, ()).rows()[0]
            ('', 'device', 'host', 'disk', 's', 'bottleneck', 'verdict', 'because')
        """
        header = ("", "device", "host", "disk", "s", "bottleneck", "verdict", "because")
        return [header, *map(self._row, self.rungs)]

    def _row(self, rung: Rung) -> tuple[str, ...]:
        found, time = rung.plan, rung.forecast
        peaks = (getattr(found.peak_of(place), place).total for place in ("device", "host", "disk"))
        return (
            f"{'* ' if rung is self.best else ''}{rung.composition}",
            *(in_bytes(peak) for peak in peaks),
            f"{time.at_most_s:.3g}",
            time.bottleneck,
            rung.verdict,
            rung.why,
        )

    def __str__(self) -> str:
        chosen = f"take {self.best.composition}" if self.best else "no composition fits"
        return "\n".join([in_columns(self.rows()), "", chosen, *self.hints])

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        return html_table(str(self.best.composition) if self.best else "none fits", header, rows)


@takes(
    model=instance(Model, "a zf.planner.Model", "zf.planner.Model(loss_fn, params, batch)"),
    hardware=HARDWARE,
    group=GROUP_OR_SIZE,
)
def advise(model: Model, hardware: Hardware, group: Group | int) -> Advice:
    """Find the fastest composition that fits a machine; see [Note: the ladder].

    Args:
        model: the loss, the parameters and a batch.
        hardware: rates and sizes; ``device_bytes`` at least should be given.
        group: the ranks, as in :func:`plan`.

    Returns:
        All that was tried, each with the reason, and the best.

    Raises:
        OptionError: the hardware has no limit, so everything fits.

    Example:
        >>> empty = lambda *shape: torch.empty(shape, device="meta")
        >>> loss = lambda p, x: torch.tanh(x @ p["up"] @ p["down"]).sum()
        >>> params = {"up": empty(256, 1024), "down": empty(1024, 256)}
        >>> machine = Hardware(flops_per_s=1e12, network=1e9, host_link=1e9, device_bytes=9e6)
        >>> found = advise(Model(loss, params, empty(8, 256)), machine, 4)
        >>> found.best.plan.peak.device.total <= 9e6
        True
    """
    if min(hardware.device_bytes, hardware.host_bytes, hardware.disk_bytes) == float("inf"):
        raise OptionError(
            "advise() compares the memory of a step with that of a machine; got hardware without "
            "limits; pass zf.planner.Hardware(..., device_bytes=80e9)"
        )

    def tried(composition: Candidate, why: str, batch: Any = model.batch) -> Rung:
        make = lambda group: composition.of(model, group)
        found = plan(make, model.params, batch, group, device="meta")
        return Rung(composition, why, found, found.on(hardware), found.excess(hardware))

    rungs: list[Rung] = []
    for composition, why in _ladder(model):
        rungs.append(tried(composition, why))
        if not rungs[-1].excess:
            break
    hints = ["lower the defaults of generation, such as the width of a beam"]
    if rungs[-1].excess:
        hints.append("add ranks, because the shards of the state shrink with their number")
        return Advice(tuple(rungs), None, 1, tuple(hints))
    for composition in _faster(rungs[-1].composition):
        if composition not in [rung.composition for rung in rungs]:
            rungs.append(tried(composition, "may be faster than the rung that fits"))
    best = min(
        (rung for rung in rungs if not rung.excess), key=lambda rung: rung.forecast.at_most_s
    )
    factor = 1
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        if tried(best.composition, "", _longer(model.batch, 2**doubling)).excess:
            break
        factor = 2**doubling
    if factor > 1:
        hints.append(f"raise the batch: {factor} times as many rows fit")
    hints.append("tune bucket_bytes, prefetch and reuse_distance by measured steps")
    return Advice(tuple(rungs), best, factor, tuple(hints))


def _ladder(model: Model) -> Iterator[tuple[Candidate, str]]:
    """Yield the rungs, from the fastest to the leanest, each with the reason."""
    has = model.recomputed is not None
    first = Candidate(1, precision=model.precision)
    yield first, "shards the optimizer's state at no cost in messages"
    base = first._replace(recomputed=has)
    if has:
        yield base, "keeps the inputs of blocks in place of all activations"
    yield base._replace(stage=2), "shards the gradients too"
    stored = base._replace(stage=2, offloaded=("optimizer",))
    yield stored, "keeps the optimizer's state off the device"
    third = base._replace(stage=3)
    yield third, "shards the parameters too, for half as many messages again"
    yield third._replace(offloaded=("params",)), "keeps the shards of parameters off the device"
    third = third._replace(offloaded=("params", "optimizer"))
    yield third, "keeps the whole state off the device"
    third = third._replace(lean=True)
    yield third, "gathers less at a time"
    if model.precision is None:
        third = third._replace(precision=torch.bfloat16)
        yield third, "halves the activations and the gathered parameters"
    yield third._replace(on_disk=True), "keeps the state out of host memory too"


def _faster(found: Candidate) -> Iterator[Candidate]:
    """Yield variants of a composition that fits, with one cost less."""
    yield found._replace(recomputed=False)
    if found.offloaded:
        yield found._replace(offloaded=(), on_disk=False)
        yield found._replace(offloaded=("optimizer",), on_disk=False)
    if found.stage == 3:
        yield found._replace(
            stage=2, offloaded=tuple(part for part in found.offloaded if part != "params")
        )


def _longer(batch: Any, factor: int) -> Any:
    def repeat(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return leaf
        return torch.empty((factor * len(leaf), *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return map_batch(lambda leaf: tree.map(repeat, leaf), batch)
