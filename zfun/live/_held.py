"""What a plan says."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Held", "Live", "Moment"]


class Held(NamedTuple):
    """Bytes of one rank in one place, by what they are.

    Attributes:
        params: the parameters, frozen ones too; whole or this rank's part.
        gathered: gathered buckets, and what is made to send or to use them in another dtype or format.
        gradients: whole buckets of gradients, not summed over the ranks yet.
        reduced: gradients that are summed, or on their way to be: messages too, and what error feedback keeps of them for the next ones.
        optimizer: the optimizer's state, master weights included, and what its step makes on the way, as clipped gradients.
    """

    params: int = 0
    gathered: int = 0
    gradients: int = 0
    reduced: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Moment(NamedTuple):
    """What is held at one moment of a step.

    Attributes:
        what: what has just been made.
        device: bytes on the device.
        store: bytes in stores. On a CPU both are host memory.
    """

    what: str
    device: Held
    store: Held


class Live(NamedTuple):
    """What a step holds; ``print`` it. Made by :func:`live_bytes`.

    Attributes:
        kept: between steps.
        moments: each time a buffer is made, in order, and at the end of the step, while the old state is still there.
    """

    kept: Moment
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment at which most is on the device."""
        return max(self.moments, key=lambda moment: moment.device.total)

    @property
    def largest(self) -> Held:
        """The most of each on the device, each at its own worst moment."""
        return Held(*map(max, zip(*(moment.device for moment in self.moments), strict=True)))

    def __str__(self) -> str:
        header = ("", *Held._fields, "on the device", "in a store")
        named = [("between steps", self.kept), (f"peak: {self.peak.what}", self.peak)]
        rows = [header, *((name, *(f"{n:,}" for n in (*m.device, m.device.total, m.store.total))) for name, m in named)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in rows
        )
