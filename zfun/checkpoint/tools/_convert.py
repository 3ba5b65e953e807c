"""Training states of other libraries, written as checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zfun.checkpoint._collect import Contents, Shared, collect
from zfun.checkpoint._directory import FILES
from zfun.checkpoint._parts import Part, join
from zfun.checkpoint._publish import Job
from zfun.checkpoint.format._manifest import CHUNK_BYTES
from zfun.checkpoint.format._plain import encode
from zfun.checkpoint.format._write import Hashing
from zfun.collectives import single_group
from zfun.errors import CheckpointError, OptionError
from zfun.files import Files
from zfun.objects import files_of
from zfun.options import PATH, instance, integer, takes
from zfun.sources import Source, TrainingState, joined, tensors

# The names of torch's Adam, and the places in the state of zf.zero with zf.optim.adamw.
ADAM = {"exp_avg": "opt_state.mu", "exp_avg_sq": "opt_state.nu"}
_HASH = "xxh64"  # the default of save()


@takes(
    found=instance(TrainingState, "a training state", "zf.sources.deepspeed('run')"),
    path=PATH,
    step=integer(0, 10**18 - 1) | None,
    moments=instance(Mapping, "a mapping from moments to paths", "{'exp_avg': 'opt_state.mu'}"),
    files=FILES,
)
def convert(
    found: TrainingState,
    path: str | Path,
    *,
    step: int | None = None,
    moments: Mapping[str, str] = ADAM,
    count: str | None = "opt_state.count",
    data: Any = None,
    files: Files | None = None,
) -> str:
    """Write the training state of another library as a checkpoint, so that the run can go on.

    :func:`zfun.load` then fills a state of ``zf.zero`` of any composition: parameters, moments and
    the number of steps. One leaf is in memory at a time. One process calls; no group is used.

    Args:
        found: the training state, such as that of :func:`zfun.sources.deepspeed`.
        path: the directory of checkpoints.
        step: the step of the checkpoint; by default ``found.step``.
        moments: by name in ``found.moments``, the path in the new state. The default is that of
            ``zf.optim.adam`` and ``zf.optim.adamw``.
        count: the path of the optimizer's count of steps; ``None`` for an optimizer without.
        data: your own data, as for :func:`zfun.save`; by default those of ``found.values`` that a
            checkpoint can keep.
        files: the operations on files.

    Returns:
        The directory of the checkpoint. Parameters without moments are frozen ones there, as for
        ``zf.zero(..., trainable=...)``; if no parameter has moments, none is frozen.

    Raises:
        OptionError: ``found.step`` is ``None``, and ``step`` too, or a moment without a path.
        CheckpointError: the disk refused, or a job saves to the directory.

    Example:
        >>> import tempfile, zfun as zf
        >>> w = tensors({"w": torch.ones(2)})
        >>> found = TrainingState(w, tensors({}), {"exp_avg": w, "exp_avg_sq": w}, 7, {})
        >>> loss = lambda params, batch: (params["w"] * batch).sum()
        >>> zero = zf.zero(3, loss, zf.optim.adamw(0.1), zf.process_group())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     made = convert(found, path)
        ...     state = zf.load(path, zero.init({"w": torch.zeros(2)})).state
        >>> state.step, zero.params(state)["w"]
        (7, tensor([1., 1.]))
    """
    step = found.step if step is None else step
    if step is None:
        raise OptionError(
            "a checkpoint has the number of a step; got a training state without one; pass step=..."
        )
    homeless = [slot for slot in found.moments if slot not in moments]
    if homeless:
        raise OptionError(
            f"moments= of convert() names a path for each moment; got none for {homeless[0]!r}; "
            f"write moments={{{homeless[0]!r}: 'opt_state...', ...}}, or remove the moment"
        )
    num_applied = step if found.step is None else found.step
    leaves, ties = _keyed(found, moments)
    if count is not None and found.moments:
        leaves = joined(leaves, tensors({count: torch.tensor(num_applied)}))
    values = {"step": step, "num_skipped": 0, "num_applied": num_applied}
    contents = Contents(
        [Part(path, value) for path, value in {**leaves, **values}.items()],
        ties,
        {},
        step,
        {"converted_from": found.params.origin},
        _kept(found.values) if data is None else encode(data, "data="),
    )
    group = single_group()
    job = Job(str(path), group, files_of(path, files), None, Hashing(CHUNK_BYTES, _HASH))
    try:
        job.begin(step)
        job.in_turn(*collect(contents, Shared(set(), {}), group))
    except BaseException:
        job.abandon()
        raise
    finally:
        job.release()
    return job.final


def _kept(values: Mapping[str, Any]) -> Any:
    """Encode the values that a checkpoint can keep, if they are read and there are any."""
    kept: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        with contextlib.suppress(CheckpointError):
            encode(value, "data=")
            kept[name] = value
    return encode(kept or None, "data=")


def _keyed(found: TrainingState, moments: Mapping[str, str]) -> tuple[Source, dict[str, str]]:
    """Return the leaves by their keys in a state of ``zf.zero``, and the ties."""
    trained = {name for slot in found.moments.values() for name in slot}
    aliases = found.params.ties

    def place(name: str) -> str:
        is_frozen = trained and aliases.get(name, name) not in trained
        return join("frozen" if is_frozen else "params", name)

    parts = [
        found.params.renamed(lambda name: None if name in aliases else place(name)),
        found.buffers.renamed(lambda name: join("buffers", name)),
    ]
    ties = {place(name): place(first) for name, first in aliases.items()}
    for slot, held in found.moments.items():
        parts.append(held.renamed(lambda name: join(moments[slot], name)))
        ties |= {
            join(moments[slot], name): join(moments[slot], first)
            for name, first in aliases.items()
            if first in held
        }
    return joined(*parts), ties
