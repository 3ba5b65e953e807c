"""Programs with unequal pieces; run on simulated ranks and on processes."""

from __future__ import annotations

from typing import Any

import zfun as zf
from tests.property.test_placements import train
from zfun.placement import Aligned, Owned


def whole_leaves(group: zf.Group) -> Any:
    """Train with whole leaves on each rank, at every stage."""
    return [train(group, Owned(), stage, "muon", "none")[0] for stage in (1, 2, 3)]


def rows(group: zf.Group) -> Any:
    """Train with pieces of whole rows, with parameters, gradients and state in stores."""
    return [train(group, Aligned(rows=True), stage, "adamw", "all")[0] for stage in (2, 3)]


def mixed(group: zf.Group) -> Any:
    """Train with matrices on one rank each and the rest in equal pieces."""
    rule = lambda path, leaf: Owned() if leaf.ndim == 2 else zf.S
    return [train(group, rule, stage, "lamb", "none", bucket_bytes=64)[0] for stage in (1, 2, 3)]


BODIES = [whole_leaves, rows, mixed]
