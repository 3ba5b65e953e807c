"""Checkpoints of ``torch.distributed.checkpoint``, read and written without a process group.

[Note: DCP's files]
``.metadata`` is a pickle: for every tensor its chunks, with offsets and sizes in each dimension,
and for every chunk the file and the range of bytes. The range holds an archive of ``torch.save``.
Other values are archives too. Names are the keys of nested dicts, joined by dots.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun.errors import CorruptCheckpoint, OptionError, SpecMismatch
from zfun.objects import is_url, located
from zfun.options import PATH, instance, takes
from zfun.sources._files import CPU, StoredTensor, check_no_link, entry
from zfun.sources._pickles import Inert, as_shape, load, load_metadata
from zfun.sources._source import SOURCE, Source, TrainingState, named
from zfun.sources._write import Written
from zfun.sources.scratch import scratch

METADATA = ".metadata"
_INERT = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    # The names that Python 3.13 writes.
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)


@takes(path=PATH)
def dcp(
    path: str | Path, *, params: str = "model.", moments: str = "optim.state."
) -> TrainingState:
    """Open a directory of ``torch.distributed.checkpoint``, without a process group.

    The metadata is a pickle, which is read without running code of the file.

    Args:
        path: the directory.
        params: the beginning of the names of parameters; ``""`` if all tensors are parameters.
        moments: the beginning of the names of the optimizer's tensors, such as
            ``optim.state.w.exp_avg``. ``get_optimizer_state_dict`` writes these names.

    Returns:
        The parameters, which hold buffers too, because DCP does not tell them apart, and the
        moments, by names without the prefixes. ``values`` has the other values by name, and
        tensors under other names are left out. Nothing is read until a leaf is loaded.

    Raises:
        UntrustedCheckpoint: a pickle that names anything but tensors, plain values and DCP's own
            metadata, or files elsewhere.
        CorruptCheckpoint: a damaged or incomplete directory.
        OptionError: no such directory, or no parameter under ``params``.

    Example:
        >>> import tempfile
        >>> from zfun import sources
        >>> model = {"model.w": torch.ones(2), "optim.state.w.step": torch.ones(1)}
        >>> leaves = sources.tensors(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = write_dcp(folder, leaves, values={"epoch": 3})
        ...     found = dcp(folder)
        ...     found.params["w"].load(), found.step, dict(found.values)
        (tensor([1., 1.]), 1, {'epoch': 3})
    """
    folder = located(path)
    if not (folder / METADATA).is_file():
        raise OptionError(
            f"path of dcp() must be a directory with a file {METADATA}; got {str(folder)!r}; pass "
            "the checkpoint_id given to torch.distributed.checkpoint.save()"
        )
    tensors, others = _contents(folder)
    source = named(tensors, str(folder))
    optimizer = source.under(moments) if moments else Source({}, str(folder))
    found = source.under(params) if params else source
    if not found:
        known = sorted({f"{name.split('.')[0]}." for name in source})
        raise OptionError(
            f"params of dcp() must begin names in the checkpoint; got {params!r}, and names begin "
            f"with {', '.join(known[:8]) or 'nothing'}; write params={(known or [''])[0]!r}"
        )
    slots: dict[str, dict[str, Any]] = {}
    for name, leaf in optimizer.items():
        param, _, slot = name.rpartition(".")
        slots.setdefault(slot, {})[param] = leaf
    steps = [leaf for leaf in slots.pop("step", {}).values() if leaf.numel() == 1]
    step = steps[0].load().item() if steps else None
    if isinstance(step, float) and not step.is_integer():
        raise CorruptCheckpoint(
            f"the step of an optimizer is a whole number; got {step}; copy the directory again",
            path=str(folder),
        )
    return TrainingState(
        found,
        Source({}, str(folder)),
        {slot: Source(leaves, str(folder)) for slot, leaves in slots.items()},
        None if step is None else int(step),
        _ChunkValues(others),
    )


class _ChunkPlace(NamedTuple):
    """The bytes of an archive."""

    file: Path
    offset: int
    num_bytes: int


class _Chunk(NamedTuple):
    """A block of a tensor, and where its archive is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _ChunkPlace


class _ChunkValues(Mapping[str, object]):
    """Plain values, each read when asked for, because a checkpoint may have thousands."""

    def __init__(self, places: Mapping[str, _ChunkPlace]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> object:
        place = self._places[name]
        return load(place.file, offset=place.offset, num_bytes=place.num_bytes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _contents(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, _ChunkPlace]]:
    """Return the tensors and the places of the other values, by name."""
    where = folder / METADATA
    check_no_link(where)
    metadata = load_metadata(where, _INERT)
    try:
        places = {
            (index.state["fqn"], _offsets(index.state.get("offset"))): _place(folder, info.state)
            for index, info in metadata.state["storage_data"].items()
        }
        tensors: dict[str, StoredTensor] = {}
        others: dict[str, _ChunkPlace] = {}
        for name, item in metadata.state["state_dict_metadata"].items():
            if _kind(item) == "BytesStorageMetadata":
                others[name] = places[name, None]
                continue
            chunks = [
                _Chunk(offsets, as_shape(chunk.state["sizes"]), places[name, offsets])
                for chunk in item.state["chunks"]
                for offsets in [as_shape(chunk.state["offsets"])]
            ]
            shape = as_shape(item.state["size"])
            dtype = item.state["properties"].state[0]
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"a dtype {reprlib.repr(dtype)}")
            tensors[name] = _tensor(name, shape, dtype, chunks)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{where} has the layout of torch.distributed.checkpoint; got "
            f"{type(error).__name__}: {error}; copy the directory again",
            path=str(where),
        ) from None
    return tensors, others


