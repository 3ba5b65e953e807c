"""ZeRO's memory and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import NamedTuple

from zfun.options import BOOL, each, integer, number, one_of, takes

_STAGE = one_of(0, 1, 2, 3, example="3")
_COUNT = number(0, example="7.5e9")
_POSITIVE = number(above=0, example="32e9")


@takes(num_params=_COUNT, size=integer(1), stage=_STAGE, optimizer_bytes=_COUNT)
def zero_memory(
    num_params: float, size: int, stage: int, *, optimizer_bytes: float = 12
) -> Fraction:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds.

    Parameters and gradients are half precision, of 2 bytes each.

    Args:
        num_params: Ψ, the number of parameters.
        size: N, the number of ranks.
        stage: 0, 1 (P_os), 2 (P_os+g) or 3 (P_os+g+p).
        optimizer_bytes: K, bytes of optimizer state for each parameter; Adam in mixed precision has
            12: float32 weights, first and second moments.

    Returns:
        Bytes, exact.

    Example:
        >>> [float(zero_memory(7.5e9, 64, stage)) / 1e9 for stage in (0, 1, 2, 3)]
        [120.0, 31.40625, 16.640625, 1.875]

    After ZeRO's paper (Rajbhandari et al., 2020), section 5.
    """
    parts = (Fraction(optimizer_bytes), Fraction(2), Fraction(2))
    return Fraction(num_params) * sum(
        part / size if stage > number else part for number, part in enumerate(parts)
    )


_SIZES = each(integer(1), "a sequence of numbers of ranks", "(1, 4, 16)", least=1)
_MODELS = each(_COUNT, "a sequence of numbers of parameters", "(7.5e9, 128e9)", least=1)


@takes(models=_MODELS, sizes=_SIZES, optimizer_bytes=_COUNT)
def zero_table(
    models: Sequence[float] = (7.5e9, 128e9, 1e12),
    sizes: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    *,
    optimizer_bytes: float = 12,
) -> str:
    """Print the memory of stages 1 to 3 as table 1 of ZeRO's paper does, in GB of 10**9 bytes.

    Args:
        models: numbers of parameters, one group of columns for each.
        sizes: numbers of ranks, one row for each.
        optimizer_bytes: bytes of optimizer state for each parameter.

    Returns:
        The table. Like the paper's, numbers from 100 on are cut to whole GB, and smaller ones
        rounded to three digits.

    Example:
        >>> print(zero_table(models=(7.5e9, 1e12), sizes=(1, 64)))
               7.5B                       1T
        ranks  P_os  P_os+g  P_os+g+p   P_os  P_os+g  P_os+g+p
            1   120     120       120  16000   16000     16000
           64  31.4    16.6      1.88   4187    2218       250

    After ZeRO's paper (Rajbhandari et al., 2020), table 1.
    """
    names = ("P_os", "P_os+g", "P_os+g+p")
    titles, header = [""], ["ranks"]
    rows = [[str(size)] for size in sizes]
    for model in models:
        titles += [_count(model), "", ""]
        header += names
        for size, row in zip(sizes, rows, strict=True):
            row += [
                _as_printed(
                    zero_memory(model, size, stage, optimizer_bytes=optimizer_bytes) / 10**9
                )
                for stage in (1, 2, 3)
            ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    # A title stands above the first of three columns, to the right like the numbers.
    lines = [titles, header, *rows]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)


def _count(numel: float) -> str:
    """Write a number of parameters as papers do.

    Example:
        >>> _count(7.5e9), _count(1e12), _count(350e6)
        ('7.5B', '1T', '350M')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if numel >= size:
            return f"{numel / size:g}{unit}"
    return f"{numel:g}"


def _as_printed(value: Fraction) -> str:
    if value >= 100:
        return str(int(value))
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    digits = Decimal("0.1") if exact >= 10 else Decimal("0.01")
    return f"{exact.quantize(digits, ROUND_HALF_UP).normalize():f}"


@takes(
    device_bytes=_POSITIVE,
    size=integer(1),
    stage=_STAGE,
    optimizer_bytes=_COUNT,
    model_parallel=integer(1),
)
def largest_model(
    device_bytes: float,
    size: int,
    stage: int,
    *,
    optimizer_bytes: float = 12,
    model_parallel: int = 1,
) -> Fraction:
    """Return the number of parameters whose model states fill the memory of a device.

    Args:
        device_bytes: memory of a device, in bytes.
        size: the number of data-parallel ranks.
        stage: 0, 1, 2 or 3.
        optimizer_bytes: bytes of optimizer state for each parameter.
        model_parallel: the number of ranks that each replica is split over.

    Returns:
        Parameters, with no room for activations.

    Example:
        >>> [round(float(largest_model(32e9, 64, stage)) / 1e9, 1) for stage in range(4)]
        [2.0, 7.6, 14.4, 128.0]

    After ZeRO's paper (Rajbhandari et al., 2020), table 2.
    """
    each_bytes = zero_memory(1, size, stage, optimizer_bytes=optimizer_bytes)
    return model_parallel * Fraction(device_bytes) / each_bytes


class Volume(NamedTuple):
    """The elements that a rank sends in a step.

    Attributes:
        grads: of gradients.
        params: of parameters.
    """

    grads: Fraction
    params: Fraction

    @property
    def total(self) -> Fraction:
        """The elements of both."""
        return self.grads + self.params


@takes(
    num_params=_COUNT,
    size=integer(1),
    stage=_STAGE,
    num_micro_batches=integer(1),
    reduce_once=BOOL,
    keep_gathered=BOOL,
)
def zero_volume(
    num_params: float,
    size: int,
    stage: int,
    *,
    num_micro_batches: int = 1,
    reduce_once: bool = False,
    keep_gathered: bool = False,
) -> Volume:
    """Return the elements that a rank sends in a step.

    A reduce-scatter and an all-gather send Ψ (N-1)/N elements each, an all-reduce twice as many.
    At stage 3, a step of :func:`zfun.zero` sends less by the last buckets of forward, which stay
    gathered for backward, unless ``ScheduleOptions(reuse_distance=0)``; with that, a bucket that a
    pass uses twice is gathered twice.

    Args:
        num_params: Ψ, the number of parameters, padding included.
        size: N, the number of ranks.
        stage: 0, 1, 2 or 3.
        num_micro_batches: micro-batches of a step. Stages 2 and 3 reduce the gradients of each,
            stage 3 gathers the parameters for each.
        reduce_once: reduce the sum of all micro-batches once, at any stage.
        keep_gathered: at stage 3, keep gathered parameters from forward to backward.

    Returns:
        The elements of gradients and of parameters.

    Example:
        >>> [int(zero_volume(1024, 8, stage).total) for stage in (0, 1, 2, 3)]
        [1792, 1792, 1792, 2688]
        >>> int(zero_volume(1024, 8, 3, num_micro_batches=4).total)
        10752

    After ZeRO's paper (Rajbhandari et al., 2020), section 7.
    """
    once = Fraction(num_params) * (size - 1) / size
    reductions = 1 if reduce_once or stage < 2 else num_micro_batches
    if stage == 0:
        return Volume(2 * once, Fraction(0))
    gathers = num_micro_batches * (1 if keep_gathered else 2) if stage == 3 else 1
    return Volume(reductions * once, gathers * once)
