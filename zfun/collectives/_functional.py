"""Collectives that can be differentiated, by every transform of torch.func.

[Note: the gradient of a collective]

A collective is a linear map A from the tensors of all ranks to the tensors of all ranks. Its
derivative is A itself; its transpose is the map A* with <A x, y> = <x, A* y>, where the inner
product is summed over the ranks. So the gradient that a rank receives is that of the *sum over the
ranks* of the values that the ranks differentiate:

====================  ===================================
collective            transpose
====================  ===================================
all_reduce            all_reduce
all_gather            reduce_scatter
reduce_scatter        all_gather
broadcast from root   reduce to root, zeros elsewhere
all_to_all            all_to_all with the dims exchanged
permute               the inverse permute
replicated            all_reduce
====================  ===================================

If every rank computes the same loss from a replicated value, the sum counts the loss once per rank;
divide the loss by the number of ranks to count it once.

The backward pass starts collectives too, so every rank must take the gradient, of a tensor that
requires a gradient.

``_rows`` turns a collective of any shape, or of a tree, into one autograd function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from zfun.collectives._group import Group
from zfun.collectives._ops import RANKS, AllReduce, Broadcast, Permute
from zfun.collectives._rows import alike, exchanged, gathered, scattered
from zfun.collectives._work import Work
from zfun.options import Kind, integer, takes

_T = TypeVar("_T")

# The planning of a collective looks at the leaves, and names one that is no tensor.
LEAVES = Kind(lambda x: x is not None, ("a tensor or a tree of tensors",), "torch.zeros(2)")


class _Replicated(torch.autograd.Function):
    """The identity on a value that all ranks share; the transpose is the sum over the ranks."""

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


@takes()
def replicated(x: Tensor, group: Group, *, name: str = "") -> Tensor:
    """``R -> R``: use a value that is equal on all ranks.

    Nothing is sent; the transpose is an all-reduce.

    ::

        rank             0  1          0  1
        gradient         1  2    ->    3  3

    So every rank receives the gradient of the sum over the ranks.

    Args:
        x: a tensor, equal on all ranks.
        group: the ranks.
        name: a name of the gradient for messages and logs.

    Returns:
        The same tensor.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     fn = lambda x: (group.rank + 1) * replicated(x, group)
        ...     return torch.func.grad(fn)(torch.tensor(5.0)).item()
        >>> simulate(2, main)
        [3.0, 3.0]
    """
    return _Replicated.apply(x, group, name)  # type: ignore[no-any-return]


@takes(x=LEAVES)
def all_reduce(x: _T, group: Group, *, name: str = "", part: str = "") -> _T:
    """``P -> R``: every rank receives the sum. The transpose is the same sum.

    ::

        rank     0  1  2  3              0   1   2   3
        x        1  2  3  4     ->      10  10  10  10

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such.
        group: the ranks.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        The sum over the ranks, in rank order; the shape of ``x``.

    Raises:
        PeerLost: another rank did not take part.
        CollectiveMismatch: another rank started another collective.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(4, lambda group: all_reduce(torch.tensor(group.rank + 1), group).item())
        [10, 10, 10, 10]
        >>> found = {"loss": torch.tensor(0.5), "hits": torch.tensor(3)}
        >>> simulate(2, lambda group: all_reduce(found, group))[0]
        {'loss': tensor(1.), 'hits': tensor(6)}
    """
    return alike(x, AllReduce()).run(group, name, part)


@takes(x=LEAVES)
def start_all_reduce(x: Any, group: Group, *, name: str = "", part: str = "") -> Work:
    """Start an :func:`all_reduce`; ``wait()`` returns the differentiable result."""
    return alike(x, AllReduce()).start(group, name, part)


@takes(x=LEAVES, dim=integer())
def all_gather(x: _T, group: Group, dim: int = 0, *, name: str = "", part: str = "") -> _T:
    """``S -> R``: every rank receives the shards of all, one after the other along ``dim``.

    The transpose is a reduce-scatter.

    ::

        rank     0    1    2    3              0         1         2         3
        x       [1]  [2]  [3]  [4]    ->   [1 2 3 4] [1 2 3 4] [1 2 3 4] [1 2 3 4]

    Args:
        x: a shard, of the same shape on all ranks, or a tree of such; at least one dimension.
        group: the ranks.
        dim: the dimension that grows ``size`` times.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        The shards of all ranks, joined.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: all_gather(torch.tensor([group.rank]), group).tolist())
        [[0, 1], [0, 1]]
    """
    return gathered(x, group, dim).run(group, name, part)


@takes(x=LEAVES, dim=integer())
def start_all_gather(x: Any, group: Group, dim: int = 0, *, name: str = "", part: str = "") -> Work:
    """Start an :func:`all_gather`; ``wait()`` returns the differentiable result."""
    return gathered(x, group, dim).start(group, name, part)


@takes(x=LEAVES, dim=integer())
def reduce_scatter(x: _T, group: Group, dim: int = 0, *, name: str = "", part: str = "") -> _T:
    """``P -> S``: rank r receives the r-th piece of the sum. The transpose is an all-gather.

    ::

        rank       0      1           0     1
        x       [1 2]  [10 20]   ->  [11]  [22]

    Args:
        x: a term of the sum, of the same shape on all ranks, or a tree of such; the group's size
            divides ``dim``.
        group: the ranks.
        dim: the dimension that is cut into ``size`` pieces.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        This rank's piece of the sum.

    Raises:
        OptionError: the ranks do not divide ``dim``.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: reduce_scatter(torch.tensor([1, 2]), group).tolist())
        [[2], [4]]
    """
    return scattered(x, group, dim).run(group, name, part)


@takes(x=LEAVES, dim=integer())
def start_reduce_scatter(
    x: Any, group: Group, dim: int = 0, *, name: str = "", part: str = ""
) -> Work:
    """Start a :func:`reduce_scatter`; ``wait()`` returns the differentiable result."""
    return scattered(x, group, dim).start(group, name, part)


@takes(x=LEAVES, root=integer(0))
def broadcast(x: _T, group: Group, root: int = 0, *, name: str = "", part: str = "") -> _T:
    """Every rank receives the tensor of ``root``.

    The transpose sums on ``root`` and gives zeros to the others.

    ::

        rank        0  1  2  3          0  1  2  3
        x, root 1   1  2  3  4    ->    2  2  2  2

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such; only the values on ``root``
            count.
        group: the ranks.
        root: the rank that sends.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        The tensor of ``root``.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(3, lambda group: broadcast(torch.tensor(group.rank), group, root=2).item())
        [2, 2, 2]
    """
    return alike(x, Broadcast(root)).run(group, name, part)


@takes(x=LEAVES, root=integer(0))
def start_broadcast(x: Any, group: Group, root: int = 0, *, name: str = "", part: str = "") -> Work:
    """Start a :func:`broadcast`; ``wait()`` returns the differentiable result."""
    return alike(x, Broadcast(root)).start(group, name, part)


@takes(x=LEAVES, destinations=RANKS)
def permute(
    x: _T, group: Group, destinations: Sequence[int], *, name: str = "", part: str = ""
) -> _T:
    """Rank ``destinations[r]`` receives the tensor of rank r.

    The transpose is the inverse permutation.

    ::

        rank                         0  1  2  3          0  1  2  3
        x, destinations (1,2,3,0)    1  2  3  4    ->    4  1  2  3

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such.
        group: the ranks.
        destinations: for each rank the rank that receives its tensor; each rank once.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        The tensor of the rank that sends to this one.

    Raises:
        OptionError: ``destinations`` is no permutation of the ranks.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(3, lambda group: permute(torch.tensor(group.rank), group, (1, 2, 0)).item())
        [2, 0, 1]
    """
    return alike(x, Permute(tuple(destinations))).run(group, name, part)


@takes(x=LEAVES, destinations=RANKS)
def start_permute(
    x: Any, group: Group, destinations: Sequence[int], *, name: str = "", part: str = ""
) -> Work:
    """Start a :func:`permute`; ``wait()`` returns the differentiable result."""
    return alike(x, Permute(tuple(destinations))).start(group, name, part)


@takes(x=LEAVES, split_dim=integer(), concat_dim=integer())
def all_to_all(
    x: _T, group: Group, split_dim: int = 0, concat_dim: int = 0, *, name: str = "", part: str = ""
) -> _T:
    """Cut along ``split_dim``, send piece j to rank j, join the pieces along ``concat_dim``.

    The transpose exchanges the two dims.

    ::

        rank       0      1               0      1
        x       [1 2]  [3 4]    ->     [1 3]  [2 4]

    Args:
        x: a tensor of the same shape on all ranks, or a tree of such; the group's size divides
            ``split_dim``.
        group: the ranks.
        split_dim: the dimension that is cut into ``size`` pieces.
        concat_dim: the dimension along which the received pieces are joined, in rank order.
        name: a name for messages and logs.
        part: the part of a value, such as a bucket.

    Returns:
        The joined pieces.

    Raises:
        OptionError: the ranks do not divide ``split_dim``.

    Example:
        >>> from zfun.collectives import simulate
        >>> rows = torch.tensor([1, 2])
        >>> simulate(2, lambda group: all_to_all(rows + 2 * group.rank, group).tolist())
        [[1, 3], [2, 4]]
    """
    return exchanged(x, group, split_dim, concat_dim).run(group, name, part)


@takes(x=LEAVES, split_dim=integer(), concat_dim=integer())
def start_all_to_all(
    x: Any, group: Group, split_dim: int = 0, concat_dim: int = 0, *, name: str = "", part: str = ""
) -> Work:
    """Start an :func:`all_to_all`; ``wait()`` returns the differentiable result."""
    return exchanged(x, group, split_dim, concat_dim).start(group, name, part)
