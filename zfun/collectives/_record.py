"""A group that writes down what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from zfun.collectives._calls import Call, Lane
from zfun.collectives._group import Group
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
class Recorder(Group):
    """A group that passes every collective on and keeps a :class:`Record` of it in ``log``. Made by :func:`record`."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self.log: list[Record] = []
        self._group = group

    @property
    def debug(self) -> bool:
        return self._group.debug

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

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return self._group.buffer(numel, dtype, device)

    def await_readers(self, x: Tensor) -> None:
        self._group.await_readers(x)

    def close(self) -> None:
        self._group.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The group itself tells the other ranks why it ends.
        self._group.__exit__(kind, error, trace)

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
