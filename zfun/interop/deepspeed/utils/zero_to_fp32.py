"""``deepspeed.utils.zero_to_fp32``: fp32 weights from a checkpoint, without a group.

The functions read checkpoints of ``engine.save_checkpoint`` and those that DeepSpeed wrote. On a
command line::

    python -m zfun.interop.deepspeed.utils.zero_to_fp32 CHECKPOINTS OUTPUT
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.checkpoint import training_state
from zfun.errors import CheckpointError, OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.options import PATH, TEXT, integer, takes
from zfun.sources import Source, TrainingState, joined, write_safetensors
from zfun.sources import deepspeed as deepspeed_source

# DeepSpeed puts a file zero_to_fp32.py into the directory of all checkpoints; this is its text.
SCRIPT = """#!/usr/bin/env python
from zfun.interop.deepspeed.utils.zero_to_fp32 import main

main()
"""

# Each goes with its files at the end of the process.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []

_PLAIN, _PICKLED = "client_state", "client_pickle"
_NUMBERS = (type(None), bool, int, float, str, bytes, Tensor, np.ndarray)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@takes(checkpoint_dir=PATH)
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | float | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint in float32, by the module's names.

    The arguments are DeepSpeed's. Frozen parameters are those without moments of the optimizer, and
    ``lazy_mode`` is not used: ``zf.sources.deepspeed`` reads one leaf at a time.

    Returns:
        The parameters, from the master weights where there are any, and the buffers. A tied
        parameter stands under each name that the checkpoint knows (``ties`` in its data).

    Raises:
        CheckpointError: there is no such checkpoint.
        OptionError: frozen parameters of a checkpoint without moments.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:  # written by DeepSpeed without ZeRO
        ...     model = {"module": torch.nn.Linear(2, 1).state_dict(), "global_steps": 7}
        ...     torch.save(model | {"skipped_steps": 0}, f"{run}/mp_rank_00_model_states.pt")
        ...     list(get_fp32_state_dict_from_zero_checkpoint(run))
        ['weight', 'bias']
    """
    return _wide(_weights(checkpoint_dir, tag, exclude_frozen_parameters))


@takes(checkpoint_dir=PATH, output_dir=PATH, max_shard_size=TEXT | integer(1) | None)
def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | float | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in float32 as files that ``from_pretrained`` reads.

    The arguments are DeepSpeed's: safetensors of at most ``max_shard_size`` with
    ``safe_serialization``, and else one ``pytorch_model.bin``.

    Raises:
        CheckpointError: there is no such checkpoint.
        OptionError: ``max_shard_size`` is no size; or frozen parameters of a checkpoint without
            moments.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     model = {"module": torch.nn.Linear(2, 1).state_dict(), "global_steps": 7}
        ...     torch.save(model | {"skipped_steps": 0}, f"{run}/mp_rank_00_model_states.pt")
        ...     convert_zero_checkpoint_to_fp32_state_dict(run, f"{run}/out")
        ...     sorted(torch.load(f"{run}/out/pytorch_model.bin"))
        ['bias', 'weight']
    """
    size = _bytes_of(max_shard_size)
    source = _weights(checkpoint_dir, tag, exclude_frozen_parameters)
    if safe_serialization:
        write_safetensors(output_dir, source, dtype=torch.float32, max_shard_bytes=size)
        return
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    torch.save(_wide(source), Path(output_dir) / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | float | None = None
) -> torch.nn.Module:
    """Load the weights of a checkpoint into a module on the CPU, and return the module.

    Example:
        >>> import tempfile
        >>> layer = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as run:
        ...     model = {"module": layer.state_dict(), "global_steps": 7}
        ...     torch.save(model | {"skipped_steps": 0}, f"{run}/mp_rank_00_model_states.pt")
        ...     loaded = load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 1), run)
        >>> torch.equal(loaded.weight, layer.weight)
        True
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(weights, strict=False)
    return model


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return a file for ``torch.load`` with the client state and the counters of one tag.

    For a checkpoint of ``engine.save_checkpoint`` the file is a new one, which goes at the end of
    the process, and has no weights.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    partitioned = "zero_pp_rank_0_" if zero_stage == 3 else ""
    found = Path(checkpoint_dir) / f"{partitioned}mp_rank_00_model_states.pt"
    if found.is_file():
        return str(found)
    data: Any = _opened(Path(checkpoint_dir), None).values.get("data") or {}
    content = {**data.get("counters", {}), **unpacked(data)}
    return _written("mp_rank_00_model_states.pt", content)


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return files for ``torch.load``, one for each rank, with the stage of one tag.

    For a checkpoint of ``engine.save_checkpoint``, which any stage loads, there is one new file
    without moments.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    numbers = lambda path: [int(number) for number in re.findall(r"\d+", path.name)]
    if found := sorted(Path(checkpoint_dir).glob("*_optim_states.pt"), key=numbers):
        return [str(path) for path in found]
    _opened(Path(checkpoint_dir), None)
    content = {"optimizer_state_dict": {"zero_stage": 0}}
    return [_written("zero_pp_rank_0_mp_rank_00_optim_states.pt", content)]


