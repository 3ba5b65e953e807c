"""Codecs: encodings of numbers as bytes, for sending."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun import ops
from zfun.compression._feedback import ErrorFeedback
from zfun.errors import OptionError
from zfun.options import Kind, instance, integer, one_of, shown, takes

# One block is one tile of a GPU kernel.
_MAX_BLOCK = 1 << 14


class Codec(abc.ABC):
    """An encoding of numbers as bytes, for sending.

    :func:`int8` and :func:`int4` make codecs. A codec of your own is a subclass that implements
    ``message_bytes``, ``encode`` and ``decode``; collectives, recorded bytes and error feedback use
    these methods.
    """

    @property
    def feedback(self) -> ErrorFeedback | None:
        """Memory for the rounding errors of a message until the next; ``None`` drops the errors."""
        return None

    @abc.abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` numbers."""

    @abc.abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Write each row as a message.

        Args:
            rows: ``[m, n]``, floating.

        Returns:
            uint8 ``[m, message_bytes(n)]``.
        """

    @abc.abstractmethod
    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Read messages that :meth:`encode` wrote.

        Args:
            messages: uint8 ``[m, message_bytes(numel)]``.
            numel: the numbers in each message.
            dtype: the dtype of the result.

        Returns:
            ``[m, numel]``.
        """

    def decode_sum(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode messages and add the numbers by rows, in float32 or float64, rounded once.

        Args:
            messages: uint8 ``[m, message_bytes(numel)]``; m is at least 1.
            numel: the numbers in each message.
            dtype: the dtype of the result.

        Returns:
            ``[numel]``.
        """
        return ops.sum_in_rank_order(list(self.decode(messages, numel, ops.wide(dtype)))).to(dtype)


CODEC = instance(Codec, "a codec", "zf.compression.int8()")
FEEDBACK = instance(ErrorFeedback, "an error feedback", "zf.compression.error_feedback()")
BLOCK = Kind(
    lambda x: integer(2, _MAX_BLOCK).accepts(x) and x % 2 == 0,
    (f"an even integer from 2 to {_MAX_BLOCK}",),
    "256",
)


@takes(bits=one_of(4, 8), block=BLOCK, feedback=FEEDBACK | None)
@dataclass(frozen=True)
class BlockCodec(Codec):
    """Numbers as small integers, in blocks with a float32 scale each.

    Made by :func:`int8` and :func:`int4`.

    Attributes:
        bits: bits per number: 4 or 8.
        block: how many numbers share a scale; even.
        feedback: memory for the rounding errors of a message until the next; ``None`` drops the
            errors.
    """

    bits: int
    block: int
    feedback: ErrorFeedback | None = None

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message: ``4 ceil(numel / block) + 4 ceil(numel bits / 32)``."""
        return ops.message_bytes(numel, bits=self.bits, block=self.block)

    def encode(self, rows: Tensor) -> Tensor:
        """Write each row as scales and codes."""
        if rows.dim() != 2 or not rows.is_floating_point():
            raise OptionError(
                f"a codec encodes floating rows, [m, n]; got {shown(rows)}; pass x.view(1, -1) of "
                "a floating tensor"
            )
        return ops.quantise(rows, bits=self.bits, block=self.block)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Read messages: codes times scales."""
        self._check(messages, numel)
        return ops.dequantise(messages, numel, bits=self.bits, block=self.block, dtype=dtype)

    def decode_sum(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Read and add messages in one pass."""
        self._check(messages, numel)
        if not len(messages):
            raise OptionError(
                f"decode_sum() adds at least one message; got {shown(messages)}; pass the messages "
                "of all ranks"
            )
        return ops.sum_dequantised(messages, numel, bits=self.bits, block=self.block, dtype=dtype)

    def _check(self, messages: Tensor, numel: int) -> None:
        """Refuse messages of another form, because kernels read memory without checks."""
        nbytes = self.message_bytes(numel)
        if messages.dtype != torch.uint8 or messages.dim() != 2 or messages.shape[1] != nbytes:
            raise OptionError(
                f"messages of {numel} numbers are torch.uint8 of shape [m, {nbytes}]; got "
                f"{shown(messages)}; pass what encode() returned, and its number of numbers"
            )

    def bound(self, largest: float) -> float:
        """Return the largest possible error of a decoded number of a block.

        Args:
            largest: the largest magnitude in the block.

        Returns:
            Half a step of the scale, with the rounding of float32.
        """
        return max(largest / ((1 << (self.bits - 1)) - 1), 2.0**-126) / 2 * (1 + 2.0**-15)


def check_repeatable(codec: Codec | None, what: str) -> None:
    """Refuse error feedback on values that are sent twice."""
    if codec is not None and codec.feedback is not None:
        raise OptionError(
            f"{what} gathers parameters in forward and again in backward, and must get the same "
            "numbers; got a codec with error feedback, which would add the error of the first "
            "message to the second; leave feedback to gradients, which are sent once"
        )


@takes(block=BLOCK, feedback=FEEDBACK | None)
def int8(*, block: int = 256, feedback: ErrorFeedback | None = None) -> BlockCodec:
    """Send 8 bits per number, and a float32 scale for each block: about a quarter of float32.

    A decoded number is within 1/254 of the largest magnitude in its block. A block with a number
    that is not finite comes back as NaN.

    Args:
        block: how many numbers share a scale; even. Smaller blocks lose less and cost ``4 / block``
            bytes a number.
        feedback: made by :func:`error_feedback`.

    Returns:
        The codec, for ``shard_params(..., compression=...)`` or
        ``data_parallel(..., compression=...)``.

    Example:
        >>> int8().message_bytes(1024)
        1040
    """
    return BlockCodec(8, block, feedback)


@takes(block=BLOCK, feedback=FEEDBACK | None)
def int4(*, block: int = 128, feedback: ErrorFeedback | None = None) -> BlockCodec:
    """Send 4 bits per number, and a float32 scale for each block: about an eighth of float32.

    A decoded number is within 1/14 of the largest magnitude in its block. A block with a number
    that is not finite comes back as NaN.

    Args:
        block: how many numbers share a scale; even. Smaller blocks lose less and cost ``4 / block``
            bytes a number.
        feedback: made by :func:`error_feedback`.

    Returns:
        The codec, for ``data_parallel(..., compression=...)``. Parameters are better sent in 8
        bits.

    Example:
        >>> int4().message_bytes(1024)
        544
    """
    return BlockCodec(4, block, feedback)


@takes(params=CODEC | None, grads=CODEC | None)
@dataclass(frozen=True, slots=True)
class Compression:
    """Codecs for the traffic of a step; ``None`` sends exactly.

    Attributes:
        params: the codec of gathered parameters, such as :func:`zfun.compression.int8`; for stage 3
            only. Shards stay exact.
        grads: the codec of sums of gradients over the ranks, such as
            :func:`zfun.compression.int4`.

    Example:
        >>> Compression(grads=int4()).grads.bits
        4
    """

    params: Codec | None = None
    grads: Codec | None = None
