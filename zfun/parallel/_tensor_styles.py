"""Styles of tensor parallelism: how a leaf lies over the axis, as data."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zfun.errors import LeafError, OptionError
from zfun.options import TEXT, each, integer, takes
from zfun.placement import Cut

# The functions in which a leaf may be used, by style.
USES: Mapping[str, str] = {
    "colwise": "F.linear(x, leaf, bias)",
    "packed_colwise": "F.linear(x, leaf, bias)",
    "colwise_gather_output": "F.linear(x, leaf, bias)",
    "rowwise": "F.linear(x, leaf, bias)",
    "packed_rowwise": "F.linear(x, leaf, bias)",
    "rowwise_split_input": "F.linear(x, leaf, bias)",
    "embedding_rowwise": "F.embedding(ids, leaf), and in F.linear(x, leaf) as a tied head",
    "sequence_parallel": "F.embedding(ids, leaf) or a norm, of this rank's tokens",
    "replicated_with_grad_allreduce": "any function of values that differ between ranks",
    "replicated": "any function of values that all ranks have alike",
}
# Whole leaves, whose gradients are parts of a sum.
SUMMED = frozenset(["sequence_parallel", "replicated_with_grad_allreduce"])
WHOLE = SUMMED | {"replicated"}
# The input of F.linear is whole, and the output is cut.
OUTPUT_CUT = frozenset(["colwise", "packed_colwise", "colwise_gather_output", "embedding_rowwise"])


@takes(name=TEXT, parts=each(integer(1), "a sequence of lengths", "(8, 2, 2)"), heads=integer(0))
@dataclass(frozen=True, slots=True)
class TensorStyle:
    """The style of a leaf over a tensor axis, with details that a bare name leaves out.

    Args:
        name: one of the styles of :func:`zfun.tensor_parallel`.
        parts: of a packed style, the lengths of the parts along the dimension that is cut; by
            default two halves.
        heads: attention heads that lie along the dimension that is cut, which the ranks must
            divide; 0 for none.

    Raises:
        OptionError: a style that does not exist, or parts of a style that is not packed.

    Example:
        >>> TensorStyle("packed_colwise", parts=(8, 2, 2)).cut("qkv.weight", (12, 16), 2)
        Cut(dim=0, parts=(8, 2, 2))
    """

    name: str
    parts: tuple[int, ...] = ()
    heads: int = 0

    def __post_init__(self) -> None:
        if self.name not in USES:
            raise OptionError(
                f"styles of tensor_parallel() are {', '.join(USES)}; got {self.name!r}; write one "
                "of these, or leave the leaf whole"
            )
        if self.parts and not self.name.startswith("packed"):
            raise OptionError(
                f"packed styles have parts; got parts for {self.name!r}; write "
                f"'packed_{self.name}', or leave the parts out"
            )

    def cut(self, path: str, shape: Sequence[int], size: int) -> Cut | None:
        """Return how a leaf is cut over ``size`` ranks; ``None`` for a whole leaf.

        A bias is a leaf of one dimension.

        Raises:
            LeafError: the ranks do not divide the heads, or the leaf.
        """
        if self.heads % size:
            raise LeafError(
                f"a rank of a tensor axis has whole attention heads; got {self.heads} heads in "
                f"leaf {path!r} over {size} ranks; use an axis whose size divides the heads",
                leaf=path,
            )
        if self.name in WHOLE or (self.name not in OUTPUT_CUT and len(shape) < 2):
            return None
        # A matrix is [out, in], and experts put a dimension before these two.
        dim = max(len(shape) - (2 if self.name in OUTPUT_CUT else 1), 0)
        parts = tuple(self.parts)
        if self.name.startswith("packed") and not parts:
            half = shape[dim] // 2
            parts = (half, shape[dim] - half)
        cut = Cut(dim, parts)
        cut.check(path, shape, size)
        return cut


StylePlan: TypeAlias = Mapping[str, str | TensorStyle]
"""Styles by glob; see :func:`zfun.tensor_parallel`."""


def styles_of(plan: StylePlan) -> dict[str, TensorStyle]:
    """Return the styles of a plan by glob."""
    return {
        glob: style if isinstance(style, TensorStyle) else TensorStyle(style)
        for glob, style in plan.items()
    }


def glob_of(path: str, globs: Mapping[str, TensorStyle]) -> str | None:
    """Return the first glob that matches a leaf's path, or the path of the module that has it."""
    owner = path.rpartition(".")[0]
    for glob in globs:
        if fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(owner, glob):
            return glob
    return None
