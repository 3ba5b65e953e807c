"""Training states of other libraries, written as checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.checkpoint._directory import FILES
from zfun.checkpoint._parts import join, real_dtype
from zfun.checkpoint._publish import Job
from zfun.checkpoint.format import CHUNK_BYTES, encode, plan_file, write_file
from zfun.collectives import single_group
from zfun.errors import OptionError
from zfun.files import Files
from zfun.objects import files_of
from zfun.options import ANY, PATH, TEXT, instance, integer, takes
from zfun.sources import Source, TrainingState, joined, tensors

# The names of torch's Adam, and the places in the state of zf.zero with zf.optim.adamw.
ADAM = {"exp_avg": "opt_state.mu", "exp_avg_sq": "opt_state.nu"}
_FILE = "00000.safetensors"
_HASH = "xxh64"  # the default of save()


@takes(
    found=instance(TrainingState, "a training state", "zf.sources.deepspeed('run')"),
    path=PATH,
    step=integer(0, 10**18 - 1) | None,
    moments=instance(Mapping, "a mapping from moments to paths", "{'exp_avg': 'opt_state.mu'}"),
    count=TEXT | None,
    data=ANY,
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
        data: your own data, as for :func:`zfun.save`.
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
    job = Job(
        str(path).rstrip("/") or "/",
        single_group(),
        files_of(path, files),
        None,
        CHUNK_BYTES,
        _HASH,
    )
    try:
        job.begin(step)
        report = _written(job, leaves)
        report["shared"] = {
            "step": step,
            "leaves": [
                [key, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
                for key, leaf in leaves.items()
            ],
            "ties": ties,
            "masters": dict[str, str](),
            "optional": list[str](),
            "values": {"step": step, "num_skipped": 0, "num_applied": num_applied},
            "data": encode(data, "data="),
            "composition": {"ranks": 1, "converted_from": found.params.origin},
        }
        job.publish([report])
    except BaseException:
        job.abandon()
        raise
    finally:
        job.release()
    return job.final


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


def _written(job: Job, leaves: Source) -> dict[str, Any]:
    """Write the payload, and return what the manifest needs of it."""
    report: dict[str, Any] = {"file": None, "pieces": [], "own": [], "values": {}}
    report |= {"rng": encode(None, "rng="), "loader": encode(None, "loader=")}
    held = {key: leaf for key, leaf in leaves.items() if leaf.numel()}
    if not held:
        return report
    sizes = {key: math.prod(leaf.shape) * (1 + leaf.dtype.is_complex) for key, leaf in held.items()}
    planned = plan_file(
        [
            (key, real_dtype(leaf.dtype), (sizes[key],) if leaf.dtype.is_complex else leaf.shape)
            for key, leaf in held.items()
        ]
    )

    def blocks() -> Iterator[np.ndarray]:
        yield np.frombuffer(planned.header, np.uint8)
        for leaf in held.values():
            yield _bytes_of(leaf.load())

    path = f"{job.temporary}/{_FILE}"
    written = write_file(
        job.files,
        path,
        blocks(),
        planned.num_bytes,
        job.chunk_bytes,
        hash_name=job.hash_name,
    )
    report["file"] = [_FILE, written.num_bytes, len(planned.header), list(written.chunks)]
    report["pieces"] = [
        [key, at, 0, sizes[key], False] for key, at in zip(held, planned.offsets, strict=True)
    ]
    return report


def _bytes_of(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().contiguous()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(torch.uint8).numpy()
