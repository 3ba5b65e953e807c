"""How leaves of a model are spread over a model axis, as data that travels with the loss.

[Note: model axes]
ZeRO cuts flat buckets over the *data* axes of a mesh, and never looks at what is in the leaves. A
*model* axis spreads leaves by meaning: columns of a matrix, experts, layers. Each rank then has a
tree of its own, with smaller or fewer leaves, and ZeRO over the data axes shards this *local* tree.
The *logical* tree is the one that a single process would have.

A transform such as :func:`zfun.tensor_parallel` returns a :class:`ParallelLoss`: a loss of the
local tree, and for each model axis the rule by which the local tree comes from the logical one.
:func:`zfun.zero` reads these rules: ``init`` takes the logical tree and keeps the local one,
``params`` returns the logical tree, and a norm counts each element of the logical tree once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun.collectives import Group
from zfun.errors import LeafError


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
    """

    ranks: tuple[int, ...]


LeafRule: TypeAlias = Callable[[str, Any], Cut | Held | None]
"""``rule(path, leaf)`` says how a leaf of the logical tree is spread, alike on all ranks; the leaf
may be a meta tensor. ``None``: every rank has the whole leaf, with equal values and gradients."""


@dataclass(frozen=True, slots=True)
class ModelAxis:
    """A model axis, and the rule that spreads the leaves over it."""

    group: Group
    rule: LeafRule


class ParallelLoss:
    """A loss of the local tree, which knows its model axes.

    Args:
        fn: ``(params, batch) -> scalar``, of the leaves that this rank holds.
        axes: see :func:`model_axes`; the first one cuts the logical tree, the next one its pieces.
    """

    def __init__(self, fn: Callable[..., Any], axes: Sequence[ModelAxis]) -> None:
        self.fn = fn
        self.model_axes = tuple(axes)

    def __call__(self, params: Any, batch: Any) -> Any:
        return self.fn(params, batch)


def model_axes(loss: Any) -> tuple[ModelAxis, ...]:
    """Return the model axes of a loss, outermost transform last; empty for a plain function."""
    return getattr(loss, "model_axes", ())
