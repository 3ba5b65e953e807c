"""Compressed communication: what is sent in few bits, and what that does to the numbers.

[Note: what travels]
A wire format says how numbers are written before they are sent: in blocks of small integers with a scale each (see ``zfun/ops/_blocks.py``
for the arithmetic). Bytes go through the very same collectives as everything else, so whatever group there is sends them, counts them and
checks them.

* all-gather: every rank writes its shard as one message, and reads all messages, its own too. So every rank gets the same bits, and nobody
  keeps a better copy of its own.
* reduce-scatter: no sum can be taken of codes, so it is an all-to-all: every rank writes one message for each rank, and adds what it
  receives in rank order, in float32 (float64 where the numbers are), rounded once. Over a mesh it goes in two hops, over the inner axis and
  then over the outer one, written anew in between: what crosses between rows is the sum over a row.
* all-reduce: a reduce-scatter and an all-gather of the sums, written anew.

What was lost in a message can be added to the next one of the same place: that is error feedback.

After Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023), who gather parameters in 8 bits
and reduce gradients in 4; error feedback: Seide et al., "1-Bit Stochastic Gradient Descent" (2014); its slow form: Xie et al., "LoCo:
Low-Bit Communication Adaptor for Large-scale Model Training" (2024).

[Note: one bit]
With one bit a number, feedback is no choice: without it what is sent has nothing to do with small numbers. So ``compressed_all_reduce`` is
no wire format but a function of its own, whose errors go in and come out. It is made of three, ``send_signs``, ``answer_signs`` and
``read_signs``, so that several buffers share a message and the messages of several buckets are under way at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, ops
from zfun.collectives import AllGather, AllReduce, AllToAll, Call, Group, Lane, Mesh, Op, Pending, ReduceScatter
from zfun.errors import OptionError, checked_options

__all__ = [
    "ErrorFeedback",
    "Wire",
    "all_gather",
    "all_reduce",
    "compressed_all_reduce",
    "error_feedback",
    "int4",
    "int8",
    "reduce_scatter",
    "start",
    "start_over",
]

# One block is one tile of a GPU kernel.
_MAX_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire format: how numbers are written to be sent. Made by :func:`int8` and :func:`int4`.

    Attributes:
        bits: of a number.
        block: how many numbers share a float32 scale.
        feedback: where what a message lost is kept for the next one; ``None`` forgets it.
    """

    bits: int
    block: int
    feedback: ErrorFeedback | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise OptionError(f"a wire format has 4 or 8 bits a number; got {self.bits!r}; use zf.wire.int4() or zf.wire.int8()")
        if type(self.block) is not int or not 2 <= self.block <= _MAX_BLOCK or self.block % 2:
            raise OptionError(f"a block is an even number of elements from 2 to {_MAX_BLOCK}; got block={self.block!r}; 256 is usual")

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message of so many numbers: ``4 ceil(numel / block) + 4 ceil(numel bits / 32)``."""
        return ops.message_bytes(numel, bits=self.bits, block=self.block)

    def bound(self, largest: float) -> float:
        """Return how far, at most, a number of a block comes back from where it was.

        Args:
            largest: the largest magnitude in the block.

        Returns:
            Half a step of the scale, with what float32 rounds.
        """
        return max(largest / ((1 << (self.bits - 1)) - 1), 2.0**-126) / 2 * (1 + 2.0**-15)


def check_wire(wire: object, what: str, *, is_repeated: bool = False) -> None:
    """Refuse an option that is no wire format, and feedback where one value is sent more than once and must come back the same."""
    if is_repeated and isinstance(wire, Wire) and wire.feedback is not None:
        raise OptionError(
            f"{what} gathers parameters in forward and again in backward, and must get the same numbers; got a wire format with an error "
            "feedback, which would add to the second what the first has lost; leave feedback to gradients, which are sent once"
        )
    if not (wire is None or isinstance(wire, Wire)):
        raise OptionError(f"{what} takes a wire format, or None to send exactly; got wire={wire!r}; zf.wire.int8() makes one")


@checked_options
def int8(*, block: int = 256, feedback: ErrorFeedback | None = None) -> Wire:
    """Send 8 bits a number, and a float32 scale for each block: about a quarter of float32.

    A number comes back to within 1/254 of the largest magnitude in its block. A block with a number that is not finite comes back as NaN.

    Args:
        block: how many numbers share a scale; even. Smaller blocks lose less and cost ``4 / block`` bytes a number.
        feedback: what :func:`error_feedback` returned.

    Returns:
        The wire format, for ``shard_params(..., wire=...)`` or ``data_parallel(..., wire=...)``.

    Example:
        >>> int8().message_bytes(1024)
        1040
    """
    return Wire(8, block, feedback)


@checked_options
def int4(*, block: int = 128, feedback: ErrorFeedback | None = None) -> Wire:
    """Send 4 bits a number, and a float32 scale for each block: about an eighth of float32.

    A number comes back to within 1/14 of the largest magnitude in its block. A block with a number that is not finite comes back as NaN.

    Args:
        block: how many numbers share a scale; even. Smaller blocks lose less and cost ``4 / block`` bytes a number.
        feedback: what :func:`error_feedback` returned.

    Returns:
        The wire format, for ``data_parallel(..., wire=...)``. Parameters are better sent in 8 bits.

    Example:
        >>> int4().message_bytes(1024)
        544
    """
    return Wire(4, block, feedback)


class ErrorFeedback:
    """What messages lost, kept by their sender until the next message of the same place. Made by :func:`error_feedback`.

    It is the one part of a step that is not in the values that go in and come out: as a store, it belongs to who made it. A rank keeps what
    is its own; simulated ranks may share one object.

    Attributes:
        err_beta: how slowly it learns; 0 adds all that was lost.
        reset: after how many messages of a place what is kept is forgotten; 0 never does.
    """

    __slots__ = ("_kept", "_lock", "err_beta", "reset")

    def __init__(self, err_beta: float, reset: int) -> None:
        self.err_beta = err_beta
        self.reset = reset
        self._kept: dict[tuple[int, str], tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"error_feedback(err_beta={self.err_beta}, reset={self.reset})"

    def kept(self, rank: int = 0) -> dict[str, Tensor]:
        """Return what a rank keeps, by place, for a checkpoint.

        Args:
            rank: the rank.

        Returns:
            A tensor for each place, and its number of messages so far as ``"<place> count"``.
        """
        with self._lock:
            mine = {place: entry for (owner, place), entry in self._kept.items() if owner == rank}
        return {place: kept for place, (_, kept) in mine.items()} | {
            f"{place} count": torch.tensor(count) for place, (count, _) in mine.items()
        }

    def restore(self, kept: Mapping[str, Tensor], rank: int = 0) -> None:
        """Take over what :meth:`kept` returned; what the rank kept before is forgotten.

        Args:
            kept: what was kept.
            rank: the rank.
        """
        fresh = {
            (rank, place): (int(kept[f"{place} count"]), tensor.clone()) for place, tensor in kept.items() if not place.endswith(" count")
        }
        with self._lock:
            self._kept = {key: entry for key, entry in self._kept.items() if key[0] != rank} | fresh

    def _take(self, rank: int, place: str, rows: Tensor) -> tuple[int, Tensor | None]:
        """Return how many messages of a place there were, and what is kept of the last."""
        with self._lock:
            count, kept = self._kept.get((rank, place), (0, None))
        if kept is not None and kept.shape != rows.shape:
            raise OptionError(
                f"an error feedback is for the gradients of one layout; got {rows.numel()} numbers in {rows.shape[0]} messages for "
                f"{place}, after {kept.numel()} in {kept.shape[0]}; make one with zf.wire.error_feedback() for each training run"
            )
        return count, kept

    def _keep(self, rank: int, place: str, count: int, lost: Tensor) -> None:
        with self._lock:
            self._kept[rank, place] = (count, lost)


@checked_options
def error_feedback(*, err_beta: float = 0.8, reset: int = 1024) -> ErrorFeedback:
    """Make room for what messages lose, so that it is sent later.

    Before numbers x are written, what is kept of the same place is added: ``c = x + e``. Of what comes back as q the sender keeps
    ``e' = e err_beta + (c - q) (1 - err_beta)``. With ``err_beta = 0`` what is sent and what is kept make up c, to the last bit: nothing is
    ever lost, only late. A larger one smooths the noise of single steps; no direction is lost in the long run either, since what is kept
    grows by ``(1 - err_beta) (x - q)`` each time. What is not finite is not kept.

    It costs a whole gradient of memory on every rank, in the dtype of the gradients. A step that is skipped leaves what was kept changed.

    Args:
        err_beta: how slowly it learns, from 0 to less than 1.
        reset: after how many messages what is kept is forgotten, since the gradients that it belongs to are long past; 0 for never.

    Returns:
        What ``int4(feedback=...)`` and ``int8(feedback=...)`` take.

    Raises:
        OptionError: numbers out of range.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     wire = int4(feedback=error_feedback(err_beta=0.0))
        ...     x = torch.tensor([1.0, 10.0, 0.0, 0.0]) * (1 - group.rank)
        ...     return torch.stack([reduce_scatter(x, group, wire)[0] for _ in range(30)])
        >>> sums = zf.simulate(2, main)[0]
        >>> sums[:4]  # a step of the scale, 10 / 7, or nothing
        tensor([1.4286, 0.0000, 1.4286, 1.4286])
        >>> sums.mean()
        tensor(1.0000)
    """
    if not 0 <= err_beta < 1:
        raise OptionError(f"err_beta is a number from 0 to less than 1; got {err_beta!r}; 0 keeps all that was lost")
    if type(reset) is not int or reset < 0:
        raise OptionError(f"reset is a number of messages; got {reset!r}; 0 never forgets")
    return ErrorFeedback(err_beta, reset)


@checked_options
def start(call: Call, x: Tensor, group: Group, wire: Wire, *, dtype: torch.dtype | None = None) -> Pending:
    """Start a collective in few bits, on a flat tensor; it is not differentiated.

    ============== ============ ==============================================================================
    collective     result       each rank sends, of n numbers over N ranks
    ============== ============ ==============================================================================
    all-gather     ``[N n]``    ``(N - 1) message_bytes(n)``
    reduce-scatter ``[n / N]``  ``(N - 1) message_bytes(n / N)``
    all-reduce     ``[n]``      ``2 (N - 1) message_bytes(ceil(n / N))``
    ============== ============ ==============================================================================

    A collective of more than one phase starts the later ones when it is waited for, so all ranks must wait in one order.

    Args:
        call: which collective, for whom and in which order.
        x: 1-D, floating.
        group: the ranks.
        wire: how it is sent.
        dtype: of the result; by default that of ``x``.

    Returns:
        The pending result: of an all-gather and an all-reduce the same bits on every rank.

    Raises:
        OptionError: another collective, numbers that are not floating, or a length that the ranks do not divide.

    Example:
        >>> import zfun as zf
        >>> from zfun.collectives import AllReduce
        >>> zf.simulate(2, lambda group: start(Call(AllReduce()), torch.tensor([127.0, 3.0]), group, int8()).wait())[1]
        tensor([254.,   6.])
    """
    size, numel = group.size, x.numel()
    if not x.is_floating_point():
        raise OptionError(f"a wire format is for floating numbers; got {call.op.kind} of {x.dtype}; send it exactly: leave wire out")
    if x.dim() != 1 or (isinstance(call.op, ReduceScatter) and numel % size):
        raise OptionError(
            f"{call.op.kind} in a wire format takes a 1-D tensor that the {size} ranks divide; got shape {tuple(x.shape)}; pad it"
        )
    x, dtype = x.detach().contiguous(), dtype or x.dtype
    if size == 1:
        return Pending.done(x.to(dtype, copy=True))
    match call.op:
        case AllGather():
            return Pending(_start_gather(call, x, group, wire, dtype))
        case ReduceScatter():
            return Pending(_start_sum(call, x, group, wire, dtype))
        case AllReduce():
            padding = -numel % size
            scattered = _start_sum(call, torch.nn.functional.pad(x, (0, padding)) if padding else x, group, wire, ops.wide(x.dtype))
            return Pending(lambda: _start_gather(call, scattered(), group, wire, dtype)()[:numel])
        case _:
            raise OptionError(f"a wire format is for all_gather, reduce_scatter and all_reduce; got {call.op.kind}; send it exactly")


def start_over(call: Call, x: Tensor, group: Group, wire: Wire) -> Pending:
    """Start a sum over the mesh of a group in few bits, cut over the group (``P -> S``).

    Over a group or a mesh this is :func:`start`. Over the inner axis of a mesh the shards of the sum over a row are summed over the outer
    axis too, by an all-reduce.

    Args:
        call: a reduce-scatter.
        x: 1-D, floating; the size of ``group`` divides its length.
        group: a group, a mesh, or the inner axis of one.
        wire: how it is sent.

    Returns:
        The pending piece of this rank.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     mesh = zf.split(group, inner=2)
        ...     return start_over(Call(ReduceScatter()), torch.tensor([127.0, 254.0]), mesh.inner, int8()).wait().item()
        >>> zf.simulate(4, main)
        [508.0, 1016.0, 508.0, 1016.0]
    """
    mesh = group.mesh
    if group is mesh or not isinstance(mesh, Mesh):
        return start(call, x, group, wire)
    scattered = start(call, x, group, wire)
    again = Call(AllReduce(), call.name, call.part, call.lane)
    return Pending(lambda: start(again, scattered.wait(), mesh.outer, wire).wait())


def _start_gather(call: Call, x: Tensor, group: Group, wire: Wire, dtype: torch.dtype) -> Callable[[], Tensor]:
    message = _written(x.view(1, -1), group, wire, f"{call.name} {call.part} gather {group.axis}".strip())
    pending = group.start(Call(AllGather(), call.name, call.part, call.lane), message.view(-1))

    def finish() -> Tensor:
        messages = pending.wait().view(group.size, -1)
        return ops.dequantise(messages, x.numel(), bits=wire.bits, block=wire.block, dtype=dtype).view(-1)

    return finish


def _start_sum(call: Call, x: Tensor, group: Group, wire: Wire, dtype: torch.dtype) -> Callable[[], Tensor]:
    first, *later = _hops(group)
    started = _start_hop(call, x, first, group, wire, 0, ops.wide(x.dtype) if later else dtype)

    def finish() -> Tensor:
        total = started()
        for index, hop in enumerate(later, 1):
            total = _start_hop(call, total, hop, group, wire, index, dtype)()
        return total

    return finish


def _hops(group: Group) -> tuple[Group, ...]:
    """The groups that a sum goes through, one after the other."""
    if isinstance(group, Mesh):
        return tuple(axis for axis in (group.inner, group.outer) if axis.size > 1)
    return (group,)


def _number(group: Group) -> int:
    """This rank in the group of all ranks."""
    return group.mesh.numbers[group.mesh.rank]


def _start_hop(call: Call, x: Tensor, hop: Group, group: Group, wire: Wire, index: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Send every rank of a hop its piece; what is returned waits, and adds what has come."""
    numel = x.numel() // hop.size
    messages = _written(x.view(hop.size, numel), group, wire, f"{call.name} {call.part} hop {index} {group.axis}".strip())
    pending = hop.start(Call(AllToAll(), call.name, call.part, call.lane), messages.view(-1))

    def finish() -> Tensor:
        received = pending.wait().view(hop.size, -1)
        return ops.sum_dequantised(received, numel, bits=wire.bits, block=wire.block, dtype=dtype)

    return finish


