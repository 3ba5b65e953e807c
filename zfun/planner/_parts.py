"""The bytes of a rank by the parts of a training step, at one moment and over a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zfun.tables import html_table, in_bytes, in_columns

PLACES = ("device", "host", "disk")


class Bytes(NamedTuple):
    """Bytes in one place, by category.

    Attributes:
        params: the parameters, frozen ones too, whole or this rank's shard.
        masters: wide copies of narrow parameters.
        moments: the rest of the optimizer's state.
        grads: gradients of activations, of leaves and of buckets.
        gathered: gathered buckets and their casts.
        communication: messages: gradients on the way to a sum, encoded values.
        activations: everything else that the loss makes, and makes again in backward.
        staging: copies on the way between the device and host memory.
        work: everything else, such as the pieces that an optimizer copies.
    """

    params: int = 0
    masters: int = 0
    moments: int = 0
    grads: int = 0
    gathered: int = 0
    communication: int = 0
    activations: int = 0
    staging: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        """The sum over the categories."""
        return sum(self)


class Instant(NamedTuple):
    """The bytes at one moment.

    Attributes:
        what: the operation that has just made a buffer.
        device: bytes where the loss is computed.
        host: bytes in host memory, where that is another place.
        disk: bytes that stores keep on a disk.
    """

    what: str
    device: Bytes
    host: Bytes = Bytes()
    disk: Bytes = Bytes()


@dataclass(frozen=True)
class Live:
    """The bytes of a rank in the course of a step, made by :func:`live_bytes`.

    Attributes:
        instants: between steps, each time that the step makes a buffer, in order, and at the end,
            beside the old state.
    """

    instants: tuple[Instant, ...]

    @property
    def steady(self) -> Instant:
        """The bytes between steps."""
        return self.instants[0]

    @property
    def peak(self) -> Instant:
        """The first moment at which most is on the device."""
        return self.peak_of("device")

    def peak_of(self, place: str) -> Instant:
        """Return the first moment at which most is on the ``device``, the ``host`` or the ``disk``.

        Example:
            >>> live = Live((Instant("between steps", Bytes()), Instant("add", Bytes(work=4))))
            >>> live.peak_of("device").what, live.peak_of("disk").what
            ('add', 'between steps')
        """
        return max(self.instants, key=lambda instant: getattr(instant, place).total)

    @property
    def largest(self) -> Bytes:
        """The most of each category on the device, each at the worst moment of the category."""
        return Bytes(*map(max, zip(*(instant.device for instant in self.instants), strict=True)))

    def __repr__(self) -> str:
        return (
            f"Live({len(self.instants) - 1} moments, "
            f"{in_bytes(self.steady.device.total)} between steps, "
            f"at most {in_bytes(self.peak.device.total)} on the device: {self.peak.what})"
        )

    def __str__(self) -> str:
        return in_columns(self.rows())

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        return html_table(repr(self), header, rows)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of categories, the header first, without places and rows of zeros.

        Example:
            >>> Live((Instant("between steps", Bytes(params=4)),)).rows()[0]
            ('', 'between steps', 'peak')
        """
        columns: list[tuple[str, ...]] = [("", *Bytes._fields, "total")]
        for place in PLACES:
            steady, peak = (getattr(one, place) for one in (self.steady, self.peak_of(place)))
            if place == "device" or peak.total:
                prefix = "" if place == "device" else f"{place}, "
                columns.append((f"{prefix}between steps", *_cells(steady)))
                columns.append((f"{prefix}peak", *_cells(peak)))
        rows = [*zip(*columns, strict=True)]
        return [row for row in rows if row[0] in ("", "total") or {*row[1:]} != {"0"}]


def peaks_of(live: Live) -> tuple[int, ...]:
    """Return the most bytes on the device, in host memory and on the disk."""
    return tuple(getattr(live.peak_of(place), place).total for place in PLACES)


def _cells(held: Bytes) -> tuple[str, ...]:
    return tuple(f"{n:,}" for n in (*held, held.total))
