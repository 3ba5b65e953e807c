"""Codecs: how numbers are written as bytes to be sent."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from zfun import ops
from zfun.compression._feedback import ErrorFeedback
from zfun.errors import OptionError, checked_options

__all__ = ["BlockCodec", "Codec", "Compression", "check_codec", "int4", "int8"]

# One block is one tile of a GPU kernel.
_MAX_BLOCK = 1 << 14


class Codec(abc.ABC):
    """A codec: how numbers are written as bytes to be sent, and read again.

    :func:`int8` and :func:`int4` make two. Another one is a subclass with the three methods below;
    the collectives, the bytes that are recorded and error feedback follow from these.

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
            dtype: of the result.

        Returns:
            ``[m, numel]``.
        """

    def decode_sum(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode messages and add the numbers by rows, in float32 or float64, rounded once.

        Args:
            messages: uint8 ``[m, message_bytes(numel)]``; at least one.
            numel: the numbers in each message.
            dtype: of the result.

        Returns:
            ``[numel]``.
        """
        return ops.sum_in_rank_order(list(self.decode(messages, numel, ops.wide(dtype)))).to(dtype)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Numbers as small integers, in blocks with a float32 scale each.

    Made by :func:`int8` and :func:`int4`.

    Attributes:
        bits: of a number: 4 or 8.
        block: how many numbers share a scale; even.
        feedback: memory for the rounding errors of a message until the next; ``None`` drops the
            errors.
    """

    bits: int
    block: int
    feedback: ErrorFeedback | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (4, 8):
            raise OptionError(
                f"a block codec has 4 or 8 bits a number; got {self.bits!r}; use "
                "zf.compression.int4() or zf.compression.int8()"
            )
        if type(self.block) is not int or not 2 <= self.block <= _MAX_BLOCK or self.block % 2:
            raise OptionError(
                f"a block is an even number of elements from 2 to {_MAX_BLOCK}; got "
                f"block={self.block!r}; 256 is usual"
            )

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message: ``4 ceil(numel / block) + 4 ceil(numel bits / 32)``."""
        return ops.message_bytes(numel, bits=self.bits, block=self.block)

    def encode(self, rows: Tensor) -> Tensor:
        """Write each row as scales and codes."""
        return ops.quantise(rows, bits=self.bits, block=self.block)

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Read messages: codes times scales."""
        return ops.dequantise(messages, numel, bits=self.bits, block=self.block, dtype=dtype)

    def decode_sum(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Read messages and add them, in one pass."""
        return ops.sum_dequantised(messages, numel, bits=self.bits, block=self.block, dtype=dtype)

    def bound(self, largest: float) -> float:
        """Return how far, at most, a number of a block comes back from where it was.

        Args:
            largest: the largest magnitude in the block.

        Returns:
            Half a step of the scale, with the rounding of float32.
        """
        return max(largest / ((1 << (self.bits - 1)) - 1), 2.0**-126) / 2 * (1 + 2.0**-15)


def check_codec(codec: object, what: str, *, is_repeated: bool = False) -> None:
    """Refuse an option that is no codec, and error feedback on values that are sent twice."""
    if is_repeated and isinstance(codec, Codec) and codec.feedback is not None:
        raise OptionError(
            f"{what} gathers parameters in forward and again in backward, and must get the same "
            "numbers; got a codec with error feedback, which would add the loss of the first "
            "message to the second; leave feedback to gradients, which are sent once"
        )
    if not (codec is None or isinstance(codec, Codec)):
        raise OptionError(
            f"{what} takes a codec, or None to send exactly; got compression={codec!r}; "
            "zf.compression.int8() makes one"
        )


@checked_options
def int8(*, block: int = 256, feedback: ErrorFeedback | None = None) -> BlockCodec:
    """Send 8 bits a number, and a float32 scale for each block: about a quarter of float32.

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


@checked_options
def int4(*, block: int = 128, feedback: ErrorFeedback | None = None) -> BlockCodec:
    """Send 4 bits a number, and a float32 scale for each block: about an eighth of float32.

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


@dataclass(frozen=True, slots=True)
class Compression:
    """Codecs for the traffic of a step; ``None`` sends exactly.

    Attributes:
        params: with which parameters are gathered, such as :func:`zfun.compression.int8`; stage 3
            only, whose shards stay exact.
        grads: with which gradients are summed over the ranks, such as
            :func:`zfun.compression.int4`.

    Example:
        >>> Compression(grads=int4()).grads.bits
        4
    """

    params: Codec | None = None
    grads: Codec | None = None
