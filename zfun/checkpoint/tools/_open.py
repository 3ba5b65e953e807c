"""Checkpoints as sources of leaves, for tools, without a group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zfun import sources
from zfun.checkpoint._directory import manifest_at
from zfun.checkpoint._fill import read_leaf
from zfun.checkpoint._parts import join
from zfun.checkpoint.format._manifest import LeafEntry, Manifest
from zfun.checkpoint.format._payload import Payload
from zfun.checkpoint.format._plain import decode
from zfun.errors import CheckpointError
from zfun.options import FLOATING, PATH, integer, takes
from zfun.sources import Deferred, Source, TrainingState, Written

# The default of Hugging Face's own writer.
DEFAULT_SHARD_BYTES = 5 * 10**9


@takes(path=PATH, step=integer(0) | None)
def leaves(path: str | Path, step: int | None = None) -> Source:
    """Open all leaves of a checkpoint by key, without a group.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint.
        step: the step; by default the newest.

    Returns:
        The leaves by key, such as ``"opt_state.mu.h.0.w"``, tied ones under all of their keys. The
        leaf of one rank has the rank behind its key, such as ``"buffers.n[1]"``. A leaf is read and
        verified when asked for.

    Raises:
        CorruptCheckpoint: the manifest is damaged; from a leaf, its bytes are.
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     leaves(path)["w"].load()
        tensor([1., 1., 1.])
    """
    return _leaves(*manifest_at(path, step))


def _leaves(directory: str, manifest: Manifest, *, of_rank_0: bool = False) -> Source:
    found: dict[str, Deferred] = {}
    suffixes: dict[str, list[str]] = {}
    for entry in manifest.leaves:
        if of_rank_0 and entry.rank:
            continue
        suffix = "" if entry.rank is None or of_rank_0 else f"[{entry.rank}]"
        suffixes.setdefault(entry.key, []).append(suffix)
        found[entry.key + suffix] = _deferred(directory, manifest, entry)
    for alias, key in manifest.ties.items():
        found |= {alias + suffix: found[key + suffix] for suffix in suffixes.get(key, ())}
    return Source(found, directory)


def _deferred(directory: str, manifest: Manifest, entry: LeafEntry) -> Deferred:
    def make() -> torch.Tensor:
        with Payload(directory, manifest) as payload:
            return read_leaf(payload, entry)

    return Deferred(entry.key, torch.empty(entry.shape, dtype=entry.dtype, device="meta"), make)


@takes(path=PATH, step=integer(0) | None)
def training_state(
    path: str | Path, step: int | None = None, *, params: str = "params", masters: bool = True
) -> TrainingState:
    """Open the training state of a checkpoint by the names of the parameters, without a group.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint.
        step: the step; by default the newest.
        params: the path of the parameters in the state that was saved; ``"."`` if the state is
            the parameters. Frozen parameters, buffers and the optimizer's state are looked for
            beside them, as ``zf.zero`` has them.
        masters: whether a parameter with a master weight has the value of the master weight, and
            not the rounded one.

    Returns:
        The parameters, frozen ones included, by their paths in the user's tree, which are the
        module's own names for ``zf.functional(module).params``. A buffer that differs from rank to
        rank has the value of rank 0.

    Raises:
        CorruptCheckpoint: the manifest is damaged; from a leaf, its bytes are.
        CheckpointError: there is no such checkpoint, or none with parameters at ``params``.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> loss = lambda params, batch: (params["w"] * batch).sum()
        >>> zero = zf.zero(1, loss, zf.optim.adamw(0.1), zf.process_group())
        >>> state, _ = zero.step(zero.init({"w": torch.ones(2)}), torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, state)
        ...     found = training_state(path)
        ...     list(found.params), list(found.moments), found.step
        (['w'], ['mu', 'nu'], 1)
    """
    directory, manifest = manifest_at(path, step)
    everything = _leaves(directory, manifest, of_rank_0=True)
    above = "" if params == "." else params.rpartition(".")[0] or "."
    found = _beneath(everything, params, manifest.masters if masters else {})
    frozen = _beneath(everything, join(above, "frozen"), {}) if above else Source({}, directory)
    if not found and not frozen:
        known = ", ".join(sorted({name.split(".")[0] for name in everything})[:8]) or "no leaves"
        raise CheckpointError(
            f"params= is the path of the parameters in the saved state; got {params!r} for "
            f"{directory}, which has {known}; name one of these, or '.' for all",
            path=directory,
        )
    if not above:
        return TrainingState(found, frozen, {}, manifest.step, _values(manifest))
    buffers = _beneath(everything, join(above, "buffers"), {})
    moments = _by_slot(_beneath(everything, join(above, "opt_state"), {}), found)
    applied = manifest.values.get(join(above, "num_applied"), manifest.step)
    return TrainingState(
        sources.joined(found, frozen),
        buffers,
        {slot: Source(held, directory) for slot, held in moments.items()},
        applied if type(applied) is int else None,
        _values(manifest),
    )


def _beneath(everything: Source, path: str, masters: Mapping[str, str]) -> Source:
    """Return the leaves below a path by their paths there, or their master weights."""
    found: dict[str, Deferred] = {}
    for key, leaf in everything.items():
        if path == "." or key == path or key.startswith(f"{path}."):
            name = key if path == "." else key[len(path) + 1 :] or "."
            first = everything.ties.get(key, key) if masters else key
            found[name] = everything.get(masters.get(first, ""), leaf)
    return Source(found, everything.origin)


def _by_slot(state: Source, params: Source) -> dict[str, dict[str, Deferred]]:
    """Return the leaves of an optimizer's state that belong to parameters, such as ``mu.h.w``."""
    slots: dict[str, dict[str, Deferred]] = {}
    for key, leaf in state.items():
        words = key.split(".")
        for cut in range(1, len(words) + 1):
            name = ".".join(words[cut:]) or "."
            if name in params and leaf.shape == params[name].shape:
                slots.setdefault(".".join(words[:cut]), {})[name] = leaf
                break
    return slots


def _values(manifest: Manifest) -> dict[str, Any]:
    data = decode(manifest.data)
    return {**manifest.values, **({} if data is None else {"data": data})}


@takes(
    path=PATH, out=PATH, step=integer(0) | None, dtype=FLOATING | None, max_shard_bytes=integer(1)
)
def export(
    path: str | Path,
    out: str | Path,
    step: int | None = None,
    *,
    params: str = "params",
    dtype: torch.dtype | None = None,
    masters: bool = True,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Written:
    """Write the parameters of a checkpoint as safetensors, without a group.

    The folder is one that ``from_pretrained`` of Hugging Face reads, once ``config.json`` is in it.
    One leaf is in memory at a time, and every byte is verified. Buffers are written too.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint.
        out: the folder to write.
        step: the step; by default the newest.
        params: as for :func:`training_state`.
        dtype: the dtype of floating leaves; by default each keeps its own, that of master weights
            where there are any.
        masters: as for :func:`training_state`.
        max_shard_bytes: above this size the folder has several files and an index.

    Returns:
        The files and their size.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged. The folder then has no model.
        CheckpointError: there is no such checkpoint, or none with parameters at ``params``.
        OptionError: the folder has a model.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"params": {"w": torch.ones(3)}}, step=7)
        ...     written = export(path, f"{path}/model", dtype=torch.float16)
        ...     zf.sources.huggingface(f"{path}/model")["w"].load()
        tensor([1., 1., 1.], dtype=torch.float16)
    """
    found = training_state(path, step, params=params, masters=masters)
    return sources.write_safetensors(
        out,
        sources.joined(found.params, found.buffers),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