def _written(rows: Tensor, group: Group, wire: Wire, place: str) -> Tensor:
    """Write rows as messages, with what the last ones of the same place lost."""
    feedback = wire.feedback
    if feedback is None:
        return ops.quantise(rows, bits=wire.bits, block=wire.block)
    count, kept = feedback._take(_number(group), place, rows)
    wide = ops.wide(rows.dtype)
    if feedback.reset and count and count % feedback.reset == 0:
        kept = None
    full = rows.to(wide) if kept is None else rows + kept
    messages = ops.quantise(full, bits=wire.bits, block=wire.block)
    lost = full - ops.dequantise(messages, rows.shape[1], bits=wire.bits, block=wire.block, dtype=wide)
    if feedback.err_beta:
        lost.mul_(1.0 - feedback.err_beta)
        if kept is not None:
            lost.add_(kept * feedback.err_beta)
    # What is not finite would stay so for ever.
    feedback._keep(_number(group), place, count + 1, torch.where(torch.isfinite(lost), lost, 0.0))
    return messages


class _StraightThrough(torch.autograd.Function):
    """A compressed collective whose derivative is that of the exact one: rounding has none that is of use."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, group: Group, wire: Wire, call: Call
    ) -> Tensor:
        return start(call, x, group, wire).wait()

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
        raise OptionError("a compressed collective has no vmap rule; got a batched tensor; send it exactly: leave wire out")


_EXACT = {"all_gather": collectives.all_gather, "reduce_scatter": collectives.reduce_scatter, "all_reduce": collectives.all_reduce}


def _exact(x: Tensor, group: Group, call: Call, op: Op) -> Tensor:
    return _EXACT[op.kind](x, group, name=call.name, part=call.part, lane=call.lane)


def all_gather(x: Tensor, group: Group, wire: Wire, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Tensor:
    """Gather shards in few bits (``S -> R``). The derivative is that of the exact one: a reduce-scatter.

    Args:
        x: this rank's shard, 1-D, floating.
        group: the ranks.
        wire: how it is sent.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        ``[size * n]``, the same bits on every rank.

    Raises:
        OptionError: ``x`` is not floating.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return zf.wire.all_gather(torch.tensor([1.0, 127.0]) * (group.rank + 1), group, zf.wire.int8(block=2))
        >>> zf.simulate(2, main)[1]
        tensor([  1., 127.,   2., 254.])
    """
    return _run(x, group, wire, Call(AllGather(), name, part, lane))


def reduce_scatter(x: Tensor, group: Group, wire: Wire, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Tensor:
    """Sum over the ranks in few bits, each keeping its piece (``P -> S``). The derivative is that of the exact one: an all-gather.

    Args:
        x: a term of the sum, 1-D, floating; the ranks divide its length.
        group: the ranks.
        wire: how it is sent.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        ``[n / size]``.

    Raises:
        OptionError: ``x`` is not floating, or the ranks do not divide it.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x = torch.tensor([1.0, 127.0, 2.0, 254.0]) * (group.rank + 1)
        ...     return zf.wire.reduce_scatter(x, group, zf.wire.int8(block=2))
        >>> zf.simulate(2, main)
        [tensor([  3., 381.]), tensor([  6., 762.])]
    """
    return _run(x, group, wire, Call(ReduceScatter(), name, part, lane))


def all_reduce(x: Tensor, group: Group, wire: Wire, *, name: str = "", part: str = "", lane: Lane = Lane.CONTROL) -> Tensor:
    """Sum over the ranks in few bits, every rank receiving the sum (``P -> R``). The derivative is that of the exact one.

    Args:
        x: a term of the sum, 1-D, floating.
        group: the ranks.
        wire: how it is sent, both the terms and their sums.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        ``[n]``, the same bits on every rank.

    Raises:
        OptionError: ``x`` is not floating.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return zf.wire.all_reduce(torch.tensor([1.0, 127.0]) * (group.rank + 1), group, zf.wire.int8(block=2))
        >>> zf.simulate(2, main)[0]
        tensor([  3., 381.])
    """
    return _run(x, group, wire, Call(AllReduce(), name, part, lane))


def compressed_all_reduce(
    x: Tensor,
    worker_error: Tensor | None,
    server_error: Tensor | None,
    group: Group,
    *,
    name: str = "",
    part: str = "",
    lane: Lane = Lane.CONTROL,
) -> tuple[Tensor, Tensor, Tensor]:
    """Average over the ranks in one bit a number, each message with what the last ones lost (``P -> R``). It is not differentiated.

    Every rank adds what it has kept, ``c = x + worker_error``, and sends the signs of c, each rank its chunk, and one scale
    ``s = ‖c‖ / √n``; what comes back of a number is s or -s (s for both zeros). It keeps ``c - (±s)``. Every rank then averages the chunks
    that it received, in rank order, adds ``server_error``, and sends signs and scale of that to all, keeping what this loses. So what is
    sent and what is kept make up what was to be sent: the difference is rounded once, and exact where a number is between half and twice
    the scale.

    The chunks are those of x padded to a multiple of ``8 size``, whole bytes for every rank; padding counts in no scale and is never
    received. On one rank nothing is sent, and nothing is lost.

    Args:
        x: ``[n]``, floating, of one length on all ranks; half types are computed in float32.
        worker_error: ``[n]``, what this rank has kept of its own messages; ``None`` for nothing yet.
        server_error: what it has kept of its chunk of the means; ``None`` for nothing yet.
        group: the ranks.
        name: what is sent, for messages and logs.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The mean ``[n]``, with the same bits on every rank, and the two errors for the next call. A number that is not finite makes all of
        them so. Each rank sends ``2 (size - 1) (b + ceil(n / (8 size)))`` bytes, b being 4, or 8 for float64.

    Raises:
        OptionError: ``x`` is not 1-D and floating, or an error has another length.

    After Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (2021).

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x, errors, means = torch.tensor([3.0, 1.0]) * (group.rank + 1), (None, None), []
        ...     for _ in range(400):
        ...         mean, *errors = zf.wire.compressed_all_reduce(x, *errors, group)
        ...         means.append(mean)
        ...     return means[0], torch.stack(means).mean(0).round(decimals=1)
        >>> zf.simulate(2, main)[1]  # one message says little, many say all
        (tensor([3.3541, 3.3541]), tensor([4.5000, 1.5000]))
    """
    if x.dim() != 1 or not x.is_floating_point():
        raise OptionError(
            f"compressed_all_reduce() takes a 1-D floating tensor; got {x.dtype} of shape {tuple(x.shape)}; flatten it, and send integers "
            "exactly with all_reduce()"
        )
    numel, dtype = x.numel(), ops.wide(x.dtype)
    mine = own_chunk(numel, group)
    num_mine = mine.stop - mine.start
    for what, error, length in (("worker", worker_error, numel), ("server", server_error, num_mine)):
        if error is not None and (error.dim() != 1 or error.numel() != length or error.dtype != dtype):
            raise OptionError(
                f"the {what}_error of {numel} numbers of {x.dtype} has {length} of {dtype} on this rank; got {error.dtype} of shape "
                f"{tuple(error.shape)}; pass what the last call for the same buffer returned, or None at first"
            )
    worker = x.detach().to(dtype, copy=True)
    worker = worker if worker_error is None else worker.add_(worker_error)
    server = x.new_zeros(num_mine, dtype=dtype) if server_error is None else server_error.clone()
    if group.size == 1:
        return worker.add_(server).to(x.dtype), torch.zeros_like(worker), torch.zeros_like(server)
    received = send_signs([worker], group, name, part, lane).wait()
    packed = answer_signs(received, [server], [numel], group, name, part, lane).wait()
    (mean,) = read_signs(packed, [numel], group.size, dtype)
    return mean.to(x.dtype), worker, server


def own_chunk(numel: int, group: Group) -> slice:
    """Return which of so many numbers this rank averages in :func:`compressed_all_reduce`."""
    chunk = 8 * _chunk_bytes(numel, group.size)
    return slice(min(group.rank * chunk, numel), min((group.rank + 1) * chunk, numel))


def packed_bytes(numels: Sequence[int], size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the messages of one hop of a compressed all-reduce: for each rank scales, and then the signs of its chunks."""
    return size * (len(numels) * dtype.itemsize + sum(_chunk_bytes(numel, size) for numel in numels))


