"""Values of modules that were built on the ``meta`` device."""

from __future__ import annotations

import copy
import functools
import zlib
from typing import Any

import torch
from torch import nn

from zfun.errors import OptionError
from zfun.interop._named import first_names
from zfun.sources import Deferred


def values_of(module: nn.Module, device: torch.device, seed: int) -> dict[str, Any]:
    """Return the values of parameters and buffers by name.

    Values on the ``meta`` device are made by ``reset_parameters`` when the state asks for a leaf,
    so that no rank ever holds all of them.

    Args:
        module: the module.
        device: of the state.
        seed: of random values, equal on all ranks.

    Raises:
        OptionError: a module with values on ``meta`` has no ``reset_parameters``.
    """
    found: dict[str, Any] = {}
    names = first_names(module)
    for prefix, owner in module.named_modules():
        for key, x in [*owner._parameters.items(), *owner._buffers.items()]:
            if x is None or names[id(x)] in found:
                continue
            name = names[id(x)]
            if not x.is_meta:
                found[name] = x.detach()
                continue
            if not callable(getattr(owner, "reset_parameters", None)):
                raise OptionError(
                    "remote_device='meta' makes values by reset_parameters(); leaf "
                    f"{name!r} belongs to {type(owner).__name__}, which has no such method; "
                    "write the method, or leave remote_device out",
                    leaf=name,
                )
            made = functools.partial(_made, owner, key, zlib.crc32(prefix.encode()) ^ seed)
            found[name] = Deferred(name, x.detach(), made, device)
    return found


def _made(owner: nn.Module, key: str, seed: int) -> torch.Tensor:
    """Make one value of a module, whose other values are made and dropped."""
    fresh = copy.copy(owner)
    fresh.__dict__["_parameters"] = dict(owner._parameters)
    fresh.__dict__["_buffers"] = dict(owner._buffers)
    fresh.__dict__["_modules"] = dict[str, nn.Module]()
    fresh.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        fresh.reset_parameters()  # pyrefly: ignore[not-callable]
    made = {**fresh._parameters, **fresh._buffers}[key]
    assert made is not None
    return made.detach()
