"""A machine as data, and the time that a step takes there."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zfun.errors import OptionError
from zfun.options import instance, integer, number, takes
from zfun.planner._parts import PLACES

_SIZE = number(0, infinite=True, example="80e9")
_RATE = number(above=0, infinite=True, example="1e12")


@takes(
    flops_per_s=_RATE,
    network=_RATE,
    host_link=_RATE,
    disk=_RATE,
    latency_s=number(0),
    memory=_RATE,
    host_memory=_RATE,
    device_bytes=_SIZE,
    host_bytes=_SIZE,
    disk_bytes=_SIZE,
    local_network=_RATE | None,
    ranks_per_host=integer(1) | None,
    touch=_RATE,
    op_s=number(0),
    message_s=number(0),
    leaf_s=number(0),
    step_s=number(0),
    least_flops_per_s=_RATE | None,
)
@dataclass(frozen=True, slots=True)
class Hardware:
    """The rates and sizes of a machine, as one rank sees them; an infinite rate costs no time.

    ``zfun hw-bench`` measures the rates of a machine.

    Attributes:
        flops_per_s: floating-point operations per second of a device, as measured in a large
            matrix product.
        network: bytes per second that a rank sends to other ranks; with ``ranks_per_host``, to
            ranks of other hosts.
        host_link: bytes per second between the device and host memory, in each direction.
        disk: bytes per second of reads and writes, together.
        latency_s: seconds that each collective takes beside its bytes.
        memory: bytes per second that an update reads and writes in the memory of the device.
        host_memory: the same in host memory, where optimizers in a store take their steps.
        device_bytes: the memory of the device.
        host_bytes: the host memory for one rank.
        disk_bytes: the room on a disk for one rank.
        local_network: bytes per second that a rank sends to ranks of its host; by default
            ``network``.
        ranks_per_host: ranks that share a host, numbered one host after the other. The inner axis
            of :func:`zfun.split` lies inside a host, and so does an axis of ``mesh=`` whose ranks
            are neighbours enough.
        touch: bytes per second that the operations of a loss read and write, at the slowest. These
            count in the upper bound of a step.
        op_s: seconds that each operation of a loss takes beside its bytes, in the upper bound.
        message_s: seconds that a rank works for each message, with the update of its bucket, in the
            upper bound.
        leaf_s: seconds that a rank works for each leaf of the parameters, in the upper bound.
        step_s: seconds of a step that has nothing to do, in the upper bound.
        least_flops_per_s: as ``flops_per_s``, in the slowest products of a step, for the upper
            bound; by default the same.

    Example:
        >>> Hardware(flops_per_s=300e12, network=25e9, host_link=25e9).disk
        inf
    """

    flops_per_s: float
    network: float = math.inf
    host_link: float = math.inf
    disk: float = math.inf
    latency_s: float = 0.0
    memory: float = math.inf
    host_memory: float = math.inf
    device_bytes: float = math.inf
    host_bytes: float = math.inf
    disk_bytes: float = math.inf
    local_network: float | None = None
    ranks_per_host: int | None = None
    touch: float = math.inf
    op_s: float = 0.0
    message_s: float = 0.0
    leaf_s: float = 0.0
    step_s: float = 0.0
    least_flops_per_s: float | None = None

    def save(self, path: str | Path) -> None:
        """Write the description as JSON, without infinite values."""
        finite = {
            name: x
            for name, x in dataclasses.asdict(self).items()
            if x is not None and math.isfinite(x)
        }
        Path(path).write_text(json.dumps(finite, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read a description that :meth:`save` has written.

        Raises:
            OptionError: the file is not a description of hardware.
        """
        try:
            found = json.loads(Path(path).read_text())
            return cls(**found)
        except (OSError, ValueError, TypeError) as error:
            raise OptionError(
                f"a description of hardware is a JSON object of the fields of zf.planner.Hardware; "
                f"got {str(path)!r}: {error}; write the file with zfun hw-bench"
            ) from error


HARDWARE = instance(
    Hardware, "a zf.planner.Hardware", "zf.planner.Hardware(flops_per_s=300e12, network=25e9)"
)


class StepWork(NamedTuple):
    """The work of a rank's step, for each part of a machine.

    Attributes:
        num_ranks: the ranks of the group.
        flops: floating-point operations.
        sent: bytes that the rank sends along each axis of a mesh, ``""`` for a group without axes.
            ``"inner"`` lies inside a host, ``"outer"`` does not, and ``mesh`` tells of others.
        num_messages: the collectives.
        copied: bytes between the device and host memory, of the busier direction.
        disk: bytes written to and read from a disk.
        state_on_device: bytes of the optimizer's state on the device.
        state_elsewhere: bytes of the optimizer's state in stores.
        touched: bytes that the operations of the loss read and write.
        num_ops: the operations of the loss.
        num_leaves: the leaves of the parameters.
        mesh: the name and the size of each axis; neighbouring ranks lie along the last one.
        bubble: the share of a step in which a rank of a pipeline waits for others.
    """

    num_ranks: int
    flops: int
    sent: Mapping[str, int]
    num_messages: int
    copied: int
    disk: int
    state_on_device: int
    state_elsewhere: int
    touched: int
    num_ops: int
    num_leaves: int
    mesh: Sequence[tuple[str, int]] = ()
    bubble: float = 0.0


