"""Placement: the meaning of the local buffers of a value across the group."""

from __future__ import annotations

import enum

__all__ = ["P", "Placement", "R", "S"]


class Placement(enum.Enum):
    """The part of a value that each rank holds.

    ``REPLICATED`` (``R``): every rank holds the whole. ``PARTIAL`` (``P``): every rank holds one
    term of a sum. ``SHARDED`` (``S``): rank r holds the r-th contiguous piece.
    """

    REPLICATED = "R"
    PARTIAL = "P"
    SHARDED = "S"

    def __repr__(self) -> str:
        return self.value


R = Placement.REPLICATED
P = Placement.PARTIAL
S = Placement.SHARDED