def send_signs(terms: Iterable[Tensor], group: Group, name: str, part: str, lane: Lane = Lane.GRADS) -> Pending:
    """Start the first hop of a compressed all-reduce of several buffers, in one message to each rank.

    Args:
        terms: what to send, 1-D, of one dtype, each taken when its turn comes; of each stays what is lost.
        group: the ranks.
        name: what is sent.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The pending messages, for :func:`answer_signs`.
    """
    scales: list[Tensor] = []
    rows: list[Tensor] = []
    for term in terms:
        scale, signs = _to_signs(term)
        scales.append(scale)
        chunk = _chunk_bytes(term.numel(), group.size)
        rows.append(torch.nn.functional.pad(signs, (0, group.size * chunk - signs.numel())).view(group.size, chunk))
    head = torch.stack(scales).view(torch.uint8).expand(group.size, -1)
    return group.start(Call(AllToAll(), name, part, lane), torch.cat([head, *rows], 1).view(-1))


def answer_signs(
    received: Tensor, kept: Sequence[Tensor], numels: Sequence[int], group: Group, name: str, part: str, lane: Lane = Lane.GRADS
) -> Pending:
    """Start the second hop of a compressed all-reduce: average the own chunks of the terms, and send their signs to all.

    Args:
        received: the messages of the first hop.
        kept: for each buffer what this rank's last answer lost, as long as its ``own_chunk``; takes what this one does.
        numels: the lengths of the buffers.
        group: the ranks.
        name: what is sent.
        part: which part of it.
        lane: the order of collectives that it takes part in.

    Returns:
        The pending messages, for :func:`read_signs`: the same on all ranks.
    """
    head, parts = _taken_apart(received, numels, group.size, kept[0].dtype)
    scales: list[Tensor] = []
    rows: list[Tensor] = []
    for index, (error, signs) in enumerate(zip(kept, parts, strict=True)):
        terms = _from_signs(signs, error.numel(), head[:, index], error.dtype)
        error.add_(ops.sum_in_rank_order(list(terms)).div_(group.size))
        scale, packed = _to_signs(error)
        scales.append(scale)
        rows.append(torch.nn.functional.pad(packed, (0, signs.shape[1] - packed.numel())))
    message = torch.cat([torch.stack(scales).view(torch.uint8), *rows])
    return group.start(Call(AllGather(), name, part, lane), message)


