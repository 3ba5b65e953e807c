"""Values of a state by the names of a module, for the loops that hold a module."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zfun import stores, tree
from zfun.collectives import agreement_group, barrier
from zfun.errors import PlacementError, SpecMismatch
from zfun.flat import Flat, flats, leaf_spans
from zfun.interop._together import begin
from zfun.optim import MasterState
from zfun.recipes import ZeroState
from zfun.stores import Stored, fetch
from zfun.transforms import unshard


def named(values: tree.Tree) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    return dict(zip(tree.paths(values), tree.leaves(values), strict=True))


def whole_by_bucket(flat: Flat) -> Iterator[dict[str, Tensor]]:
    """Yield whole leaves by path, one bucket after the other; every rank must call."""
    places = list(zip(flat.layout.paths, flat.layout.positions, strict=True))
    for index in range(len(flat.layout.buckets)):
        inside = {path for path, i in places if flat.layout.leaves[i].bucket == index}
        yield named(unshard(flat, lambda path, leaf, inside=inside: path in inside))


def first_names(module: nn.Module) -> dict[int, str]:
    """Return the names of tensors in the state by identity; tied tensors have the first name."""
    names = {
        id(x): name
        for named in (module.named_buffers(), module.named_parameters())
        for name, x in named
    }
    # A script may have moved or renamed parts of a live module since the state was made.
    live = getattr(module._parameters, "live", None)
    return names | live.names if live is not None and live.module is module else names


def state_dict_of(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return ``module.state_dict()`` with the values that are given by :func:`first_names`."""
    names, own = first_names(module), module.state_dict(keep_vars=True)
    merged = {key: values.get(names.get(id(x), ""), x) for key, x in own.items()}
    return {key: x.detach() if isinstance(x, Tensor) else x for key, x in merged.items()}


class _Lent(dict[str, Tensor]):
    """Values of some leaves, which stand for a module on one rank."""

    def __missing__(self, name: str) -> Tensor:
        raise PlacementError(
            "a rank that saves alone reads the values that it got; got a read of leaf "
            f"{name!r}, which is none of them; pass a state_dict with the leaf, or save on all "
            "ranks",
            leaf=name,
        )


