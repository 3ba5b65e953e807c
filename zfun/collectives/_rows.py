"""The one autograd function of all collectives, and how tensors and trees become rows.

The function takes matrices of one row per chunk (``[1, m] -> [size, m]`` for an all-gather), so
that a batched dimension fits between rows and columns without moving data. The callers restore
shapes and dims by ordinary views:

======================  ===============  ===============  ====================
on 4 ranks              a leaf           rows sent        rows received
======================  ===============  ===============  ====================
all_reduce              ``[2, 3]``       ``[1, 6]``       ``[1, 6]``
all_gather, dim 0       ``[2, 3]``       ``[1, 6]``       ``[4, 6]``
reduce_scatter, dim 0   ``[8, 3]``       ``[4, 6]``       ``[1, 6]``
all_to_all, dims 0, 1   ``[8, 3]``       ``[4, 6]``       ``[4, 6]``
======================  ===============  ===============  ====================

A tree of tensors goes as one message for each dtype, not one for each leaf: the rows of its leaves
are put side by side, so that all leaves send one chunk to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import _ops
from zfun.collectives._group import Group
from zfun.collectives._work import Work
from zfun.errors import LeafError, OptionError, PlacementError

RowCounts: TypeAlias = tuple[tuple[int, ...], ...]


class _UnderWay:
    """Holds the handle of a started collective. Not a list, because torch.func copies lists."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Work | None = None


class _RowsCall(torch.autograd.Function):
    """``rows [a, m] -> rows [b, m]``, with a and b being 1 or the number of ranks.

    The transpose has the dual op.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        rows: Tensor, group: Group, call: _ops.Collective, started: _UnderWay | None
    ) -> Tensor:
        out = rows.new_empty((group.size if call.op.splits_output else 1, rows.shape[1]))
        pending = group.start(call, rows.contiguous().view(-1), out.view(-1))
        if started is None:
            pending.wait()
        else:
            started.pending = pending
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Not the handle, which holds the output: the two would keep each other for good.
        _, ctx.group, ctx.call, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        call: _ops.Collective = ctx.call
        dual = _ops.Collective(call.op.dual, call.name, call.part)
        return _apply(grad, ctx.group, dual, None), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        # Torch copies a tangent whose strides are not those of its primal, so its values must be
        # there at once.
        return _apply(tangent, ctx.group, ctx.call, None)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: tuple[int, None, None, None],
        rows: Tensor,
        group: Group,
        call: _ops.Collective,
        started: _UnderWay | None,
    ) -> tuple[Tensor, int]:
        batched = rows.movedim(in_dims[0], 1)
        out = _apply(batched.flatten(1), group, call, started)
        return out.view(out.shape[0], *batched.shape[1:]), 1


@ops.uncompiled
def _apply(rows: Tensor, group: Group, call: _ops.Collective, started: _UnderWay | None) -> Tensor:
    return _RowsCall.apply(rows, group, call, started)  # type: ignore[no-any-return]


class _ExchangeRows(torch.autograd.Function):
    """``[n, ...] -> [m, ...]``, where each rank sends some rows to each; see ``exchange_rows``."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, group: Group, counts: RowCounts, name: str, part: str
    ) -> Tensor:
        width = math.prod(x.shape[1:])
        elements = tuple(tuple(count * width for count in row) for row in counts)
        op = _ops.UnequalAllToAll(elements, group.rank)
        out = x.new_empty((sum(row[group.rank] for row in counts), *x.shape[1:]))
        call = _ops.Collective(op, name, part)
        group.start(call, x.contiguous().view(-1), out.view(-1)).wait()
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.counts, *ctx.labels = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        back = tuple(zip(*ctx.counts, strict=True))
        return exchange_rows(grad, ctx.group, back, *ctx.labels), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return exchange_rows(tangent, ctx.group, ctx.counts, *ctx.labels)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: tuple[int, None, None, None, None],
        x: Tensor,
        group: Group,
        counts: RowCounts,
        name: str,
        part: str,
    ) -> tuple[Tensor, int]:
        return exchange_rows(x.movedim(in_dims[0], 1), group, counts, name, part), 1


