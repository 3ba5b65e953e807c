"""The client state of a checkpoint: plain values as they are, and pickles of others."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN, _PICKLED = "client_state", "client_pickle"
_NUMBERS = (type(None), bool, int, float, str, bytes, Tensor, np.ndarray)


def packed(client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client state as entries of the data of a checkpoint."""
    plain = {name: value for name, value in client_state.items() if _is_plain(value)}
    others = {name: value for name, value in client_state.items() if name not in plain}
    if not others:
        return {_PLAIN: plain}
    buffer = io.BytesIO()
    torch.save(others, buffer)
    return {_PLAIN: {**dict.fromkeys(client_state), **plain}, _PICKLED: buffer.getvalue()}


def unpacked(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client state of a checkpoint's data. A pickle may run code, as in DeepSpeed."""
    plain, pickled = data.get(_PLAIN, {}), data.get(_PICKLED)
    if pickled is None:
        return dict(plain)
    others = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)
    return {**plain, **others}


def _is_plain(value: Any) -> bool:
    """Return whether a value comes back as it is, with its type."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(x) for pair in value.items() for x in pair)
    return type(value) in _NUMBERS
