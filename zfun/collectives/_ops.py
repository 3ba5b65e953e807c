"""Collectives as data: an op, a name and a part for messages, and a stream that orders them."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from zfun.errors import OptionError
from zfun.options import each, instance, integer, takes


class Stream(enum.IntEnum):
    """An ordered queue of collectives.

    Within a stream every rank starts the same calls in the same order; streams are independent of
    each other.
    """

    PARAMS = 0
    GRADS = 1
    CONTROL = 2


class _Map:
    """A linear map from one 1-D tensor per rank to one 1-D tensor per rank.

    Attributes:
        kind: the name of the operation.
        splits_input: whether a rank gives one chunk for each rank.
        splits_output: whether a rank receives one chunk from each rank.
    """

    __slots__ = ()
    kind: ClassVar[str]
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @property
    def dual(self) -> Op:
        """The op whose inner product, summed over the ranks, mirrors this one's (its adjoint)."""
        raise NotImplementedError

    def output_numel(self, numel: int, size: int) -> int:
        """Return the length of a rank's result."""
        return numel // (size if self.splits_input else 1) * (size if self.splits_output else 1)

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        """Return the bytes that a rank sends for an input of ``nbytes``."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class AllGather(_Map):
    """``S -> R``: every rank receives all shards, in rank order. Lengths ``n -> size * n``."""

    kind = "all_gather"
    splits_output = True

    @property
    def dual(self) -> Op:
        return ReduceScatter()

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes * (size - 1)


@dataclass(frozen=True, slots=True)
class ReduceScatter(_Map):
    """``P -> S``: rank r receives the r-th chunk of the sum. Lengths ``size * n -> n``."""

    kind = "reduce_scatter"
    splits_input = True

    @property
    def dual(self) -> Op:
        return AllGather()

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes // size * (size - 1)


@dataclass(frozen=True, slots=True)
class AllReduce(_Map):
    """``P -> R``: every rank receives the sum.

    The bytes are those of a reduce-scatter and an all-gather of the input, padded to a multiple of
    the size; two ranks send each other the whole input.
    """

    kind = "all_reduce"

    @property
    def dual(self) -> Op:
        return self

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        if size == 2:
            return nbytes
        return 2 * (size - 1) * -(-(nbytes // itemsize) // size) * itemsize


RANKS = each(integer(0), "a sequence of ranks", "(1, 0)")


@takes(root=integer(0))
@dataclass(frozen=True, slots=True)
class Broadcast(_Map):
    """Every rank receives the tensor of ``root``."""

    root: int = 0
    kind = "broadcast"

    @property
    def dual(self) -> Op:
        return Reduce(self.root)

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes * (size - 1) if rank == self.root else 0

    def __str__(self) -> str:
        return f"broadcast from rank {self.root}"


@takes(root=integer(0))
@dataclass(frozen=True, slots=True)
class Reduce(_Map):
    """``root`` receives the sum, the others zeros; so a reduce is the adjoint of a broadcast."""

    root: int = 0
    kind = "reduce"

    @property
    def dual(self) -> Op:
        return Broadcast(self.root)

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes if rank != self.root and size > 1 else 0

    def __str__(self) -> str:
        return f"reduce to rank {self.root}"


@dataclass(frozen=True, slots=True)
class AllToAll(_Map):
    """Chunk j of rank i becomes chunk i of rank j: a transpose of ranks and chunks."""

    kind = "all_to_all"
    splits_input = True
    splits_output = True

    @property
    def dual(self) -> Op:
        return self

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes // size * (size - 1)


@dataclass(frozen=True, slots=True)
class UnequalAllToAll(_Map):
    """Rank i sends ``counts[i][j]`` elements to rank j, one part after the other.

    All ranks know all counts, so they notice at once when these differ.

    Args:
        counts: the elements from each rank (a row) to each rank.
        rank: this one.
    """

    counts: tuple[tuple[int, ...], ...]
    rank: int = field(compare=False)
    kind = "all_to_all"

    @property
    def dual(self) -> Op:
        return UnequalAllToAll(tuple(zip(*self.counts, strict=True)), self.rank)

    @property
    def sent(self) -> tuple[int, ...]:
        """The elements to each rank."""
        return self.counts[self.rank]

    @property
    def received(self) -> tuple[int, ...]:
        """The elements from each rank."""
        return tuple(row[self.rank] for row in self.counts)

    def output_numel(self, numel: int, size: int) -> int:
        return sum(self.received)

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return (sum(self.sent) - self.sent[self.rank]) * itemsize

    def __str__(self) -> str:
        return f"all_to_all of counts with checksum {zlib.crc32(repr(self.counts).encode()):08x}"


@takes(destinations=RANKS)
@dataclass(frozen=True, slots=True)
class Permute(_Map):
    """Rank ``destinations[r]`` receives the tensor of rank r."""

    destinations: tuple[int, ...]
    kind = "permute"

    def __post_init__(self) -> None:
        # Caches hash the operation, which a list would not allow.
        object.__setattr__(self, "destinations", tuple(self.destinations))

    @property
    def sources(self) -> tuple[int, ...]:
        """The rank that each rank receives from."""
        return tuple(sorted(range(len(self.destinations)), key=self.destinations.__getitem__))

    @property
    def dual(self) -> Op:
        return Permute(self.sources)

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes if self.destinations[rank] != rank else 0

    def __str__(self) -> str:
        return f"permute to {_shortened(self.destinations)}"


Op: TypeAlias = (
    AllGather
    | ReduceScatter
    | AllReduce
    | Broadcast
    | Reduce
    | AllToAll
    | UnequalAllToAll
    | Permute
)


@takes(
    op=instance(_Map, "an operation", "AllReduce()"),
    stream=instance(Stream, "a Stream", "Stream.CONTROL"),
)
@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, as data.

    Args:
        op: the operation.
        name: the name of the tensor ("params", "grads", "loss", ...). Ranks must agree on the name.
        part: the bucket or the leaves, for error messages. Ranks must agree on ``part``.
        stream: the queue of the collective.
        zero_copy: the result may lie in shared memory, and the result of an all-gather may show
            the inputs of the ranks where they lie. Such a result must not be written, nor an input
            before ``await_readers``, and a fork of this process cannot read the result. Groups
            without shared memory return a fresh tensor. Ranks may differ in ``zero_copy``.
    """

    op: Op
    name: str = ""
    part: str = ""
    stream: Stream = Stream.CONTROL
    zero_copy: bool = field(default=False, compare=False)


