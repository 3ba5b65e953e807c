"""Pickles of other libraries, read without running code of the file.

[Note: inert classes]
An unpickler calls every function and class that the file names. Both loaders here resolve names by
a table. Tensors of ``torch.save`` are rebuilt by torch's own unpickler with ``weights_only=True``;
classes of the writing library become *inert* classes, made for one load, which only keep their
arguments. A name that is in neither table is refused before anything of the file is called.

Tensors are loaded onto the ``meta`` device, which allocates nothing. torch notes the place of their
bytes in the file, and the bytes are read from there when asked for. The places are checked
against the directory of the zip archive, and the bytes against its checksums: those of a tensor
before the first read, all others at once.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import reprlib
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zfun.errors import CorruptCheckpoint, UntrustedCheckpoint
from zfun.sources import _files
from zfun.sources._archives import ZIP_MAGIC, ArchiveRecord, damaged, records_of
from zfun.sources.deferred import memory_of
from zfun.sources.scratch import scratch

# torch keeps one table of allowed classes for the process.
_TABLE = threading.Lock()
# A list that contains another list twice doubles the values, so 60 small lists make 2**60.
_MAX_VALUES = 1 << 24
_MAX_EXPANDED_BYTES = 1 << 26
# The hash of a tuple walks it, again each time it is a key.
_MAX_TUPLE = 1 << 16
# A number, a version, facts of the machine, the object, and the names of the storages.
_OLD_PICKLES = 5


class Inert:
    """An object of a class that is not imported: the arguments and the state that a file gives."""

    args: Any
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any) -> Inert:
        # An unpickler may leave __init__ out.
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _inert(name: str) -> type[Inert]:
    return type(name.rpartition(".")[2], (Inert,), {"__module__": "inert", "name": name})


def load(path: Path, *, inert: str = "", offset: int = 0, num_bytes: int | None = None) -> Any:
    """Load a file of ``torch.save``, with a :class:`Stored` in place of every tensor.

    Args:
        path: the file.
        inert: the beginning of the names of classes that become inert; none by default.
        offset: the first byte of the archive in the file.
        num_bytes: the length of the archive; by default the rest of the file.

    Raises:
        UntrustedCheckpoint: the file names a function or class that is not for tensors.
        CorruptCheckpoint: the file is damaged.
    """
    with _files.View(path, offset, num_bytes) as view:
        lazy = view.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        records = records_of(view) if lazy else {}
        for place in [at for at, x in records.items() if x.name.endswith("/data.pkl")]:
            view.seek(place)
            _check_tuples(view, path)
        table: list[Any] = []
        if lazy and inert:
            table = [(_inert(name), name) for name in _unknown(view, inert)]
        view.seek(0)
        for _ in range(0 if lazy else _OLD_PICKLES):
            _check_tuples(view, path)
        view.seek(0)
        try:
            with _TABLE, safe_globals(table):
                found = torch.load(
                    view,  # type: ignore[arg-type]
                    map_location="meta" if lazy else "cpu",
                    weights_only=True,
                )
        except pickle.UnpicklingError as error:
            raise _refused(path, str(error)) from None
        except Exception as error:  # noqa: BLE001, a damaged pickle fails in any way
            raise damaged(path, error) from None
    made: dict[Hashable, _files.StoredTensor] = {}

    def to_stored(tensor: Tensor) -> _files.StoredTensor:
        # Tied parameters of a module are two tensors of one memory in its state dict.
        at = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        place = (at, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (memory_of(tensor), place) if at is None or not tensor.numel() else place
        if key not in made:
            made[key] = _lazy(path, offset, records, tensor) if lazy else _files.in_memory(tensor)
        return made[key]

    try:
        plain = _plain(found, to_stored, {})
        if _num_values(plain, {}) > _MAX_VALUES:
            raise ValueError(
                f"more than {_MAX_VALUES} values in lists that repeat, or a dict inside of itself"
            )
    except (RecursionError, ValueError) as error:
        raise damaged(path, error) from None
    return plain


def _check_tuples(view: Any, path: Path) -> None:
    """Refuse a tuple that holds another one twice, and so on, before anything takes its hash."""
    sizes: list[Any] = []
    memo: dict[Any, Any] = {}
    mark = pickletools.markobject
    try:
        for count, (op, arg, _) in enumerate(pickletools.genops(view)):
            name, before = op.name, op.stack_before
            if "GET" in name:
                sizes.append(memo[arg])
                continue
            if "PUT" in name or name == "MEMOIZE":
                memo[len(memo) if arg is None else arg] = sizes[-1]
                continue
            size = 1
            if mark in before:
                while (inner := sizes.pop()) is not None:
                    size += inner
            for _ in range(before.index(mark) if mark in before else len(before)):
                size += sizes.pop() or 0
            if name.startswith("TUPLE") and size > _MAX_TUPLE + count:
                raise ValueError(f"more than {_MAX_TUPLE} values in tuples that repeat")
            sizes.extend(None if kind is mark else size for kind in op.stack_after)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise damaged(path, error) from None


def _unknown(view: _files.View, inert: str) -> list[str]:
    """Return the names of a pickle that torch does not know and that may become inert."""
    view.seek(0)
    try:
        # A wrong guess of this list does no harm, because the load refuses other names.
        found = get_unsafe_globals_in_checkpoint(view)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001, a damaged pickle fails in any way
        raise damaged(view.path, error) from None
    return [name for name in found if name.startswith(inert)]


def _refused(path: Path, message: str) -> UntrustedCheckpoint:
    name = re.search(r"GLOBAL (\S+)", message)
    reason = f"the name {name[1]}" if name else message.strip().splitlines()[-1]
    return UntrustedCheckpoint(
        f"a checkpoint of {path.name} holds tensors and plain values; got {reason}, which is not "
        "loaded because a pickle runs code; if you trust the file, convert it to safetensors",
        path=str(path),
    )


def _lazy(
    path: Path, base: int, records: Mapping[int, ArchiveRecord], tensor: Tensor
) -> _files.StoredTensor:
    """Return the tensor of the file for a tensor on the meta device, which knows its place."""
    storage = tensor.untyped_storage()
    at = getattr(storage, "_checkpoint_offset", None)
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    span = (reach + 1) if tensor.numel() else 0
    num_bytes = span * tensor.dtype.itemsize
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or any(stride < 0 for stride in tensor.stride())
        or (
            tensor.numel() > 0
            and (at is None or at not in records or first + num_bytes > records[at].num_bytes)
        )
        # A stride of 0 makes any number of elements of one.
        or tensor.numel() * tensor.dtype.itemsize > max(num_bytes, _MAX_EXPANDED_BYTES)
    ):
        raise CorruptCheckpoint(
            f"{path} holds dense tensors inside its records; got {tuple(tensor.shape)}, "
            f"{tensor.dtype}, {tensor.layout} elsewhere; copy the file again",
            path=str(path),
        )
    shape, dtype, strides = tuple(tensor.shape), tensor.dtype, tensor.stride()
    begin = base + (at or 0) + first
    record = records.get(at) if at is not None else None
    whole = _files.in_file(path, begin, shape, dtype) if tensor.is_contiguous() else None

    def fetch(start: int, stop: int) -> Tensor:
        if record is not None:
            record.check(path, base)
        if whole is not None:
            return whole.fetch(start, stop)
        memory = scratch((span,), dtype, _files.CPU)
        _files.read_into(path, begin, memory)
        return memory.as_strided(shape, strides).reshape(-1)[start:stop]

    return _files.StoredTensor(shape, dtype, fetch)


def _plain(
    value: Any, to_stored: Callable[[Tensor], _files.StoredTensor], done: dict[int, Any]
) -> Any:
    """Return a value with tensors of the file for tensors; a repeated value is one object."""
    if id(value) in done:
        return done[id(value)]
    made: Any
    if isinstance(value, Tensor):
        made = done[id(value)] = to_stored(value)
    elif isinstance(value, dict):
        made = done[id(value)] = dict[Any, Any]()
        made.update((key, _plain(inner, to_stored, done)) for key, inner in value.items())
    elif isinstance(value, list):
        made = done[id(value)] = list[Any]()
        made.extend(_plain(inner, to_stored, done) for inner in value)
    elif isinstance(value, tuple):
        made = done[id(value)] = tuple(_plain(inner, to_stored, done) for inner in value)
    elif isinstance(value, Inert):
        made = done[id(value)] = value
        value.args = _plain(value.args, to_stored, done)
        value.state = _plain(value.state, to_stored, done)
    else:
        made = value
    return made


def _num_values(value: Any, done: dict[int, float]) -> float:
    """Count the values in containers as often as a walk meets them; a cycle has no end."""
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if id(value) not in done:
        done[id(value)] = math.inf
        inner = value.values() if isinstance(value, dict) else value
        done[id(value)] = 1 + sum(_num_values(x, done) for x in inner)
    return done[id(value)]


class _Restricted(pickle._Unpickler):  # type: ignore[misc, name-defined]
    """An unpickler of metadata, whose names become inert classes and dtypes.

    The class in Python, because the one in C allocates what an index in the file asks for.
    """

    def __init__(self, text: bytes, path: Path, inert: tuple[str, ...]) -> None:
        super().__init__(io.BytesIO(text))
        self._path, self._inert = path, inert
        self._made: dict[str, Any] = {"collections.OrderedDict": type("Ordered", (dict,), {})}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        # Not getattr, because torch imports some of its modules when they are asked for.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if full not in self._made:
            # A name such as "pathlib.Path.write_text" is a method.
            if not any(
                full == known or (known[-1] == "." and full.startswith(known))
                for known in self._inert
            ):
                raise _refused(self._path, f"GLOBAL {full}")
            self._made[full] = _inert(full)
        return self._made[full]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a reference to something outside the file")


def load_metadata(path: Path, inert: tuple[str, ...]) -> Any:
    """Load a pickle of metadata, in which the names in ``inert`` become inert objects.

    A name that ends with a dot is the beginning of names.

    Raises:
        UntrustedCheckpoint: the file names something else.
        CorruptCheckpoint: the file is damaged.
    """
    with _files.View(path) as view:
        if view.num_bytes > _files.MAX_TEXT_BYTES:
            raise damaged(path, ValueError(f"{view.num_bytes} bytes of metadata"))
        text = view.read()
    _check_tuples(text, path)
    try:
        return _Restricted(text, path, inert).load()
    except UntrustedCheckpoint:
        raise
    except Exception as error:  # noqa: BLE001, a damaged pickle fails in any way
        raise damaged(path, error) from None


def as_shape(value: Any) -> tuple[int, ...]:
    """Return a shape of a checkpoint as a tuple of integers."""
    if isinstance(value, Inert):
        value = value.args[0] if value.args else None
    if not isinstance(value, (tuple, list)) or not all(
        type(size) is int and size >= 0 for size in value
    ):
        raise CorruptCheckpoint(
            f"a shape is a sequence of sizes; got {reprlib.repr(value)}; copy the checkpoint again"
        )
    return tuple(value)
