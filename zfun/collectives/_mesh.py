"""Meshes: the ranks of a group in rows (the inner axis) and columns (the outer axis).

[Note: two axes]

A mesh is a group whose ranks are arranged in rows and columns. A row is the *inner* axis, for
example the ranks of one host. A column is the *outer* axis: one rank of every row. The i-th rank of
the o-th row has rank ``i * outer.size + o`` in the mesh. So a shard over the inner axis is the
concatenation of the shards of one column, and every change between the three placements (whole,
sharded over the inner axis, sharded over the mesh) is one collective of one axis, without a copy.

A collective of the mesh goes axis by axis, so that no byte crosses between rows twice:

==================  ===========================================================================
all-gather          outer, then inner: each shard crosses once to each row
reduce-scatter      inner, then outer: only the sums of a row cross
all-reduce          reduce-scatter inner, all-reduce outer, all-gather inner
all-to-all          inner, then outer: one message for each row
broadcast           outer in the column of the root, then inner in every row
reduce              inner in every row, then outer in the column of the root
==================  ===========================================================================

**Sums are taken over the inner axis first, in rank order, and then over the outer one**, in every
collective, so all compositions over one mesh give the same bits. Another mesh of as many ranks, or
the group without a mesh, adds in another order, and differs by rounding.

The second phase of a collective starts when a rank waits for the result. Phases still start in the
order of the calls: a wait for one collective first starts the phases of the collectives before it,
and so does a call that goes through the axes in another order. So ranks may wait in any order
within a stream. A wait on the control stream also starts the last phases of the gathers of
parameters, because a rank that takes another branch may be waiting for these phases. A rank waits
on the control stream only after it has started all gathers that other ranks may need by then.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TypeAlias, final

import torch
from torch import Tensor

from zfun.collectives._group import Group, Wrapper, global_ranks, is_checked, is_symmetric
from zfun.collectives._ops import (
    CALL,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    check_collective,
)
from zfun.collectives._work import Work
from zfun.errors import OptionError, PlacementError
from zfun.options import GROUP, TENSOR, TEXT, integer, takes

# Up to this size, one message less saves more time than fewer bytes.
_SHORT_BYTES = 4096

# Yields each phase once started, is sent the result of the phase, and returns the final result.
_Phases: TypeAlias = Generator[Work, Tensor, Tensor]

_OUTER_INNER, _INNER_OUTER, _INNER_OUTER_INNER, _FLAT = (
    ("outer", "inner"),
    ("inner", "outer"),
    ("inner", "outer", "inner"),
    ("",),
)


class _Running:
    """A collective of the mesh under way."""

    __slots__ = ("_error", "_left", "_pending", "_phases", "axes")

    def __init__(self, axes: tuple[str, ...], phases: _Phases) -> None:
        self.axes = axes
        self._phases = phases
        self._pending = next(phases)
        self._left = len(axes) - 1
        self._error: BaseException | None = None

    def bring_forward(self) -> None:
        """Start the last phase."""
        if self._error is not None:
            raise self._error
        try:
            while self._left:
                self._pending = self._phases.send(self._pending.wait())
                self._left -= 1
        except BaseException as error:
            self._error = error
            raise

    def finish(self) -> Tensor:
        self.bring_forward()
        try:
            self._phases.send(self._pending.wait())
        except StopIteration as end:
            result: Tensor = end.value
            return result
        raise AssertionError("a collective has as many phases as axes to go through")


@final
class _Axis(Wrapper):
    """One axis of a mesh.

    Before a collective of its own, the axis starts the phases of the mesh's earlier collectives.
    """

    def __init__(self, group: Group, mesh: Mesh, axis: str, numbers: Sequence[int]) -> None:
        super().__init__(group)
        self.plain = group
        self.mesh = mesh
        self.axis = axis
        self.global_ranks = numbers

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        self.mesh._bring_forward(call.stream)
        return self.plain.start(call, x, out)

    def __repr__(self) -> str:
        return f"<{self.axis} axis: rank {self.rank} of {self.size}>"


@takes(inner=GROUP, outer=GROUP, whole=GROUP | None)
class Mesh(Group):
    """A group whose ranks are arranged in rows and columns.

    See [Note: two axes]; :func:`split` makes one of a group.

    Args:
        inner: the ranks of this rank's row.
        outer: the ranks of this rank's column: one of each row, at this rank's place in the row.
        whole: the group of all ranks, row after row, if there is one. Only :func:`permute` needs
            this group.

    Attributes:
        inner: the inner axis, as a group that the transforms take: values sharded over the inner
            axis are replicated over the outer axis.
        outer: the outer axis.

    Example:
        >>> import torch
        >>> from zfun.collectives import gather_values, simulate
        >>> def main(group):
        ...     row = group.subgroup([[0, 1], [2, 3]])
        ...     column = group.subgroup([[0, 2], [1, 3]])
        ...     mesh = Mesh(row, column)
        ...     return mesh.rank, gather_values(torch.tensor(group.rank), mesh, "rank").tolist()
        >>> simulate(4, main)
        [(0, [0, 2, 1, 3]), (2, [0, 2, 1, 3]), (1, [0, 2, 1, 3]), (3, [0, 2, 1, 3])]
    """

    def __init__(self, inner: Group, outer: Group, whole: Group | None = None) -> None:
        for name, group in (("inner", inner), ("outer", outer)):
            if mesh_of(group) is not group:
                raise OptionError(
                    f"the {name} axis is a group of its own; got an axis of another mesh; make a "
                    "group of its ranks"
                )
        if whole is not None and (
            whole.size != inner.size * outer.size
            or whole.rank != outer.rank * inner.size + inner.rank
        ):
            raise OptionError(
                f"the whole group has the ranks of the mesh, row after row; got rank {whole.rank} "
                f"of {whole.size} for rank {inner.rank} of {inner.size} in row {outer.rank} of "
                f"{outer.size}; leave it out, or use zf.split()"
            )
        self.rank = inner.rank * outer.size + outer.rank
        self.size = inner.size * outer.size
        self._whole = whole
        self.global_ranks: Sequence[int] = range(self.size)
        row, column = range(inner.size), range(outer.size)
        if whole is not None:
            known = global_ranks(whole)
            self.global_ranks = [known[o * inner.size + i] for i in row for o in column]
        self.inner: Group = _Axis(
            inner, self, "inner", [self.global_ranks[i * outer.size + outer.rank] for i in row]
        )
        self.outer: Group = _Axis(
            outer, self, "outer", [self.global_ranks[inner.rank * outer.size + o] for o in column]
        )
        self._plain = {"inner": inner, "outer": outer}
        self._queues: dict[Stream, collections.deque[_Running]] = {
            stream: collections.deque() for stream in Stream
        }

    @property
    def failure(self) -> Exception | None:
        """The error of the first collective that failed, on any axis."""
        groups = (self.inner, self.outer, self._whole)
        return next((error for x in groups if (error := getattr(x, "failure", None))), None)

    @property
    def is_checked(self) -> bool:
        """Whether the axes compare the collectives that their ranks start."""
        return is_checked(self.inner)

    @property
    def is_symmetric(self) -> bool:
        """Whether ranks of an axis read each other's memory."""
        return is_symmetric(self.inner) or is_symmetric(self.outer)

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        x = x.detach()
        result = x.new_empty(call.op.output_numel(x.numel(), self.size)) if out is None else out
        into = result.detach()
        match call.op:
            case AllGather():
                axes, phases = _OUTER_INNER, self._all_gather(call, x, into)
            case ReduceScatter():
                axes, phases = _INNER_OUTER, self._reduce_scatter(call, x, into)
            case AllReduce() if self.sums_whole(x.numel() * x.dtype.itemsize):
                axes, phases = _INNER_OUTER, self._all_reduce_short(call, x, into)
            case AllReduce():
                axes, phases = _INNER_OUTER_INNER, self._all_reduce(call, x, into)
            case Broadcast(root):
                axes, phases = _OUTER_INNER, self._broadcast(call, x, into, root)
            case Reduce(root):
                axes, phases = _INNER_OUTER, self._reduce(call, x, into, root)
            case AllToAll():
                axes, phases = _INNER_OUTER, self._all_to_all(call, x, into)
            case Permute(destinations):
                axes, phases = _FLAT, self._permute(call, x, into, destinations)
        finished = self._launch(call.stream, axes, phases)

        def wait() -> Tensor:
            finished.wait()
            return result

        return Work(wait)

    def reduce_scatter_inner(self, call: Collective, x: Tensor) -> Work:
        """Start a sum over the mesh, sharded over the inner axis; columns send shards."""
        check_collective(call, x, None, self.inner.size)
        return self._launch(call.stream, _INNER_OUTER, self._reduce_scatter_inner(call, x.detach()))

    def reduce_inner(self, call: Collective, x: Tensor, root: int) -> Work:
        """Start a sum over the mesh, for one rank of each row; only their column sends it."""
        return self._launch(call.stream, _INNER_OUTER, self._reduce_inner(call, x.detach(), root))

    def sums_whole(self, nbytes: int) -> bool:
        """Whether an all-reduce of ``nbytes`` goes whole over one axis, then over the other."""
        return 1 in (self.inner.size, self.outer.size) or nbytes <= _SHORT_BYTES

    def map_groups(self, fn: Callable[[Group, str], Group]) -> tuple[Group, Group, Group | None]:
        """Call ``fn(group, axis)`` on each axis and on the group of all ranks."""
        whole = None if self._whole is None else fn(self._whole, "")
        return fn(self._plain["inner"], "inner"), fn(self._plain["outer"], "outer"), whole

    def close(self) -> None:
        for group in self._plain.values():
            group.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for group in self._plain.values():
            group.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return (
            f"<mesh: rank {self.rank} of {self.size}, {self.inner.size} inner x "
            f"{self.outer.size} outer>"
        )

    # The order of phases.

    def _launch(self, stream: Stream, axes: tuple[str, ...], phases: _Phases) -> Work:
        queue = self._queues[stream]
        # Collectives that go through the same axes may have phases under way together, because
        # these phases start in the order of the calls. Phases of other collectives must not mix.
        if len(axes) > 2 or any(before.axes != axes for before in queue):
            self._bring_forward(stream)
        running = _Running(axes, phases)
        queue.append(running)

        def finish() -> Tensor:
            if stream is Stream.CONTROL:
                self._bring_forward(Stream.PARAMS)
            while running in queue:
                queue[0].bring_forward()
                queue.popleft()
            return running.finish()

        return Work(finish)

    def _bring_forward(self, stream: Stream) -> None:
        queue = self._queues[stream]
        while queue:
            queue[0].bring_forward()
            queue.popleft()

    def _on(
        self, axis: str, op: Op, call: Collective, x: Tensor, out: Tensor | None = None
    ) -> Work:
        """Start a phase; on an axis of one rank there is nothing to send."""
        group = self._plain[axis]
        if group.size > 1:
            phase = Collective(op, call.name, call.part, call.stream, zero_copy=True)
            return group.start(phase, x, out)
        if out is None:
            return Work.done(x)
        if not out.is_set_to(x):
            out.copy_(x)
        return Work.done(out)

    # The phases.

    def _all_gather(self, call: Collective, x: Tensor, out: Tensor) -> _Phases:
        row = out.view(self.inner.size, -1)[self.inner.rank] if x.numel() else out
        row = yield self._on("outer", AllGather(), call, x, row)
        return (yield self._on("inner", AllGather(), call, row, out))

    def _reduce_scatter(self, call: Collective, x: Tensor, out: Tensor) -> _Phases:
        row = yield self._on("inner", ReduceScatter(), call, x)
        return (yield self._on("outer", ReduceScatter(), call, row, out))

    def _reduce_scatter_inner(self, call: Collective, x: Tensor) -> _Phases:
        row = yield self._on("inner", ReduceScatter(), call, x)
        # The received buffer belongs to this rank, so the sum may overwrite it; the caller's input
        # may not be overwritten.
        total = yield self._on(
            "outer", AllReduce(), call, row, row if self.inner.size > 1 else None
        )
        return total.clone() if total is x else total

    def _reduce_inner(self, call: Collective, x: Tensor, root: int) -> _Phases:
        row = yield self._on("inner", Reduce(root), call, x)
        if self.inner.rank == root:
            return (yield self._on("outer", AllReduce(), call, row.clone() if row is x else row))
        yield Work.done(row)
        return row

    def _all_reduce_short(self, call: Collective, x: Tensor, out: Tensor) -> _Phases:
        row = yield self._on("inner", AllReduce(), call, x)
        return (yield self._on("outer", AllReduce(), call, row, out))

    def _all_reduce(self, call: Collective, x: Tensor, out: Tensor) -> _Phases:
        numel = x.numel()
        padding = -numel % self.inner.size
        row = yield self._on(
            "inner",
            ReduceScatter(),
            call,
            torch.nn.functional.pad(x, (0, padding)) if padding else x,
        )
        row = yield self._on("outer", AllReduce(), call, row, row)
        total = yield self._on("inner", AllGather(), call, row, None if padding else out)
        return out.copy_(total[:numel]) if padding else total

    def _broadcast(self, call: Collective, x: Tensor, out: Tensor, root: int) -> _Phases:
        place, row = divmod(root, self.outer.size)
        if self.inner.rank == place:
            x = yield self._on("outer", Broadcast(row), call, x)
        else:
            yield Work.done(x)
        return (yield self._on("inner", Broadcast(place), call, x, out))

    def _reduce(self, call: Collective, x: Tensor, out: Tensor, root: int) -> _Phases:
        place, row = divmod(root, self.outer.size)
        x = yield self._on("inner", Reduce(place), call, x)
        if self.inner.rank == place:
            return (yield self._on("outer", Reduce(row), call, x, out))
        yield Work.done(x)
        return out.zero_()

    def _all_to_all(self, call: Collective, x: Tensor, out: Tensor) -> _Phases:
        inner, outer = self.inner.size, self.outer.size
        numel = x.numel() // self.size
        row = yield self._on("inner", AllToAll(), call, x)
        by_row = row.view(inner, outer, numel).transpose(0, 1).reshape(-1)
        column = yield self._on("outer", AllToAll(), call, by_row)
        return out.copy_(column.view(outer, inner, numel).transpose(0, 1).reshape(-1))

    def _permute(
        self, call: Collective, x: Tensor, out: Tensor, destinations: tuple[int, ...]
    ) -> _Phases:
        if self._whole is None:
            raise OptionError(
                "a permutation goes along no axis; got a mesh of two groups; make it of the "
                "whole group with zf.split()"
            )
        place = [
            i * self.outer.size + o for o in range(self.outer.size) for i in range(self.inner.size)
        ]
        flat = Permute(tuple(place.index(destinations[rank]) for rank in place))
        return (
            yield self._whole.start(Collective(flat, call.name, call.part, call.stream), x, out)
        )


