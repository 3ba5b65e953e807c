"""Collectives that can be differentiated, by every transform of torch.func.

[Note: what the gradient of a collective is]

A collective is a linear map A from the tensors of all ranks to the tensors of all ranks. Its derivative is A itself; its transpose is the
map A* with <A x, y> = <x, A* y>, where the inner product is summed over the ranks. So the gradient that a rank receives is that of the *sum
over the ranks* of what each of them differentiates:

====================  ===================================
collective            transpose
====================  ===================================
all_reduce            all_reduce
all_gather            reduce_scatter
reduce_scatter        all_gather
broadcast from root   reduce to root, zeros elsewhere
all_to_all            all_to_all with the dims exchanged
permute               the inverse permute
replicated            all_reduce (of what is one value)
====================  ===================================

If every rank computes the same loss from a replicated value, the sum counts it once per rank; divide where the loss is meant once.

The backward pass is a program of collectives too: every rank must take the gradient, of a value that requires it.

A tree of tensors goes as one message for each dtype, not one for each leaf: in rows, what different leaves send to one rank is one chunk.

One autograd function does it all. It sees matrices of one row per chunk (``[1, m] -> [size, m]`` for an all-gather), so that a batched
dimension fits between rows and columns without moving data; shapes and dims are restored outside by ordinary views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Lane, Op, Permute, ReduceScatter
from zfun.collectives._group import Group
from zfun.collectives._pending import Pending
from zfun.errors import LeafError, OptionError, PlacementError
from zfun.flat import flats

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "permute",
    "reduce_scatter",
    "replicated",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_permute",
    "start_reduce_scatter",
]


_T = TypeVar("_T")


class _UnderWay:
    """Where a started collective puts its handle. Not a list, since torch.func copies lists."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Pending | None = None


class _Collective(torch.autograd.Function):
    """``rows [a, m] -> rows [b, m]``, with a and b being 1 or the number of ranks. Its transpose is itself with the dual op."""

    @staticmethod
    def forward(  # type: ignore[override]
        rows: Tensor, group: Group, call: Call, started: _UnderWay | None
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
        _, ctx.group, ctx.call, ctx.started = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        call: Call = ctx.call
        dual = Call(call.op.dual, call.name, call.part, call.lane)
        return _apply(grad, ctx.group, dual, None), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        # Torch copies a tangent whose strides are not those of its primal, so its values must be there at once.
        return _apply(tangent, ctx.group, ctx.call, None)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple[int, None, None, None], rows: Tensor, group: Group, call: Call, started: _UnderWay | None
    ) -> tuple[Tensor, int]:
        batched = rows.movedim(in_dims[0], 1)
        out = _apply(batched.flatten(1), group, call, started)
        return out.view(out.shape[0], *batched.shape[1:]), 1


def _apply(rows: Tensor, group: Group, call: Call, started: _UnderWay | None) -> Tensor:
    return _Collective.apply(rows, group, call, started)  # type: ignore[no-any-return]


class _Plan(NamedTuple):
    """A collective of shaped tensors as one of rows: ``restore`` gives the result its shape, copying if need be."""

    rows: Tensor
    op: Op
    restore: Callable[[Tensor], Tensor]

    def run(self, group: Group, name: str, part: str, lane: Lane) -> Tensor:
        return self.restore(_apply(self.rows, group, Call(self.op, name, part, lane), None))

    def start(self, group: Group, name: str, part: str, lane: Lane) -> Pending:
        """Start the collective. Its output is part of the graph at once, and holds its values once it has been waited for."""
        started = _UnderWay()
        out = _apply(self.rows, group, Call(self.op, name, part, lane), started)

        def finish() -> Tensor:
            assert started.pending is not None
            started.pending.wait()
            return self.restore(out)

        return Pending(finish)


class _Replicated(torch.autograd.Function):
    """The identity on what all ranks hold alike, as seen from one value that they share: its transpose is the sum."""

    @staticmethod
    def forward(x: Tensor, group: Group, name: str) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_reduce(grad, ctx.group, name=ctx.name), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple[int, None, None], x: Tensor, group: Group, name: str
    ) -> tuple[Tensor, int]:
        return replicated(x, group, name=name), in_dims[0]


def replicated(x: Tensor, group: Group, *, name: str = "") -> Tensor:
    """``R -> R``: use a value that all ranks hold alike. Nothing is sent; the transpose is an all-reduce.

    ::

        rank             0  1          0  1
        gradient         1  2    ->    3  3

    So the gradient of the sum over the ranks arrives on all of them, and they go on alike.

    Args:
        x: a tensor, equal on all ranks.
        group: the ranks.
        name: what is sent backward, for messages and logs.

    Returns:
        The same tensor.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     return torch.func.grad(lambda x: (group.rank + 1) * replicated(x, group))(torch.tensor(5.0)).item()
        >>> simulate(2, main)
        [3.0, 3.0]
    """
    return _Replicated.apply(x, group, name)  # type: ignore[no-any-return]