@ops.uncompiled
def exchange_rows(
    x: Tensor, group: Group, counts: RowCounts, name: str = "", part: str = ""
) -> Tensor:
    """Send ``counts[i][j]`` rows of rank i to rank j; the transpose sends them back.

    ::

        rank                     0          1              0        1
        x, counts ((1, 2),    [1 2 3]      [4]     ->     [1]    [2 3 4]
                   (0, 1))

    Args:
        x: ``[n, ...]``; first the rows for rank 0, then those for rank 1, and so on.
        group: the ranks.
        counts: the rows from each rank to each rank, alike on all ranks.
        name: a name for messages and logs.
        part: the part of a value.

    Returns:
        The rows that this rank receives, in the order of the ranks.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     x = [torch.tensor([1, 2, 3]), torch.tensor([4])][group.rank]
        ...     return exchange_rows(x, group, ((1, 2), (0, 1))).tolist()
        >>> simulate(2, main)
        [[1], [2, 3, 4]]
    """
    return _ExchangeRows.apply(x, group, counts, name, part)  # type: ignore[no-any-return]


class Runs(Protocol):
    """A collective with everything but the group."""

    def run(self, group: Group, name: str, part: str) -> Any: ...

    def start(self, group: Group, name: str, part: str) -> Work: ...


class _RowsPlan(NamedTuple):
    """A collective of shaped tensors as one of rows; ``restore`` gives the result its shape."""

    rows: Tensor
    op: _ops.Op
    restore: Callable[[Tensor], Tensor]

    def run(self, group: Group, name: str, part: str) -> Tensor:
        return self.restore(_apply(self.rows, group, _ops.Collective(self.op, name, part), None))

    def start(self, group: Group, name: str, part: str) -> Work:
        """Start the collective.

        The output is part of the graph at once, and holds values after the wait.
        """
        started = _UnderWay()
        out = _apply(self.rows, group, _ops.Collective(self.op, name, part), started)

        def finish() -> Tensor:
            assert started.pending is not None
            # Groups of shared memory write the output here, which the graph knows already.
            with torch.no_grad():
                started.pending.wait()
            return self.restore(out)

        return Work(finish)


class _Bundle(NamedTuple):
    """A collective of every leaf of a tree, as one of rows for each dtype and device."""

    plans: list[_RowsPlan]
    labels: list[str]
    restore: Callable[[list[Tensor]], Any]

    def run(self, group: Group, name: str, part: str) -> Any:
        return self.restore(
            [
                plan.run(group, name, part or label)
                for plan, label in zip(self.plans, self.labels, strict=True)
            ]
        )

    def start(self, group: Group, name: str, part: str) -> Work:
        under_way = [
            plan.start(group, name, part or label)
            for plan, label in zip(self.plans, self.labels, strict=True)
        ]
        return Work(lambda: self.restore([pending.wait() for pending in under_way]))


