"""Checkpoints of an engine: a directory for each tag, and ``latest`` beside the directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zfun.checkpoint import latest, read_manifest, step_path, training_state
from zfun.checkpoint.format import decode
from zfun.collectives import Group, broadcast
from zfun.errors import CheckpointError

__all__ = ["load", "save", "write_weights"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_DEEPSPEED = "*model_states.pt"


def save(
    engine: Any,
    save_dir: str | Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    save_latest: bool,
) -> bool:
    """Save an engine; see :meth:`DeepSpeedEngine.save_checkpoint`."""
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    scheduler = engine.lr_scheduler
    engine._core.save(
        str(Path(save_dir) / name),
        extra={
            "client_state": dict(client_state or {}),
            "counters": {counter: getattr(engine, counter) for counter in _COUNTERS},
            "lr_scheduler": None if scheduler is None else dict(scheduler.state_dict()),
            "lr": engine.get_lr(),
        },
    )
    if save_latest:
        latest_path = Path(save_dir) / "latest"
        write_on_rank_0(engine._group, latest_path, lambda path: _write(path, name.encode()))
    return True


def load(
    engine: Any,
    load_dir: str | Path,
    tag: str | None,
    strict: bool,
    *,
    has_optimizer: bool,
    has_counters: bool,
    has_scheduler: bool,
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
    if not path.is_dir() or latest(path) is None:
        raise CheckpointError(
            f"load_checkpoint() takes a directory of save_checkpoint() and a tag; got {str(path)!r}"
            ", which has no checkpoint; pass the tag of one, or leave the tag out"
        )
    if has_optimizer:
        extra = engine._core.load(str(path)) or {}
        for group, rate in zip(engine._groups_now(), extra.get("lr", ()), strict=False):
            group["lr"] = rate
    else:
        found = training_state(path)
        weights = {name: leaf.load() for name, leaf in {**found.params, **found.buffers}.items()}
        engine._core.replace(weights, strict=strict)
        extra = decode(read_manifest(step_path(path)).data) or {}
    for counter, value in extra.get("counters", {}).items() if has_counters else ():
        setattr(engine, counter, value)
    if has_scheduler and engine.lr_scheduler is not None and extra.get("lr_scheduler"):
        engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    engine.loaded_checkpoint_tag = tag
    return str(path), dict(extra.get("client_state", {}))


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
