"""A mean over the ranks in one bit per number.

[Note: one bit]
With one bit per number, error feedback is necessary: signs alone carry nothing about the size of
small numbers. So ``compressed_all_reduce`` is not a codec but a function that takes and returns the
errors. The function has three parts, ``send_signs``, ``answer_signs`` and ``read_signs``, so that
several buffers share a message and the messages of several buckets are under way at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import AllGather, AllToAll, Collective, Group, Stream, Work
from zfun.errors import OptionError
from zfun.options import takes


@takes()
def compressed_all_reduce(
    x: Tensor,
    worker_error: Tensor | None,
    server_error: Tensor | None,
    group: Group,
    *,
    name: str = "",
    part: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """``P -> R``: average over the ranks in one bit per number, with error feedback.

    The function has no derivative.

    Every rank adds its last error, ``c = x + worker_error``, and sends each rank the signs of a
    chunk of c, and one scale ``s = ‖c‖ / √n``. A number is decoded as s or -s (s for both zeros),
    and the new error is ``c - (±s)``. Every rank then averages the chunks that arrive, in rank
    order, adds ``server_error``, and sends signs and scale of the result to all ranks; the rounding
    error becomes the new ``server_error``. So a message and its error add up to the number, up to
    one rounding, and exactly if the number is between half and twice the scale.

    The chunks are those of x padded to a multiple of ``8 size``, whole bytes for every rank;
    padding counts in no scale and is never received. On one rank nothing is sent, and the result is
    exact.

    Args:
        x: ``[n]``, floating, of one length on all ranks; half types are computed in float32.
        worker_error: ``[n]``, the error of this rank's last message; ``None`` at first.
        server_error: the error of this rank's last chunk of the means; ``None`` at first.
        group: the ranks.
        name: the name of ``x`` in messages and logs.
        part: the part of ``x``, for the same use.

    Returns:
        The mean ``[n]``, with the same bits on every rank, and the two errors for the next call. If
        a number is not finite, no result is finite. Each rank sends
        ``2 (size - 1) (b + ceil(n / (8 size)))`` bytes, b being 4, or 8 for float64.

    Raises:
        OptionError: ``x`` is not 1-D and floating, or an error has another length.

    After Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed" (2021).

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     x, errors, means = torch.tensor([3.0, 1.0]) * (group.rank + 1), (None, None), []
        ...     for _ in range(400):
        ...         mean, *errors = zf.compression.compressed_all_reduce(x, *errors, group)
        ...         means.append(mean)
        ...     return means[0], torch.stack(means).mean(0).round(decimals=1)
        >>> zf.simulate(2, main)[1]  # one mean is coarse, the mean of many is right
        (tensor([3.3541, 3.3541]), tensor([4.5000, 1.5000]))
    """
    if x.dim() != 1 or not x.is_floating_point():
        raise OptionError(
            f"compressed_all_reduce() takes a 1-D floating tensor; got {x.dtype} of shape "
            f"{tuple(x.shape)}; flatten it, and send integers exactly with all_reduce()"
        )
    numel, dtype = x.numel(), ops.wide(x.dtype)
    mine = own_chunk(numel, group)
    num_mine = mine.stop - mine.start
    for what, error, length in (
        ("worker", worker_error, numel),
        ("server", server_error, num_mine),
    ):
        if error is not None and (
            error.dim() != 1 or error.numel() != length or error.dtype != dtype
        ):
            raise OptionError(
                f"the {what}_error of {numel} numbers of {x.dtype} has {length} of {dtype} on "
                f"this rank; got {error.dtype} of shape {tuple(error.shape)}; pass the "
                "error that the last call for the same buffer returned, or None at first"
            )
    worker = x.detach().to(dtype, copy=True)
    worker = worker if worker_error is None else worker.add_(worker_error)
    server = x.new_zeros(num_mine, dtype=dtype) if server_error is None else server_error.clone()
    if group.size == 1:
        return worker.add_(server).to(x.dtype), torch.zeros_like(worker), torch.zeros_like(server)
    received = send_signs([worker], group, name, part, Stream.CONTROL).wait()
    packed = answer_signs(received, [server], [numel], group, name, part, Stream.CONTROL).wait()
    (mean,) = read_signs(packed, [numel], group.size, dtype)
    return mean.to(x.dtype), worker, server


def own_chunk(numel: int, group: Group) -> slice:
    """Return the chunk of ``numel`` numbers that this rank averages."""
    chunk = 8 * _chunk_bytes(numel, group.size)
    return slice(min(group.rank * chunk, numel), min((group.rank + 1) * chunk, numel))


def packed_bytes(numels: Sequence[int], size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one hop of a compressed all-reduce.

    The message to each rank holds the scales, and then the signs of the chunks of that rank.
    """
    return size * (
        len(numels) * dtype.itemsize + sum(_chunk_bytes(numel, size) for numel in numels)
    )


