"""Meshes: the ranks of a group along named axes, and the groups of some of these axes.

A shard over several axes is a part of a shard over the innermost of them, because a rank in a group
of several axes counts along the outermost axis fastest. So every change between whole, cut over
inner axes, and cut over all is one collective along some axes, without a copy.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives._axes import Axis, Hop, Hops, Order, chained, hops_of, started, summed
from zfun.collectives._group import (
    Group,
    Wrapper,
    global_ranks,
    is_checked,
    is_symmetric,
    queue_aside,
)
from zfun.collectives._work import Work
from zfun.errors import OptionError
from zfun.options import takes


@final
class NamedMesh:
    """Named axes of the ranks of a group; :func:`mesh` makes them.

    ``mesh["dp"]`` and ``mesh["dp", "tp"]`` are groups. The mesh itself is none, because a transform
    must be told over which axes it cuts or sums.

    Attributes:
        names: of the axes; the ranks along the last one are neighbours.
        shape: the size of each axis.
        sizes: the size of each axis by name.
        coordinates: this rank's place along each axis by name.

    Example:
        >>> import zfun as zf
        >>> mesh = zf.mesh(zf.collectives.abstract_group(8, rank=5), dp=4, tp=2)
        >>> mesh, mesh["dp"]
        (<mesh: dp=4 x tp=2, this rank at dp=2, tp=1>, <dp axis: rank 2 of 4>)
    """

    instead = 'pass some of its axes, such as mesh["dp"]'

    def __init__(self, axes: Mapping[str, Group], whole: Group | None = None) -> None:
        self.names = tuple(axes)
        self.shape = tuple(group.size for group in axes.values())
        self.sizes = {name: group.size for name, group in axes.items()}
        self.coordinates = {name: group.rank for name, group in axes.items()}
        self.order = Order(queue_aside(axes.values()))
        self.whole = whole
        self.axes = {
            name: Axis(group, name, self.numbers((name,)), self.order)
            for name, group in axes.items()
        }
        for axis in self.axes.values():
            axis.home = self
        self.meshes: dict[tuple[str, ...], Mesh] = {}
        self._parts: dict[tuple[tuple[str, ...], tuple[str, ...]], Hybrid] = {}

    def __getitem__(self, names: str | tuple[str, ...]) -> Group:
        return self.group(*((names,) if isinstance(names, str) else names))

    def group(self, *names: str, replicate: str | Sequence[str] = ()) -> Group:
        """Return the group of some axes, the same one each time.

        Args:
            names: the axes, in any order.
            replicate: axes along which values over the group are repeated, and ranks have batches
                of their own too. Sums go over these axes as well (hybrid sharding). They stand
                before the others in the mesh.

        Returns:
            The ranks that differ from this one along these axes only. In a group of several axes
            ranks count along the first axis fastest.

        Raises:
            OptionError: no axis, an unknown one, or one twice; or an axis of ``replicate`` that
                stands after one of the others.

        Example:
            >>> import torch, zfun as zf
            >>> def main(group):
            ...     hybrid = zf.mesh(group, rep=2, dp=3).group("dp", replicate="rep")
            ...     params = zf.shard({"w": torch.ones(96)}, hybrid)
            ...     return params.buffers[0].numel(), zf.collectives.sum_group(hybrid).size
            >>> zf.simulate(6, main)[0]
            (64, 6)
        """
        others = (replicate,) if isinstance(replicate, str) else tuple(replicate)
        self._check(names, others)
        cut, along = (tuple(x for x in self.names if x in some) for some in (names, others))
        if not along:
            return self.along(cut)
        if (cut, along) not in self._parts:
            whole = self.along((*along, *cut))
            assert isinstance(whole, Mesh)
            self._parts[cut, along] = Hybrid(self.along(cut), whole, self.along(along))
        return self._parts[cut, along]

    def along(self, names: tuple[str, ...]) -> Axis | Mesh:
        """Return the group of some axes, named in the order of the mesh."""
        if len(names) == 1:
            return self.axes[names[0]]
        return self.meshes[names] if names in self.meshes else Mesh.over(self, names)

    def _check(self, names: tuple[str, ...], others: tuple[str, ...]) -> None:
        known, asked = ", ".join(self.names), (*names, *others)
        if not names:
            raise OptionError(f"a group has at least one axis; got none; name one of {known}")
        for name in asked:
            if name not in self.names:
                raise OptionError(f"the axes of this mesh are {known}; got {name!r}; use these")
            if asked.count(name) > 1:
                raise OptionError(f"an axis is named once; got {name!r} twice; leave one out")
        place = self.names.index
        if others and max(map(place, others)) > min(map(place, names)):
            raise OptionError(
                "axes that replicate stand before those that cut, because sums go over the last "
                f"axis first; got replicate={', '.join(others)} for {', '.join(names)} of {known}; "
                "name them in this order in zf.mesh()"
            )

    def map(self, fn: Callable[[Group, str], Group]) -> NamedMesh:
        """Return a mesh of ``fn(group, axis)`` for each axis and for all ranks (``""``)."""
        whole = None if self.whole is None else fn(self.whole, "")
        return NamedMesh({name: fn(x.wrapped, name) for name, x in self.axes.items()}, whole)

    def places(self, names: Sequence[str]) -> list[int]:
        """Return the place of each rank of some axes among all ranks, in the order of the group."""
        at = tuple(slice(None) if x in names else self.coordinates[x] for x in self.names)
        places = np.arange(math.prod(self.shape)).reshape(self.shape)[at]
        # A group counts along its first axis fastest.
        return [int(place) for place in places.T.ravel()]

    def numbers(self, names: Sequence[str]) -> list[int]:
        """Return the global rank of each rank of some axes, in the order of the group."""
        known = range(math.prod(self.shape)) if self.whole is None else global_ranks(self.whole)
        return [known[place] for place in self.places(names)]

    def __repr__(self) -> str:
        sizes = " x ".join(f"{name}={size}" for name, size in self.sizes.items())
        here = ", ".join(f"{name}={place}" for name, place in self.coordinates.items())
        return f"<mesh: {sizes}, this rank at {here}>"


@takes()
class Mesh(Group):
    """A group of several axes; :func:`mesh` and :func:`split` make one.

    Collectives go over one axis after the other; see [Note: several axes]. The constructor makes
    a group of two axes from two groups.

    Args:
        inner: the ranks of this rank's row.
        outer: the ranks of this rank's column: one of each row, at this rank's place in the row.
        whole: the group of all ranks, row after row, if there is one. Only :func:`permute` needs
            this group.

    Attributes:
        inner: the innermost axis, as a group that the transforms take: values sharded over it are
            replicated over the others.
        outer: the other axes.

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
            if isinstance(group, Axis | Hybrid):
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
        self._join(NamedMesh({"outer": outer, "inner": inner}, whole), ("outer", "inner"))

    @classmethod
    def over(cls, home: NamedMesh, names: tuple[str, ...]) -> Mesh:
        """Return the group of some axes of a mesh."""
        made = cls.__new__(cls)
        made._join(home, names)
        return made

    def _join(self, home: NamedMesh, names: tuple[str, ...]) -> None:
        self.home = home
        home.meshes[names] = self
        self.names = names
        self.axes = [home.axes[name] for name in reversed(names)]
        self.size = math.prod(axis.size for axis in self.axes)
        self.rank = 0
        for axis in self.axes:
            self.rank = self.rank * axis.size + axis.rank
        self.global_ranks = home.numbers(names)

    @functools.cached_property
    def inner(self) -> Group:
        """The innermost axis; sums go over all axes."""
        return self.home.group(self.names[-1], replicate=self.names[:-1])

    @functools.cached_property
    def outer(self) -> Group:
        """The other axes."""
        return Hybrid(self.home.along(self.names[:-1]), self, None)

    @property
    def failure(self) -> Exception | None:
        """The error of the first collective that failed, on any axis."""
        groups = (*self.axes, self.home.whole)
        return next((error for x in groups if (error := getattr(x, "failure", None))), None)

    @property
    def is_checked(self) -> bool:
        """Whether the axes compare the collectives that their ranks start."""
        return is_checked(self.axes[0])

    @property
    def is_symmetric(self) -> bool:
        """Whether ranks of an axis read each other's memory."""
        return any(map(is_symmetric, self.axes))

    def start(self, call: _ops.Collective, x: Tensor, out: Tensor | None = None) -> Work:
        _ops.check_collective(call, x, out, self.size)
        x = x.detach()
        result = x.new_empty(call.op.output_numel(x.numel(), self.size)) if out is None else out
        into = result.detach()
        if isinstance(call.op, _ops.Permute):
            hops = [self._permutation(call.op)]
        else:
            hops = hops_of(call.op, self.axes, x.numel() * x.dtype.itemsize)
        if not hops:
            if not x.is_meta and not into.is_set_to(x):
                into.copy_(x)
            return Work.done(result)
        finished = self.launch(call, hops, started(call, hops, x, into), x)

        def wait() -> Tensor:
            finished.wait()
            return result

        return Work(wait)

    def launch(self, call: _ops.Collective, hops: Sequence[Hop], steps: Hops, x: Tensor) -> Work:
        """Start a collective of ``x`` by some hops."""
        return self.home.order.launch(call.stream, [hop.axis for hop in hops], steps, x)

    def _permutation(self, op: _ops.Permute) -> Hop:
        """Return a permutation as one of the whole group."""
        whole = self.home.whole
        if whole is None or whole.size != self.size:
            raise OptionError(
                f"a permutation goes along no axis of several; got {self!r}; permute along one "
                "axis, or over a mesh of the whole group, from zf.split() or zf.mesh()"
            )
        places = self.home.places(self.names)
        flat = dict(zip(places, (places[rank] for rank in op.destinations), strict=True))
        destinations = tuple(flat[place] for place in range(self.size))
        return Hop(Axis(whole, "", places, self.home.order), _ops.Permute(destinations))

    def close(self) -> None:
        for axis in self.axes:
            axis.close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for axis in self.axes:
            axis.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis.size} {axis.axis}" for axis in self.axes)
        return f"<mesh: rank {self.rank} of {self.size}, {axes}>"


