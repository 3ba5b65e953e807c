"""The bytes of a state between steps, by part and by path."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from zfun.flat import Flat, flats, leaf_spans
from zfun.planner._meter import masters_of
from zfun.stores import Stored


class PathBytes(NamedTuple):
    """Bytes that a rank keeps between steps for the leaves below one entry of the parameters.

    Attributes:
        path: the first part of the paths; ``"padding"`` for the padding of the buckets.
        params: of parameters.
        masters: of master weights.
        moments: of the rest of the optimizer's state.
    """

    path: str
    params: int
    masters: int
    moments: int


class StateBytes(NamedTuple):
    """Bytes of a rank's state without padding; ``vectors`` counts its tensors of each bucket."""

    params: int
    masters: int
    moments: int
    vectors: int


def state_bytes(rows: Iterable[PathBytes], vectors: int) -> StateBytes:
    """Add up the bytes of the paths."""
    parts = [row[1:] for row in rows if row.path != "padding"]
    params, masters, moments = (sum(part[index] for part in parts) for index in range(3))
    return StateBytes(params, masters, moments, vectors)


def _parts(state: Any) -> dict[str, list[Flat]]:
    """Return the flats of a state by category."""
    opt_state = getattr(state, "opt_state", None)
    optimizer, masters = flats(opt_state), flats([*masters_of(opt_state)])
    return {
        "params": _without(flats(state), optimizer),
        "masters": masters,
        "moments": _without(optimizer, masters),
    }


def _without(some: list[Flat], others: list[Flat]) -> list[Flat]:
    left_out = set(map(id, others))
    return [flat for flat in some if id(flat) not in left_out]


def _bytes_of(leaf: Any) -> int:
    if isinstance(leaf, (Tensor, Stored)):
        return leaf.shape.numel() * leaf.dtype.itemsize
    return 0


def num_leaves(state: Any) -> int:
    """Return the number of leaves of the parameters."""
    return sum(len(flat.layout.leaves) for flat in _parts(state)["params"])


def bytes_by_path(state: Any) -> tuple[PathBytes, ...]:
    found: dict[str, dict[str, int]] = {}

    def add(path: str, part: str, num_bytes: int) -> None:
        if num_bytes:
            row = found.setdefault(path, {})
            row[part] = row.get(part, 0) + num_bytes

    kept = _parts(state)
    for part, its in kept.items():
        padding = 0
        for flat in its:
            for span in leaf_spans(flat):
                itemsize = flat.buffers[span.bucket].dtype.itemsize
                add(span.path.split(".")[0], part, (span.stop - span.start) * itemsize)
                padding -= (span.stop - span.start) * itemsize
            padding += sum(map(_bytes_of, flat.buffers))
        add("padding", part, padding)
    rows = [PathBytes(path, *(row.get(part, 0) for part in kept)) for path, row in found.items()]
    return tuple(sorted(rows, key=lambda row: row.path == "padding"))
