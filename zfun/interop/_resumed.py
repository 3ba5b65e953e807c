"""Resumes in parts, as host libraries have files for each: weights, and moments of optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from zfun.flat import flats
from zfun.interop._named import apart, masters_of, with_flats, write_leaves
from zfun.interop.engine import Engine
from zfun.interop.engine._values import whole_values
from zfun.optim import averages_of

_WEIGHTS = ("params", "frozen", "buffers")


def load_parts(engine: Engine, path: str | Path, *, weights: bool = True, moments: bool) -> None:
    """Load the weights of a saved state, the rest of it, or both. All ranks call.

    Parameters of a loss go with the moments, because no file of weights has them.
    """

    def is_kept(key: str) -> bool:
        part, _, name = key.partition(".")
        is_weight = part in _WEIGHTS and name not in engine._extra
        return not (weights if is_weight else moments)

    is_all = weights and moments
    engine.load(path, rng=False, keeps_groups=True, reset=None if is_all else is_kept)
    if not is_all:
        _follow(engine, averages=not moments)


def _follow(engine: Engine, *, averages: bool) -> None:
    """Let master weights, and averages, be those of the weights; digits that agree stay."""
    state = engine.state
    copies = [*masters_of(state.opt_state)]
    copies += flats([x.average for x in averages_of(state.opt_state)]) if averages else []
    written = {id(flat): flat for flat in copies}
    for flat in copies:
        for slot in flat.layout.leaves:
            value = whole_values(state, {slot.path})
            written[id(flat)] = write_leaves(written[id(flat)], value, keeps_digits=True)
    engine.state = with_flats(state, written)


@contextlib.contextmanager
def moments_beside(optimizers: Iterable[Any]) -> Generator[list[Any]]:
    """Give those optimizers of torch, or in these wrappers, that load no moments in a context."""
    found: list[Any] = []

    def look(optimizer: Any, state: Any) -> None:
        if not state["state"]:
            found.append(optimizer)

    own = [getattr(x, "optimizer", x) for x in optimizers]
    hooks = [x.register_load_state_dict_pre_hook(look) for x in own]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def own_values_of(models: Iterable[Any]) -> Iterator[None]:
    """Let ``state_dict()`` of live models return values of their own in a context."""
    models = list(models)
    # A user may have put a method of their own there, as scripts of PEFT do.
    before = [vars(model).get("state_dict") for model in models]
    for model in models:
        model.state_dict = functools.partial(_own_values, model.state_dict)
    try:
        yield
    finally:
        for model, own in zip(models, before, strict=True):
            del model.state_dict
            if own is not None:
                model.state_dict = own


def _own_values(state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    found = state_dict(*args, **kwargs)
    return found if kwargs.get("keep_vars") else apart(found)
