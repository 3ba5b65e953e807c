"""The table of all keys."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zfun.interop.ds_config.table._keys import Key
from zfun.interop.ds_config.table._optim import OPTIM, TORCH_OPTIMIZERS, TYPES
from zfun.interop.ds_config.table._run import RUN
from zfun.interop.ds_config.table._zero import ZERO

KEYS: tuple[Key, ...] = (*RUN, *ZERO, *OPTIM)

# Every path that is the beginning of another path, "optimizer.params" for example.
SECTIONS = frozenset(
    ".".join(parts[:length])
    for parts in (key.path.split(".") for key in KEYS)
    for length in range(1, len(parts))
)


def kind_of(section: str, name: Any) -> str | None:
    """Return a type of the optimizer or scheduler in the table's spelling.

    Args:
        section: ``"optimizer"`` or ``"scheduler"``.
        name: the type, in any case.

    Returns:
        The type; ``None`` if there is none of this name.

    Example:
        >>> kind_of("optimizer", "adamw"), kind_of("scheduler", "adamw")
        ('AdamW', None)
    """
    return TYPES[section].get(name.lower()) if isinstance(name, str) else None


def keys_of(optimizer: str | None, scheduler: str | None) -> Mapping[str, Key]:
    """Return by path the keys that a configuration with these types may have.

    Where a type is ``None``, the parameters of all types are known, and none is refused.
    """
    chosen = {"optimizer": optimizer, "scheduler": scheduler}
    found = {}
    for key in KEYS:
        kind = chosen[key.path.partition(".")[0]] if key.only else None
        if not key.only or kind in key.only:
            found[key.path] = key
        elif kind is None:
            found[key.path] = key._replace(verdict="ignored")
    return found


@functools.cache
def params_of(optimizer: str) -> frozenset[str]:
    """Return the names that a type of optimizer has in ``params``, refused ones included."""
    start = "optimizer.params."
    paths = keys_of(optimizer, None)
    return frozenset(path[len(start) :] for path in paths if path.startswith(start))


@functools.cache
def torch_options(optimizer: str | None) -> frozenset[str]:
    """Return the names of options that torch's class of a type takes; none for other types."""
    if optimizer not in TORCH_OPTIMIZERS:
        return frozenset()
    return frozenset(inspect.signature(getattr(torch.optim, optimizer)).parameters) - {"params"}