@takes(group=GROUP, inner=integer(1))
def split(group: Group, inner: int) -> Mesh:
    """Put the ranks of a group in rows: ranks ``0 ... inner - 1`` in the first, and so on.

    A value sharded over ``mesh.inner`` is replicated over ``mesh.outer``: hybrid sharding, where
    only sums of gradients leave a row. A value sharded over the mesh itself is sharded over all
    ranks, with collectives that go axis by axis.

    Args:
        group: all the ranks. Every rank calls.
        inner: how many ranks make a row; the ranks of one host, if the launcher numbers the ranks
            host by host.

    Returns:
        A group of all the ranks with the groups ``inner`` and ``outer`` in it. The mesh ends with
        ``group``. Ranks of the mesh count along the columns: the rank of ``group`` that is the i-th
        in row o has rank ``i * outer.size + o``.

    Raises:
        OptionError: ``inner`` does not divide the number of ranks, or this kind of group cannot be
            divided.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     mesh = zf.split(group, inner=2)
        ...     params = zf.shard({"w": torch.ones(128)}, mesh.inner)
        ...     return mesh.inner.size, mesh.outer.size, params.buffers[0].numel()
        >>> zf.simulate(6, main)[0]
        (2, 3, 96)
    """
    if group.size % inner:
        raise OptionError(
            f"split() makes rows of equal length; got {group.size} ranks and inner={inner}; "
            "use a divisor"
        )
    if mesh_of(group) is not group or isinstance(group, Mesh):
        raise OptionError(
            f"split() takes a group without axes; got {group!r}; split the group "
            "that the mesh was made of"
        )
    rows = [range(first, first + inner) for first in range(0, group.size, inner)]
    columns = [range(place, group.size, inner) for place in range(inner)]
    return Mesh(group.subgroup(rows, "inner"), group.subgroup(columns, "outer"), group)


