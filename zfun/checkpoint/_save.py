"""Save a state: every rank writes its part, rank 0 publishes; see [Note: publication]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zfun import ops, tree
from zfun.checkpoint import _collect
from zfun.checkpoint._background import Saved, in_background, settle
from zfun.checkpoint._directory import FILES
from zfun.checkpoint._parts import Part, group_of, is_over_model_axes, masters_of, parts_of, ties_of
from zfun.checkpoint._publish import Job
from zfun.checkpoint._random import loader_position, random_states
from zfun.checkpoint._together import agree, attempt
from zfun.checkpoint.format._manifest import CHUNK_BYTES
from zfun.checkpoint.format._plain import dtype_name, encode
from zfun.checkpoint.format._write import Hashing
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.files import Files
from zfun.flat import Flat
from zfun.objects import files_of
from zfun.options import PATH, SECONDS, Kind, instance, integer, one_of, takes
from zfun.stores import stored

_CHUNK = Kind(
    lambda x: integer(4096, 1 << 26).accepts(x) and x % 4096 == 0,
    ("a multiple of 4096 from 4096 to 2**26",),
    "2**20",
)


def has_buffers(path: str) -> bool:
    """Whether a path leads to the buffers of a state, which may be kept by rank."""
    return "buffers" in path.split(".")


@ops.uncompiled
@takes(
    path=PATH,
    step=integer(0, 10**18 - 1) | None,
    keep=integer(1) | None,
    rng=instance(dict, "a dict of random generators", "{'augment': generator}") | None,
    checksum=one_of("xxh64", "sha256"),
    chunk_bytes=_CHUNK,
    timeout_s=SECONDS,
    files=FILES,
)
def save(
    path: str | Path,
    state: tree.Tree,
    *,
    step: int | None = None,
    group: Group | None = None,
    keep: int | None = None,
    background: bool = False,
    data: Any = None,
    loader: Any = None,
    rng: Mapping[str, Any] | None = None,
    by_rank: Callable[[str], bool] | None = None,
    checksum: str = "xxh64",
    chunk_bytes: int = CHUNK_BYTES,
    timeout_s: float = 1800.0,
    files: Files | None = None,
) -> Saved:
    """Save a state as one checkpoint in a directory of checkpoints. All ranks call.

    The checkpoint holds each logical leaf once, for :func:`zfun.load` under any group size, stage,
    bucket size, mesh, precision and store. The checkpoint appears whole, by one rename, or not at
    all. If one rank fails, all ranks raise, and the checkpoints that exist stay as they are.

    Args:
        path: the directory of checkpoints, which all ranks see; made if missing.
        state: flats, tensors, handles of stores, numbers and text in any tree, such as the state of
            :func:`zfun.zero`.
        step: the step, which names the checkpoint; by default ``state.step``.
        group: the ranks; by default those of the flats in ``state``.
        keep: how many steps to keep, the new one included; by default all.
        background: return when the values are copied to host memory, and write while training
            goes on. An error surfaces at the next step of :func:`zfun.zero`, at the next save, or
            at ``wait()``. The end of the process waits for the save.
        data: the caller's own numbers, text, lists, dicts and small tensors; those of rank 0.
        loader: the position of this rank's data loader: an object with ``state_dict()``, as
            torchdata's ``StatefulDataLoader`` has, or plain values.
        rng: this rank's random generators, by name: of torch, numpy or Python. torch's default
            generators are saved without being named.
        by_rank: ``by_rank(path)``: whether a replicated flat at this path of the state may hold
            values that differ from rank to rank; by default the flats under ``buffers``.
        checksum: the hash of every chunk. ``"xxh64"`` finds accidents at the speed of memory;
            ``"sha256"`` also finds intent, for those who keep the digest of the manifest elsewhere.
        chunk_bytes: bytes that are hashed and written at a time, a multiple of 4096.
        timeout_s: seconds that the ranks wait for each other in the background.
        files: the operations on files, for tests that let some of them fail.

    Returns:
        A handle: ``path`` of the checkpoint, and ``wait()``.

    Raises:
        CheckpointError: on all ranks: the disk refused, another job saves to ``path``, or a value
            that no checkpoint can hold. The error has ``path``, ``errno``, ``leaf`` and ``rank``.
        SpecMismatch: ranks hold different trees.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> directory = tempfile.TemporaryDirectory()
        >>> def main(group):
        ...     return zf.save(directory.name, {"w": zf.shard(torch.arange(4.0), group)}, step=3)
        >>> saved = zf.simulate(2, main)[0]
        >>> like = {"w": zf.shard(torch.zeros(4), zf.process_group())}
        >>> zf.unshard(zf.load(directory.name, like).state["w"])
        tensor([0., 1., 2., 3.])
        >>> directory.cleanup()
    """
    everyone = group_of(state, group)
    settle(everyone)
    files = files_of(path, files, timeout_s)
    job = Job(str(path), everyone, files, keep, Hashing(chunk_bytes, checksum))

    def look() -> tuple[_collect.Contents, dict[str, str]]:
        contents = _contents_of(state, step, data, loader, rng)
        return contents, _collect.records_of(contents.parts, everyone, by_rank or has_buffers)

    found, error = attempt(look)
    steps = agree(everyone, error, None if found is None else found[0].step)
    assert found is not None
    contents, records = found
    if len(set(steps)) > 1:
        raise OptionError(f"all ranks save one step; got the steps {steps}; pass the same step=")
    is_spread = is_over_model_axes(state)
    shared = _collect.compared(records, everyone, is_spread=is_spread)
    sources, report = _collect.collect(contents, shared, everyone, is_spread=is_spread)
    try:
        job.begin(contents.step)
        if not background:
            job.in_turn(sources, report)
            return Saved(job.final)
        copies: list[_collect.WriteSource] = []
        job.together(lambda: copies.extend(_collect.snapshot(sources)))
        return in_background(job, lambda: job.write(copies, report, gentle=True), timeout_s)
    except BaseException:
        job.release()
        raise


def _contents_of(
    state: tree.Tree, step: int | None, data: Any, loader: Any, rng: Mapping[str, Any] | None
) -> _collect.Contents:
    found = parts_of(state)
    parts = _collect.kept_parts(found)
    if step is None:
        step = getattr(state, "step", None)
    if type(step) is not int:
        raise OptionError(
            "a checkpoint has the number of a step; got a state without .step; pass step=..."
        )
    return _collect.Contents(
        parts,
        ties_of(found),
        masters_of(parts),
        step,
        {"values": [_described(part) for part in parts if isinstance(part.value, Flat)]},
        encode(data, "data="),
        encode(loader_position(loader), "loader="),
        encode(random_states(rng), "rng="),
    )


def _described(part: Part) -> dict[str, Any]:
    flat = part.value
    return {
        "path": part.path,
        "placement": repr(flat.placement),
        "ranks": flat.group.size,
        "buckets": [bucket.padded_numel for bucket in flat.layout.buckets],
        "dtypes": sorted({dtype_name(x.dtype) for x in flat.buffers}),
        "stores": sorted({repr(x.store) for x in stored(flat)}),
    }
