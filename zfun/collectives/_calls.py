"""Collectives as data: what is done (an op), for whom (a name and a part), and in which order (a lane)."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from zfun.errors import OptionError

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Call",
    "Lane",
    "Op",
    "Permute",
    "Reduce",
    "ReduceScatter",
    "check_call",
    "describe",
]


class Lane(enum.IntEnum):
    """An order of collectives. Within a lane every rank starts the same calls in the same order; lanes are independent of each other."""

    PARAMS = 0
    GRADS = 1
    CONTROL = 2


@dataclass(frozen=True, slots=True)
class AllGather:
    """``S -> R``: every rank receives all shards, in rank order. Lengths ``n -> size * n``."""

    kind: ClassVar[str] = "all_gather"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = True

    @property
    def dual(self) -> Op:
        return ReduceScatter()

    def output_numel(self, numel: int, size: int) -> int:
        return numel * size

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes * (size - 1)


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """``P -> S``: rank r receives the r-th chunk of the sum. Lengths ``size * n -> n``."""

    kind: ClassVar[str] = "reduce_scatter"
    splits_input: ClassVar[bool] = True
    splits_output: ClassVar[bool] = False

    @property
    def dual(self) -> Op:
        return AllGather()

    def output_numel(self, numel: int, size: int) -> int:
        return numel // size

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes // size * (size - 1)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """``P -> R``: every rank receives the sum.

    It is a reduce-scatter and an all-gather of the input, padded to a multiple of the size; two ranks send each other the whole.
    """

    kind: ClassVar[str] = "all_reduce"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @property
    def dual(self) -> Op:
        return self

    def output_numel(self, numel: int, size: int) -> int:
        return numel

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        if size == 2:
            return nbytes
        return 2 * (size - 1) * -(-(nbytes // itemsize) // size) * itemsize


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every rank receives the tensor of ``root``."""

    root: int = 0
    kind: ClassVar[str] = "broadcast"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @property
    def dual(self) -> Op:
        return Reduce(self.root)

    def output_numel(self, numel: int, size: int) -> int:
        return numel

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes * (size - 1) if rank == self.root else 0


@dataclass(frozen=True, slots=True)
class Reduce:
    """``root`` receives the sum, the others zeros (which is what makes it the adjoint of a broadcast)."""

    root: int = 0
    kind: ClassVar[str] = "reduce"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @property
    def dual(self) -> Op:
        return Broadcast(self.root)

    def output_numel(self, numel: int, size: int) -> int:
        return numel

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes if rank != self.root and size > 1 else 0


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Chunk j of rank i becomes chunk i of rank j: a transpose of ranks and chunks."""

    kind: ClassVar[str] = "all_to_all"
    splits_input: ClassVar[bool] = True
    splits_output: ClassVar[bool] = True

    @property
    def dual(self) -> Op:
        return self

    def output_numel(self, numel: int, size: int) -> int:
        return numel

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes // size * (size - 1)


@dataclass(frozen=True, slots=True)
class Permute:
    """Rank ``destinations[r]`` receives the tensor of rank r."""

    destinations: tuple[int, ...]
    kind: ClassVar[str] = "permute"
    splits_input: ClassVar[bool] = False
    splits_output: ClassVar[bool] = False

    @property
    def sources(self) -> tuple[int, ...]:
        """The rank that each rank receives from."""
        return tuple(sorted(range(len(self.destinations)), key=self.destinations.__getitem__))

    @property
    def dual(self) -> Op:
        return Permute(self.sources)

    def output_numel(self, numel: int, size: int) -> int:
        return numel

    def sent_bytes(self, nbytes: int, rank: int, size: int, itemsize: int = 1) -> int:
        return nbytes if self.destinations[rank] != rank else 0


# A linear map from one 1-D tensor per rank to one 1-D tensor per rank. ``splits_input`` and ``splits_output`` say whether that side is one
# chunk per rank; ``dual`` is the adjoint: the op whose inner product, summed over the ranks, mirrors this one's; ``output_numel`` is the
# length of a rank's result, and ``sent_bytes`` what a rank sends of an input of so many bytes.
Op: TypeAlias = AllGather | ReduceScatter | AllReduce | Broadcast | Reduce | AllToAll | Permute


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank asks for it.

    Args:
        op: what is done.
        name: what is sent ("params", "grads", "loss", ...). Ranks must agree on it.
        part: which bucket or leaves, for error messages. Ranks must agree on it.
        lane: the order in which the call takes part.
        borrow: the result of an all-gather or an all-reduce is only read, and may share memory with what the ranks gave, which is only read
            from then on too, until ``Group.await_readers``; the input of an all-reduce is given up. The bits are the same.
        squared: called with the squares of this rank's piece of a sum, as ``ops.squares_in_bins`` returns them, by groups that take them
            while they add; others never call it. Ranks need not agree on it.
    """

    op: Op
    name: str = ""
    part: str = ""
    lane: Lane = Lane.CONTROL
    borrow: bool = False
    squared: Callable[[Tensor], None] | None = field(default=None, compare=False)