def _written(name: str, content: Mapping[str, Any]) -> str:
    folder = tempfile.TemporaryDirectory()
    _FOLDERS.append(folder)
    path = Path(folder.name) / name
    torch.save(dict(content), path)
    return str(path)


def main(args: Sequence[str] | None = None) -> None:
    """Write fp32 weights, by the arguments of DeepSpeed's script."""
    parser = argparse.ArgumentParser(
        prog="python -m zfun.interop.deepspeed.utils.zero_to_fp32",
        description="Write the weights of a checkpoint in float32.",
    )
    add = parser.add_argument
    add("checkpoint_dir", help="the directory given to save_checkpoint")
    add("output_dir", help="the folder of the files")
    add("--max_shard_size", default="5GB", help="the largest file; 5GB by default")
    add("--safe_serialization", action="store_true", help="write safetensors")
    add("-t", "--tag", help="of the checkpoint; by default the one that latest names")
    add("-e", "--exclude_frozen_parameters", action="store_true")
    add("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(args))
    del given["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**given)


def _weights(path: str | Path, tag: str | float | None, without_frozen: bool) -> Source:
    found = _opened(Path(path), tag)
    params = found.params
    if without_frozen:
        if not found.moments:
            raise OptionError(
                "exclude_frozen_parameters=True leaves out the parameters without moments; got a "
                f"checkpoint without any moments, {str(path)!r}; pass False"
            )
        trained = {name for slot in found.moments.values() for name in slot}
        params = params.renamed(lambda name: name if name in trained else None)
    return weights_of(found, params)


def weights_of(found: TrainingState, params: Source) -> Source:
    """Return parameters and buffers by the names that ``state_dict()`` of the module has."""
    data = found.values.get("data")
    data = data if isinstance(data, Mapping) else {}
    known = {alias: params[own] for alias, own in data.get("ties", {}).items() if own in params}
    gone = frozenset(data.get("not_persistent", ()))
    buffers = found.buffers.renamed(lambda name: None if name in gone else name)
    return joined(joined(params, Source(known, params.origin)), buffers)


def tag_of(path: Path, tag: Any) -> str | None:
    """Return a tag as text, as in DeepSpeed; by default the one that ``latest`` names, if any."""
    if tag is not None:
        return str(tag)
    latest = path / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def _opened(path: Path, tag: str | float | None) -> TrainingState:
    name = tag_of(path, tag)
    folder = path if name is None else path / name
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint_dir is a directory of save_checkpoint(); got {str(folder)!r}, which does "
            "not exist; pass the directory and the tag of a checkpoint"
        )
    if any(folder.glob("*model_states.pt")):
        return deepspeed_source(folder)
    return training_state(folder)


def _wide(source: Source) -> dict[str, Tensor]:
    loaded = ((name, leaf.load()) for name, leaf in source.items())
    return {name: x.float() if x.is_floating_point() else x for name, x in loaded}


def _bytes_of(size: str | int | None) -> int:
    if size is None:
        return 2**62
    if isinstance(size, int):
        return size
    unit = size[-2:].upper()
    if unit not in _UNITS or not size[:-2].strip().isdigit():
        raise OptionError(f"max_shard_size is a number of KB, MB or GB; got {size!r}; write '5GB'")
    return int(size[:-2]) * _UNITS[unit]


# The client state: plain values as they are, and pickles of others.


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


__getattr__ = absent("utils.zero_to_fp32", globals())

if __name__ == "__main__":
    main()
