"""Single leaves of a state: whole values out of a state, and new values into a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.flat import Flat, leaf_spans
from zfun.optim import MasterState
from zfun.recipes import ZeroState
from zfun.stores import Stored, fetch
from zfun.transforms import unshard

__all__ = ["whole_values", "with_values"]


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
    for flat in (*flats, *(_masters(state.opt_state) if masters else ())):
        if isinstance(flat, Flat) and names.intersection(flat.layout.paths):
            part = unshard(flat, lambda path, leaf: path in names)
            found |= {
                path: leaf
                for path, leaf in zip(tree.paths(part), tree.leaves(part), strict=True)
                if isinstance(leaf, Tensor)
            }
    return found


def with_values(state: ZeroState, values: Mapping[str, Tensor]) -> ZeroState:
    """Return a state with new values of some leaves, whose buffers are those of the old state.

    Master weights take the values too; the moments stay.

    Args:
        state: of a run; not to be used again.
        values: whole values by name, the same on every rank.
    """
    for flat in _masters(state.opt_state):
        _write(flat, values)
    frozen, buffers = (
        None if flat is None else _write(flat, values) for flat in (state.frozen, state.buffers)
    )
    return state._replace(params=_write(state.params, values), frozen=frozen, buffers=buffers)


def _masters(state: Any) -> Iterator[Flat]:
    """Yield the master weights of every optimizer in a state."""
    if isinstance(state, MasterState):
        if isinstance(state.master, Flat):
            yield state.master
        yield from _masters(state.inner)
    elif isinstance(state, Mapping):
        yield from _masters([*state.values()])
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _masters(part)


@torch.no_grad()
def _write(flat: Flat, values: Mapping[str, Tensor]) -> Flat:
    """Write the elements of this rank into the buffers, in place; a store puts a buffer again."""
    buffers = list(flat.buffers)
    loaded: dict[int, Tensor] = {}
    for span in leaf_spans(flat):
        value = values.get(span.path)
        if value is None or span.start == span.stop:
            continue
        if span.bucket not in loaded:
            loaded[span.bucket] = fetch(buffers[span.bucket], flat.layout.device)
        real = torch.view_as_real(value) if value.is_complex() else value
        piece = real.reshape(-1)[span.first : span.first + span.stop - span.start]
        loaded[span.bucket][span.start : span.stop].copy_(piece)
    for bucket, buffer in loaded.items():
        old = buffers[bucket]
        if isinstance(old, Stored):
            buffers[bucket] = old.store.put(buffer, old.name)
    return flat.with_buffers(buffers)
