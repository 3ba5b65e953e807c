"""The random generators and the data loader of a rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zfun.errors import CheckpointError, CorruptCheckpoint


def default_generators() -> dict[str, Any]:
    """Return torch's default generators, by device."""
    found: dict[str, Any] = {"torch": torch.default_generator}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {f"cuda:{i}": one for i, one in enumerate(torch.cuda.default_generators)}
    return found


def random_states(rng: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the states of torch's default generators and of the caller's, by name."""
    return {
        "default": {name: state_of(one) for name, one in default_generators().items()},
        "named": {str(name): state_of(one) for name, one in (rng or {}).items()},
    }


def set_random(states: Any, rng: Mapping[str, Any] | None) -> None:
    """Set torch's default generators, and the caller's."""
    here = default_generators()
    try:
        default, named = dict(states["default"]), dict(states["named"])
    except (TypeError, ValueError, LookupError) as error:
        raise CorruptCheckpoint(
            "the random generators of a checkpoint are kept by name; got "
            f"{str(states)[:60]!r}; load another checkpoint, or pass rng=False"
        ) from error
    for name in rng or {}:
        if name not in named:
            raise CheckpointError(
                f"a checkpoint has the generators that were saved: {', '.join(named) or 'none'}; "
                f"got rng= with {name!r}; leave the generator out"
            )
    for name, state in default.items():
        if name in here:
            set_generator(here[name], state)
    for name, generator in (rng or {}).items():
        set_generator(generator, named[name])


def loader_position(loader: Any) -> Any:
    """Return the position of a data loader: its ``state_dict()``, or a plain value itself."""
    return loader.state_dict() if callable(getattr(loader, "state_dict", None)) else loader


def use_loader(loader: Any, position: Any) -> None:
    """Set a data loader to a position."""
    if not callable(getattr(loader, "load_state_dict", None)):
        raise CheckpointError(
            "loader= of load() takes a data loader with load_state_dict(), such as torchdata's "
            f"StatefulDataLoader; got {type(loader).__name__}; read the position of other loaders "
            "from the result of load()"
        )
    loader.load_state_dict(position)


def state_of(generator: Any) -> Any:
    """Return the state of a random generator as a plain value; refuse another object."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
    raise CheckpointError(
        "rng= takes random generators by name: torch.Generator, random.Random, and Generator or "
        f"RandomState of numpy; got {type(generator).__name__}; pass what it wraps"
    )


def set_generator(generator: Any, state: Any) -> None:
    """Set the state of a random generator."""
    try:
        match generator:
            case random.Random():
                generator.setstate(state)
            case np.random.Generator():
                generator.bit_generator.state = state
            case _:
                generator.set_state(state)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"a generator takes the state of one of its kind; got another for "
            f"{type(generator).__name__}: {error}; pass the generator that was saved"
        ) from error
