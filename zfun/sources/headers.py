"""The header of a safetensors file: names, dtypes and places of its tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

# The limit of the format.
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


class Header(NamedTuple):
    """The beginning of a file, with the place of each tensor and the length of the file."""

    data: bytes
    offsets: tuple[int, ...]
    num_bytes: int


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], multiple: int = 8
) -> Header:
    """Lay tensors out in the given order, by name, dtype and shape.

    A dtype that safetensors does not know is shown as bytes. The header is padded to a multiple of
    some bytes.

    Example:
        >>> header_of([("w", torch.float32, (2, 3)), ("b", torch.uint8, (5,))], 64)[1:]
        ((192, 216), 221)
    """
    # transformers refuses files without this entry.
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * dtype.itemsize
        tag = _TAGS.get(dtype)
        described[name] = {
            "dtype": tag or "U8",
            "shape": list(shape) if tag else [num_bytes],
            "data_offsets": [ends[-1], ends[-1] + num_bytes],
        }
        ends.append(ends[-1] + num_bytes)
    text = json.dumps(described, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // multiple) * multiple - 8
    data = length.to_bytes(8, "little") + text.ljust(length)
    return Header(data, tuple(len(data) + at for at in ends[:-1]), len(data) + ends[-1])
