"""The borders of code that ranks share: values that all ranks use alike, and their gradients.

[Note: values used alike]
Between the borders each rank works on its part of one computation, such as its columns of a matrix.
Outside, all ranks compute the same, down to one loss. So this loss counts once, where the other
collectives count a loss once per rank:

==================  ==============  ===========
function            forward         backward
==================  ==============  ===========
``enter(x)``        ``R -> R``      ``P -> R``
``leave(x)``        ``P -> R``      ``R -> R``
``enter(x, dim)``   ``R -> S``      ``S -> R``
``leave(x, dim)``   ``S -> R``      ``R -> S``
==================  ==============  ===========

Each is the backward pass of the other, so derivatives of any order hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives._functional import all_gather
from zfun.collectives._group import Group
from zfun.collectives._ops import AllReduce, Collective
from zfun.errors import OptionError
from zfun.options import integer, takes


class _Border(torch.autograd.Function):
    """``enter`` or ``leave``; ``dim`` is ``None`` for a sum."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, group: Group, dim: int | None, enters: bool, name: str, part: str
    ) -> Tensor:
        if dim is not None:
            return (
                x.chunk(group.size, dim)[group.rank]
                if enters
                else _joined(x, group, dim, name, part)
            )
        if enters:
            return x.view_as(x)
        rows = x.contiguous().view(-1)
        return group.start(Collective(AllReduce(), name, part), rows).wait().view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.options = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        group, dim, enters, *named = ctx.options
        return _cross(grad, group, dim, not enters, *named), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        out = _cross(tangent, *ctx.options)
        return out.view_as(out)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any,
        in_dims: tuple[int, None, None, None, None, None],
        x: Tensor,
        group: Group,
        dim: int | None,
        enters: bool,
        name: str,
        part: str,
    ) -> tuple[Tensor, int]:
        batched = x.movedim(in_dims[0], 0)
        return _cross(batched, group, None if dim is None else dim + 1, enters, name, part), 0


def _joined(x: Tensor, group: Group, dim: int, name: str, part: str) -> Tensor:
    return all_gather(x, group, dim, name=name, part=part).contiguous()


@ops.uncompiled
def _cross(
    x: Tensor, group: Group, dim: int | None, enters: bool, name: str, part: str = ""
) -> Tensor:
    return _Border.apply(x, group, dim, enters, name, part)  # type: ignore[no-any-return]


def _dim_of(x: Tensor, dim: int | None, function: str) -> int | None:
    if dim is None:
        return None
    if not -x.dim() <= dim < x.dim():
        raise OptionError(
            f"{function} needs a dim of its tensor; got dim {dim} of shape {tuple(x.shape)}; "
            "name another one"
        )
    return dim % x.dim()


@takes(dim=integer() | None)
def enter(
    x: Tensor, group: Group, dim: int | None = None, *, name: str = "", part: str = ""
) -> Tensor:
    """``R -> R``: each rank goes on with its part of a computation; backward ``P -> R``.

    Nothing is sent; backward sums the gradients of the ranks::

        rank             0  1          0  1
        x                5  5    ->    5  5
        gradient         3  3    <-    1  2

    With ``dim`` a rank keeps its piece, ``R -> S``, and backward gathers, ``S -> R``::

        rank             0      1            0    1
        x              [5 6]  [5 6]    ->   [5]  [6]
        gradient       [1 2]  [1 2]    <-   [1]  [2]

    This is :func:`replicated` for a loss that all ranks compute alike: the two differ in second
    derivatives only, where this one counts the loss once.

    Args:
        x: a tensor, equal on all ranks.
        group: the ranks.
        dim: the dimension that is cut; by default none is.
        name: a name for messages and logs.
        part: what is summed, such as the path of a leaf; ranks with different parts are refused.

    Returns:
        The same tensor, or this rank's piece.

    Raises:
        OptionError: the ranks do not divide ``dim``.

    Example:
        >>> from zfun.collectives import simulate
        >>> def main(group):
        ...     loss = lambda x: leave((group.rank + 1) * enter(x, group), group)
        ...     return torch.func.grad_and_value(loss)(torch.tensor(5.0))
        >>> simulate(2, main)[0]
        (tensor(3.), tensor(15.))
    """
    at = _dim_of(x, dim, "enter()")
    if at is not None and x.shape[at] % group.size:
        raise OptionError(
            f"enter() needs a dim that the {group.size} ranks divide; got length {x.shape[at]} at "
            f"dim {dim} of {tuple(x.shape)}; pad it"
        )
    return _cross(x, group, at, True, name, part)


@takes(dim=integer() | None)
def leave(x: Tensor, group: Group, dim: int | None = None, *, name: str = "") -> Tensor:
    """``P -> R``: all ranks go on with the sum of their parts, alike; backward ``R -> R``.

    Forward sums, and nothing is sent in backward::

        rank             0  1          0  1
        x                1  2    ->    3  3
        gradient         7  7    <-    7  7

    With ``dim`` the parts are joined, ``S -> R``, and backward keeps a piece, ``R -> S``::

        rank             0    1            0      1
        x               [5]  [6]    ->   [5 6]  [5 6]
        gradient        [1]  [2]    <-   [1 2]  [1 2]

    An :func:`all_reduce` or :func:`all_gather` in this place would count the loss once per rank.

    Args:
        x: this rank's part, of the same shape on all ranks.
        group: the ranks.
        dim: the dimension along which the parts are joined; by default they are added.
        name: a name for messages and logs.

    Returns:
        The sum in rank order, or the parts of all ranks, joined.

    Raises:
        PeerLost: another rank did not take part.
        CollectiveMismatch: another rank started another collective.

    Example:
        >>> from zfun.collectives import simulate
        >>> simulate(2, lambda group: leave(torch.tensor([group.rank + 1]), group, 0).tolist())
        [[1, 2], [1, 2]]
    """
    return _cross(x, group, _dim_of(x, dim, "leave()"), False, name)
