"""A plan as data: memory, traffic and operations of one rank's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zfun.collectives import Record
from zfun.options import ANY, takes
from zfun.planner._parts import Live, peaks_of
from zfun.planner.plans._flops import Flops, Touched
from zfun.planner.plans._hardware import HARDWARE, Forecast, Hardware, StepWork, forecast, missing
from zfun.planner.plans._kept import PathBytes
from zfun.tables import html_table, in_bytes, in_columns


class Sent(NamedTuple):
    """The collectives of a step with one kind, one name and one axis.

    Attributes:
        kind: such as ``"all_gather"``.
        name: of the value: ``"params"``, ``"grads"``, ``"norm"`` and others.
        axis: the name of an axis of a mesh, such as ``"inner"`` or ``"tp"``; else ``""``.
        num_messages: the number of collectives.
        num_bytes: the bytes that the rank sends.
    """

    kind: str
    name: str
    axis: str
    num_messages: int
    num_bytes: int


def sent_by(log: Iterable[Record]) -> tuple[Sent, ...]:
    """Return the counts of collectives."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for entry in log:
        key = entry.kind, entry.name, entry.axis
        count, num_bytes = found.get(key, (0, 0))
        found[key] = count + 1, num_bytes + entry.sent_bytes
    return tuple(Sent(*key, *counts) for key, counts in found.items())


class Moved(NamedTuple):
    """Bytes that a step moves between the memories of one rank.

    Attributes:
        to_host: from the device to host memory.
        to_device: from host memory to the device.
        to_disk: written to a disk.
        from_disk: read from a disk.
    """

    to_host: int = 0
    to_device: int = 0
    to_disk: int = 0
    from_disk: int = 0


class InPipeline(NamedTuple):
    """The part of a rank in a pipeline.

    Attributes:
        num_micro_batches: of a step.
        in_flight: the most micro-batches of which the rank keeps activations at one time, over all
            of its stages.
        bubble: the share of a step in which a rank waits for others, if all stages take equally
            long and messages no time; see :func:`zfun.parallel.schedules.bubble`.
    """

    num_micro_batches: int
    in_flight: int
    bubble: float


