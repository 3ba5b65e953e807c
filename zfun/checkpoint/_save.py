"""Save a state: every rank writes its part, rank 0 publishes; see [Note: publication]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zfun import ops, tree
from zfun.checkpoint._background import Saved, in_background, settle
from zfun.checkpoint._collect import (
    Collected,
    Output,
    bytes_of,
    collect,
    differing,
    kept_parts,
    records_of,
    snapshot,
)
from zfun.checkpoint._directory import FILES
from zfun.checkpoint._parts import Part, PartSlot, group_of, masters_of, parts_of, ties_of
from zfun.checkpoint._publish import Job
from zfun.checkpoint._random import loader_position, random_states
from zfun.checkpoint._together import agree
from zfun.checkpoint.format import CHUNK_BYTES, encode, plan_file, write_file
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.files import Files
from zfun.flat import Flat
from zfun.objects import files_of
from zfun.options import (
    ANY,
    BOOL,
    FUNCTION,
    GROUP,
    PATH,
    SECONDS,
    Kind,
    instance,
    integer,
    one_of,
    takes,
)
from zfun.stores import Stored

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
    state=ANY,
    step=integer(0, 10**18 - 1) | None,
    group=GROUP | None,
    keep=integer(1) | None,
    background=BOOL,
    data=ANY,
    loader=ANY,
    rng=instance(dict, "a dict of random generators", "{'augment': generator}") | None,
    by_rank=FUNCTION | None,
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
    job = Job(str(path).rstrip("/") or "/", everyone, files, keep, chunk_bytes, checksum)
    error: Exception | None = None
    contents = None
    try:
        contents = _contents_of(state, step, data, loader, rng, everyone, by_rank or has_buffers)
    except Exception as caught:  # noqa: BLE001, raised below on all ranks
        error = caught
    found = agree(everyone, error, None if contents is None else contents.step)
    assert contents is not None
    if len(set(found)) > 1:
        raise OptionError(f"all ranks save one step; got the steps {found}; pass the same step=")
    names = differing(contents.records, everyone)
    collected = collect(contents.parts, contents.ties, names, everyone)
    try:
        job.begin(contents.step)
        if not background:
            return _in_turn(job, collected, contents)
        try:
            collected = replace(collected, sources=snapshot(collected.sources))
        except Exception as caught:  # noqa: BLE001, raised below on all ranks
            error = caught
        job.agree(error)
        return in_background(
            job, lambda: _written(job, collected, contents, gentle=True), timeout_s
        )
    except BaseException:
        job.release()
        raise


class _Contents(NamedTuple):
    """The contents of a checkpoint beside tensors."""

    parts: list[Part]
    ties: dict[str, str]
    masters: dict[str, str]
    records: dict[str, str]
    step: int
    data: Any
    loader: Any
    rng: Any
    composition: dict[str, Any]


def _contents_of(
    state: tree.Tree,
    step: int | None,
    data: Any,
    loader: Any,
    rng: Mapping[str, Any] | None,
    group: Group,
    by_rank: Callable[[str], bool],
) -> _Contents:
    found = parts_of(state)
    parts = kept_parts(found)
    if step is None:
        step = getattr(state, "step", None)
    if type(step) is not int:
        raise OptionError(
            "a checkpoint has the number of a step; got a state without .step; pass step=..."
        )
    return _Contents(
        parts,
        ties_of(found),
        masters_of(parts),
        records_of(parts, group, by_rank),
        step,
        encode(data, "data="),
        encode(loader_position(loader), "loader="),
        encode(random_states(rng), "rng="),
        {"values": [_described(part) for part in parts if isinstance(part.value, Flat)]},
    )


def _described(part: Part) -> dict[str, Any]:
    flat = part.value
    stores = {repr(x.store) for x in flat.buffers if isinstance(x, Stored)}
    return {
        "path": part.path,
        "placement": repr(flat.placement),
        "ranks": flat.group.size,
        "buckets": [bucket.padded_numel for bucket in flat.layout.buckets],
        "dtypes": sorted({str(x.dtype).removeprefix("torch.") for x in flat.buffers}),
        "stores": sorted(stores),
    }


def _in_turn(job: Job, collected: Collected, contents: _Contents) -> Saved:
    """Write and publish, with collectives between."""
    error, report = None, None
    try:
        report = _written(job, collected, contents)
    except Exception as caught:  # noqa: BLE001, raised below on all ranks
        error = caught
    reports = job.agree(error, report)
    try:
        if job.group.rank == 0:
            job.publish(reports)
    except Exception as caught:  # noqa: BLE001, raised below on all ranks
        error = caught
    job.agree(error)
    job.release()
    return Saved(job.final)


def _written(
    job: Job, collected: Collected, contents: _Contents, *, gentle: bool = False
) -> dict[str, Any]:
    """Write the payload file of this rank, and report what rank 0 needs for the manifest."""
    outputs = [output for source in collected.sources for output in source.outputs]
    report: dict[str, Any] = {
        "file": None,
        "pieces": [],
        "own": [_leaf_json(slot) for slot in collected.own],
        "values": collected.own_values,
        "rng": contents.rng,
        "loader": contents.loader,
    }
    if job.group.rank == 0:
        report["shared"] = {
            "step": contents.step,
            "leaves": [_leaf_json(slot) for slot in collected.slots],
            "ties": collected.ties,
            "masters": contents.masters,
            "optional": [part.path for part in contents.parts if part.is_optional],
            "values": collected.values,
            "data": contents.data,
            "composition": {"ranks": job.group.size, **contents.composition},
        }
    if not outputs:
        return report
    dtypes = [source.dtype for source in collected.sources for _ in source.outputs]
    planned = plan_file([_described_tensor(x, d) for x, d in zip(outputs, dtypes, strict=True)])
    name = f"{job.group.rank:05d}.safetensors"
    written = write_file(
        job.files,
        f"{job.temporary}/{name}",
        _with_header(planned.header, bytes_of(collected.sources)),
        planned.num_bytes,
        job.chunk_bytes,
        hash_name=job.hash_name,
        gentle=gentle,
    )
    report["file"] = [name, written.num_bytes, len(planned.header), list(written.chunks)]
    report["pieces"] = [
        [x.slot.key, at, x.first, x.numel, x.by_rank]
        for x, at in zip(outputs, planned.offsets, strict=True)
    ]
    return report


def _with_header(header: bytes, blocks: Any) -> Any:
    yield np.frombuffer(header, np.uint8)
    yield from blocks


def _described_tensor(output: Output, dtype: Any) -> tuple[str, Any, tuple[int, ...]]:
    """Name a range for other tools: a whole real leaf by its key, in its shape."""
    slot = output.slot
    is_whole = output.numel == slot.numel
    name = slot.key if is_whole else f"{slot.key}[{output.first}:{output.first + output.numel}]"
    return name, dtype, slot.shape if is_whole and not slot.dtype.is_complex else (output.numel,)


def _leaf_json(slot: PartSlot) -> list[Any]:
    return [slot.key, str(slot.dtype).removeprefix("torch."), list(slot.shape)]
