"""Whole values of single leaves of a state."""

from __future__ import annotations

from torch import Tensor

from zfun import tree
from zfun.flat import Flat
from zfun.interop._named import masters_of
from zfun.recipes import ZeroState
from zfun.transforms import unshard

__all__ = ["whole_values"]


def whole_values(
    state: ZeroState, names: set[str] | frozenset[str], *, masters: bool = False
) -> dict[str, Tensor]:
    """Return whole values by name, on every rank; every rank must call with the same names.

    Args:
        state: of a run.
        names: the leaves.
        masters: whether a leaf with a master weight has the value of the master weight.
    """
    flats = [state.params, state.frozen, state.buffers]
    found: dict[str, Tensor] = {}
    for flat in (*flats, *(masters_of(state.opt_state) if masters else ())):
        if isinstance(flat, Flat) and names.intersection(flat.layout.paths):
            part = unshard(flat, lambda path, leaf: path in names)
            found |= {
                path: leaf
                for path, leaf in zip(tree.paths(part), tree.leaves(part), strict=True)
                if isinstance(leaf, Tensor)
            }
    return found
