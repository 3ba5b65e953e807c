"""The files of a local folder in the format of safetensors, read leaf by leaf.

The files come from strangers: sizes, offsets and names are checked before a byte is read, and the
header of a file is at most as long as the format allows. Files are read, not mapped, because mapped
pages count as memory of the process.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, OptionError
from zfun.files import KeyTwice, parse_json
from zfun.objects import located
from zfun.options import DEVICE, FLOATING, PATH, shown, takes
from zfun.sources._files import NotRegularError, OpenFile, check_no_link
from zfun.sources.deferred import Deferred, once
from zfun.sources.headers import DTYPES, MAX_HEADER_BYTES
from zfun.sources.scratch import scratch

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 1 << 22


class _HeaderEntry(NamedTuple):
    """One tensor of a file: where the bytes begin in the file, and what the bytes are."""

    name: str
    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The length of the bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        LeafError: a leaf that no file has, or has with another shape, or that two files have; a
            dtype that torch does not know; a file that is cut short.
        OptionError: no such files, or a file that is no safetensors file.

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
    entries = _entries(located(path))
    place = torch.device(device)

    def deferred(leaf_path: str, entry: _HeaderEntry) -> Deferred:
        kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        spec = torch.empty(entry.shape, dtype=kind, device="meta")
        return Deferred(leaf_path, spec, functools.partial(_read, entry, kind, leaf_path), place)

    if params is None:
        # Blocks in the order of their numbers, because buckets should follow the order of use.
        return {name: deferred(name, entries[name]) for name in sorted(entries, key=_by_number)}
    leaves, tree_of = once(params, "safetensors()")
    found = {}
    for key, (leaf, paths) in leaves.items():
        names = [(name_of or str)(one) for one in paths]
        found[key] = deferred(paths[0], _chosen(entries, leaf, paths, names, path))
    return tree_of(found)


def _by_number(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _chosen(
    entries: Mapping[str, _HeaderEntry], leaf: Tensor, paths: list[str], names: list[str], path: Any
) -> _HeaderEntry:
    """Return the entry of a leaf, of whose names the files have one or more."""
    entry = next((entries[name] for name in names if name in entries), None)
    if entry is None:
        near = difflib.get_close_matches(str(names[0]), entries, n=1)
        raise LeafError(
            f"every leaf must be in the files; leaf {paths[0]!r} is not in {path} under "
            f"{' or '.join(map(repr, names))}; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + "name_of=lambda path: ... names a leaf in the files",
            leaf=paths[0],
        )
    if entry.shape != tuple(leaf.shape):
        raise LeafError(
            f"a leaf must have the shape of the model; leaf {paths[0]!r} is {tuple(leaf.shape)} in "
            f"params and {entry.shape} as {entry.name!r} in {entry.file}; use the configuration "
            "of the checkpoint",
            leaf=paths[0],
        )
    if entry.dtype.is_floating_point != leaf.dtype.is_floating_point:
        raise LeafError(
            f"a leaf must be floating where the model is; leaf {paths[0]!r} is {leaf.dtype} in "
            f"params and {entry.dtype} as {entry.name!r} in {entry.file}; use files that are not "
            "quantised, or convert the file",
            leaf=paths[0],
        )
    return entry


def _entries(path: Path) -> dict[str, _HeaderEntry]:
    """Return all tensors of a folder or of a file, by name."""
    if path.is_file():
        return _entries_of(path)
    for name in (ONE_FILE, INDEX):
        check_no_link(path / name)
    if (path / ONE_FILE).is_file():
        return _entries_of(path / ONE_FILE)
    if (path / INDEX).is_file():
        return _entries_of_index(path)
    raise OptionError(
        f"path of safetensors() must be a folder with {ONE_FILE} or {INDEX}, or one file; got "
        f"{str(path)!r}; download the model into a local folder first"
    )


def _entries_of_index(folder: Path) -> dict[str, _HeaderEntry]:
    index = folder / INDEX
    with _opened(index) as file:
        if file.size > MAX_HEADER_BYTES:
            raise _broken(index, f"{file.size} bytes", f"at most {MAX_HEADER_BYTES} bytes")
        text = bytearray(file.size)
        file.read(text, 0)
    files = _json(index, bytes(text))
    places = files.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise _broken(index, "no weight_map", "a weight_map from names of tensors to files")
    entries: dict[str, _HeaderEntry] = {}
    for file in dict.fromkeys(places.values()):
        # An index may not lead out of the folder.
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise _broken(index, f"the file {file!r}", "names of files in this folder")
        check_no_link(folder / file)
        for name, entry in _entries_of(folder / file).items():
            if name in entries:
                raise LeafError(
                    f"one file has each tensor; {name!r} is in {entries[name].file} and in "
                    f"{entry.file}; remove one of them, and the index that names both",
                    leaf=name,
                )
            entries[name] = entry
    for name, file in places.items():
        if name not in entries or entries[name].file.name != file:
            raise LeafError(
                f"a file must have the tensors that the index names; {name!r} is not in "
                f"{folder / file}; download the folder again",
                leaf=name,
            )
    return entries


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[OpenFile]:
    try:
        with OpenFile(file) as opened:
            yield opened
    except NotRegularError:
        raise _broken(file, "a pipe, a device or a folder", "a regular file") from None
    except OSError as error:
        raise OptionError(
            f"a safetensors file must be readable; {file}: {error}; download the folder again"
        ) from error


def _entries_of(file: Path) -> dict[str, _HeaderEntry]:
    """Return the tensors of one file, by name."""
    with _opened(file) as opened:
        size, head = opened.size, bytearray(8)
        length = struct.unpack("<Q", head)[0] if opened.read(head, 0) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _broken(file, f"a header of {length} bytes in {size}", "a shorter header")
        text = bytearray(length)
        opened.read(text, 8)
    start = 8 + length
    found = {
        name: _entry(file, start, size, name, fields)
        for name, fields in _json(file, bytes(text)).items()
        if name != "__metadata__"
    }
    _check_gapless(file, start, size, found.values())
    return found


def _check_gapless(file: Path, start: int, size: int, entries: Iterable[_HeaderEntry]) -> None:
    """Refuse tensors that overlap, and bytes that belong to none, as the library does."""
    place = start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != place:
            raise _broken(
                file,
                f"{entry.name!r} at byte {entry.start}",
                f"the next tensor at byte {place}",
                entry.name,
            )
        place += entry.num_bytes
    if place != size:
        raise _broken(file, f"{size - place} bytes behind the last tensor", "none")


def _entry(file: Path, start: int, size: int, name: str, fields: Any) -> _HeaderEntry:
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
    if span[1] - span[0] != math.prod(shape) * dtype.itemsize:
        wanted = f"{math.prod(shape) * dtype.itemsize}"
        raise _broken(file, f"{span[1] - span[0]} bytes for {name!r}", wanted, name)
    if start + span[1] > size:
        raise LeafError(
            f"a file must have all bytes of its tensors; {name!r} ends at byte {start + span[1]} "
            f"of {file}, which has {size}; download the file again",
            leaf=name,
        )
    return _HeaderEntry(name, file, start + span[0], shape, dtype)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple; None for anything else."""
    is_good = isinstance(values, list) and all(type(x) is int and 0 <= x < 2**62 for x in values)
    return tuple(values) if is_good else None


