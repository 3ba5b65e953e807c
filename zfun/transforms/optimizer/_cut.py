"""Cut an optimizer's state by the buckets of the parameters, and join the pieces again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfun import tree
from zfun.errors import SpecMismatch
from zfun.flat import Flat
from zfun.layout import Layout
from zfun.stores import Stored


@dataclass(frozen=True, slots=True)
class CutState:
    """A state of which each flat part has at most one buffer for each bucket of the parameters.

    Attributes:
        layout: of the parameters.
        spec: the structure of the state, with flat parts as leaves.
        parts: the flat parts; counts and other values, which belong to no bucket.
        places: of each flat part, the index of the buffer by bucket; of other parts ``None``.
    """

    layout: Layout
    spec: tree.Spec
    parts: tuple[Any, ...]
    places: tuple[dict[int, int] | None, ...]

    def buffers(self, bucket: int) -> dict[int, Any]:
        """Return the buffers of a bucket, by the index of the part."""
        return {
            index: part.buffers[place[bucket]]
            for index, (part, place) in enumerate(zip(self.parts, self.places, strict=True))
            if place is not None and bucket in place
        }

    def part(self, bucket: int, buffers: dict[int, Tensor]) -> Any:
        """Return the state of one bucket: counts as they are, ``None`` for a part without it."""
        layout = self.layout.select([bucket])

        def one(index: int) -> Any:
            part = self.parts[index]
            if self.places[index] is None:
                return part
            if index not in buffers:
                return None
            return Flat([buffers[index]], part.placement, layout, part.group, codec=part.codec)

        return tree.unflatten(self.spec, map(one, range(len(self.parts))))

    def split(self, state: Any) -> list[Any]:
        """Return the parts of a state of one bucket."""
        parts = tree.subtrees(self.spec, state)
        if parts is None:
            raise SpecMismatch(
                "an optimizer keeps the structure of its state from step to step; got "
                f"{tree.structure(state)} after {self.spec}; make in init all that the state will "
                "hold"
            )
        return parts

    def pieces(self, bucket: int, state: Any) -> dict[int, Any]:
        """Return the parts that the state of one bucket has, by index."""
        found: dict[int, Any] = {}
        for index, (place, at) in enumerate(zip(self.places, self.spec.accessors(), strict=True)):
            if place is None or bucket in place:
                # The state of a label has no parts without leaves of that label.
                with contextlib.suppress(TypeError, LookupError, AttributeError):
                    found[index] = at(state)
        return found

    def joined(self, buffers: dict[tuple[int, int], Any], others: dict[int, Any]) -> Any:
        """Return a state of new buffers, by part and bucket, and new values of the other parts."""

        def one(index: int) -> Any:
            part, place = self.parts[index], self.places[index]
            if place is None:
                return others.get(index, part)
            return part.with_buffers([buffers[index, bucket] for bucket in sorted(place)])

        return tree.unflatten(self.spec, map(one, range(len(self.parts))))


def cut_state(state: Any, layout: Layout) -> CutState | None:
    """Cut a state by buckets; ``None`` if a part has neither one number nor these buckets."""
    parts, spec = tree.flatten(state, is_leaf=lambda x: isinstance(x, Flat))
    bucket_of = {
        layout.leaves[bucket.leaves[0]].path: index
        for index, bucket in enumerate(layout.buckets)
        if bucket.leaves
    }
    places: list[dict[int, int] | None] = []
    for part in parts:
        if not isinstance(part, Flat):
            if isinstance(part, Stored) or (isinstance(part, Tensor) and part.ndim):
                return None
            places.append(None)
            continue
        if part.layout is layout:
            places.append({index: index for index in range(len(layout.buckets))})
            continue
        firsts = [part.layout.leaves[bucket.leaves[0]].path for bucket in part.layout.buckets]
        found = [bucket_of.get(path, -1) for path in firsts]
        if sorted(found) != found or -1 in found or part.layout != layout.select(found):
            return None
        places.append({bucket: index for index, bucket in enumerate(found)})
    return CutState(layout, spec, tuple(parts), tuple(places))


def last_of(numels: Sequence[int], fraction: float) -> range:
    """Return the least number of last places that hold at least a fraction of all elements."""
    wanted, first = fraction * sum(numels), len(numels)
    while first and sum(numels[first:]) < wanted:
        first -= 1
    return range(first, len(numels))