def _over_leaves(x: Any, plan_of: Callable[[Tensor], _RowsPlan]) -> Runs:
    """Plan a collective of a tensor, or of a whole tree: one row holds the chunks of one rank."""
    if isinstance(x, Tensor):
        return plan_of(x)
    # A Flat is the only node of a tree that has a placement.
    if any(
        hasattr(part, "placement")
        for part in tree.leaves(x, is_leaf=lambda part: hasattr(part, "placement"))
    ):
        raise PlacementError(
            "a collective takes tensors; got a Flat, which has a placement to go to; call "
            "zf.redistribute()"
        )
    leaves, spec = tree.flatten(x)
    for path, leaf in zip(tree.paths(x), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise LeafError(
                f"a collective takes a tensor or a tree of tensors; leaf {path!r} is "
                f"{type(leaf).__name__}",
                leaf=path,
            )
    alone = [plan_of(leaf) for leaf in leaves]
    kinds: dict[object, list[int]] = {}
    for index, plan in enumerate(alone):
        kinds.setdefault((plan.rows.dtype, plan.rows.device), []).append(index)
    together = list(kinds.values())

    def restore(results: list[Tensor]) -> Any:
        found: dict[int, Tensor] = {}
        for indices, rows in zip(together, results, strict=True):
            first = 0
            for index in indices:
                width = alone[index].rows.shape[1]
                found[index] = alone[index].restore(rows.narrow(1, first, width).clone())
                first += width
        return tree.unflatten(spec, [found[index] for index in range(len(alone))])

    plans = [
        _RowsPlan(
            torch.cat([alone[i].rows for i in indices], 1), alone[indices[0]].op, lambda rows: rows
        )
        for indices in together
    ]
    labels = [f"{len(indices)} {'leaf' if len(indices) == 1 else 'leaves'}" for indices in together]
    return _Bundle(plans, labels, restore)


def alike(x: Any, op: _ops.Op) -> Runs:
    """Plan a collective whose result has the shape of the input."""

    def plan(leaf: Tensor) -> _RowsPlan:
        return _RowsPlan(leaf.reshape(1, leaf.numel()), op, lambda rows: rows.view(leaf.shape))

    return _over_leaves(x, plan)


def gathered(x: Any, group: Group, dim: int) -> Runs:
    """Plan an all-gather along a dim."""

    def plan(leaf: Tensor) -> _RowsPlan:
        shard = leaf.movedim(_checked_dim(leaf, dim, "all_gather"), 0)

        def restore(rows: Tensor) -> Tensor:
            return rows.reshape(group.size * shard.shape[0], *shard.shape[1:]).movedim(0, dim)

        return _RowsPlan(shard.reshape(1, shard.numel()), _ops.AllGather(), restore)

    return _over_leaves(x, plan)


def scattered(x: Any, group: Group, dim: int) -> Runs:
    """Plan a reduce-scatter along a dim."""

    def plan(leaf: Tensor) -> _RowsPlan:
        length = _checked_pieces(leaf, dim, group.size, "reduce_scatter")
        whole = leaf.movedim(dim, 0)

        def restore(piece: Tensor) -> Tensor:
            return piece.reshape(length, *whole.shape[1:]).movedim(0, dim)

        return _RowsPlan(
            whole.reshape(group.size, whole.numel() // group.size), _ops.ReduceScatter(), restore
        )

    return _over_leaves(x, plan)


def exchanged(x: Any, group: Group, split_dim: int, concat_dim: int) -> Runs:
    """Plan an all-to-all that cuts along one dim and joins along another."""

    def plan(leaf: Tensor) -> _RowsPlan:
        length = _checked_pieces(leaf, split_dim, group.size, "all_to_all")
        split, concat = split_dim % leaf.dim(), _checked_dim(leaf, concat_dim, "all_to_all")
        pieces = leaf.unflatten(split, (group.size, length)).movedim(split, 0)

        def restore(rows: Tensor) -> Tensor:
            return rows.view(pieces.shape).movedim(0, concat).flatten(concat, concat + 1)

        return _RowsPlan(
            pieces.reshape(group.size, leaf.numel() // group.size), _ops.AllToAll(), restore
        )

    return _over_leaves(x, plan)


def _checked_dim(x: Tensor, dim: int, kind: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise OptionError(
            f"{kind} needs a dim of its tensor; got dim {dim} of shape {tuple(x.shape)}"
        )
    return dim % x.dim()


def _checked_pieces(x: Tensor, dim: int, size: int, kind: str) -> int:
    length = x.shape[_checked_dim(x, dim, kind)]
    if length % size:
        raise OptionError(
            f"{kind} needs a dim that the {size} ranks divide; got length {length} at dim {dim} "
            f"of {tuple(x.shape)}; pad it"
        )
    return length // size