def read_signs(packed: Tensor, numels: Sequence[int], size: int, dtype: torch.dtype, out: torch.dtype | None = None) -> list[Tensor]:
    """Read the means of several buffers from the messages of the second hop.

    Args:
        packed: the messages.
        numels: the lengths of the buffers.
        size: the number of ranks.
        dtype: of the scales.
        out: of the result; by default that of the scales.

    Returns:
        For each buffer its mean, ``[numel]``.
    """
    head, parts = _taken_apart(packed, numels, size, dtype)
    return [
        _from_signs(signs, 8 * signs.shape[1], head[:, index], out or dtype).view(-1)[:numel]
        for index, (signs, numel) in enumerate(zip(parts, numels, strict=True))
    ]


def _chunk_bytes(numel: int, size: int) -> int:
    return -(-numel // (8 * size))


def _to_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and signs of a vector, and leave in it what they lose."""
    numel = x.numel()
    # The norm is exact, so that it is the same on however many threads it is taken.
    norm = ops.total_of_bins(ops.squares_in_bins(x)[None]).sqrt()
    scale = (norm / math.sqrt(max(numel, 1))).to(x.dtype)
    signs = ops.pack_signs(x)
    x.sub_(ops.unpack_signs(signs, numel, scale=scale, dtype=x.dtype))
    return scale, signs


def _from_signs(signs: Tensor, numel: int, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.unpack_signs(signs[:, : -(-numel // 8)].contiguous(), numel, scale=scales, dtype=dtype)


def _taken_apart(messages: Tensor, numels: Sequence[int], size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The scales of messages, one row for each rank, and for each buffer the signs."""
    rows = messages.view(size, -1)
    widths = [len(numels) * dtype.itemsize, *(_chunk_bytes(numel, size) for numel in numels)]
    head, *parts = rows.split(widths, 1)
    # A copy of its own, since numbers are read at addresses that their size divides.
    return head.clone(memory_format=torch.contiguous_format).view(dtype), parts


def _run(x: Tensor, group: Group, wire: Wire, call: Call) -> Tensor:
    return _StraightThrough.apply(x, group, wire, call)  # type: ignore[no-any-return]