@final
class Hybrid(Wrapper):
    """Some axes of a group of several, over all of which sums go.

    Attributes:
        axes: these axes, innermost first.
        sums: the group of all axes.
        replicas: the axes along which values over this group are repeated; ``None`` for axes that
            only repeat values.
    """

    def __init__(self, group: Axis | Mesh, sums: Mesh, replicas: Axis | Mesh | None) -> None:
        super().__init__(group)
        self.sums = sums
        self.replicas = replicas
        self.axes = group.axes

    @property
    def is_symmetric(self) -> bool:
        """Whether ranks along any of the axes read each other's memory."""
        return is_symmetric(self.sums)

    def start(self, call: _ops.Collective, x: Tensor, out: Tensor | None = None) -> Work:
        return self.wrapped.start(call, x, out)

    def start_sum(self, call: _ops.Collective, x: Tensor) -> Work:
        """Start a sum over all axes that ends on these ones: a reduce-scatter or a reduce."""
        _ops.check_collective(call, x, None, self.size)
        x = x.detach()
        first = hops_of(call.op, self.axes, 0)
        is_held = not isinstance(call.op, _ops.Reduce) or call.op.root == self.rank
        across = self.replicas.axes if is_held and self.replicas is not None else []
        then = hops_of(_ops.AllReduce(), across, sys.maxsize)

        def steps() -> Hops:
            piece = yield from chained(call, first, x, None)
            # A received piece belongs to this rank, so the sum may overwrite it.
            owned = bool(first) and isinstance(call.op, _ops.ReduceScatter)
            total = yield from summed(call, then, piece, None, owned=owned)
            return total.clone() if total is x else total

        hops = [*first, *then]
        return self.sums.launch(call, hops, steps(), x) if hops else Work.done(x.clone())

    def __repr__(self) -> str:
        return repr(self.wrapped)
