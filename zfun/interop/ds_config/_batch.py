"""Batch sizes: the three numbers of a configuration, and sizes for changing numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zfun.errors import OptionError
from zfun.options import each, integer, takes

# Highly composite numbers: each has more divisors than every smaller number, so a batch of such a
# multiple can be divided among many numbers of ranks. These reach 720,720 micro-batches.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760),
    *(277200, 332640, 498960, 554400, 665280, 720720),
)


class Batch(NamedTuple):
    """The sizes of a step; ``train = micro * accumulation * world_size``.

    Attributes:
        train: samples of one step, over all ranks.
        micro: samples that a rank computes at a time.
        accumulation: micro-batches of one step of a rank.
        world_size: ranks.
    """

    train: int
    micro: int
    accumulation: int
    world_size: int


class ElasticBatch(NamedTuple):
    """A batch size for many numbers of ranks.

    Attributes:
        train: samples of one step, over all ranks.
        world_sizes: the numbers of ranks, model-parallel ranks counted once, that can train it.
        micro: samples that a rank computes at a time; ``None`` without a world size.
    """

    train: int
    world_sizes: tuple[int, ...]
    micro: int | None


@takes(
    world_size=integer(1),
    train=integer(1) | None,
    micro=integer(1) | None,
    accumulation=integer(1) | None,
)
def batch_of(
    world_size: int,
    *,
    train: int | None = None,
    micro: int | None = None,
    accumulation: int | None = None,
) -> Batch:
    """Complete the sizes of a batch, as DeepSpeed does.

    Args:
        world_size: ranks.
        train: samples of one step, over all ranks; alone means one micro-batch.
        micro: samples that a rank computes at a time; alone means one micro-batch.
        accumulation: micro-batches of one step of a rank; not enough alone.

    Returns:
        The sizes.

    Raises:
        OptionError: too few numbers, or numbers that do not go together.

    Example:
        >>> batch_of(2, train=32, micro=8)
        Batch(train=32, micro=8, accumulation=2, world_size=2)
        >>> batch_of(2, train=33, micro=17)
        Traceback (most recent call last):
        ...
        zfun.errors.OptionError: train_batch_size equals ...; got 33 with 17 · ... · 2; ...
    """
    given = (train, micro, accumulation)
    if train is None and micro is None:
        raise OptionError(
            "train_batch_size or train_micro_batch_size_per_gpu must be known; got "
            f"{'neither' if accumulation is None else f'accumulation {accumulation} alone'}; "
            "write one of the two"
        )
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    else:
        accumulation = accumulation or train // (micro * world_size)
    if not (micro and accumulation) or train != micro * accumulation * world_size:
        numbers = " · ".join("..." if x is None else str(x) for x in (*given[1:], world_size))
        good = (micro or 1) * (accumulation or 1) * world_size
        raise OptionError(
            "train_batch_size equals train_micro_batch_size_per_gpu · gradient_accumulation_steps ·"
            f" ranks; got {train} with {numbers}; write {good}, or leave one number out"
        )
    return Batch(train, micro, accumulation, world_size)


@takes(
    max_batch=integer(1),
    micro_batches=each(integer(1), "a list of micro-batch sizes", "[2, 4, 6]", least=1),
    world_size=integer(1) | None,
    min_ranks=integer(1),
    max_ranks=integer(1) | None,
    ranks_per_node=integer(1) | None,
    model_parallel=integer(1),
)
def solve_batch(
    max_batch: int,
    micro_batches: Sequence[int],
    world_size: int | None = None,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    prefer_larger: bool = True,
    ranks_per_node: int | None = None,
    model_parallel: int = 1,
) -> ElasticBatch:
    """Choose a batch size that many numbers of ranks can train unchanged.

    DeepSpeed's elasticity 0.1, and with ``ranks_per_node`` version 0.2, which does so for whole
    nodes. Candidates are multiples of each micro-batch size, and of their least common multiple, by
    the largest highly composite number below the bound. The candidate wins that the most numbers of
    ranks can train.

    Args:
        max_batch: the largest batch, in samples over all ranks.
        micro_batches: sizes that fit into the memory of a rank.
        world_size: ranks now, model-parallel ranks included; ``ranks_per_node`` needs this number.
        min_ranks: the least number of ranks.
        max_ranks: the largest number of ranks; by default ``max_batch`` over the smallest
            micro-batch.
        prefer_larger: of candidates with equally many numbers of ranks take the larger, and with
            ``ranks_per_node`` the larger micro-batch.
        ranks_per_node: ranks of a node; by default nodes may be split.
        model_parallel: ranks that hold one replica; needs ``ranks_per_node``.

    Returns:
        The batch size, the numbers of ranks, and the micro-batch size of ``world_size``.

    Raises:
        OptionError: no batch fits, ``world_size`` cannot train the batch, or the options do not go
            together.

    Example:
        >>> solve_batch(32, [1, 2, 3, 7], world_size=4)
        ElasticBatch(train=24, world_sizes=(1, 2, 3, 4, 6, 8, 12, 24), micro=3)
    """
    if ranks_per_node is None:
        if model_parallel > 1:
            raise OptionError(
                "version 0.1 is for data parallelism alone; got "
                f"model_parallel={model_parallel}; use version 0.2, which is ranks_per_node="
            )
        train, sizes = _by_ranks(max_batch, micro_batches, min_ranks, max_ranks, prefer_larger)
        micro = None if world_size is None else _largest(train, sizes, micro_batches, world_size)
        return ElasticBatch(train, sizes, micro)
    if ranks_per_node % model_parallel:
        raise OptionError(
            "the ranks of a node must be whole replicas; got ranks_per_node="
            f"{ranks_per_node} and model_parallel={model_parallel}; use a divisor"
        )
    if world_size is None:
        raise OptionError("whole nodes need the number of ranks; got none; pass world_size")
    replicas, now = ranks_per_node // model_parallel, world_size // model_parallel
    least = max(1, min_ranks // ranks_per_node)
    most = None if max_ranks is None else max(1, max_ranks // ranks_per_node)
    train, nodes = _by_ranks(max_batch // replicas, micro_batches, least, most, prefer_larger)
    train, sizes = train * replicas, tuple(count * replicas for count in nodes)
    if now not in sizes:
        # The largest multiple of what these ranks compute at a time.
        steps = [micro * now for micro in micro_batches if now and micro * now <= max_batch]
        if not steps:
            raise OptionError(
                f"a micro-batch of each rank must fit into max_batch={max_batch}; got {world_size} "
                f"ranks, {ranks_per_node} on a node, and micro-batches {list(micro_batches)}; "
                "raise max_batch"
            )
        fitting = [max_batch // step * step for step in steps]
        train, sizes = max(fitting) if prefer_larger else min(fitting), (now,)
    good = [micro for micro in micro_batches if train // now % micro == 0]
    return ElasticBatch(train, sizes, (max(good) if prefer_larger else good[0]) if good else None)


def elastic_batch(section: Mapping[str, Any], world_size: int | None) -> ElasticBatch:
    """Return the batch size of a section ``elasticity``, with DeepSpeed's defaults."""
    version = section.get("version", 0.2)
    if str(version) not in ("0.1", "0.2"):
        raise OptionError(f"version of elasticity is 0.1 or 0.2; got {version!r}; write 0.2")
    return solve_batch(
        section.get("max_train_batch_size", 2000),
        section.get("micro_batch_sizes", [2, 4, 6]),
        world_size,
        min_ranks=section.get("min_gpus", 1),
        max_ranks=section.get("max_gpus"),
        prefer_larger=section.get("prefer_larger_batch", True),
        ranks_per_node=None if str(version) == "0.1" else section.get("num_gpus_per_node", 1),
        model_parallel=section.get("model_parallel_size", 1),
    )