CALL = instance(Collective, "a Collective", "Collective(AllReduce())")


def describe(call: Collective, numel: int, dtype: torch.dtype) -> str:
    """Describe a collective in words; all ranks must start the same description.

    Example:
        >>> call = Collective(AllGather(), "params", "bucket 2", Stream.PARAMS)
        >>> describe(call, 64, torch.float32)
        "all_gather 'params' (bucket 2) of 64 float32 on stream PARAMS"
        >>> describe(Collective(Broadcast(1)), 1, torch.int64)
        'broadcast from rank 1 of 1 int64 on stream CONTROL'
    """
    name = f" {call.name!r}" if call.name else ""
    part = f" ({call.part})" if call.part else ""
    if isinstance(call.op, UnequalAllToAll):
        numel = sum(map(sum, call.op.counts))  # of all ranks, because each has another length
    return (
        f"{call.op}{name}{part} of {numel} {str(dtype).removeprefix('torch.')} on stream "
        f"{call.stream.name}"
    )


def _shortened(ranks: Iterable[int]) -> str:
    text = ", ".join(map(str, ranks))
    return (
        f"({text})"
        if len(text) <= 60
        else f"({text[:50]}..., checksum {zlib.crc32(text.encode()):08x})"
    )


def check_collective(call: Collective, x: Tensor, out: Tensor | None, size: int) -> None:
    """Refuse an impossible collective before anything is sent.

    Raises:
        OptionError: the input is not 1-D and contiguous or does not divide, the output does not
            fit, or the op names a rank that does not exist.
    """
    op = call.op
    if x.dim() != 1 or not x.is_contiguous():
        raise _refusal(
            call,
            f"takes a contiguous 1-D tensor; got shape {tuple(x.shape)}, strides {x.stride()}; "
            "flatten it first",
        )
    if op.splits_input and x.numel() % size:
        raise _refusal(
            call, f"needs a length that the {size} ranks divide; got {x.numel()}; pad it"
        )
    if out is not None:
        expected = op.output_numel(x.numel(), size)
        if (
            out.dim() != 1
            or not out.is_contiguous()
            or out.numel() != expected
            or out.dtype != x.dtype
            or out.device != x.device
        ):
            wanted = f"contiguous 1-D output of {expected} {x.dtype} on {x.device}"
            raise _refusal(
                call, f"needs a {wanted}; got shape {tuple(out.shape)}, {out.dtype} on {out.device}"
            )
    match op:
        case Broadcast(root) | Reduce(root) if not 0 <= root < size:
            raise _refusal(call, f"has root {root}; the ranks are 0 to {size - 1}")
        case UnequalAllToAll(counts) if len(counts) != size or sum(op.sent) != x.numel():
            raise _refusal(
                call,
                f"needs the counts of {size} ranks, which sum to the length of its input; got "
                f"counts of {len(counts)} ranks, {sum(op.sent)} in all, for {x.numel()} elements",
            )
        case Permute(destinations) if sorted(destinations) != list(range(size)):
            raise _refusal(
                call,
                f"needs each rank of 0 to {size - 1} once among its destinations; got "
                f"{destinations}",
            )
        case _:
            pass


def _refusal(call: Collective, reason: str) -> OptionError:
    label = f"{call.op.kind} {call.name!r}" if call.name else call.op.kind
    return OptionError(f"{label} {reason}", collective=label)