def send_signs(
    terms: Iterable[Tensor], group: Group, name: str, part: str, stream: Stream = Stream.GRADS
) -> Work:
    """Start the first hop of a compressed all-reduce of buffers: one message to each rank.

    Each of ``terms``, 1-D and of one dtype, is taken in turn, and overwritten with its error. The
    messages are for :func:`answer_signs`.
    """
    scales: list[Tensor] = []
    rows: list[Tensor] = []
    for term in terms:
        scale, signs = _to_signs(term)
        scales.append(scale)
        chunk = _chunk_bytes(term.numel(), group.size)
        rows.append(
            torch.nn.functional.pad(signs, (0, group.size * chunk - signs.numel())).view(
                group.size, chunk
            )
        )
    head = torch.stack(scales).view(torch.uint8).expand(group.size, -1)
    return group.start(
        Collective(AllToAll(), name, part, stream), torch.cat([head, *rows], 1).view(-1)
    )


def answer_signs(
    received: Tensor,
    kept: Sequence[Tensor],
    numels: Sequence[int],
    group: Group,
    name: str,
    part: str,
    stream: Stream = Stream.GRADS,
) -> Work:
    """Start the second hop of a compressed all-reduce: average own chunks and send the signs.

    ``kept`` has for each buffer the error of this rank's last answer, as long as ``own_chunk``, and
    gets the new one. The messages, equal on all ranks, are for :func:`read_signs`.
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
    return group.start(Collective(AllGather(), name, part, stream), message)


def read_signs(
    packed: Tensor,
    numels: Sequence[int],
    size: int,
    dtype: torch.dtype,
    out: torch.dtype | None = None,
) -> list[Tensor]:
    """Read the means of buffers of these lengths from the messages of the second hop.

    ``dtype`` is that of the scales, and by default of the result.
    """
    head, parts = _taken_apart(packed, numels, size, dtype)
    return [
        _from_signs(signs, 8 * signs.shape[1], head[:, index], out or dtype).view(-1)[:numel]
        for index, (signs, numel) in enumerate(zip(parts, numels, strict=True))
    ]


def _chunk_bytes(numel: int, size: int) -> int:
    return -(-numel // (8 * size))


def _to_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and signs of a vector, and overwrite the vector with the error."""
    numel = x.numel()
    # The norm is exact, so that any number of threads gives the same bits.
    norm = ops.total_of_bins(ops.squares_in_bins(x)[None]).sqrt()
    scale = (norm / math.sqrt(max(numel, 1))).to(x.device, x.dtype)
    signs = ops.pack_signs(x)
    x.sub_(ops.unpack_signs(signs, numel, scale=scale, dtype=x.dtype))
    return scale, signs


def _from_signs(signs: Tensor, numel: int, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.unpack_signs(
        signs[:, : -(-numel // 8)].contiguous(), numel, scale=scales, dtype=dtype
    )


def _taken_apart(
    messages: Tensor, numels: Sequence[int], size: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return the scales of messages, one row for each rank, and the signs of each buffer."""
    rows = messages.view(size, -1)
    widths = [len(numels) * dtype.itemsize, *(_chunk_bytes(numel, size) for numel in numels)]
    head, *parts = rows.split(widths, 1)
    # A copy, because view() needs aligned addresses.
    return head.clone(memory_format=torch.contiguous_format).view(dtype), parts
