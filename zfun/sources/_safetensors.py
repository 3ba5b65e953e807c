"""The files of a local folder in the format of safetensors, read leaf by leaf.

The files come from strangers: sizes, offsets and names are checked before a byte is read, and the
header of a file is at most as long as the format allows. Files are read, not mapped, because mapped
pages count as memory of the process.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import CorruptCheckpoint, LeafError, OptionError, SpecMismatch
from zfun.objects import located
from zfun.options import DEVICE, FLOATING, PATH, shown, takes
from zfun.sources._files import CPU, StoredTensor, View, as_json, check_no_link, in_file, of_index
from zfun.sources._source import Source, differences, matched
from zfun.sources.deferred import Deferred
from zfun.sources.headers import DTYPES, MAX_HEADER_BYTES
from zfun.sources.scratch import scratch

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 1 << 22


@takes(path=PATH, dtype=FLOATING | None, device=DEVICE)
def safetensors(
    path: Path | str,
    params: tree.Tree = None,
    *,
    name_of: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tree.Tree:
    """Return a tree whose leaves are read from safetensors files, one at a time.

    Args:
        path: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and
            the files that the index names; or one file. The tensors must stay where they are until
            the leaves have been made.
        params: a tree of tensors, of which structure and shapes count, such as
            ``zf.functional(model).params`` of a module on ``meta``. A file has tied leaves once,
            under any of their paths. By default a dict of all tensors by name, ``h.2`` before
            ``h.10``.
        name_of: ``name_of(path)`` returns the name of a leaf in the files; by default the path.
        dtype: the dtype of floating leaves; by default each has the dtype of its file.
        device: the device of the state.

    Returns:
        A tree of :class:`Deferred` leaves; with ``params``, the tree of ``params``.

    Raises:
        SpecMismatch: a leaf that no file has, or has with another shape or kind of numbers.
        CorruptCheckpoint: a file that is missing, damaged or cut short, or two files with one name;
            an ``UntrustedCheckpoint`` where the index or a link leads out of the folder.
        LeafError: a dtype that torch does not know.
        OptionError: no such files.

    Example:
        >>> import tempfile
        >>> import zfun as zf
        >>> folder = tempfile.TemporaryDirectory()
        >>> leaves = zf.sources.tensors({"w": torch.arange(3.0)})
        >>> _ = zf.sources.write_safetensors(folder.name, leaves)
        >>> params = zf.sources.safetensors(folder.name)
        >>> params
        {'w': Deferred(w, torch.float32 (3,))}
        >>> zf.simulate(2, lambda group: zf.unshard(zf.shard(params, group)))[0]
        {'w': tensor([0., 1., 2.])}
        >>> folder.cleanup()
    """
    tensors = _tensors(located(path))
    # Blocks in the order of their numbers, because buckets should follow the order of use.
    names = sorted(tensors, key=_by_number)
    leaves = {name: _deferred(name, tensors[name], dtype, torch.device(device)) for name in names}
    if params is None:
        return leaves
    source = Source(leaves, str(path))
    found = matched("safetensors()", source, params, name_of)
    if found.missing:
        raise SpecMismatch(differences(source, found.missing), leaf=found.missing[0])
    return found.tree


def _by_number(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _deferred(
    name: str, tensor: StoredTensor, dtype: torch.dtype | None, device: torch.device
) -> Deferred:
    kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    spec = torch.empty(tensor.shape, dtype=kind, device="meta")
    return Deferred(name, spec, functools.partial(_read, tensor, kind), device)


def _read(tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Read a tensor, and convert it in pieces of a few megabytes."""
    if tensor.dtype == dtype:
        return tensor.read()
    out = scratch((tensor.numel,), dtype, CPU)
    step = _CHUNK_BYTES // tensor.dtype.itemsize
    for at in range(0, tensor.numel, step):
        out[at : at + step] = tensor.fetch(at, min(at + step, tensor.numel))
    return out.view(tensor.shape)


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder or of a file, by name."""
    if path.is_file():
        return _tensors_of(path)
    for name in (ONE_FILE, INDEX):
        check_no_link(path / name)
    if (path / ONE_FILE).is_file():
        return _tensors_of(path / ONE_FILE)
    if (path / INDEX).is_file():
        return of_index(path, INDEX, _tensors_of)
    raise OptionError(
        f"path of safetensors() must be a folder with {ONE_FILE} or {INDEX}, or one file; got "
        f"{str(path)!r}; download the model into a local folder first"
    )


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name."""
    with View(file) as view:
        size, length = view.num_bytes, int.from_bytes(view.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _broken(file, f"a header of {length} bytes in {size}", "a shorter header")
        header = as_json(file, view.read(length))
    if not isinstance(header, dict):
        raise _broken(file, type(header).__name__, "a JSON object")
    spans: list[tuple[int, int, str]] = []
    found: dict[str, StoredTensor] = {}
    for name, fields in header.items():
        if name != "__metadata__":
            begin, found[name] = _tensor(file, 8 + length, size, name, fields)
            num_bytes = found[name].numel * found[name].dtype.itemsize
            spans.append((begin, begin + num_bytes, name))
    # As the library does, refuse tensors that overlap, and bytes that belong to none.
    place = 8 + length
    for begin, end, name in sorted(spans):
        if begin != place:
            wanted = f"the next tensor at byte {place}"
            raise _broken(file, f"{name!r} at byte {begin}", wanted, name)
        place = end
    if place != size:
        raise _broken(file, f"{size - place} bytes behind the last tensor", "none")
    return found


def _tensor(file: Path, start: int, size: int, name: str, fields: Any) -> tuple[int, StoredTensor]:
    """Return where a tensor begins in a file, and the tensor."""
    fields = fields if isinstance(fields, dict) else {}
    shape, span = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    kind = fields.get("dtype")
    if shape is None or span is None or len(span) != 2:
        raise _broken(file, f"{shown(fields)} for {name!r}", "shape and data_offsets", name)
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise LeafError(
            f"a tensor of a file has a dtype of torch; {name!r} in {file} is {kind!r}; convert "
            f"the file to one of {', '.join(DTYPES)}",
            leaf=name,
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    if span[1] - span[0] != num_bytes:
        raise _broken(file, f"{span[1] - span[0]} bytes for {name!r}", f"{num_bytes}", name)
    if start + span[1] > size:
        wanted = f"{name!r} up to byte {start + span[1]}"
        raise _broken(file, f"{size} bytes", wanted, name)
    return start + span[0], in_file(file, start + span[0], shape, dtype)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple; None for anything else."""
    is_good = isinstance(values, list) and all(type(x) is int and 0 <= x < 2**62 for x in values)
    return tuple(values) if is_good else None


def _broken(file: Path, got: str, wanted: str, leaf: str | None = None) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"a safetensors file must follow the format; {file} has {got} where the format has "
        f"{wanted}; download the file again",
        path=str(file),
        leaf=leaf,
    )
