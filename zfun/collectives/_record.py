"""A group that logs its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final, overload

import torch
from torch import Tensor

from zfun.collectives._group import Group, Wrapper
from zfun.collectives._mesh import Mesh
from zfun.collectives._ops import Collective, Stream
from zfun.collectives._roles import axis_of, sum_group
from zfun.collectives._work import Work
from zfun.errors import OptionError
from zfun.options import takes


@dataclass(frozen=True, slots=True)
class Record:
    """One collective as one rank started it.

    Attributes:
        kind: the operation.
        name: the name of the tensor.
        part: the bucket or the leaves.
        stream: the queue.
        sent_bytes: the bytes that this rank sends.
        numel: the length of the input.
        dtype: the dtype of the input.
        axis: the name of the axis of a mesh, such as ``"inner"``, else ``""``.
    """

    kind: str
    name: str
    part: str
    stream: Stream
    sent_bytes: int
    numel: int
    dtype: torch.dtype
    axis: str = ""


class _Log:
    """The records of a group, in the order of their collectives."""

    log: list[Record]

    def bytes_sent(self, name: str | None = None, *, axis: str | None = None) -> int:
        """Return the bytes that this rank has sent, in all, of one name, or along one axis."""
        return sum(
            entry.sent_bytes
            for entry in self.log
            if name in (None, entry.name) and axis in (None, entry.axis)
        )

    def clear(self) -> None:
        """Forget the log."""
        self.log.clear()


@final
class Recorder(_Log, Wrapper):
    """A group that passes every collective on and keeps a :class:`Record` of it in ``log``.

    Made by :func:`record`.
    """

    def __init__(self, group: Group, axis: str = "", log: list[Record] | None = None) -> None:
        super().__init__(group)
        self.log = [] if log is None else log
        self._name = axis

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        pending = self.wrapped.start(call, x, out)
        sent_bytes = call.op.sent_bytes(
            x.numel() * x.dtype.itemsize, self.rank, self.size, x.dtype.itemsize
        )
        self.log.append(
            Record(
                call.op.kind,
                call.name,
                call.part,
                call.stream,
                sent_bytes,
                x.numel(),
                x.dtype,
                self._name,
            )
        )
        return pending

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        return Recorder(self.wrapped.subgroup(parts, name), name, self.log)

    def __repr__(self) -> str:
        return f"record({self.wrapped!r})"


@final
class MeshRecorder(_Log, Mesh):
    """A mesh that keeps a :class:`Record` of each collective of each axis in ``log``.

    Made by :func:`record`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.log = []
        home = mesh.home.map(lambda group, axis: Recorder(group, axis, self.log))
        self._join(home, mesh.names)

    def __repr__(self) -> str:
        return f"record({super().__repr__()})"


@overload
def record(group: Mesh) -> MeshRecorder: ...


@overload
def record(group: Group) -> Recorder: ...


@takes()
def record(group: Group) -> Recorder | MeshRecorder:
    """Return a group that acts like ``group`` and logs each collective.

    A log entry holds kind, name, part, stream, bytes and axis.

    Args:
        group: any group. Of a mesh every axis is recorded, into one log.

    Returns:
        A group with ``log``, ``bytes_sent(name=None, axis=None)`` and ``clear()``.

    Raises:
        OptionError: an axis of a mesh.

    Example:
        >>> import torch
        >>> from zfun.collectives import abstract_group, gather_values, split
        >>> group = record(abstract_group(4))
        >>> _ = gather_values(torch.zeros(10), group, "params")
        >>> group.bytes_sent("params")
        120
        >>> mesh = record(split(abstract_group(4), inner=2))
        >>> _ = gather_values(torch.zeros(10), mesh, "params")
        >>> mesh.bytes_sent(axis="outer"), mesh.bytes_sent(axis="inner")
        (40, 80)
    """
    if isinstance(group, Mesh):
        return MeshRecorder(group)
    if sum_group(group) is not group:
        raise OptionError(
            f"an axis is recorded with its mesh; got the {axis_of(group)} axis alone; call "
            "zf.record(mesh)"
        )
    return Recorder(group)
