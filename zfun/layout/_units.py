"""Where buckets close: at the repeated unit of a tree.

[Note: a bucket is a block]
A *unit* is one of several equal parts of a tree: ``h.0``, ``h.1``, and so on. A loss uses all
leaves of a unit together, so a unit is a good bucket: one gather brings everything with which a
block computes, and overlaps with the computation of the block before. A bucket for each leaf would
send the same bytes in many small messages.

Small units share a bucket of up to ``FUSED_BYTES``, because every collective has a fixed cost.
Leaves outside every unit share no more, because nothing says that they are used together.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator, Sequence

from zfun.layout._slots import aligned

DEFAULT_BUCKET_BYTES = 2**30
# Small units, and leaves outside every unit, share a bucket of at most so many bytes.
FUSED_BYTES = 26 * 2**20
# Leaves outside every unit that make up less than this part of a shared bucket, such as the norm
# before the head, go with the unit before, because they are not worth a collective.
_SMALL_PART = 32


def units_of(
    leaves: Sequence[tuple[str, Hashable]], sizes: Sequence[int], bound: int
) -> list[str | None]:
    """Return the repeated unit in which each leaf lies; ``None`` for a leaf outside every unit.

    A part of a path that is a number is an index. The unit is the shortest path up to an index such
    that another index at that place has equal leaves below it. If that is larger than the bound,
    such as one of two equal models, the unit is the next shortest. Sizes and bound are bytes.

    Example:
        >>> paths = ["wte", "h.0.w", "h.0.mlp.0", "h.1.w", "h.1.mlp.0", "mlp.0", "norm"]
        >>> units_of([(path, ()) for path in paths], [4] * 7, 8)
        [None, 'h.0', 'h.0', 'h.1', 'h.1', None, None]
    """
    # The leaves below each index, by the path before the index.
    below: dict[str, dict[str, list[Hashable]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    indices: list[list[tuple[str, str]]] = []
    for path, kind in leaves:
        parts = path.split(".")
        places = [i for i, part in enumerate(parts) if part.isdigit()]
        indices.append([(".".join(parts[:i]), ".".join(parts[: i + 1])) for i in places])
        for (parent, unit), i in zip(indices[-1], places, strict=True):
            below[parent][unit].append((*parts[i + 1 :], kind))
    repeated = {
        parent
        for parent, children in below.items()
        if len({tuple(child) for child in children.values()}) < len(children)
    }
    total = collections.Counter[str]()
    for found, size in zip(indices, sizes, strict=True):
        total.update({unit: size for _, unit in found})

    def unit_of(found: list[tuple[str, str]]) -> str | None:
        units = [unit for parent, unit in found if parent in repeated]
        return next((unit for unit in units if total[unit] <= bound), units[-1] if units else None)

    return [unit_of(found) for found in indices]


def bucket_cuts(
    numels: Sequence[int], units: Sequence[str | None], bound: int, shared: int
) -> list[int]:
    """Return the places at which a bucket begins; see [Note: a bucket is a block].

    A bucket with several leaves has at most ``bound`` elements, and one that units share at most
    ``shared``.

    Example:
        >>> units = [None, "h.0", "h.0", "h.1", "h.1", None, None]
        >>> bucket_cuts([96, 640, 640, 640, 640, 1, 640], units, 2048, 256)
        [0, 1, 3, 6]
    """
    cuts = [0] if numels else []
    end, left = 0, sum(map(aligned, numels))
    is_part = False  # the open bucket has a part of a unit
    for unit, run in itertools.groupby(_joined(numels, units, shared), lambda item: item[0]):
        members = [place for _, place in run]
        size = sum(aligned(numels[place]) for place in members)
        # Avoid a small last bucket, because every bucket costs the same time in Python.
        is_last = end + left <= shared
        is_full = 2 * end >= shared or (unit is not None and end + size > shared)
        if end and ((is_part and unit is not None) or (is_full and not is_last)):
            cuts.append(members[0])
            end, is_part = 0, False
        limit = shared if unit is None else bound
        for place in members:
            if end and end + numels[place] > limit:
                cuts.append(place)
                end, is_part = 0, unit is not None
            end += aligned(numels[place])
        left -= size
    return cuts


def _joined(
    numels: Sequence[int], units: Sequence[str | None], shared: int
) -> Iterator[tuple[str | None, int]]:
    """Yield the unit and the place of each leaf; a small leaf outside goes with the unit before."""
    before, joined = None, 0
    for place, (numel, unit) in enumerate(zip(numels, units, strict=True)):
        if unit is None and (joined + numel) * _SMALL_PART < shared:
            joined += numel
        else:
            before, joined = unit, 0
        yield before, place
