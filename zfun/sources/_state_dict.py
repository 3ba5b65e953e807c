"""Files of one state dict, and the folders of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zfun.errors import OptionError
from zfun.objects import located
from zfun.options import PATH, takes
from zfun.sources._files import StoredTensor, check_no_link, of_index
from zfun.sources._pickles import load
from zfun.sources._safetensors import safetensors
from zfun.sources._source import Source, named

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@takes(path=PATH)
def state_dict(path: str | Path) -> Source:
    """Open the file of a state dict: of safetensors, or of ``torch.save``.

    A file of ``torch.save`` is read as ``torch.load(weights_only=True)`` does, without running code
    of the file, and tensors are read when asked for. Files that torch wrote before version 1.6 are
    read as a whole.

    Args:
        path: the file. Tensors in dicts and lists inside the state dict have dotted names, and
            other values are left out.

    Returns:
        The tensors by name; tensors that were one tensor are tied.

    Raises:
        UntrustedCheckpoint: a pickle that names anything but tensors and plain values.
        CorruptCheckpoint: a damaged file.
        OptionError: no such file.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(2, 1).state_dict(), f"{folder}/model.pt")
        ...     source = state_dict(f"{folder}/model.pt")
        ...     source["weight"].load().shape
        torch.Size([1, 2])
    """
    path = located(path)
    if not path.is_file():
        raise OptionError(
            f"path of state_dict() must be a file; got {str(path)!r}; open a folder with "
            "huggingface(), deepspeed() or dcp()"
        )
    if path.suffix == ".safetensors":
        return Source(safetensors(str(path)), str(path))
    return named(_pickled(path), str(path))


def _pickled(path: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    _collect(load(path), "", found)
    return found


def _collect(value: Any, prefix: str, found: dict[str, StoredTensor]) -> None:
    """Add the tensors of nested dicts and lists under dotted names."""
    if isinstance(value, StoredTensor):
        found[prefix[:-1] or "."] = value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{prefix}{key}.", found)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _collect(inner, f"{prefix}{index}.", found)


@takes(path=PATH)
def huggingface(path: str | Path) -> Source:
    """Open a local model folder of Hugging Face.

    Args:
        path: a folder with ``model.safetensors``, else ``pytorch_model.bin``, whole or split with
            an index.

    Returns:
        The tensors by name. The folder has tied parameters once, under one of their names.

    Raises:
        UntrustedCheckpoint: a pickle that names anything but tensors, or an index that names files
            elsewhere.
        CorruptCheckpoint: a damaged file.
        OptionError: a folder without these files.

    Example:
        >>> import tempfile, torch
        >>> from zfun import sources
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = sources.write_safetensors(folder, sources.tensors({"w": torch.ones(2)}))
        ...     huggingface(folder)["w"].load()
        tensor([1., 1.])
    """
    folder = located(path)
    for name in SAFETENSORS + PICKLES:
        check_no_link(folder / name)
    if any((folder / name).is_file() for name in SAFETENSORS):
        return Source(safetensors(str(folder)), str(folder))
    if (folder / PICKLES[0]).is_file():
        return state_dict(str(folder / PICKLES[0]))
    if not (folder / PICKLES[1]).is_file():
        raise OptionError(
            f"path of huggingface() must be a folder with one of {', '.join(SAFETENSORS + PICKLES)}"
            f"; got {str(folder)!r}; download the model into a local folder first"
        )
    return named(of_index(folder, PICKLES[1], _pickled), str(folder))
