"""ZeRO-Infinity's memory, bandwidth and efficiency."""

from __future__ import annotations

from typing import NamedTuple

from zfun.options import integer, number, one_of, takes

_COUNT = number(0, example="7.5e9")
_POSITIVE = number(above=0, example="32e9")


@takes(num_layers=integer(1), hidden=integer(1))
def transformer_params(num_layers: int, hidden: int) -> int:
    """Return the parameters of the blocks of a transformer, 12 times layers times width squared.

    Args:
        num_layers: the number of blocks.
        hidden: the width.

    Returns:
        Parameters, without embeddings, biases and norms.

    Example:
        >>> transformer_params(128, 25_600) / 1e12
        1.00663296

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 3.
    """
    return 12 * num_layers * hidden**2


@takes(
    part=one_of("params and grads", "optimizer", "activations"),
    batch=integer(1),
    seq=integer(1),
    hidden=integer(1),
    every=integer(1),
)
def intensity(
    part: str, *, batch: int = 1, seq: int = 1024, hidden: int = 8192, every: int = 1
) -> float:
    """Return the arithmetic intensity of a part of the state: operations for each byte moved.

    Args:
        part: ``"params and grads"`` move 8 bytes for each parameter, ``"optimizer"`` state 32;
            ``"activations"`` are the checkpoints between blocks.
        batch: sequences of a rank; activations do not depend on the batch.
        seq: tokens of a sequence.
        hidden: the width; only for activations.
        every: blocks between two checkpoints; only for activations.

    Returns:
        Floating-point operations for each byte.

    Example:
        >>> [intensity(part, batch=2) for part in ("params and grads", "optimizer", "activations")]
        [2048.0, 512.0, 196608.0]

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 4.
    """
    if part == "activations":
        return 24.0 * hidden * every
    return batch * seq / (1.0 if part == "params and grads" else 4.0)


@takes(ait=_POSITIVE, bandwidth=_POSITIVE, peak=_POSITIVE)
def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Return the share of the time in which a device computes, if nothing overlaps.

    Args:
        ait: arithmetic intensity, in operations for each byte; see :func:`intensity`.
        bandwidth: bytes per second.
        peak: operations per second that the device reaches on its own.

    Returns:
        A number between 0 and 1.

    Example:
        >>> round(efficiency(intensity("params and grads"), 70e9, 70e12), 3)
        0.506

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 4.
    """
    return ait * bandwidth / (ait * bandwidth + peak)


@takes(ait=_POSITIVE, share=number(above=0, below=1, example="0.5"), peak=_POSITIVE)
def required_bandwidth(ait: float, share: float, peak: float) -> float:
    """Return the bandwidth at which :func:`efficiency` is ``share``.

    Args:
        ait: arithmetic intensity, in operations for each byte.
        share: the wanted efficiency.
        peak: operations per second.

    Returns:
        Bytes per second.

    Example:
        >>> round(required_bandwidth(intensity("optimizer", batch=2), 0.9, 70e12) / 1e12, 2)
        1.23

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 4.
    """
    return share / (1 - share) * peak / ait


@takes(size=integer(1), link=_POSITIVE, fabric=_POSITIVE)
def aggregate_bandwidth(size: int, link: float, fabric: float) -> float:
    """Return the bandwidth at which the ranks together read a tensor from host memory or a disk.

    Each rank reads a shard over a link of its own, and the ranks gather the shards.

    Args:
        size: the number of ranks.
        link: bytes per second of one rank's link to host memory or to the disk.
        fabric: bytes per second between the ranks.

    Returns:
        Bytes per second that reach each rank.

    Example:
        >>> [aggregate_bandwidth(n, 4e9, 70e9) / 1e9 for n in (1, 16, 64)]
        [4.0, 64.0, 70.0]

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 6.
    """
    return min(size * link, fabric)


class InfinityMemory(NamedTuple):
    """Bytes of a transformer.

    Attributes:
        states: parameters, gradients and optimizer state of the model.
        checkpoints: activations between blocks, of the batch.
        working_states: parameters and gradients of the largest operator.
        working_activations: activations between two checkpoints, of the batch.
    """

    states: float
    checkpoints: float
    working_states: float
    working_activations: float


@takes(
    num_layers=integer(1),
    hidden=integer(1),
    heads=integer(1),
    batch=integer(1),
    seq=integer(1),
    every=integer(1),
)
def infinity_memory(
    num_layers: int, hidden: int, heads: int, *, batch: int = 1, seq: int = 1024, every: int = 1
) -> InfinityMemory:
    """Return the memory that the parts of a transformer need, the states of Adam included.

    Args:
        num_layers: the number of blocks.
        hidden: the width.
        heads: attention heads.
        batch: sequences.
        seq: tokens of a sequence.
        every: blocks between two checkpoints.

    Returns:
        Bytes of the whole model and the whole batch, not of a rank.

    Example:
        >>> found = infinity_memory(128, 25_600, 256, batch=32)
        >>> round(found.states / 2**40, 2), round(found.checkpoints / 2**40, 2)
        (18.31, 0.2)

    After ZeRO-Infinity's paper (Rajbhandari et al., 2021), section 3.
    """
    return InfinityMemory(
        240.0 * num_layers * hidden**2,
        2.0 * batch * seq * hidden * num_layers / every,
        4.0 * hidden * 4 * hidden,
        float(batch * seq * every * (16 * hidden + 2 * heads * seq)),
    )
