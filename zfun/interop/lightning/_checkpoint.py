"""Checkpoints of the strategy: a directory written by ``zf.save``, and one file made of it.

Lightning's part of a checkpoint (loops, callbacks, schedulers, hyperparameters) is any picklable
value. It lies as bytes in the caller's data of the checkpoint, so the whole appears by one rename.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core import saving
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zfun import checkpoint as zcheckpoint
from zfun.checkpoint.format import decode
from zfun.errors import CheckpointError
from zfun.interop._named import first_names
from zfun.interop.engine import TORCH_NAMES, Engine, ParamGroups
from zfun.interop.lightning._runs import master_values
from zfun.options import BOOL, PATH, takes
from zfun.sources import Deferred, TrainingState

MARK = "zfun"
"""The key that has the path of a directory, whose values are in the state already."""

_FORMAT = 1


def read_directories() -> None:
    """Let ``LightningModule.load_from_checkpoint`` read directories of the strategy too."""
    load_file = saving.pl_load

    @functools.wraps(load_file)
    def load_any(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(path_or_url, (str, Path)) and Path(path_or_url).is_dir()
        return whole_of(path_or_url) if is_path else load_file(path_or_url, *args, **kwargs)

    saving.pl_load = load_any


def given_of(module: LightningModule, *, exclude_frozen: bool) -> dict[str, Any]:
    """Return the module's ``state_dict()`` for a checkpoint, whose parameters are live.

    Args:
        module: the module.
        exclude_frozen: whether to leave out parameters that are not trained.
    """
    if is_overridden("state_dict", module, nn.Module):
        found = module.state_dict()
    else:
        found = module.state_dict(keep_vars=True)
    return {
        key: value
        for key, value in found.items()
        if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
    }


def packed(
    checkpoint: Mapping[str, Any], module: nn.Module, engines: Sequence[Engine]
) -> dict[str, Any]:
    """Return Lightning's part of a checkpoint as a plain value for ``zf.save``; all ranks call."""
    known = {name for engine in engines for name in leaves_of(engine)}
    first = first_names(module)
    tensors: dict[str, str] = {}
    others: dict[str, Any] = {}
    for key, value in checkpoint["state_dict"].items():
        if first.get(id(value)) in known:
            tensors[key] = first[id(value)]
        else:
            others[key] = value.detach() if isinstance(value, Tensor) else value
    rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
    buffer = io.BytesIO()
    torch.save({"checkpoint": rest, "others": others}, buffer)
    return {
        "lightning": _FORMAT,
        "engines": len(engines),
        "names": tensors,
        "pickle": buffer.getvalue(),
    }


def plain(checkpoint: Mapping[str, Any], engines: Sequence[Engine]) -> dict[str, Any]:
    """Return a checkpoint with whole values, as plain Lightning has it; all ranks call."""
    whole = {**checkpoint, "state_dict": master_values(checkpoint["state_dict"], engines)}
    if "optimizer_states" in checkpoint:
        whole["optimizer_states"] = [engine.optimizer_state() for engine in engines]
    return whole


def read_extra(path: str | Path) -> dict[str, Any]:
    """Return the caller's data of a checkpoint of the strategy.

    Raises:
        CheckpointError: the directory has no checkpoint, or none that the strategy has saved.
    """
    found = zcheckpoint.read_manifest(zcheckpoint.step_path(path))
    data = decode(found.data)
    if not isinstance(data, dict) or data.get("lightning") != _FORMAT:
        raise CheckpointError(
            f"a directory for ckpt_path= is one that ZfunStrategy has saved; got {str(path)!r}, "
            "which another program has saved; load the directory with zf.load()",
            path=str(path),
        )
    return data