class _Bundle(NamedTuple):
    """A collective of every leaf of a tree, as one of rows for each dtype and device."""

    plans: list[_Plan]
    labels: list[str]
    restore: Callable[[list[Tensor]], Any]

    def run(self, group: Group, name: str, part: str, lane: Lane) -> Any:
        return self.restore([plan.run(group, name, part or label, lane) for plan, label in zip(self.plans, self.labels, strict=True)])

    def start(self, group: Group, name: str, part: str, lane: Lane) -> Pending:
        under_way = [plan.start(group, name, part or label, lane) for plan, label in zip(self.plans, self.labels, strict=True)]
        return Pending(lambda: self.restore([pending.wait() for pending in under_way]))


def _over_leaves(x: Any, plan_of: Callable[[Tensor], _Plan]) -> Any:
    """Plan a collective of a tensor, or of all leaves of a tree at once: chunks of one rank stand in one row, whatever leaf they are of."""
    if isinstance(x, Tensor):
        return plan_of(x)
    if flats(x):
        raise PlacementError("a collective takes tensors; got a Flat, which has a placement to go to; call zf.redistribute()")
    leaves, spec = tree.flatten(x)
    for path, leaf in zip(tree.paths(x), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            raise LeafError(f"a collective takes a tensor or a tree of tensors; leaf {path!r} is {type(leaf).__name__}", leaf=path)
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

    plans = [_Plan(torch.cat([alone[i].rows for i in indices], 1), alone[indices[0]].op, lambda rows: rows) for indices in together]
    labels = [f"{len(indices)} {'leaf' if len(indices) == 1 else 'leaves'}" for indices in together]
    return _Bundle(plans, labels, restore)


def _alike(x: Any, op: Op) -> Any:
    return _over_leaves(x, lambda leaf: _alike_plan(leaf, op))


def _alike_plan(x: Tensor, op: Op) -> _Plan:
    def restore(rows: Tensor) -> Tensor:
        return rows.view(x.shape)

    return _Plan(x.reshape(1, x.numel()), op, restore)


def all_reduce(x: _T, group: Group, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> _T:
    """``P -> R``: every rank receives the sum. The transpose is the same sum.

    ::

        rank     0  1  2  3              0   1   2   3
        x        1  2  3  4     ->      10  10  10  10

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such.
        group: the ranks.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The sum over the ranks, in rank order; the shape of ``x``.

    Raises:
        PeerLost: another rank did not take part.
        CollectiveMismatch: another rank started something else.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(4, lambda group: all_reduce(torch.tensor(group.rank + 1), group).item())
        [10, 10, 10, 10]
        >>> simulate(2, lambda group: all_reduce({"loss": torch.tensor(0.5), "hits": torch.tensor(3)}, group))[0]
        {'loss': tensor(1.), 'hits': tensor(6)}
    """
    return _alike(x, AllReduce()).run(group, name, part, lane)


def start_all_reduce(x: Any, group: Group, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Pending:
    """Start an :func:`all_reduce`; ``wait()`` returns the differentiable result."""
    return _alike(x, AllReduce()).start(group, name, part, lane)


def all_gather(x: _T, group: Group, dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> _T:
    """``S -> R``: every rank receives the shards of all, one after the other along ``dim``. The transpose is a reduce-scatter.

    ::

        rank     0    1    2    3              0         1         2         3
        x       [1]  [2]  [3]  [4]    ->   [1 2 3 4] [1 2 3 4] [1 2 3 4] [1 2 3 4]

    Args:
        x: a shard, of the same shape on all ranks, or a tree of such; at least one dimension.
        group: the ranks.
        dim: the dimension that grows ``size`` times.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The shards of all ranks, joined.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: all_gather(torch.tensor([group.rank]), group).tolist())
        [[0, 1], [0, 1]]
    """
    return _over_leaves(x, lambda leaf: _gather_plan(leaf, group, dim)).run(group, name, part, lane)


def start_all_gather(x: Any, group: Group, dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Pending:
    """Start an :func:`all_gather`; ``wait()`` returns the differentiable result."""
    return _over_leaves(x, lambda leaf: _gather_plan(leaf, group, dim)).start(group, name, part, lane)


def _gather_plan(x: Tensor, group: Group, dim: int) -> _Plan:
    shard = x.movedim(_checked_dim(x, dim, "all_gather"), 0)

    def restore(rows: Tensor) -> Tensor:
        return rows.reshape(group.size * shard.shape[0], *shard.shape[1:]).movedim(0, dim)

    return _Plan(shard.reshape(1, shard.numel()), AllGather(), restore)


def reduce_scatter(x: _T, group: Group, dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> _T:
    """``P -> S``: rank r receives the r-th piece of the sum. The transpose is an all-gather.

    ::

        rank       0      1           0     1
        x       [1 2]  [10 20]   ->  [11]  [22]

    Args:
        x: a term of the sum, of the same shape on all ranks, or a tree of such; the group's size divides ``dim``.
        group: the ranks.
        dim: the dimension that is cut into ``size`` pieces.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        This rank's piece of the sum.

    Raises:
        OptionError: the ranks do not divide ``dim``.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: reduce_scatter(torch.tensor([1, 2]), group).tolist())
        [[2], [4]]
    """
    return _over_leaves(x, lambda leaf: _scatter_plan(leaf, group, dim)).run(group, name, part, lane)


def start_reduce_scatter(x: Any, group: Group, dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Pending:
    """Start a :func:`reduce_scatter`; ``wait()`` returns the differentiable result."""
    return _over_leaves(x, lambda leaf: _scatter_plan(leaf, group, dim)).start(group, name, part, lane)


def _scatter_plan(x: Tensor, group: Group, dim: int) -> _Plan:
    length = _checked_pieces(x, dim, group.size, "reduce_scatter")
    whole = x.movedim(dim, 0)

    def restore(piece: Tensor) -> Tensor:
        return piece.reshape(length, *whole.shape[1:]).movedim(0, dim)

    return _Plan(whole.reshape(group.size, whole.numel() // group.size), ReduceScatter(), restore)


def broadcast(x: _T, group: Group, root: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> _T:
    """Every rank receives the tensor of ``root``. The transpose sums on ``root`` and gives zeros to the others.

    ::

        rank        0  1  2  3          0  1  2  3
        x, root 1   1  2  3  4    ->    2  2  2  2

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such; its values count on ``root`` only.
        group: the ranks.
        root: the rank that is heard.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The tensor of ``root``.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(3, lambda group: broadcast(torch.tensor(group.rank), group, root=2).item())
        [2, 2, 2]
    """
    return _alike(x, Broadcast(root)).run(group, name, part, lane)


def start_broadcast(x: Any, group: Group, root: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Pending:
    """Start a :func:`broadcast`; ``wait()`` returns the differentiable result."""
    return _alike(x, Broadcast(root)).start(group, name, part, lane)


def permute(x: _T, group: Group, destinations: Sequence[int], *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> _T:
    """Rank ``destinations[r]`` receives the tensor of rank r. The transpose is the inverse permutation.

    ::

        rank                         0  1  2  3          0  1  2  3
        x, destinations (1,2,3,0)    1  2  3  4    ->    4  1  2  3

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such.
        group: the ranks.
        destinations: for each rank the one that it sends to; each rank once.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The tensor of the rank that sends to this one.

    Raises:
        OptionError: ``destinations`` is no permutation of the ranks.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(3, lambda group: permute(torch.tensor(group.rank), group, (1, 2, 0)).item())
        [2, 0, 1]
    """
    return _alike(x, Permute(tuple(destinations))).run(group, name, part, lane)


def start_permute(
    x: Any, group: Group, destinations: Sequence[int], *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL
) -> Pending:
    """Start a :func:`permute`; ``wait()`` returns the differentiable result."""
    return _alike(x, Permute(tuple(destinations))).start(group, name, part, lane)


def all_to_all(
    x: _T, group: Group, split_dim: int = 0, concat_dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL
) -> _T:
    """Cut along ``split_dim``, send piece j to rank j, join what arrives along ``concat_dim``. The transpose exchanges the two dims.

    ::

        rank       0      1               0      1
        x       [1 2]  [3 4]    ->     [1 3]  [2 4]

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such; the group's size divides ``split_dim``.
        group: the ranks.
        split_dim: the dimension that is cut into ``size`` pieces.
        concat_dim: the dimension along which the received pieces are joined, in rank order.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The joined pieces.

    Raises:
        OptionError: the ranks do not divide ``split_dim``.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: all_to_all(torch.tensor([1, 2]) + 2 * group.rank, group).tolist())
        [[1, 3], [2, 4]]
    """
    return _over_leaves(x, lambda leaf: _transpose_plan(leaf, group, split_dim, concat_dim)).run(group, name, part, lane)


def start_all_to_all(
    x: Any, group: Group, split_dim: int = 0, concat_dim: int = 0, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL
) -> Pending:
    """Start an :func:`all_to_all`; ``wait()`` returns the differentiable result."""
    return _over_leaves(x, lambda leaf: _transpose_plan(leaf, group, split_dim, concat_dim)).start(group, name, part, lane)


def _transpose_plan(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> _Plan:
    length = _checked_pieces(x, split_dim, group.size, "all_to_all")
    split, concat = split_dim % x.dim(), _checked_dim(x, concat_dim, "all_to_all")
    pieces = x.unflatten(split, (group.size, length)).movedim(split, 0)

    def restore(rows: Tensor) -> Tensor:
        return rows.view(pieces.shape).movedim(0, concat).flatten(concat, concat + 1)

    return _Plan(pieces.reshape(group.size, x.numel() // group.size), AllToAll(), restore)


def _checked_dim(x: Tensor, dim: int, kind: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise OptionError(f"{kind} needs a dim of its tensor; got dim {dim} of shape {tuple(x.shape)}")
    return dim % x.dim()


def _checked_pieces(x: Tensor, dim: int, size: int, kind: str) -> int:
    length = x.shape[_checked_dim(x, dim, kind)]
    if length % size:
        raise OptionError(f"{kind} needs a dim that the {size} ranks divide; got length {length} at dim {dim} of {tuple(x.shape)}; pad it")
    return length // size