def _json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except KeyTwice as error:
        raise _broken(file, f"{error.key!r} twice", "each name once", error.key) from None
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"{error}", "JSON") from error
    if not isinstance(found, dict):
        raise _broken(file, type(found).__name__, "a JSON object")
    return found


def _broken(file: Path, got: str, wanted: str, leaf: str | None = None) -> OptionError:
    return OptionError(
        f"a safetensors file must follow the format; {file} has {got} where the format has "
        f"{wanted}; download the file again",
        leaf=leaf,
    )


def _read(entry: _HeaderEntry, dtype: torch.dtype, path: str) -> Tensor:
    """Read one tensor, and convert it in pieces of a few megabytes."""
    numel = math.prod(entry.shape)
    out = scratch((numel,), dtype, torch.device("cpu"))
    is_converted = dtype != entry.dtype
    step = max(1, _CHUNK_BYTES // entry.dtype.itemsize)
    staging = torch.empty(min(step, numel) if is_converted else 0, dtype=entry.dtype, device="cpu")
    try:
        with OpenFile(entry.file) as opened:
            for at in range(0, numel, step):
                piece = out[at : at + step]
                target = staging[: piece.numel()] if is_converted else piece
                offset = entry.start + at * entry.dtype.itemsize
                if opened.fill(target, offset) < target.nbytes:
                    raise LeafError(
                        f"a file must have all bytes of its tensors; {entry.file} ends inside "
                        f"leaf {path!r}; download the file again",
                        leaf=path,
                    )
                if is_converted:
                    piece.copy_(target)
    except OSError as error:
        raise LeafError(
            f"a leaf must be readable; leaf {path!r} of {entry.file}: {error}; download the file "
            "again",
            leaf=path,
        ) from error
    return out.view(entry.shape)