def unpacked(
    data: Mapping[str, Any], *, weights_only: bool | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Lightning's checkpoint without tensors, and other values of ``state_dict()``."""
    found = torch.load(
        io.BytesIO(data["pickle"]), map_location="cpu", weights_only=bool(weights_only)
    )
    return found["checkpoint"], found["others"]


def leaves_of(engine: Engine) -> list[str]:
    """Return the names of the leaves of a state."""
    parts = (engine.state.params, engine.state.frozen, engine.state.buffers)
    return [path for part in parts if part is not None for path in part.layout.paths]


@torch.no_grad()
def take(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values into a module that is not live; return those of values on ``meta``.

    Raises:
        CheckpointError: a parameter has no value.
    """
    later: dict[str, Any] = {}
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if name in values:
            if x.is_meta:
                later[name] = values[name]
            else:
                x.copy_(value.load() if isinstance(value := values[name], Deferred) else value)
        elif isinstance(x, nn.Parameter):
            raise CheckpointError(
                f"a checkpoint has every parameter of the module; got one without {name!r}; load "
                "the checkpoint into the module that was saved",
                leaf=name,
            )
    return later


def states_of(path: str | Path, num_engines: int) -> list[TrainingState]:
    """Open the training states of a checkpoint, without a group."""
    if num_engines == 1:
        return [zcheckpoint.training_state(path)]
    return [zcheckpoint.training_state(path, params=f"{i}.params") for i in range(num_engines)]


def opened(path: str, *, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return Lightning's part of a directory, the values of leaves by name, and other values.

    Args:
        path: the directory.
        weights_only: as in ``torch.load``, for Lightning's part.
    """
    data = read_extra(path)
    checkpoint, others = unpacked(data, weights_only=weights_only)
    leaves: dict[str, Any] = {x: y for x, y in others.items() if isinstance(y, Tensor)}
    for state in states_of(path, data["engines"]):
        leaves |= {**state.params, **state.buffers}
    return {**checkpoint, "state_dict": {}, MARK: path}, leaves, others


def load_states_of(
    checkpoint: Mapping[str, Any], engines: Sequence[Engine], groups: Sequence[ParamGroups]
) -> None:
    """Load the whole state of a directory into the engines of a fit, with the optimizers.

    Callbacks may have unfrozen parameters and added groups since the values were loaded.

    Args:
        checkpoint: of :func:`opened`.
        engines: of a run.
        groups: of the optimizers.

    Raises:
        CheckpointError: the checkpoint has another number of optimizers.
        ValueError: the checkpoint has other groups, as from torch.
    """
    path = checkpoint[MARK]
    if len(checkpoint["optimizer_states"]) != len(engines):
        raise CheckpointError(
            "a fit goes on with the optimizers of its checkpoint; got "
            f"{len(engines)} and a checkpoint with {len(checkpoint['optimizer_states'])}; return "
            "the same optimizers from configure_optimizers()",
            path=path,
        )
    for one, numbers in zip(groups, checkpoint["optimizer_states"], strict=True):
        given = {"state": dict[int, Any](), "param_groups": _torch_groups(numbers)}
        torch.optim.Optimizer.load_state_dict(one.torch_optimizer, given)
        one.retain(numbers.get("trained", ()))
    for engine in engines:
        engine.prepare()
    states = [engine.state for engine in engines]
    like = states[0] if len(states) == 1 else {str(i): x for i, x in enumerate(states)}
    found = zcheckpoint.load(path, like).state
    for index, engine in enumerate(engines):
        engine.zero_grad()
        engine.state = found if len(states) == 1 else found[str(index)]


def _torch_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the param groups that a directory has by names, with places as in torch."""
    found, first = list[dict[str, Any]](), 0
    for group in saved["param_groups"]:
        rest = {name: value for name, value in group.items() if name != "names"}
        found.append({**rest, "params": list(range(first, first + len(group["names"])))})
        first += len(group["names"])
    return found


@takes(path=PATH, out=PATH, optimizer=BOOL)
def collate(path: str | Path, out: str | Path, *, optimizer: bool = False) -> Path:
    """Write a checkpoint directory of the strategy as one file that plain Lightning loads.

    The file has the master weights, every buffer, and Lightning's own part: hyperparameters,
    callbacks, loops and schedulers. ``LightningModule.load_from_checkpoint(out)`` and
    ``Trainer.test(ckpt_path=out)`` read the file, without zfun. No group and no GPU is necessary,
    and the directory may come from any number of ranks.

    Args:
        path: the directory, as ``ModelCheckpoint`` or ``Trainer.save_checkpoint`` names it.
        out: the file to write.
        optimizer: also write the state of the optimizers as torch has it, so that
            ``Trainer.fit(ckpt_path=out)`` goes on under another strategy.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: there is no checkpoint, or none that the strategy has saved; or the
            checkpoint has parameters alone, and ``optimizer=True``.
        CorruptCheckpoint: the files are not those that were written.

    Example:
        ``collate("checkpoints/last.ckpt", "model.ckpt")``
    """
    out = Path(out)
    temporary = out.with_name(out.name + ".tmp")
    torch.save(whole_of(path, optimizer=optimizer), temporary)
    temporary.replace(out)
    return out


def whole_of(path: str | Path, *, optimizer: bool = False) -> dict[str, Any]:
    """Return what a directory of the strategy would be as a file of plain Lightning.

    Raises:
        CheckpointError: as for :func:`collate`.
    """
    data = read_extra(path)
    checkpoint, others = unpacked(data)
    found = states_of(path, data["engines"])
    values: dict[str, Any] = {}
    for state in found:
        values |= {**state.params, **state.buffers}
    loaded: dict[str, Tensor] = {}
    state_dict: dict[str, Any] = {}
    for key, name in data["names"].items():
        if name not in loaded:
            loaded[name] = values[name].load()
        state_dict[key] = loaded[name]
    whole = {**checkpoint, "state_dict": {**state_dict, **others}}
    if optimizer and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            "collate(optimizer=True) writes the state of optimizers; got a checkpoint of "
            "parameters alone; leave optimizer= out",
            path=str(path),
        )
    if optimizer:
        whole["optimizer_states"] = [
            _torch_state(state, saved)
            for state, saved in zip(found, checkpoint["optimizer_states"], strict=True)
        ]
    else:
        # Lightning then says that the file has parameters only.
        for key in ("optimizer_states", "lr_schedulers"):
            whole.pop(key, None)
    return whole


def _torch_state(state: TrainingState, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer in torch's form."""
    names = [name for group in saved["param_groups"] for name in group["names"]]
    # Checkpoints of earlier versions have one count.
    count, numbers = {"step": torch.tensor(float(state.step or 0))}, saved.get("numbers")
    entries: dict[int, dict[str, Any]] = {}
    for slot, leaves in state.moments.items():
        word = slot.rpartition(".")[2]
        for name, leaf in {} if word == "master" else leaves.items():
            beside = count if numbers is None else numbers.get(name)
            if beside is not None:
                entry = entries.setdefault(names.index(name), dict(beside))
                entry[TORCH_NAMES.get(word, word)] = leaf.load()
    return {"state": entries, "param_groups": _torch_groups(saved)}