def _kind(item: Any) -> str:
    return type(item).__name__ if isinstance(item, Inert) else ""


def _offsets(value: Any) -> tuple[int, ...] | None:
    return None if value is None else as_shape(value)


def _place(folder: Path, info: Mapping[str, Any]) -> _ChunkPlace:
    if transforms := info.get("transform_descriptors"):
        raise OptionError(
            f"dcp() reads plain files; got {reprlib.repr(transforms)} in {folder}; save the "
            "checkpoint without extensions"
        )
    file = entry(folder, info["relative_path"], str(folder / METADATA))
    offset, length = info["offset"], info["length"]
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"bytes {offset} + {length}")
    return _ChunkPlace(file, offset, length)


def _tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: Sequence[_Chunk]
) -> StoredTensor:
    """Return the tensor that chunks make up, of which a range reads the rows that it needs."""
    for chunk in chunks:
        if len(chunk.sizes) != len(shape) or any(
            offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk {chunk.sizes} at {chunk.offsets} of {name!r} {shape}")
    # Chunks without elements come from ranks that hold nothing of the tensor.
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise CorruptCheckpoint(
            f"the chunks of a tensor have all of its elements; {name!r} of {shape} has {covered}; "
            "copy the directory again, or save it from all ranks",
            leaf=name,
        )
    _check_disjoint(name, chunks)
    row = math.prod(shape[1:])

    def fetch(start: int, stop: int) -> Tensor:
        if start >= stop:
            return torch.empty(0, dtype=dtype)
        if len(chunks) == 1:
            return _archive(name, chunks[0], dtype).fetch(start, stop)
        first, last = start // row, -(-stop // row)
        parts = [
            # The archive is checked against its file before memory is taken.
            (chunk, _archive(name, chunk, dtype))
            for chunk in chunks
            if max(first, chunk.offsets[0]) < min(last, chunk.offsets[0] + chunk.sizes[0])
        ]
        found = scratch((last - first, *shape[1:]), dtype, CPU)
        for chunk, archive in parts:
            begin = max(first, chunk.offsets[0])
            end = min(last, chunk.offsets[0] + chunk.sizes[0])
            width = math.prod(chunk.sizes[1:])
            top = begin - chunk.offsets[0]
            rows = archive.fetch(top * width, (top + end - begin) * width)
            spans = [
                slice(offset, offset + size)
                for offset, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
            ]
            block = found[(slice(begin - first, end - first), *spans)]
            block.copy_(rows.view(block.shape))
        return found.view(-1)[start - first * row : stop - first * row]

    return StoredTensor(shape, dtype, fetch)


def _check_disjoint(name: str, chunks: Sequence[_Chunk]) -> None:
    """Refuse chunks with common elements, which would leave as many elements unwritten."""
    if len(chunks) < 2:
        return
    # Along the dimension that cuts most, few chunks lie side by side.
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    open_ones: list[_Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        begin = chunk.offsets[along]
        open_ones = [x for x in open_ones if x.offsets[along] + x.sizes[along] > begin]
        for other in open_ones:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                for dim in dims
            ):
                raise CorruptCheckpoint(
                    f"the chunks of a tensor have each element once; {name!r} has {chunk.sizes} "
                    f"at {chunk.offsets} and {other.sizes} at {other.offsets}; copy the directory "
                    "again, or save it from all ranks",
                    leaf=name,
                )
        open_ones.append(chunk)


def _archive(name: str, chunk: _Chunk, dtype: torch.dtype) -> StoredTensor:
    place = chunk.place
    tensor = load(place.file, offset=place.offset, num_bytes=place.num_bytes)
    if not isinstance(tensor, StoredTensor) or tensor.shape != chunk.sizes or tensor.dtype != dtype:
        raise CorruptCheckpoint(
            f"an archive of a checkpoint holds the chunk of the metadata, {dtype} {chunk.sizes} of "
            f"{name!r}; got {reprlib.repr(tensor)} in {place.file}; copy the directory again",
            path=str(place.file),
            leaf=name,
        )
    return tensor


@takes(
    path=PATH,
    source=SOURCE,
    values=instance(Mapping, "a mapping from names to plain values", "{'epoch': 3}") | None,
)
def write_dcp(
    path: str | Path, source: Source, *, values: Mapping[str, object] | None = None
) -> Written:
    """Write leaves as a directory of ``torch.distributed.checkpoint``, one leaf at a time.

    No process group is used, so one process can write while a group exists. ``dcp.load`` reads the
    directory in jobs of any size.

    Args:
        path: the directory, which is made if necessary and holds no checkpoint yet.
        source: the leaves by name, such as ``model.w`` for ``{"model": {"w": ...}}``.
        values: other values by name. ``torch.save`` writes them.

    Returns:
        The files, and the size of the tensors.

    Raises:
        SpecMismatch: a name in both ``source`` and ``values``.
        OptionError: the directory holds a checkpoint.

    Example:
        >>> import tempfile, torch.distributed.checkpoint
        >>> from zfun import sources
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = write_dcp(folder, sources.tensors({"model.w": torch.ones(2)}))
        ...     reader = torch.distributed.checkpoint.FileSystemReader(folder)
        ...     list(reader.read_metadata().state_dict_metadata)
        ['model.w']
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    both = [name for name in values or () if name in source]
    if both:
        raise SpecMismatch(
            f"leaves and values of a checkpoint have different names; got {both[0]!r} twice; "
            "rename the leaves with renamed()",
            leaf=both[0],
        )
    if is_url(path):
        raise OptionError(
            f"write_dcp() writes to a disk; got {path}; write into a local folder, and copy it"
        )
    if (Path(path) / METADATA).exists():
        raise OptionError(
            f"path of write_dcp() must be a new directory; got {str(path)!r} with a checkpoint; "
            "name another directory, or remove the checkpoint"
        )

    Path(path).mkdir(parents=True, exist_ok=True)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(is_coordinator=True)
    specs = {name: leaf.spec for name, leaf in source.items()}
    planner.set_up_planner({**specs, **(values or {})}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    # torch's own writer holds all tensors of a file until the end of the file.
    written = [
        _write_item(Path(path), number, item, source, values or {})
        for number, item in enumerate(planner.finish_plan(plans[0]).items)
    ]
    writer.finish(metadata, [written])
    files = tuple(Path(path) / result.storage_data.relative_path for result in written)
    sizes = [spec.numel() * spec.dtype.itemsize for spec in specs.values()]
    return Written(files, len(sizes), sum(sizes))


def _write_item(
    folder: Path, number: int, item: Any, source: Source, values: Mapping[str, object]
) -> Any:
    """Write one leaf or value into a file of its own, and return what DCP notes of it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    name = f"__0_{number}.distcp"
    key = item.index.fqn
    # By path, because torch copies what it writes to a stream of Python.
    torch.save(source[key].load() if key in source else values[key], folder / name)
    with (folder / name).open("rb+") as stream:
        os.fsync(stream.fileno())
        size = os.fstat(stream.fileno()).st_size
    return WriteResult(item.index, size, _StorageInfo(name, 0, size))
