"""Checkpoints of an engine: a directory for each tag, and ``latest`` beside the directories."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zfun import checkpoint
from zfun.collectives import Group, all_reduce, broadcast
from zfun.errors import CheckpointError
from zfun.interop.deepspeed._client import packed, unpacked
from zfun.interop.deepspeed.utils import zero_to_fp32

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_DEEPSPEED = "*model_states.pt"


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """The parts of a checkpoint to load.

    Attributes:
        is_strict: whether each name of the module must be there.
        optimizer: the state of the optimizer.
        counters: the numbers of steps.
        scheduler: the scheduler.
        custom: a function that writes the weights.
    """

    is_strict: bool
    optimizer: bool
    counters: bool
    scheduler: bool
    custom: Callable[..., Any] | None


def save(
    engine: Any,
    save_dir: str | Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Save an engine; see :meth:`DeepSpeedEngine.save_checkpoint`."""
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder, scheduler, state = Path(save_dir), engine.lr_scheduler, engine._core.state
    _check_tag(engine._group, name)
    data = {
        **packed(client_state or {}),
        "counters": {counter: getattr(engine, counter) for counter in _COUNTERS},
        "lr_scheduler": None if scheduler is None else dict(scheduler.state_dict()),
        "lr": engine.get_lr(),
        "ties": _ties(engine.module),
    }
    kept = state._replace(frozen=None) if exclude_frozen else state
    saved = checkpoint.save(folder / name, kept, keep=1, data=data)

    def write_script(path: Path) -> None:
        _remove_others(folder / name, saved.path)
        _write(path, zero_to_fp32.SCRIPT.encode())

    write_on_rank_0(engine._group, folder / "zero_to_fp32.py", write_script)
    if save_latest:
        write_on_rank_0(engine._group, folder / "latest", lambda path: _write(path, name.encode()))
    return True


def load(
    engine: Any, load_dir: str | Path, tag: str | None, parts: CheckpointParts
) -> tuple[str | None, dict[str, Any] | None]:
    """Load an engine; see :meth:`DeepSpeedEngine.load_checkpoint`."""
    folder = Path(load_dir)
    if tag is None:
        named = folder / "latest"
        if not named.is_file():
            return None, None
        tag = named.read_text(encoding="utf-8").strip()
    path = folder / tag
    if any(path.glob(_DEEPSPEED)):
        raise CheckpointError(
            f"load_checkpoint() loads what this engine saved; got {str(path)!r}, which DeepSpeed "
            "wrote; convert it with zf.checkpoint.convert(zf.sources.deepspeed(path), new_path), "
            f"with new_path {str(folder / 'converted' / tag)!r}, and load that"
        )
    if not path.is_dir() or checkpoint.latest(path) is None:
        raise CheckpointError(
            f"load_checkpoint() takes a directory of save_checkpoint() and a tag; got {str(path)!r}"
            ", which has no checkpoint; pass the tag of one, or leave the tag out"
        )
    found = checkpoint.training_state(path)
    data: Any = found.values.get("data") or {}
    state = engine._core.state
    left_out = state.frozen is not None and not found.params.keys() & state.frozen.layout.paths
    if parts.optimizer and parts.custom is None and engine.optimizer is not None:
        kept = state._replace(frozen=None) if left_out else state
        loaded = checkpoint.load(path, kept).state
        engine._core.state = loaded._replace(frozen=state.frozen) if left_out else loaded
        for group, rate in zip(engine.optimizer.param_groups, data.get("lr", ()), strict=False):
            group["lr"] = rate
    else:
        weights = {name: leaf.load() for name, leaf in {**found.params, **found.buffers}.items()}
        ties = {name: weights[own] for name, own in data.get("ties", {}).items() if own in weights}
        strict = parts.is_strict and not left_out
        engine.load_module_state_dict(weights | ties, strict, parts.custom)
    engine.zero_grad()
    if parts.counters:
        for counter, value in data.get("counters", {}).items():
            setattr(engine, counter, value)
    if parts.scheduler and engine.lr_scheduler is not None and data.get("lr_scheduler"):
        engine.lr_scheduler.load_state_dict(data["lr_scheduler"])
    engine.loaded_checkpoint_tag = tag
    return str(path), unpacked(data)


def _remove_others(folder: Path, saved: str) -> None:
    """Remove the other saves of a tag, which may be of later steps of another run."""
    for other in checkpoint.steps(folder):
        if Path(other.path) != Path(saved):
            # By this name a later save removes what a crash leaves.
            gone = folder / f".saving-old-{Path(other.path).name}"
            Path(other.path).rename(gone)
            shutil.rmtree(gone)


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, each with the name in the state."""
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(param)] for name, param in every if names[id(param)] != name}


def _check_tag(group: Group, tag: str) -> None:
    """Refuse a tag that is another one on some rank."""
    own = torch.frombuffer(bytearray(hashlib.sha1(tag.encode()).digest()), dtype=torch.uint8)
    first = broadcast(own.clone(), group, 0, name="tag")
    if bool(all_reduce(torch.tensor([float((first != own).any())]), group)):
        raise CheckpointError(
            f"all ranks save under one tag; got {tag!r} here, and another one on some rank; leave "
            "the number of the rank out of the tag"
        )


def write_weights(weights: Mapping[str, Any], path: Path, group: Group) -> bool:
    """Write weights on rank 0; the other ranks wait.

    Raises:
        CheckpointError: on all ranks, where rank 0 cannot write.
    """
    whole = lambda: {name: value.cpu().clone() for name, value in weights.items()}
    write_on_rank_0(group, path, lambda partial: torch.save(whole(), partial))
    return True


def write_on_rank_0(group: Group, path: Path, write: Callable[[Path], None]) -> None:
    """Write a file that readers see whole or not at all; the other ranks wait.

    Raises:
        CheckpointError: on all ranks, where rank 0 cannot write.
    """
    error: OSError | None = None
    if group.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.part")
            write(partial)
            partial.replace(path)
        except OSError as caught:
            error = caught
    failed = broadcast(torch.tensor([error is not None]), group, 0, name=path.name)
    if bool(failed):
        raise CheckpointError(
            f"rank 0 writes {str(path)!r}; got {error or 'an error there'}; pass a directory that "
            "rank 0 can write",
            path=str(path),
        )


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
