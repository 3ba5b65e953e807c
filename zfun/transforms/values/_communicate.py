"""Run the collective of a placement change on every bucket of a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, compression
from zfun.collectives import (
    AllGather,
    AllReduce,
    Collective,
    Group,
    Op,
    ReduceScatter,
    Stream,
    Work,
    is_symmetric,
    replica_group,
    sum_group,
)
from zfun.flat import Flat, call_site
from zfun.placement import Piece
from zfun.transforms._notes import noted


def needs_autograd(buffers: tuple[Any, ...]) -> bool:
    """Whether autograd or a ``torch.func`` transform differentiates through these buffers."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(b, Tensor) and b.requires_grad for b in buffers
    )


# Collectives in flight: one that runs while the next starts.
MAX_UNDER_WAY = 2


def communicate(
    value: Flat,
    op: Op,
    over: Group,
    name: str,
    *,
    donate: bool,
    zero_copy: bool = False,
    into: Flat | None = None,
) -> Sequence[Any]:
    """Run a collective over a group on every bucket, and return the buffers."""
    layout = value.layout
    if (sum_group(over) if isinstance(op, ReduceScatter) else over).size == 1:
        return value.buffers
    if needs_autograd(value.buffers):
        return [
            _differentiable(op, buffer, over, value.codec, slot.pieces)
            for buffer, slot in zip(value.buffers, layout.buckets, strict=True)
        ]
    stream = Stream.PARAMS if isinstance(op, AllGather) else Stream.GRADS
    buffers = list(value.buffers)
    if donate:
        value.life.discard(f"redistribute({name!r}, donate=True) at {call_site()}")
    # In shared memory peers may still read inputs and old values after this rank has the sum.
    shares = is_symmetric(over)
    in_place = donate and isinstance(op, AllReduce) and not shares
    zero_copy = zero_copy and shares
    reused = (
        [None] * len(buffers)
        if into is None or shares or into.layout != layout
        else list(into.buffers)
    )
    out: list[Tensor] = []
    pending: list[Work] = []

    def settle(num_left: int) -> None:
        while len(pending) > num_left:
            out.append(pending.pop(0).wait())

    for index in range(len(buffers)):
        # Keep no reference, so that the input is freed as soon as the sum is there.
        buffer, buffers[index] = buffers[index], None
        # A sum of gradients may lie in shared memory. The result of unshard() may not.
        shown = zero_copy or (donate and isinstance(op, AllReduce))
        call = Collective(op, name, layout.label(index), stream, zero_copy=shown)
        target = buffer if in_place else None if zero_copy else reused[index]
        target = target if target is not None and target.dtype == buffer.dtype else None
        slot, codec = layout.buckets[index], value.codec if buffer.is_floating_point() else None
        match op:
            case ReduceScatter():
                work = compression.sum_bucket(call, buffer, over, slot, codec)
            case AllGather():
                work = compression.gather_bucket(call, buffer, over, slot, codec, out=target)
            case _ if codec is not None:
                work = compression.start(call, buffer, over, codec)
            case _:
                work = over.start(call, buffer, target)
        pending.append(work)
        del work
        del buffer
        pending[-1] = noted(
            pending[-1], name, "gather" if isinstance(op, AllGather) else "sum", layout, index
        )
        # A reduce-scatter in shared memory runs inside wait(); a second one would only hold memory.
        settle(0 if shares and isinstance(op, ReduceScatter) else MAX_UNDER_WAY)
    settle(0)
    return out


def _differentiable(
    op: Op,
    buffer: Tensor,
    over: Group,
    form: compression.Codec | None,
    pieces: Sequence[Piece],
) -> Tensor:
    if pieces and isinstance(op, ReduceScatter):
        start, stop = pieces[over.rank]
        rows = collectives.to_rows(buffer, pieces)
        return _differentiable(op, rows, over, form, ())[: stop - start]
    if pieces and isinstance(op, AllGather):
        longest = max(stop - start for start, stop in pieces)
        row = torch.nn.functional.pad(buffer, (0, longest - buffer.numel()))
        return collectives.from_rows(_differentiable(op, row, over, form, ()), pieces)
    # A kind has the name of its function.
    if form is None or not buffer.is_floating_point():
        send = lambda kind, x, group: getattr(collectives, kind)(x, group)
    else:
        send = lambda kind, x, group: getattr(compression, kind)(x, group, form)
    replicas = replica_group(over)
    if replicas is None:
        return send(op.kind, buffer, over)
    if isinstance(op, ReduceScatter):
        return send("all_reduce", send("reduce_scatter", buffer, over), replicas)
    # Replicas hold one value in common, so the gradient is the sum over them.
    return send("all_gather", collectives.replicated(buffer, replicas), over)
