"""Placement: the part of a value that each rank of a group holds.

``R``, ``P`` and ``S`` say whether the buffers of a :class:`zfun.Flat` are whole, terms of a sum, or
pieces. How a bucket is cut into pieces is a value too: ``S`` cuts it into equal pieces,
:class:`Owned` between leaves, :class:`Aligned` between rows or blocks. A class of your own with one
method, :meth:`Sharded.pieces`, is as good as these.

Over a model axis leaves are spread one by one, whatever the bucket: :class:`Cut` along a dimension,
or :class:`Held` whole by some ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from zfun.errors import LeafError, OptionError

UNIT = 32
"""Pieces begin and end at multiples of this many elements."""

Piece: TypeAlias = tuple[int, int]
"""``(start, stop)``: the elements of a bucket that a rank holds."""


class LeafPlace(Protocol):
    """The place of a leaf in a bucket; see :class:`zfun.layout.LeafSlot`."""

    @property
    def path(self) -> str:
        """The leaf in the tree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""

    @property
    def offset(self) -> int:
        """The first element in the bucket."""

    @property
    def numel(self) -> int:
        """The number of elements."""


class Placement:
    """The part of a value that each rank holds.

    ``R``, replicated: every rank holds the whole. ``P``, partial: every rank holds one term of a
    sum. ``S``, sharded: each rank holds one piece of each bucket.
    """

    def __repr__(self) -> str:
        return next((name for name, x in _THREE.items() if x is self), f"{type(self).__name__}()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of R is R, because code compares these three by identity.
        name = next((name for name, x in _THREE.items() if x is self), None)
        return super().__reduce_ex__(protocol) if name is None else name


class Sharded(Placement):
    """Each rank holds one piece of each bucket; subclasses say which piece.

    Make subclasses frozen dataclasses, because leaves of equal placements share buckets.
    :func:`zfun.zero`, :func:`zfun.shard` and :func:`zfun.replicate` take such a placement, or a
    rule ``(path, leaf) -> placement``.
    """

    def pieces(
        self, leaves: Sequence[LeafPlace], numel: int, size: int, held: Sequence[int]
    ) -> Sequence[Piece]:
        """Cut one bucket.

        Args:
            leaves: the leaves in the bucket, by offset. Elements between leaves are padding.
            numel: elements of the bucket, padding included.
            size: the number of ranks.
            held: elements that each rank holds of the buckets before.

        Returns:
            The piece of each rank: empty, or from one multiple of 32 elements to another, because
            exact norms add units of 32. Together the pieces hold each element once.

        Example:
            >>> S.pieces([], 64, 2, [0, 0])
            [(0, 32), (32, 64)]
        """
        del leaves, held
        return [(rank * numel // size, (rank + 1) * numel // size) for rank in range(size)]


R = Placement()
P = Placement()
S = Sharded()
_THREE: dict[str, Placement] = {"R": R, "P": P, "S": S}

PlacementRule: TypeAlias = Callable[[str, Any], Sharded]
"""``rule(path, leaf)`` returns how a leaf is cut; the leaf may be a meta tensor."""


@dataclass(frozen=True)
class Owned(Sharded):
    """Whole leaves: each leaf lies on one rank, in full.

    A rule that needs whole leaves, such as :func:`zfun.optim.muon`, then sends nothing. In each
    bucket, ranks that hold little take the next leaves, so that all hold about the same. A bucket
    of one leaf is gathered by a broadcast and summed by a reduce.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     params = {"w": torch.ones(8, 8), "v": torch.ones(8, 8)}
        ...     flat = zf.shard(params, group, placement=Owned())
        ...     return [span.stop - span.start for span in zf.flat.leaf_spans(flat)]
        >>> zf.simulate(2, main)
        [[64, 0], [0, 64]]
    """

    def pieces(
        self, leaves: Sequence[LeafPlace], numel: int, size: int, held: Sequence[int]
    ) -> Sequence[Piece]:
        """Give each rank a run of whole leaves; see :meth:`Sharded.pieces`."""
        share = (sum(held) + numel) / size
        free = sorted(range(size), key=lambda rank: (held[rank], rank))
        pieces, start = [(0, 0)] * size, 0
        for following in leaves[1:]:
            # Half of the next leaf may exceed the share; the last rank takes all that is left.
            load = held[free[0]] + following.offset - start + following.numel / 2
            if load > share and len(free) > 1:
                pieces[free.pop(0)] = (start, following.offset)
                start = following.offset
        pieces[free[0]] = (start, numel)
        return pieces


@dataclass(frozen=True)
class Aligned(Sharded):
    """Nearly equal pieces that begin at a row of a leaf, or at a multiple of a block.

    Args:
        rows: begin pieces at whole rows (the first dim of a leaf), for rules that work row by row;
            of rows whose width is no multiple of 32, at those that begin at one.
        block: begin pieces at multiples of this many elements, so that no block of a codec lies on
            two ranks.

    Raises:
        OptionError: neither or both are given.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(5, 96)}, group, placement=Aligned(rows=True))
        ...     return zf.describe(flat).rows[0].here
        >>> zf.simulate(3, main)
        [(0, 192), (192, 288), (288, 480)]
    """

    rows: bool = False
    block: int = 0

    def __post_init__(self) -> None:
        if bool(self.rows) == bool(self.block) or self.block < 0:
            raise OptionError(
                "Aligned() cuts at rows or at blocks; got "
                f"rows={self.rows!r}, block={self.block!r}; pass rows=True, or block=256"
            )

    def pieces(
        self, leaves: Sequence[LeafPlace], numel: int, size: int, held: Sequence[int]
    ) -> Sequence[Piece]:
        """Move equal cuts to the nearest row or block; see :meth:`Sharded.pieces`."""
        del held
        offsets = [leaf.offset for leaf in leaves]

        def nearest(cut: int) -> int:
            if self.block:
                block = math.lcm(self.block, UNIT)
                return min(round(cut / block) * block, numel)
            index = bisect.bisect_right(offsets, cut) - 1
            leaf = leaves[index]
            rows = leaf.shape[0] if leaf.shape else 1
            row = math.lcm(max(1, leaf.numel // max(1, rows)), UNIT)
            end = offsets[index + 1] if index + 1 < len(offsets) else numel
            inside = round((cut - leaf.offset) / row) * row
            return leaf.offset + inside if inside < leaf.numel else end

        cuts = [0, *(nearest(rank * numel // size) for rank in range(1, size)), numel]
        return list(itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Cut:
    """A leaf is cut along one dimension, in equal pieces by rank.

    Args:
        dim: the dimension, counted from the front.
        parts: of a packed leaf, such as gate and up or q, k and v, the lengths of its parts along
            ``dim``. Each part is cut, and a rank holds its piece of every part.

    Example:
        >>> packed = torch.arange(6)
        >>> cut = Cut(0, parts=(4, 2))
        >>> cut.piece(packed, 1, 2), cut.whole([cut.piece(packed, rank, 2) for rank in (0, 1)])
        (tensor([2, 3, 5]), tensor([0, 1, 2, 3, 4, 5]))
    """

    dim: int
    parts: tuple[int, ...] = ()

    def check(self, path: str, shape: Sequence[int], size: int) -> None:
        """Refuse a leaf that ``size`` ranks do not divide.

        Raises:
            LeafError: the message names the leaf.
        """
        if not 0 <= self.dim < len(shape):
            raise LeafError(
                f"a leaf is cut along one of its dimensions; got dim {self.dim} for leaf {path!r} "
                f"of shape {tuple(shape)}; name another style for this leaf",
                leaf=path,
            )
        parts = self.parts or (shape[self.dim],)
        if sum(parts) != shape[self.dim] or any(part % size for part in parts):
            raise LeafError(
                f"the ranks of an axis divide what they cut; got leaf {path!r} of shape "
                f"{tuple(shape)}, cut along dim {self.dim} in parts of "
                f"{', '.join(map(str, parts))}, over {size} ranks; use an axis whose size divides "
                "these parts, or keep the leaf whole",
                leaf=path,
            )

    def piece(self, leaf: Tensor, rank: int, size: int) -> Tensor:
        """Return the piece of a rank; of a leaf that is not packed a view."""
        split = leaf.split(self.parts or leaf.shape[self.dim], self.dim)
        pieces = [part.chunk(size, self.dim)[rank] for part in split]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join the pieces of all ranks."""
        if not self.parts:
            return torch.cat([*pieces], self.dim)
        shares = [part // len(pieces) for part in self.parts]
        split = [piece.split(shares, self.dim) for piece in pieces]
        return torch.cat([*itertools.chain(*zip(*split, strict=True))], self.dim)

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Held:
    """A leaf lies whole on some ranks of an axis, such as one stage of a pipeline.

    Args:
        ranks: ascending; a leaf with several, such as a tied embedding, has equal values and equal
            gradients on these.
        tied_to: the path of the first of tied leaves, which may lie on different ranks.
    """

    ranks: tuple[int, ...]
    tied_to: str = ""


def is_first(spread: Sequence[Cut | Held | None], ranks: Sequence[int]) -> bool:
    """Whether this rank is the first of those that hold its part of a leaf.

    Args:
        spread: how the leaf is spread over each model axis; nothing stands for whole leaves.
        ranks: this rank along each of these axes.

    Example:
        >>> [is_first((Cut(0), None), ranks) for ranks in ((0, 0), (1, 0), (0, 1))]
        [True, True, False]
    """
    firsts = [x.ranks[0] if isinstance(x, Held) else 0 for x in spread] or [0] * len(ranks)
    cuts = [isinstance(x, Cut) for x in spread] or [False] * len(ranks)
    return all(cut or rank == first for cut, rank, first in zip(cuts, ranks, firsts, strict=True))
