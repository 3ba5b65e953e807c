"""Collectives with a codec.

[Note: messages]
A codec writes numbers as bytes before they are sent: ``int8`` and ``int4`` in
blocks of small integers with a scale each (``zfun/ops/_codes.py`` has the arithmetic). The bytes
go through the same collectives as exact values, so every kind of group sends, counts and checks the
bytes.

* all-gather: every rank encodes its shard as one message and decodes all messages, including its
  own. So every rank has the same bits, and no rank keeps a better copy of its own shard.
* reduce-scatter: codes cannot be added, so the collective is an all-to-all. Every rank encodes one
  message for each rank, and adds the messages that arrive in rank order, in float32 (float64 for
  float64 numbers), rounded once. Over several axes the sum takes a hop over each, the innermost
  first, and is encoded again before each.
* all-reduce: a reduce-scatter and an all-gather of the sums, which are encoded again.

A rank releases a message as soon as the message is decoded. The caller may overwrite
the numbers as soon as the message is encoded.

With error feedback, the rounding error of one message is added to the next message of the same
place.

After Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training"
(2023): parameters gathered in 8 bits, gradients reduced in 4; error feedback: Seide et al.,
"1-Bit Stochastic Gradient Descent" (2014); its slow form: Xie et al., "LoCo: Low-Bit Communication
Adaptor for Large-scale Model Training" (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import (
    CALL,
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Group,
    ReduceScatter,
    Work,
    axes_of,
    axis_of,
    check_shardable,
    global_ranks,
    replica_group,
    start_gather,
    start_reduce_scatter_over,
    start_scatter,
)
from zfun.compression._codecs import CODEC, Codec
from zfun.errors import OptionError
from zfun.layout import BucketSlot
from zfun.options import FLOATING, takes


@takes(call=CALL, codec=CODEC, dtype=FLOATING | None)
def start(
    call: Collective, x: Tensor, group: Group, codec: Codec, *, dtype: torch.dtype | None = None
) -> Work:
    """Start a collective of a flat tensor with a codec, without a derivative.

    ============== ============ ===========================================
    collective     result       each rank sends, of n numbers over N ranks
    ============== ============ ===========================================
    all-gather     ``[N n]``    ``(N - 1) message_bytes(n)``
    reduce-scatter ``[n / N]``  ``(N - 1) message_bytes(n / N)``
    all-reduce     ``[n]``      ``2 (N - 1) message_bytes(ceil(n / N))``
    ============== ============ ===========================================

    A collective of several phases starts the later phases in ``wait()``, so all ranks must wait in
    one order.

    Args:
        call: the collective, with its name, part and stream.
        x: 1-D, floating.
        group: the ranks.
        codec: how ``x`` is written.
        dtype: the dtype of the result; by default the dtype of ``x``.

    Returns:
        The pending result: of an all-gather and an all-reduce the same bits on every rank.

    Raises:
        OptionError: another collective, numbers that are not floating, or a length that the ranks
            do not divide.

    Example:
        >>> import zfun as zf
        >>> from zfun.collectives import AllReduce
        >>> def main(group):
        ...     x = torch.tensor([127.0, 3.0])
        ...     return start(Collective(AllReduce()), x, group, zf.compression.int8()).wait()
        >>> zf.simulate(2, main)[1]
        tensor([254.,   6.])
    """
    size, numel = group.size, x.numel()
    if not x.is_floating_point():
        raise OptionError(
            f"a codec is for floating numbers; got {call.op.kind} of {x.dtype}; send it exactly: "
            "use zf.collectives"
        )
    if x.dim() != 1 or (isinstance(call.op, ReduceScatter) and numel % size):
        raise OptionError(
            f"{call.op.kind} with a codec takes a 1-D tensor that the {size} ranks divide; got "
            f"shape {tuple(x.shape)}; pad it"
        )
    if not isinstance(call.op, AllGather | ReduceScatter | AllReduce):
        raise OptionError(
            f"a codec is for all_gather, reduce_scatter and all_reduce; got {call.op.kind}; "
            "send it exactly"
        )
    x, dtype = x.detach().contiguous(), dtype or x.dtype
    if size == 1:
        return Work.done(x.to(dtype, copy=True))
    match call.op:
        case AllGather():
            return _start_gather(call, x, group, codec, dtype)
        case ReduceScatter():
            return _start_sum(call, x, group, codec, dtype)
        case _:
            padding = -numel % size
            scattered = _start_sum(
                call,
                torch.nn.functional.pad(x, (0, padding)) if padding else x,
                group,
                codec,
                ops.wide(x.dtype),
            )
            return Work(
                lambda: _start_gather(call, scattered.wait(), group, codec, dtype).wait()[:numel]
            )


@takes(call=CALL, codec=CODEC)
def start_over(call: Collective, x: Tensor, group: Group, codec: Codec) -> Work:
    """``P -> S``: start a compressed sum over the mesh of a group, sharded over the group.

    This is :func:`start`, and then, where values over ``group`` are repeated along other axes, an
    all-reduce over these.

    Args:
        call: a reduce-scatter.
        x: 1-D, floating; the size of ``group`` divides its length.
        group: over which the sum is cut.
        codec: how ``x`` is written.

    Returns:
        The pending piece of this rank.

    Raises:
        OptionError: another collective, or an ``x`` that :func:`start` refuses.
        PlacementError: ``group`` is the outer axis of a mesh.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     mesh = zf.split(group, inner=2)
        ...     x, codec = torch.tensor([127.0, 254.0]), zf.compression.int8()
        ...     return start_over(Collective(ReduceScatter()), x, mesh.inner, codec).wait().item()
        >>> zf.simulate(4, main)
        [508.0, 1016.0, 508.0, 1016.0]
    """
    check_shardable(group, "start_over()")
    if not isinstance(call.op, ReduceScatter):
        raise OptionError(
            f"start_over() is for reduce_scatter; got {call.op.kind}; pass another collective to "
            "start()"
        )
    scattered, replicas = start(call, x, group, codec), replica_group(group)
    if replicas is None:
        return scattered
    again = Collective(AllReduce(), call.name, call.part, call.stream)
    return Work(lambda: start(again, scattered.wait(), replicas, codec).wait())


def gather_bucket(
    call: Collective,
    piece: Tensor,
    group: Group,
    slot: BucketSlot,
    codec: Codec | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Work:
    """``S -> R``: start to gather a bucket from this rank's piece.

    Args:
        call: an all-gather.
        piece: of this rank.
        group: the ranks that share the bucket.
        slot: the bucket.
        codec: how floating numbers are sent; ``None`` for exactly.
        dtype: of the result with a codec.
        out: where an exact result of equal pieces may go.
    """
    send = None
    if codec is not None and piece.is_floating_point():
        send = lambda x: start(call, x, group, codec, dtype=dtype)
    if slot.pieces:
        return start_gather(group, call, piece, slot.pieces, send)
    return group.start(call, piece, out) if send is None else send(piece)


def sum_bucket(
    call: Collective, x: Tensor, group: Group, slot: BucketSlot, codec: Codec | None = None
) -> Work:
    """``P -> S``: start to sum a bucket over the mesh of a group, in pieces over the group.

    Args:
        call: a reduce-scatter.
        x: this rank's term.
        group: over which the sum is cut.
        slot: the bucket.
        codec: how floating numbers are sent; ``None`` for exactly.
    """
    send = None
    if codec is not None and x.is_floating_point():
        send = lambda x: start_over(call, x, group, codec)
    if slot.pieces:
        return start_scatter(group, call, x, slot.pieces, send)
    if send is not None:
        return send(x)
    if replica_group(group) is not None:
        # Their sum takes the place of the first one.
        return start_reduce_scatter_over(group, call, x)
    make, numel = group.allocate, x.numel() // group.size
    return group.start(call, x, None if make is None else make(numel, x.dtype, x.device))


def _start_gather(
    call: Collective, x: Tensor, group: Group, codec: Codec, dtype: torch.dtype
) -> Work:
    message = _written(
        x.view(1, -1), group, codec, f"{call.name} {call.part} gather {axis_of(group)}".strip()
    )
    gather = Collective(AllGather(), call.name, call.part, call.stream, zero_copy=True)
    pending, numel = group.start(gather, message.view(-1)), x.numel()

    def finish() -> Tensor:
        messages = pending.wait().view(group.size, -1)
        return codec.decode(messages, numel, dtype).reshape(-1)

    return Work(finish)


def _start_sum(call: Collective, x: Tensor, group: Group, codec: Codec, dtype: torch.dtype) -> Work:
    # An axis of one rank sends nothing.
    first, *later = [axis for axis in axes_of(group) if axis.size > 1]
    started = _start_hop(call, x, first, group, codec, 0, ops.wide(x.dtype) if later else dtype)

    def finish() -> Tensor:
        total = started.wait()
        for index, hop in enumerate(later, 1):
            total = _start_hop(call, total, hop, group, codec, index, dtype).wait()
        return total

    return Work(finish)


def _number(group: Group) -> int:
    """Return the global rank of this rank."""
    return global_ranks(group)[group.rank]


def _start_hop(
    call: Collective,
    x: Tensor,
    hop: Group,
    group: Group,
    codec: Codec,
    index: int,
    dtype: torch.dtype,
) -> Work:
    """Send each rank of a hop one piece; ``wait()`` adds the pieces that arrive."""
    numel = x.numel() // hop.size
    messages = _written(
        x.view(hop.size, numel),
        group,
        codec,
        f"{call.name} {call.part} hop {index} {axis_of(group)}".strip(),
    )
    exchange = Collective(AllToAll(), call.name, call.part, call.stream, zero_copy=True)
    pending = hop.start(exchange, messages.view(-1))

    def finish() -> Tensor:
        received = pending.wait().view(hop.size, -1)
        return codec.decode_sum(received, numel, dtype)

    return Work(finish)


def _written(rows: Tensor, group: Group, codec: Codec, place: str) -> Tensor:
    """Encode rows, after adding the errors of the last messages of the same place."""
    feedback = codec.feedback
    if feedback is None:
        return codec.encode(rows)
    count, kept = feedback._take(_number(group), place, rows)
    wide = ops.wide(rows.dtype)
    if feedback.reset and count and count % feedback.reset == 0:
        kept = None
    full = rows.to(wide) if kept is None else rows + kept
    messages = codec.encode(full)
    lost = codec.decode(messages, rows.shape[1], wide)
    torch.sub(full, lost, out=lost)
    if feedback.err_beta:
        lost.mul_(1.0 - feedback.err_beta)
        if kept is not None:
            lost.add_(kept * feedback.err_beta)
    # An error that is not finite would spoil all later messages.
    feedback._keep(_number(group), place, count + 1, lost.nan_to_num_(0.0, 0.0, 0.0))
    return messages
