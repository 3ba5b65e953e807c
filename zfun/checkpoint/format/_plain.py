"""JSON of plain values, with bounds: no pickle, no code, no surprises."""

from __future__ import annotations

import base64
import math
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from zfun.errors import CheckpointError, CorruptCheckpoint
from zfun.files import parse_json

# A value of the user's is at most this deep; the manifest adds a few levels.
MAX_DEPTH = 64
# Tensors inside of plain values, such as the state of a sampler's generator.
_MAX_TENSOR_BYTES = 1 << 24

_NAMES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)
}


def encode(value: Any, what: str, depth: int = 0) -> Any:
    """Return a plain value as JSON: numbers, text, bytes, small tensors, and nests of these.

    Raises:
        CheckpointError: a value of another type, a value that is too deep, or a large tensor.
    """
    if depth > MAX_DEPTH:
        _refuse(what, f"a value more than {MAX_DEPTH} levels deep")
    inner = lambda x: encode(x, what, depth + 1)
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case tuple():
            return {"$tuple": [inner(x) for x in value]}
        case list():
            return [inner(x) for x in value]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: inner(x) for key, x in value.items()}
            return {"$dict": [[inner(key), inner(x)] for key, x in value.items()]}
        case Tensor() | np.ndarray() | np.generic():
            return _encode_array(value, what)
    return _refuse(what, f"a value of the type {type(value).__name__}")


def _encode_array(value: Any, what: str) -> Any:
    match value:
        case Tensor() if value.nbytes <= _MAX_TENSOR_BYTES and dtype_name(value.dtype) in DTYPES:
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw = base64.b64encode(data.view(torch.uint8).numpy().tobytes()).decode()
            return {"$tensor": [dtype_name(value.dtype), list(value.shape), raw]}
        case np.ndarray() if value.nbytes <= _MAX_TENSOR_BYTES and value.dtype.kind in "biufc":
            raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {"$array": [value.dtype.str, list(value.shape), raw]}
        case np.generic() if value.dtype.kind in "biuf":
            return encode(value.item(), what)
    return _refuse(what, f"{type(value).__name__} of {value.nbytes} bytes of {value.dtype}")


def _refuse(what: str, got: str) -> NoReturn:
    raise CheckpointError(
        f"{what} is made of numbers, text, bytes, lists, tuples, dicts and tensors of at most "
        f"{_MAX_TENSOR_BYTES >> 20} MiB; got {got}; pass what the value is made of"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in ``DTYPES``."""
    return str(dtype).removeprefix("torch.")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real elements of a dtype."""
    return dtype.to_real() if dtype.is_complex else dtype


def decode(value: Any, depth: int = 0) -> Any:
    """Return the plain value of JSON that :func:`encode` made.

    Raises:
        CorruptCheckpoint: JSON that ``encode`` does not make.
    """
    if depth > 3 * MAX_DEPTH:
        raise CorruptCheckpoint(f"a plain value is at most {MAX_DEPTH} levels deep; got more")
    inner = lambda x: decode(x, depth + 1)
    if isinstance(value, list):
        return [inner(x) for x in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: inner(x) for key, x in value.items()}
    try:
        return _decode_tagged(tag, value[tag], inner)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, SyntaxError) as error:
        raise CorruptCheckpoint(
            f"a plain value has a known form; got {tag!r} with {str(value[tag])[:60]!r}"
        ) from error


def _decode_tagged(tag: str, held: Any, inner: Any) -> Any:
    match tag:
        case "$float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held]
        case "$bytes":
            return base64.b64decode(held, validate=True)
        case "$tuple":
            return tuple(inner(x) for x in _listed(held))
        case "$dict":
            return {inner(key): inner(x) for key, x in _listed(held)}
        case "$tensor":
            name, shape, raw = held
            data = bytearray(base64.b64decode(raw, validate=True))
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            return flat.view(DTYPES[name]).reshape(shape) if data else _empty(name, shape)
        case "$array":
            kind, shape, raw = held
            if np.dtype(kind).kind not in "biufc":
                raise ValueError(kind)
            return np.frombuffer(base64.b64decode(raw, validate=True), kind).reshape(shape).copy()
    raise KeyError(tag)


def _listed(held: Any) -> list[Any]:
    if not isinstance(held, list):
        raise TypeError("a list is expected")
    return held


def _empty(name: str, shape: Any) -> Tensor:
    if math.prod(shape):
        raise ValueError("a tensor without bytes has no elements")
    return torch.empty(shape, dtype=DTYPES[name])


def parse(text: bytes, path: str) -> Any:
    """Parse JSON from a stranger.

    Raises:
        CorruptCheckpoint: the text is not JSON, or has a key twice, NaN or deep nests.
    """
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path} must be JSON with distinct keys; got {type(error).__name__}: "
            f"{str(error)[:100]}; load another checkpoint",
            path=path,
        ) from error
