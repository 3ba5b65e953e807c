"""The bytes of a state between steps, by part and by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from zfun import tree
from zfun.flat import flats, leaf_spans
from zfun.optim import MasterState
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


def _parts(state: Any) -> Iterator[tuple[str, tree.Tree]]:
    """Yield the parts of a state, each with its category."""
    rest = getattr(state, "opt_state", None)
    masters: list[Any] = []

    def without_masters(value: Any) -> Any:
        if not isinstance(value, MasterState):
            return value
        masters.append(value.master)
        return [tree.map(without_masters, value.inner, is_leaf=_is_master)]

    moments = tree.map(without_masters, rest, is_leaf=_is_master)
    yield "masters", masters
    yield "moments", moments
    of_optimizer = {id(flat) for flat in flats(rest)}
    yield "params", [flat for flat in flats(state) if id(flat) not in of_optimizer]


def _is_master(x: Any) -> bool:
    return isinstance(x, MasterState)


def _bytes_of(leaf: Any) -> int:
    if isinstance(leaf, (Tensor, Stored)):
        return leaf.shape.numel() * leaf.dtype.itemsize
    return 0


def num_leaves(state: Any) -> int:
    """Return the number of leaves of the parameters."""
    return sum(len(flat.layout.leaves) for flat in dict(_parts(state))["params"])


def bytes_by_path(state: Any) -> tuple[PathBytes, ...]:
    found: dict[str, dict[str, int]] = {}

    def add(path: str, part: str, num_bytes: int) -> None:
        if num_bytes:
            row = found.setdefault(path, {})
            row[part] = row.get(part, 0) + num_bytes

    kept = dict(_parts(state))
    for part in ("params", "masters", "moments"):
        padding = 0
        for flat in flats(kept[part]):
            for span in leaf_spans(flat):
                itemsize = flat.buffers[span.bucket].dtype.itemsize
                add(span.path.split(".")[0], part, (span.stop - span.start) * itemsize)
                padding -= (span.stop - span.start) * itemsize
            padding += sum(map(_bytes_of, flat.buffers))
        add("padding", part, padding)
    rows = [
        PathBytes(path, *(row.get(part, 0) for part in ("params", "masters", "moments")))
        for path, row in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.path == "padding"))
