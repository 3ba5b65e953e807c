"""Leaves written as safetensors, one at a time, split as Hugging Face splits them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun.errors import CheckpointError, LeafError, OptionError
from zfun.objects import Address, is_url, located
from zfun.options import FLOATING, PATH, integer, takes
from zfun.sources._safetensors import INDEX, ONE_FILE
from zfun.sources._source import SOURCE, Source
from zfun.sources.deferred import Deferred
from zfun.sources.headers import DTYPES, header_of

# The sizes of Hugging Face are powers of ten.
DEFAULT_SHARD_BYTES = 5 * 10**9
_PIECE = 2**20


class Written(NamedTuple):
    """The result of :func:`write_safetensors` and :func:`write_dcp`.

    Attributes:
        files: the files of tensors.
        num_leaves: the number of tensors. In safetensors, tied ones are written once.
        num_bytes: the bytes of the tensors.
    """

    files: tuple[Path, ...]
    num_leaves: int
    num_bytes: int


@takes(path=PATH, source=SOURCE, dtype=FLOATING | None, max_shard_bytes=integer(1))
def write_safetensors(
    path: str | Path,
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Written:
    """Write leaves into a folder that ``from_pretrained`` of Hugging Face reads.

    One leaf is in memory at a time. A leaf that has several names is written under the first, as
    Hugging Face does. The files get their names when all of them are whole, the index last.

    Args:
        path: the folder, or the address of one in a store, which may hold other files, such as
            ``config.json``.
        source: the leaves by name, such as ``zf.sources.deepspeed(path).params``.
        dtype: the dtype of floating leaves; by default each keeps its own.
        max_shard_bytes: above this size the folder has several files and an index. A file is larger
            only if one leaf is.

    Returns:
        The files and their size.

    Raises:
        OptionError: the folder has such files already.
        LeafError: a leaf of a dtype that safetensors does not have, or named ``__metadata__``.

    Example:
        >>> import tempfile
        >>> from zfun import sources
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     leaves = sources.tensors({"w": torch.ones(2, 3), "b": torch.ones(3)})
        ...     written = write_safetensors(folder, leaves, dtype=torch.bfloat16)
        ...     written.num_bytes, sources.huggingface(folder)["b"].load()
        (18, tensor([1., 1., 1.], dtype=torch.bfloat16))
    """
    folder = located(path)
    if not is_url(path):
        folder.mkdir(parents=True, exist_ok=True)
    present = list[str]()
    with contextlib.suppress(FileNotFoundError):
        present = [file.name for file in folder.glob("model*.safetensors*")]
    if present:
        raise OptionError(
            f"path of write_safetensors() must be a folder without a model; got {str(folder)!r} "
            f"with {present[0]}; name another folder, or remove the file"
        )
    ties = source.ties
    leaves = {name: leaf for name, leaf in source.items() if name not in ties}
    dtypes = {name: _dtype(name, leaf, dtype) for name, leaf in leaves.items()}
    sizes = {name: leaf.numel() * dtypes[name].itemsize for name, leaf in leaves.items()}
    shards = _split(sizes, max_shard_bytes)
    names = _file_names(len(shards))
    index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(sizes.values())
    is_disk = not is_url(path)
    temporary = [folder / (f".{name}.tmp" if is_disk else name) for name in (*names, INDEX)]
    done: list[Path] = []
    try:
        for file, shard in zip(temporary, shards, strict=False):
            done.append(file)
            _write_file(file, {name: leaves[name] for name in shard}, dtypes)
        if len(shards) > 1:
            content = {"metadata": {"total_size": total}, "weight_map": index}
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            done.append(temporary[-1])
            with _created(temporary[-1], len(text)) as stream:
                stream.write(text.encode())
        if is_disk:
            for file, name in zip(done, (*names, INDEX), strict=False):
                file.rename(folder / name)
        done.clear()
    except OSError as error:
        raise CheckpointError(
            f"the folder of an export takes files; {folder}: {error}; free room on the disk, or "
            "look at the store",
            path=str(folder),
            errno=error.errno,
        ) from error
    finally:
        for file in done:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    return Written(tuple(folder / name for name in names), len(leaves), total)


def _dtype(name: str, leaf: Deferred, dtype: torch.dtype | None) -> torch.dtype:
    if name == "__metadata__":
        raise LeafError(
            f"safetensors has notes under the name {name!r}; got a leaf of that name; rename the "
            "leaf with renamed()",
            leaf=name,
        )
    found = leaf.dtype if dtype is None or not leaf.dtype.is_floating_point else dtype
    if found not in DTYPES.values():
        raise LeafError(
            f"a leaf of safetensors has one of the dtypes {', '.join(DTYPES)}; {name!r} is "
            f"{found}; convert the leaf, or leave it out with renamed()",
            leaf=name,
        )
    return found


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names of each file: in order, a new file where the next leaf would not fit."""
    shards, used = [list[str]()], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > most:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _file_names(count: int) -> Sequence[str]:
    if count == 1:
        return [ONE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_file(
    file: Path, leaves: Mapping[str, Deferred], dtypes: Mapping[str, torch.dtype]
) -> None:
    header = header_of((name, dtypes[name], tuple(leaf.shape)) for name, leaf in leaves.items())
    with _created(file, header.num_bytes) as stream:
        stream.write(header.data)
        for name, leaf in leaves.items():
            _write_leaf(stream, leaf.load().reshape(-1), dtypes[name])


@contextlib.contextmanager
def _created(file: Path, num_bytes: int) -> Iterator[Any]:
    """Open a new file, and wait at the end until the disk or the store has it."""
    if isinstance(file, Address):
        with file.created(num_bytes) as stream:
            yield stream
        return
    with file.open("wb", buffering=0) as stream:
        yield stream
        os.fsync(stream.fileno())


def _write_leaf(stream: Any, values: Tensor, dtype: torch.dtype) -> None:
    """Write a leaf in pieces, so that a cast needs no second leaf."""
    for start in range(0, values.numel(), _PIECE):
        piece = values[start : start + _PIECE].to(dtype).view(torch.uint8).cpu()
        data: Any = piece.numpy()
        while data.size:
            data = data[stream.write(data) :]