def _by_ranks(
    max_batch: int, micros: Sequence[int], least: int, most: int | None, prefer_larger: bool
) -> tuple[int, tuple[int, ...]]:
    if max(micros) > max_batch:
        raise OptionError(
            f"every micro-batch must fit into max_batch; got {max(micros)} and {max_batch}; remove "
            "the larger micro-batches, or raise max_batch"
        )
    most = most or max_batch // min(micros)
    bases = [base for base in (*micros, math.lcm(*micros)) if base <= max_batch]
    candidates = {
        base * max(n for n in _HIGHLY_COMPOSITE if n <= max_batch // base) for base in bases
    }
    best, train = (), 0
    for candidate in sorted(candidates):
        sizes = _sizes(candidate, micros, least, most)
        if len(sizes) > len(best) or (sizes and len(sizes) == len(best) and prefer_larger):
            best, train = sizes, candidate
    if not best:
        raise OptionError(
            f"some number of ranks from {least} to {most} must be able to train a batch of at most "
            f"{max_batch}; got none with micro-batches {list(micros)}; allow more numbers of ranks"
        )
    return train, best


def _sizes(train: int, micros: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    """Return the numbers of ranks that divide a batch into whole micro-batches."""
    wholes = {train // micro for micro in micros if train % micro == 0}
    divisors = ((n, x // n) for x in wholes for n in range(1, math.isqrt(x) + 1) if x % n == 0)
    return tuple(sorted({n for pair in divisors for n in pair if least <= n <= most}))


def _largest(train: int, sizes: tuple[int, ...], micros: Sequence[int], world_size: int) -> int:
    if world_size not in sizes:
        raise OptionError(
            f"the number of ranks must divide the batch of {train} into whole micro-batches; got "
            f"{world_size}; use one of {', '.join(map(str, sizes))}"
        )
    return max(micro for micro in micros if train // world_size % micro == 0)
