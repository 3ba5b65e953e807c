"""A machine as data, and the time that a step takes there."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zfun.errors import OptionError
from zfun.options import instance, number, takes

__all__ = ["HARDWARE", "Forecast", "Hardware"]

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
)
@dataclass(frozen=True, slots=True)
class Hardware:
    """The rates and sizes of a machine, as one rank sees them; an infinite rate costs no time.

    ``zfun hw-bench`` measures the rates of a machine.

    Attributes:
        flops_per_s: floating-point operations per second of a device, as measured in a large
            matrix product.
        network: bytes per second that a rank sends to other ranks.
        host_link: bytes per second between the device and host memory, in each direction.
        disk: bytes per second of reads and writes, together.
        latency_s: seconds that each collective takes beside its bytes.
        memory: bytes per second that an update reads and writes in the memory of the device.
        host_memory: the same in host memory, where optimizers in a store take their steps.
        device_bytes: the memory of the device.
        host_bytes: the host memory for one rank.
        disk_bytes: the room on a disk for one rank.

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

    def save(self, path: str | Path) -> None:
        """Write the description as JSON, without infinite values."""
        finite = {name: x for name, x in dataclasses.asdict(self).items() if math.isfinite(x)}
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


class Forecast(NamedTuple):
    """The time of a step, from the work of each part of a machine.

    Matrix products, convolutions and attention count as computation. An update counts four times
    the bytes of the optimizer's state, as AdamW reads and writes these and the parameters. All else
    is free. The parts may work at the same time, so a real step lies between :attr:`at_least_s`,
    where everything overlaps, and :attr:`at_most_s`, where nothing does.

    Attributes:
        compute_s: seconds of computation.
        network_s: seconds of collectives.
        host_link_s: seconds of copies between the device and host memory.
        disk_s: seconds of reads and writes.
        update_s: seconds of the optimizer's step.
    """

    compute_s: float
    network_s: float
    host_link_s: float
    disk_s: float
    update_s: float = 0.0

    @property
    def at_least_s(self) -> float:
        """Seconds of a step in which everything overlaps."""
        return max(self)

    @property
    def at_most_s(self) -> float:
        """Seconds of a step in which nothing overlaps."""
        return sum(self)

    @property
    def bottleneck(self) -> str:
        """The part that works longest, which is compute, network, host link, disk or update."""
        longest = max(self._fields, key=lambda field: getattr(self, field))
        return longest.removesuffix("_s").replace("_", " ")

    @property
    def efficiency(self) -> float:
        """The share of computation in a step in which nothing overlaps."""
        return self.compute_s / self.at_most_s if self.at_most_s else 1.0