@takes(group=GROUP)
def mesh_of(group: Group) -> Group:
    """Return the mesh that a group is an axis of, or else the group itself.

    Args:
        group: any group.

    Returns:
        A group of all ranks.

    Example:
        >>> from zfun.collectives import abstract_group
        >>> mesh = split(abstract_group(6), inner=3)
        >>> mesh_of(mesh.inner) is mesh, mesh_of(mesh) is mesh
        (True, True)
    """
    return group.mesh if isinstance(group, _Axis) else group


@takes(group=GROUP)
def axis_of(group: Group) -> str:
    """Return the name of an axis of a mesh: ``"inner"``, ``"outer"``, or ``""`` for other groups.

    Args:
        group: any group.

    Returns:
        The name.

    Example:
        >>> from zfun.collectives import abstract_group
        >>> axis_of(split(abstract_group(6), inner=3).inner)
        'inner'
    """
    return group.axis if isinstance(group, _Axis) else ""


@takes(group=GROUP, what=TEXT)
def check_shardable(group: Group, what: str) -> None:
    """Refuse the outer axis of a mesh: its shards are not pieces of the shards of the mesh.

    Args:
        group: the ranks to shard over.
        what: the function that shards, for the message.

    Raises:
        PlacementError: ``group`` is such an axis.

    Example:
        >>> from zfun.collectives import abstract_group
        >>> check_shardable(split(abstract_group(6), inner=3).inner, "shard()")
    """
    if axis_of(group) == "outer":
        raise PlacementError(
            f"{what} shards over a mesh or its inner axis; got its outer axis, which replicates; "
            "pass mesh.inner"
        )