def describe(call: Call, numel: int, dtype: torch.dtype) -> str:
    """Say in words what a rank sends: all that ranks must agree on, and so what messages are compared by.

    Example:
        >>> describe(Call(AllGather(), "params", "bucket 2", Lane.PARAMS), 64, torch.float32)
        "all_gather 'params' (bucket 2) of 64 float32 on lane PARAMS"
        >>> describe(Call(Broadcast(1)), 1, torch.int64)
        'broadcast from rank 1 of 1 int64 on lane CONTROL'
    """
    what = call.op.kind
    match call.op:
        case Broadcast(root):
            what += f" from rank {root}"
        case Reduce(root):
            what += f" to rank {root}"
        case Permute(destinations):
            what += f" to {_shortened(destinations)}"
        case _:
            pass
    name = f" {call.name!r}" if call.name else ""
    part = f" ({call.part})" if call.part else ""
    borrowed = ", borrowed" if call.borrow else ""
    return f"{what}{name}{part} of {numel} {str(dtype).removeprefix('torch.')} on lane {call.lane.name}{borrowed}"


def _shortened(ranks: Iterable[int]) -> str:
    text = ", ".join(map(str, ranks))
    return f"({text})" if len(text) <= 60 else f"({text[:50]}..., checksum {zlib.crc32(text.encode()):08x})"


def check_call(call: Call, x: Tensor, out: Tensor | None, size: int) -> None:
    """Refuse what no group can do, before anything is sent.

    Raises:
        OptionError: the input is not 1-D and contiguous or does not divide, the output does not fit, or the op names a rank that does
            not exist.
    """
    op = call.op
    if x.dim() != 1 or not x.is_contiguous():
        raise _refusal(call, f"takes a contiguous 1-D tensor; got shape {tuple(x.shape)}, strides {x.stride()}; flatten it first")
    if op.splits_input and x.numel() % size:
        raise _refusal(call, f"needs a length that the {size} ranks divide; got {x.numel()}; pad it")
    if out is not None:
        expected = op.output_numel(x.numel(), size)
        if out.dim() != 1 or not out.is_contiguous() or out.numel() != expected or out.dtype != x.dtype or out.device != x.device:
            wanted = f"contiguous 1-D output of {expected} {x.dtype} on {x.device}"
            raise _refusal(call, f"needs a {wanted}; got shape {tuple(out.shape)}, {out.dtype} on {out.device}")
    match op:
        case Broadcast(root) | Reduce(root) if not 0 <= root < size:
            raise _refusal(call, f"has root {root}; the ranks are 0 to {size - 1}")
        case Permute(destinations) if sorted(destinations) != list(range(size)):
            raise _refusal(call, f"needs each rank of 0 to {size - 1} once among its destinations; got {destinations}")
        case _:
            pass


def _refusal(call: Call, reason: str) -> OptionError:
    label = f"{call.op.kind} {call.name!r}" if call.name else call.op.kind
    return OptionError(f"{label} {reason}", collective=label)
