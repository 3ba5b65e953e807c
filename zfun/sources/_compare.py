"""Two sources compared, one leaf of each at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.options import takes
from zfun.sources._source import SOURCE, Source

_PIECE = 2**20


class Comparison(NamedTuple):
    """The result of :func:`compare`.

    Attributes:
        only_first: names that only the first source has.
        only_second: names that only the second source has.
        reshaped: names with different shapes, and the two shapes.
        retyped: names with different dtypes, and the two dtypes.
        changed: names with different values, and the largest absolute difference; NaN where one
            side is NaN and the other is not.
        equal: the number of leaves that are equal to the last bit.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    retyped: Mapping[str, tuple[torch.dtype, torch.dtype]]
    changed: Mapping[str, float]
    equal: int

    @property
    def is_same(self) -> bool:
        """Whether the sources are equal to the last bit."""
        return not any([*self[:5]])


@takes(first=SOURCE, second=SOURCE)
def compare(first: Source, second: Source) -> Comparison:
    """Compare the leaves of two sources by name.

    One leaf of each source is in memory at a time. Different dtypes are compared by value.

    Args:
        first: a source.
        second: another source.

    Returns:
        The differences.

    Example:
        >>> from zfun import sources
        >>> one = sources.tensors({"w": torch.ones(2), "b": torch.zeros(1)})
        >>> two = sources.tensors({"w": torch.tensor([1.0, 1.5]), "b": torch.zeros(1)})
        >>> found = compare(one, two)
        >>> found.changed, found.equal, found.is_same
        ({'w': 0.5}, 1, False)
    """
    both = [name for name in first if name in second]
    shapes = {name: (tuple(first[name].shape), tuple(second[name].shape)) for name in both}
    dtypes = {name: (first[name].dtype, second[name].dtype) for name in both}
    reshaped = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    changed = {}
    for name in both:
        if name not in reshaped:
            difference = _difference(first[name].load(), second[name].load())
            if difference is not None:
                changed[name] = difference
    retyped = {name: pair for name, pair in dtypes.items() if pair[0] != pair[1]}
    return Comparison(
        tuple(name for name in first if name not in second),
        tuple(name for name in second if name not in first),
        reshaped,
        retyped,
        changed,
        len(set(both) - reshaped.keys() - retyped.keys() - changed.keys()),
    )


def _difference(first: Tensor, second: Tensor) -> float | None:
    """Return the largest absolute difference; ``None`` if the tensors are equal to the last bit."""
    first, second = first.reshape(-1), second.reshape(-1)
    found: float | None = None
    for start in range(0, first.numel(), _PIECE):
        one, two = first[start : start + _PIECE], second[start : start + _PIECE]
        if one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            continue
        wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
        # Infinities of one sign differ by NaN, and NaN of both sides do not differ.
        one, two = one.to(wide), two.to(wide)
        differences = torch.where((one == two) | (one.isnan() & two.isnan()), 0, one - two).abs()
        largest = float("nan") if differences.isnan().any() else differences.max().item()
        # Of one dtype the bits differ, as those of 0.0 and -0.0 do.
        if largest or first.dtype == second.dtype:
            found = largest if found is None else _larger(found, largest)
    return found


def _larger(one: float, two: float) -> float:
    return one if one != one or one > two else two
