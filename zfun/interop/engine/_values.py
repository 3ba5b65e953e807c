"""Values of a state by the names of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zfun import optim, stores, tree
from zfun.errors import SpecMismatch
from zfun.flat import Flat, leaf_spans, unravel
from zfun.placement import S
from zfun.recipes import Zero, ZeroState

__all__ = ["holding", "named_values", "views", "with_values"]


def _first_names(module: nn.Module) -> dict[int, str]:
    """Return the name of each tensor of a module in the state; tied tensors have the first."""
    return {
        id(x): name
        for named in (module.named_buffers(), module.named_parameters())
        for name, x in named
    }


def named_values(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values by all names of ``module.state_dict()``, those of tied parameters included."""
    first = _first_names(module)
    return {name: values[first[id(x)]] for name, x in module.state_dict(keep_vars=True).items()}


@contextlib.contextmanager
def holding(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put values into the places of a module's parameters and buffers, as a context."""
    first = _first_names(module)
    new: dict[int, Any] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for part in module.modules():
            for slots, is_param in ((part._parameters, True), (part._buffers, False)):
                for key, old in slots.items():
                    if old is None:
                        continue
                    value = values[first[id(old)]]
                    if id(old) not in new:
                        new[id(old)] = (
                            nn.Parameter(value, requires_grad=False) if is_param else value
                        )
                    before.append((slots, key, old))
        for slots, key, old in before:
            slots[key] = new[id(old)]
        yield
    finally:
        for slots, key, old in before:
            slots[key] = old


def views(flat: Flat) -> Iterator[tuple[str, Tensor]]:
    """Yield leaves by name: whole, or this rank's elements of a sharded value."""
    held = stores.resident(flat)
    if flat.placement is not S:
        yield from zip(flat.layout.paths, tree.leaves(unravel(held)), strict=True)
        return
    for span in leaf_spans(held):
        yield span.path, held.buffers[span.bucket][span.start : span.stop]


def with_values(
    module: nn.Module, recipe: Zero, state: ZeroState, values: Mapping[str, Tensor]
) -> ZeroState:
    """Return a state with other parameters and buffers; moments and counts stay."""
    first = _first_names(module)
    own = module.state_dict(keep_vars=True)
    missing, unknown = [*(own.keys() - values)], [*(values.keys() - own)]
    if missing or unknown:
        raise SpecMismatch(
            f"values are named as in the module; missing are {missing[:3]}, unknown are "
            f"{unknown[:3]}; pass what state_dict() returns",
            leaf=(missing or unknown)[0],
        )
    whole = recipe.params(state)
    for name, old in own.items():
        value, path = values[name], first[id(old)]
        if value.shape != old.shape:
            raise SpecMismatch(
                f"a value has the shape of its parameter; {name!r} has {tuple(old.shape)}; got "
                f"{tuple(value.shape)}; load the values into the module they were saved from",
                leaf=name,
            )
        # Wide values make exact master weights.
        whole[path] = value.detach().to(whole[path].device, old.dtype)
    new = recipe.init(whole)
    is_master = lambda node: isinstance(node, optim.MasterState)
    opt_state = tree.map(
        lambda old, fresh: old._replace(master=fresh.master) if is_master(old) else old,
        state.opt_state,
        new.opt_state,
        is_leaf=is_master,
    )
    return state._replace(
        params=new.params, frozen=new.frozen, buffers=new.buffers, opt_state=opt_state
    )
