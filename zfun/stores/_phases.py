"""Move all values of a state into a store between phases of a run, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zfun import tree
from zfun.collectives import allocate, is_symmetric
from zfun.errors import OptionError
from zfun.flat import Flat, call_site, flats
from zfun.options import takes
from zfun.placement import S
from zfun.stores._base import Store, Stored, fetch, flush, located, locating


@takes()
def offload_values(value: tree.Tree, store: Store) -> tree.Tree:
    """Move all tensors of a state into a store; :func:`reload` brings the tensors back.

    :func:`zfun.offload` calls this function for a state. Scalars, and values that are in a store
    already, stay where they are.

    Args:
        value: a tree with flats, such as a :class:`zfun.recipes.ZeroState`. Its flats must not be
            used again, because a step may overwrite the memory.
        store: the store.

    Returns:
        The tree, with handles in place of tensors.

    Raises:
        OptionError: ``value`` has no flat.
        OffloadError: the store cannot keep a tensor; ``value`` is as it was.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = lambda params, batch: (params["w"] * batch).sum()
        ...     z = zf.zero(3, loss, zf.optim.adamw(0.1), group)
        ...     store, state = zf.stores.host(), z.init({"w": torch.ones(2)})
        ...     state = zf.offload(state, store)
        ...     print(state.opt_state.mu.buffers[0])
        ...     return z.params(zf.stores.reload(state, store))
        >>> zf.simulate(1, main)[0]
        Stored(state, 32 x torch.float32, host())
        {'w': tensor([1., 1.])}
    """
    moved = [flat for flat in _flats_of(value) if any(isinstance(b, Tensor) for b in flat.buffers)]
    kept = located(
        lambda x: store.put(x, "state") if isinstance(x, Tensor) and x.ndim else x, value
    )
    flush(kept)
    for flat in moved:
        flat.life.consume(f"zf.offload() at {call_site()}")
    return kept


@takes()
def reload(value: tree.Tree, store: Store) -> tree.Tree:
    """Bring the tensors of a state back that are in a store, to the last bit.

    Args:
        value: a tree with flats, from :func:`zfun.offload`. Its flats must not be used again.
        store: the store that the tensors are in. Handles of other stores stay.

    Returns:
        The tree with tensors, on the device of the state.

    Raises:
        OptionError: ``value`` has no flat.
        OffloadError: the store cannot return a tensor; ``value`` is as it was.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> store = zf.stores.host()
        >>> def main(group):
        ...     state = zf.offload([zf.shard({"w": torch.ones(2)}, group)], store)
        ...     return zf.unshard(zf.stores.reload(state, store)[0])
        >>> zf.simulate(2, main)[1]
        {'w': tensor([1., 1.])}
    """
    moved = _flats_of(value)
    device = moved[0].layout.device

    def back(leaf: Any) -> Any:
        if isinstance(leaf, Flat):
            return _reloaded(leaf, store)
        # A clone, because a handle of host memory would share the memory with the next step.
        return fetch(leaf, device).clone() if _is_in(store, leaf) else leaf

    found = tree.map(back, value, is_leaf=lambda x: isinstance(x, Flat))
    for flat in moved:
        if any(_is_in(store, buffer) for buffer in flat.buffers):
            flat.life.discard(f"zf.stores.reload() at {call_site()}")
    return found


def _reloaded(flat: Flat, store: Store) -> Flat:
    layout, group = flat.layout, flat.group
    buffers: list[Any] = []
    for index, buffer in enumerate(flat.buffers):
        if not _is_in(store, buffer):
            buffers.append(buffer)
            continue
        with locating(leaf=layout.label(index)):
            found = fetch(buffer, layout.device)
        if flat.placement is S and is_symmetric(group):
            # The other ranks read the shard where it lies.
            place = allocate(group, found.numel(), found.dtype, layout.device)
            found = place.copy_(found)
        buffers.append(found)
    return flat.with_buffers(buffers)


def _flats_of(value: tree.Tree) -> list[Flat]:
    found = flats(value)
    if not found:
        raise OptionError(
            f"a state has flat values; got {type(value).__name__} without any; pass the state of "
            "zf.zero(), or a tree of the flats of zf.shard()"
        )
    return found


def _is_in(store: Store, buffer: Any) -> bool:
    return isinstance(buffer, Stored) and buffer.store is store
