"""A group that writes down what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from zfun.collectives._calls import Call, Lane
from zfun.collectives._group import Group, Wrapper
from zfun.collectives._pending import Pending

__all__ = ["Record", "Recorder", "record"]


@dataclass(frozen=True, slots=True)
class Record:
    """One collective as one rank started it. ``sent_bytes`` is what this rank sends; ``numel`` and ``dtype`` are those of its input."""

    kind: str
    name: str
    part: str
    lane: Lane
    sent_bytes: int
    numel: int
    dtype: torch.dtype


@final
class Recorder(Wrapper):
    """A group that passes every collective on and keeps a :class:`Record` of it in ``log``. Made by :func:`record`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.log: list[Record] = []

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        pending = self._group.start(call, x, out)
        sent_bytes = call.op.sent_bytes(x.numel() * x.dtype.itemsize, self.rank, self.size, x.dtype.itemsize)
        self.log.append(Record(call.op.kind, call.name, call.part, call.lane, sent_bytes, x.numel(), x.dtype))
        return pending

    def bytes_sent(self, name: str | None = None) -> int:
        """Return the bytes that this rank has sent: all of them, or those of the collectives of one name."""
        return sum(entry.sent_bytes for entry in self.log if name is None or entry.name == name)

    def clear(self) -> None:
        """Forget the log."""
        self.log.clear()

    def __repr__(self) -> str:
        return f"record({self._group!r})"


def record(group: Group) -> Recorder:
    """Return a group that does what ``group`` does and logs each collective: its kind, name, part, lane and bytes.

    Args:
        group: any group.

    Returns:
        A group with ``log``, ``bytes_sent(name=None)`` and ``clear()``.

    Example:
        >>> import torch
        >>> from zfun.collectives import abstract_group
        >>> group = record(abstract_group(4))
        >>> _ = group.all_gather(torch.zeros(10), "params")
        >>> group.bytes_sent("params")
        120
    """
    return Recorder(group)
