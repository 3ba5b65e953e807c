"""Wire formats: how numbers are written to be sent."""

from __future__ import annotations

from dataclasses import dataclass

from zfun import ops
from zfun.errors import OptionError, checked_options
from zfun.wire._feedback import ErrorFeedback

__all__ = ["Wire", "check_wire", "int4", "int8"]

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
