"""Collectives with a codec, with the derivatives of the exact ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun import collectives
from zfun.collectives import AllGather, AllReduce, Collective, Group, Op, ReduceScatter
from zfun.compression._codecs import CODEC, Codec
from zfun.compression._collectives import start
from zfun.errors import OptionError
from zfun.options import takes


class _StraightThrough(torch.autograd.Function):
    """A compressed collective with the derivative of the exact one, because rounding has none."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, group: Group, codec: Codec, call: Collective
    ) -> Tensor:
        return start(call, x, group, codec).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, _, ctx.call = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exact(grad, ctx.group, ctx.call, ctx.call.op.dual), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _exact(tangent, ctx.group, ctx.call, ctx.call.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # type: ignore[override]
        raise OptionError(
            "a compressed collective has no vmap rule; got a batched tensor; send it exactly: "
            "use zf.collectives"
        )


def _exact(x: Tensor, group: Group, call: Collective, op: Op) -> Tensor:
    # A kind has the name of its function.
    return getattr(collectives, op.kind)(x, group, name=call.name, part=call.part)


@takes(codec=CODEC)
def all_gather(x: Tensor, group: Group, codec: Codec, *, name: str = "", part: str = "") -> Tensor:
    """``S -> R``: gather shards in few bits.

    The derivative is the derivative of the exact all-gather: a reduce-scatter.

    Args:
        x: this rank's shard, 1-D, floating.
        group: the ranks.
        codec: how ``x`` is written.
        name: the name of ``x`` in messages and logs.
        part: the part of ``x``, for the same use.

    Returns:
        ``[size * n]``, the same bits on every rank.

    Raises:
        OptionError: ``x`` is not 1-D and floating.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x = torch.tensor([1.0, 127.0]) * (group.rank + 1)
        ...     return zf.compression.all_gather(x, group, zf.compression.int8(block=2))
        >>> zf.simulate(2, main)[1]
        tensor([  1., 127.,   2., 254.])
    """
    return _run(x, group, codec, Collective(AllGather(), name, part))


@takes(codec=CODEC)
def reduce_scatter(
    x: Tensor, group: Group, codec: Codec, *, name: str = "", part: str = ""
) -> Tensor:
    """``P -> S``: sum over the ranks in few bits; each rank receives its piece.

    The derivative is the derivative of the exact reduce-scatter: an all-gather.

    Args:
        x: a term of the sum, 1-D, floating; the ranks divide its length.
        group: the ranks.
        codec: how ``x`` is written.
        name: the name of ``x`` in messages and logs.
        part: the part of ``x``, for the same use.

    Returns:
        ``[n / size]``.

    Raises:
        OptionError: ``x`` is not 1-D and floating, or the ranks do not divide its length.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x = torch.tensor([1.0, 127.0, 2.0, 254.0]) * (group.rank + 1)
        ...     return zf.compression.reduce_scatter(x, group, zf.compression.int8(block=2))
        >>> zf.simulate(2, main)
        [tensor([  3., 381.]), tensor([  6., 762.])]
    """
    return _run(x, group, codec, Collective(ReduceScatter(), name, part))


@takes(codec=CODEC)
def all_reduce(x: Tensor, group: Group, codec: Codec, *, name: str = "", part: str = "") -> Tensor:
    """``P -> R``: sum over the ranks in few bits; every rank receives the sum.

    The derivative is the derivative of the exact all-reduce.

    Args:
        x: a term of the sum, 1-D, floating.
        group: the ranks.
        codec: how the terms and the sums are written.
        name: the name of ``x`` in messages and logs.
        part: the part of ``x``, for the same use.

    Returns:
        ``[n]``, the same bits on every rank.

    Raises:
        OptionError: ``x`` is not 1-D and floating.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x = torch.tensor([1.0, 127.0]) * (group.rank + 1)
        ...     return zf.compression.all_reduce(x, group, zf.compression.int8(block=2))
        >>> zf.simulate(2, main)[0]
        tensor([  3., 381.])
    """
    return _run(x, group, codec, Collective(AllReduce(), name, part))


def _run(x: Tensor, group: Group, codec: Codec, call: Collective) -> Tensor:
    return _StraightThrough.apply(x, group, codec, call)  # type: ignore[no-any-return]