@dataclass(frozen=True)
class Plan(Live):
    """The memory, the traffic and the operations of one rank's step, made by :func:`plan`.

    ``print`` shows tables, ``draw`` a picture.

    Attributes:
        instants: the bytes between steps, and each time that the step makes a buffer.
        size: the number of ranks.
        rank: the rank.
        by_path: bytes kept between steps, by the first part of the path, wherever they lie.
        sent: the collectives.
        moved: bytes between the device, host memory and the disk.
        flops: floating-point operations.
        touched: bytes that the operations of the loss read and write.
        attention: the kernels of :func:`torch.nn.functional.scaled_dot_product_attention` in
            forward, each with the number of calls.
        num_leaves: the leaves of the parameters.
        mesh: the name and the size of each axis, if the plan is one of a mesh.
        pipeline: the part of the rank in a pipeline, if there is one.
        stages: the plans of all ranks of the pipeline, as far as one rank's depends on them. Ranks
            along other axes do as much as these.
    """

    size: int
    rank: int
    by_path: tuple[PathBytes, ...]
    sent: tuple[Sent, ...]
    moved: Moved
    flops: Flops
    touched: Touched
    attention: tuple[tuple[str, int], ...] = ()
    num_leaves: int = 0
    mesh: tuple[tuple[str, int], ...] = ()
    pipeline: InPipeline | None = None
    stages: tuple[Plan, ...] = field(default=(), repr=False)

    def bytes_sent(self, name: str | None = None, *, axis: str | None = None) -> int:
        """Return the bytes that the rank sends in a step, of one name or along one axis."""
        return sum(
            sent.num_bytes
            for sent in self.sent
            if name in (None, sent.name) and axis in (None, sent.axis)
        )

    @takes(self=ANY, hardware=HARDWARE)
    def on(self, hardware: Hardware) -> Forecast:
        """Forecast the time of a step on a machine, from the work of each of its parts.

        Example:
            >>> import torch, zfun as zf
            >>> empty = lambda *shape: torch.empty(shape, device="meta")
            >>> loss = lambda p, x: torch.tanh(x @ p["w"]).sum()
            >>> make = lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group)
            >>> found = zf.plan(make, {"w": empty(512, 512)}, empty(64, 512), 8)
            >>> slow = zf.planner.Hardware(flops_per_s=1e12, network=1e9)
            >>> found.on(slow).bottleneck
            'network'
        """
        return forecast(self.work, hardware)

    @property
    def work(self) -> StepWork:
        """The work of a step, for each part of a machine."""
        held = self.steady
        on_device, elsewhere = (
            sum(place.masters + place.moments for place in places)
            for places in ((held.device,), (held.host, held.disk))
        )
        return StepWork(
            self.size,
            self.flops.total,
            {
                axis: self.bytes_sent(axis=axis)
                for axis in ("", "inner", "outer", *(sent.axis for sent in self.sent))
            },
            sum(sent.num_messages for sent in self.sent),
            max(self.moved.to_host, self.moved.to_device),
            self.moved.to_disk + self.moved.from_disk,
            on_device,
            elsewhere,
            self.touched.num_bytes,
            self.touched.num_ops,
            self.num_leaves,
            self.mesh,
            0.0 if self.pipeline is None else self.pipeline.bubble,
        )

    @takes(self=ANY, hardware=HARDWARE)
    def excess(self, hardware: Hardware) -> dict[str, float]:
        """Return the bytes that the step needs beyond each memory of a machine; empty if it fits.

        Example:
            >>> import torch, zfun as zf
            >>> loss = lambda p, x: (p["w"] * x).sum()
            >>> recipe = lambda group: zf.zero(0, loss, zf.optim.sgd(0.1), group)
            >>> found = zf.plan(recipe, {"w": torch.empty(512)}, torch.empty(512), 1)
            >>> found.excess(zf.planner.Hardware(flops_per_s=1e12, device_bytes=2048))
            {'device': 4312}
        """
        return missing(peaks_of(self), hardware)

    def draw(self, title: str | None = None) -> Any:
        """Draw the bytes by category over the moments of a step.

        Args:
            title: stands above the picture.

        Returns:
            A matplotlib figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is missing; ``pip install zfun[demo]``.
        """
        from zfun.planner.plans._picture import draw

        return draw(
            self.instants, title or f"The memory of rank {self.rank} of {self.size} in a step"
        )

    def __repr__(self) -> str:
        return (
            f"Plan(rank {self.rank} of {self.size}: "
            f"{in_bytes(self.steady.device.total)} between steps, "
            f"at most {in_bytes(self.peak.device.total)} on the device, "
            f"{in_bytes(self.bytes_sent())} sent, {self.flops.total:.3g} operations)"
        )

    def __str__(self) -> str:
        return "\n\n".join(in_columns(table) for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(
            html_table(repr(self) if number == 0 else "", rows[0], rows[1:])
            for number, rows in enumerate(self._tables())
        )

    def _tables(self) -> Iterator[list[tuple[str, ...]]]:
        yield self.rows()
        yield [
            ("collective", "of", "messages", "bytes sent"),
            *(
                (f"{s.kind} {s.axis}".strip(), s.name, f"{s.num_messages:,}", f"{s.num_bytes:,}")
                for s in self.sent
            ),
        ]
        if self.mesh:
            yield [
                ("axis", "ranks", "messages", "bytes sent"),
                *(
                    (
                        name,
                        f"{size:,}",
                        f"{sum(s.num_messages for s in self.sent if s.axis == name):,}",
                        f"{self.bytes_sent(axis=name):,}",
                    )
                    for name, size in self.mesh
                ),
            ]
        if self.pipeline is not None:
            yield [
                ("pipeline", "micro-batches", "in flight", "bubble"),
                (
                    "",
                    f"{self.pipeline.num_micro_batches:,}",
                    f"{self.pipeline.in_flight:,}",
                    f"{self.pipeline.bubble:.1%}",
                ),
            ]
        names = [part for part in ("params", "masters", "moments") if any(self._kept(part))]
        yield [
            ("kept for", *names),
            *((row.path, *(f"{getattr(row, part):,}" for part in names)) for row in self.by_path),
        ]
        yield [
            ("operations", *Flops._fields, "total"),
            ("", *(f"{n:,}" for n in (*self.flops, self.flops.total))),
        ]
        if self.attention:
            yield [("attention", "calls"), *((name, f"{n:,}") for name, n in self.attention)]
        if any(self.moved):
            yield [
                ("moved", *(field.replace("_", " ") for field in Moved._fields)),
                ("", *(f"{n:,}" for n in self.moved)),
            ]

    def _kept(self, part: str) -> list[int]:
        return [getattr(row, part) for row in self.by_path]