@contextlib.contextmanager
def answering(engine: Any, values: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Let the module have these values in a context, on this rank alone, and gather nothing.

    ``save_pretrained()`` of some classes asks the module too, though it gets the values.

    Args:
        engine: of a live module.
        values: whole, by names of the module, or ``None`` to change nothing.
    """
    live, lent, found = engine._live, _Lent(), values or {}
    for name, x in engine.module.named_parameters(remove_duplicate=False) if found else ():
        leaf = live.name_of(x)
        if leaf is not None and (name in found or not live.is_hidden(leaf)):
            with torch._C.DisableTorchFunctionSubclass():
                lent[leaf] = found.get(name, x.detach())
    with live.lending(lent, keeps=False) if lent else contextlib.nullcontext(), torch.no_grad():
        yield


class Gathered(NamedTuple):
    """Whole values by name, and the parameters that they were gathered from."""

    params: Flat
    values: dict[str, Tensor]


def at_hand(engine: Any) -> dict[str, Tensor]:
    """Return the values of :func:`gathered_once`, unless the state is another one by now."""
    whole = engine._whole
    return whole.values if whole is not None and whole.params is engine._state.params else {}


@contextlib.contextmanager
def gathered_once(engines: Iterable[Any], call: str = "") -> Iterator[None]:
    """Gather parameters of stage 3 at the start of a context, inside which a rank reads alone.

    Every rank must enter, by the call that an error names. Calls of the models without gradients
    take the values too; writes are those of all ranks, as ever.
    """
    mine = [x for x in engines if x._is_sharded and x._whole is None]
    try:
        for engine in mine[:1] if call else ():
            begin(call, engine._group)
        for engine in mine:
            engine._check_here("a read of parameters", "parameters")
            flats = [x for x in (engine._state.params, engine._state.frozen) if x is not None]
            # Views of a bucket would keep it, and state_dict() would copy them.
            parts = [apart(part) for flat in flats for part in whole_by_bucket(flat)]
            values = {name: x for part in parts for name, x in part.items()}
            engine._whole = Gathered(engine._state.params, values)
        yield
    finally:
        for engine in mine:
            engine._whole = None


def write_state(engine: Any, values: Mapping[str, Tensor]) -> None:
    """Write whole values into the state of an engine, and into those of :func:`gathered_once`.

    A dict that code made of these has the new values, as that of a plain module would.
    """
    held, engine._state = at_hand(engine), with_leaves(engine._state, values)
    for name in values.keys() & held.keys():
        held[name].copy_(values[name])
    engine._whole = Gathered(engine._state.params, held) if held else None


def with_values(
    module: nn.Module, state: ZeroState, values: Mapping[str, Any], *, strict: bool = True
) -> ZeroState:
    """Return a state with new values of some leaves, in the buffers of the old state.

    Values are whole and the same on every rank, by any names of the module; of tied parameters one
    name is enough. Master weights take them too; moments and counts stay. Extra state goes to the
    module.
    """
    names, own = first_names(module), module.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {
        # Tensors that the module does not save may be given too.
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
        **{key: x for key, x in own.items() if id(x) in names},
    }
    given = {*values, *(names[id(tensors[key])] for key in values if key in tensors)}
    missing = [key for key, x in own.items() if names.get(id(x), key) not in given]
    unknown = [key for key in values if key not in tensors and key not in own]
    if strict and (missing or unknown):
        raise SpecMismatch(
            f"values are named as in the module; missing are {missing[:3]}, unknown are "
            f"{unknown[:3]}; pass what state_dict() returns",
            leaf=(missing or unknown)[0],
        )
    leaves: dict[str, Tensor] = {}
    for key in filter(tensors.__contains__, values):
        old, value = tensors[key], values[key]
        if value.shape != old.shape:
            raise SpecMismatch(
                f"a value has the shape of its parameter; {key!r} has {tuple(old.shape)}; got "
                f"{tuple(value.shape)}; load the values into the module they were saved from",
                leaf=key,
            )
        leaves[names[id(old)]] = value.detach()
    if extra := {key: values[key] for key in own.keys() - tensors.keys() if key in values}:
        module.load_state_dict(extra, strict=False)
    return with_leaves(state, leaves)


def with_leaves(state: ZeroState, leaves: Mapping[str, Tensor]) -> ZeroState:
    """Return a state with whole values, by its own names, in the buffers of the old state.

    Master weights take values of more bits than the parameters have; see :func:`settle_masters`.
    """
    ranks = agreement_group(state.params.group)
    dtypes = {slot.path: slot.dtype for slot in state.params.layout.leaves}
    wide = {name: x for name, x in leaves.items() if x.dtype != dtypes.get(name)}
    # Ranks of one host may share the buffers of whole parameters.
    barrier(ranks)
    masters = {id(x): write_leaves(x, wide) for x in masters_of(state.opt_state)} if wide else {}
    params = write_leaves(state.params, leaves)
    frozen, buffers = (
        None if flat is None else write_leaves(flat, leaves)
        for flat in (state.frozen, state.buffers)
    )
    barrier(ranks)
    state = state._replace(params=params, frozen=frozen, buffers=buffers)
    return with_flats(state, masters)


def with_flats(state: ZeroState, written: Mapping[int, Flat]) -> ZeroState:
    """Return a state with other flats in the optimizer's state, by the identity of the old ones.

    A store may keep a buffer that is put again apart from the old one.
    """
    swap = lambda x: written.get(id(x), x)
    opt_state = tree.map(swap, state.opt_state, is_leaf=lambda x: isinstance(x, Flat))
    return state._replace(opt_state=opt_state)


def settle_masters(
    state: ZeroState, names: Collection[str], *, keeps_digits: bool = True
) -> ZeroState:
    """Give master weights the values of leaves.

    With ``keeps_digits`` those stay that round to these, so code may write the values that a
    parameter has, or write others for a while, as an average for an evaluation. Ranks that share
    the buffers write the same.
    """
    params = stores.resident(state.params)
    spans = {span.path: span for span in leaf_spans(params) if span.path in names}
    written: dict[int, Flat] = {}
    for master in masters_of(state.opt_state):
        values: dict[str, Tensor] = {}
        for span in leaf_spans(master):
            if (own := spans.get(span.path)) is not None:
                first = own.start + span.first - own.first
                last = first + span.stop - span.start
                is_here = own.start <= first and last <= own.stop
                assert is_here or first == last, "a rank with a master weight has the parameter"
                values[span.path] = params.buffers[own.bucket][first:last]
        written[id(master)] = write_leaves(master, values, local=True, keeps_digits=keeps_digits)
    return with_flats(state, written)


def masters_of(state: Any) -> Iterator[Flat]:
    """Yield the master weights of every optimizer in a state."""
    for part in tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterState)):
        if isinstance(part, MasterState):
            yield from flats(part.master)
            yield from masters_of(part.inner)


@torch.no_grad()
def write_leaves(
    flat: Flat,
    values: Mapping[str, Tensor],
    *,
    local: bool = False,
    keeps_digits: bool = False,
) -> Flat:
    """Write the elements of this rank into the buffers, in place; a store puts a buffer again.

    Values are whole, or with ``local`` the elements of this rank alone. With ``keeps_digits``
    elements stay that round to the value.
    """
    buffers = list(flat.buffers)
    loaded: dict[int, Tensor] = {}
    for span in leaf_spans(flat):
        value = values.get(span.path)
        if value is None or span.start == span.stop:
            continue
        if span.bucket not in loaded:
            loaded[span.bucket] = fetch(buffers[span.bucket], flat.layout.device)
        real = torch.view_as_real(value) if value.is_complex() else value
        first = 0 if local else span.first
        piece = real.reshape(-1)[first : first + span.stop - span.start]
        place = loaded[span.bucket][span.start : span.stop]
        if keeps_digits:
            piece = torch.where(place.to(piece.dtype) == piece, place, piece.to(place.dtype))
        place.copy_(piece)
    for bucket, buffer in loaded.items():
        old = buffers[bucket]
        if isinstance(old, Stored):
            buffers[bucket] = old.store.put(buffer, old.name)
    return flat.with_buffers(buffers)


def apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which none is a view of a bucket, and tied ones share memory.

    safetensors takes views of one bucket for tied values, drops all but one, and loads none.
    """
    keys = {
        name: (x.data_ptr(), x.shape) if isinstance(x, Tensor) and x.numel() else name
        for name, x in values.items()
    }
    first = {key: name for name, key in reversed(keys.items())}
    own = {key: _unshared(values[name]) for key, name in first.items()}
    found = collections.OrderedDict((name, own[key]) for name, key in keys.items())
    if (metadata := getattr(values, "_metadata", None)) is not None:
        found._metadata = metadata  # pyrefly: ignore[missing-attribute]
    return found


def _unshared(value: Any) -> Any:
    """Return a copy of a tensor that is a part of a larger one."""
    is_part = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value