@takes(group=GROUP, call=CALL, x=TENSOR, out=TENSOR | None)
def start_reduce_scatter_over(
    group: Group, call: Collective, x: Tensor, out: Tensor | None = None
) -> Work:
    """``P -> S``: start a sum over the mesh of a group, sharded over the group.

    Args:
        group: a group, a mesh, or the inner axis of one.
        call: a reduce-scatter.
        x: 1-D; the size of ``group`` divides its length.
        out: 1-D; where the piece may go.

    Returns:
        The pending piece of this rank.

    Raises:
        OptionError: another collective.
        PlacementError: ``group`` is the outer axis of a mesh.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     mesh = split(group, inner=2)
        ...     call, x = Collective(ReduceScatter(), "grads"), torch.tensor([1, 10])
        ...     return start_reduce_scatter_over(mesh.inner, call, x).wait().item()
        >>> simulate(4, main)
        [4, 40, 4, 40]
    """
    check_shardable(group, "start_reduce_scatter_over()")
    if not isinstance(call.op, ReduceScatter):
        raise OptionError(
            f"start_reduce_scatter_over() is for reduce_scatter; got {call.op.kind}; pass another "
            "collective to group.start()"
        )
    mesh = mesh_of(group)
    if group is not mesh and isinstance(mesh, Mesh):
        return mesh.reduce_scatter_inner(call, x)
    return group.start(call, x, out)


def start_reduce_to(group: Group, call: Collective, x: Tensor, rank: int) -> Work:
    """``P -> S``: start a sum over the mesh of a group, whose whole goes to one rank of the group.

    Args:
        group: a group, a mesh, or the inner axis of one.
        call: gives name, part and stream.
        x: 1-D.
        rank: of ``group``, which receives the sum.

    Returns:
        The pending sum; of use on ``rank`` alone.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     mesh, call = split(group, inner=2), Collective(Reduce())
        ...     return start_reduce_to(mesh.inner, call, torch.tensor([1, 10]), 1).wait().tolist()
        >>> simulate(4, main)[1]
        [4, 40]
    """
    mesh = mesh_of(group)
    if group is not mesh and isinstance(mesh, Mesh):
        return mesh.reduce_inner(call, x, rank)
    return group.start(Collective(Reduce(rank), call.name, call.part, call.stream), x)