class Forecast(NamedTuple):
    """The time of a step, from the work of each part of a machine.

    Matrix products, convolutions and attention count as computation. An update counts four times
    the bytes of the optimizer's state, as AdamW reads and writes these and the parameters. The
    parts may work at the same time, so a real step lies between :attr:`at_least_s`, where
    everything overlaps at the full rates, and :attr:`at_most_s`, where nothing does, products
    are slow, and every operation of the loss costs its bytes and a start.

    Attributes:
        compute_s: seconds of computation.
        network_s: seconds of collectives, where every message of a group without axes crosses
            hosts.
        host_link_s: seconds of copies between the device and host memory.
        disk_s: seconds of reads and writes.
        update_s: seconds of the optimizer's step.
        loss_s: seconds that the operations of the loss and the work of the rank for its messages
            and leaves may take beside ``compute_s``.
        least_network_s: seconds of collectives that enter each host once.
        bubble: the share of a step in which the stages of a pipeline wait for each other.
    """

    compute_s: float
    network_s: float
    host_link_s: float
    disk_s: float
    update_s: float = 0.0
    loss_s: float = 0.0
    least_network_s: float | None = None
    bubble: float = 0.0

    @property
    def at_least_s(self) -> float:
        """Seconds of a step in which everything overlaps."""
        least = self.network_s if self.least_network_s is None else self.least_network_s
        busy = max(self.compute_s / (1.0 - self.bubble), least, self.host_link_s, self.disk_s)
        return max(busy, self.update_s)

    @property
    def at_most_s(self) -> float:
        """Seconds of a step in which nothing overlaps."""
        # Stages wait as long as others take for their parts of it.
        return sum(self[:6]) / (1.0 - self.bubble)  # type: ignore[arg-type]

    @property
    def bottleneck(self) -> str:
        """Compute, network, host link, disk, update or loss, whichever works longest."""
        longest = max(self._fields[:6], key=lambda field: getattr(self, field))
        return longest.removesuffix("_s").replace("_", " ")

    @property
    def efficiency(self) -> float:
        """The share of computation in a step in which nothing overlaps."""
        return self.compute_s / self.at_most_s if self.at_most_s else 1.0


def missing(needed: Iterable[int], hardware: Hardware) -> dict[str, float]:
    """Return the bytes beyond each memory of a machine, by place."""
    sizes = hardware.device_bytes, hardware.host_bytes, hardware.disk_bytes
    excess = (num_bytes - size for num_bytes, size in zip(needed, sizes, strict=True))
    return {place: n for place, n in zip(PLACES, excess, strict=True) if n > 0}


def forecast(work: StepWork, hardware: Hardware) -> Forecast:
    """Return the time of a step.

    Example:
        >>> machine = Hardware(flops_per_s=1e12, network=1e9, local_network=9e9, ranks_per_host=8)
        >>> work = StepWork(16, 10**12, {"": 9 * 10**9}, 0, 0, 0, 0, 0, 0, 0, 0)
        >>> found = forecast(work, machine)
        >>> found.network_s, found.least_network_s, found.at_most_s
        (9.0, 1.125, 10.0)
    """
    inside = hardware.network if hardware.local_network is None else hardware.local_network
    per_host = hardware.ranks_per_host or 1
    starts = work.num_messages * hardware.latency_s
    flat, across = work.sent.get("", 0), work.sent.get("outer", 0) / hardware.network
    within = work.sent.get("inner", 0) / inside
    for axis, num_bytes in work.sent.items():
        if axis not in ("", "inner", "outer"):
            # Groups of another size lie across hosts too.
            is_inside = work.num_ranks <= per_host or per_host % _extent(axis, work) == 0
            within += num_bytes / (inside if is_inside else min(hardware.network, inside))
    # Messages of a group without axes stay in a host, or enter each host at least once, in parts
    # that the ranks of the host share.
    most = flat / inside if work.num_ranks <= per_host else flat / min(hardware.network, inside)
    least = most
    if work.num_ranks > per_host:
        least = max(flat / per_host / hardware.network, flat / inside)
    compute_s = work.flops / hardware.flops_per_s
    return Forecast(
        compute_s,
        most + across + within + starts,
        work.copied / hardware.host_link,
        work.disk / hardware.disk,
        4 * work.state_on_device / hardware.memory
        + 4 * work.state_elsewhere / hardware.host_memory,
        max(0.0, work.flops / (hardware.least_flops_per_s or hardware.flops_per_s) - compute_s)
        + work.touched / hardware.touch
        + work.num_ops * hardware.op_s
        + work.num_messages * hardware.message_s
        + work.num_leaves * hardware.leaf_s
        + hardware.step_s,
        min(least, most) + across + within + starts,
        work.bubble,
    )


def _extent(axis: str, work: StepWork) -> int:
    """Return how many neighbours in rank order the ranks of an axis lie among."""
    names = [name for name, _ in work.mesh]
    sizes = [size for _, size in work.mesh]
    return math.prod(sizes[names.index(axis) :]) if axis in names else work.num_ranks
