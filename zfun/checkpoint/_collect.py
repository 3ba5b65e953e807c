"""The part of a state that one rank writes."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfun import ops, stores
from zfun.checkpoint import _parts
from zfun.checkpoint.format._manifest import check_key
from zfun.checkpoint.format._plain import DTYPES, dtype_name, encode, real_dtype
from zfun.collectives import Group, gather_json, gather_values, model_groups
from zfun.errors import CheckpointError, SpecMismatch
from zfun.flat import Flat
from zfun.placement import P, R
from zfun.sources import Deferred

# A tensor that all ranks hold is written by one of them, or in parts from this length on.
_SPLIT_BYTES = 1 << 20


class Contents(NamedTuple):
    """The contents of a checkpoint on this rank; ``data``, ``loader`` and ``rng`` are encoded."""

    parts: Sequence[_parts.Part]
    ties: dict[str, str]
    masters: dict[str, str]
    step: int
    composition: dict[str, Any]
    data: Any = None
    loader: Any = None
    rng: Any = None


@dataclass(frozen=True, slots=True)
class WriteSource:
    """A tensor, handle or deferred leaf, of which this rank writes some ranges.

    Attributes:
        value: the source; a list of the ranges after :func:`snapshot`.
        dtype: the real dtype of the elements.
        outputs: the ranges.
    """

    value: Any
    dtype: torch.dtype
    outputs: tuple[_parts.PartSpan, ...]


def kept_parts(parts: Sequence[_parts.Part]) -> list[_parts.Part]:
    """Return the parts to save, without second ties, and check their keys.

    Raises:
        CheckpointError: a part that no checkpoint can hold.
    """
    ties = _parts.ties_of(parts)
    kept = [part for part in parts if part.path not in ties or isinstance(part.value, Flat)]
    _check_keys(kept)
    return kept


def collect(
    contents: Contents, shared: Shared, group: Group, *, is_spread: bool = False
) -> tuple[list[WriteSource], dict[str, Any]]:
    """Find what this rank writes.

    Returns:
        The sources, and a report for the manifest: this rank's own leaves and values, and from
        rank 0 what all ranks share. The widest elements come first, because safetensors aligns its
        tensors so.
    """
    differing = shared.differing
    slots: list[_parts.PartSlot] = []
    own: list[_parts.PartSlot] = []
    sources: list[WriteSource] = []
    values: dict[str, Any] = {}
    own_values: dict[str, Any] = {}
    for index, part in enumerate(contents.parts):
        if _parts.is_plain(part.value):
            # Ranks of a model axis know the missed steps of their own leaves.
            is_joined = is_spread and part.check is not None
            held = own_values if part.path in differing and not is_joined else values
            held[part.path] = encode(part.value, f"the state at {part.path!r}")
            continue
        found = _parts.slots_of(part)
        if isinstance(part.value, Flat):
            for bucket, source in _sources_of(part, found, differing):
                is_own = _is_own(part, bucket, differing)
                (own if is_own else slots).extend(x for x in found if x.bucket == bucket)
                sources.append(source)
            continue
        slot = found[0]
        is_own = part.path in differing
        (own if is_own else slots).append(slot)
        if is_spread and not is_own:
            # Ranks count their parts differently, so the first rank that has one writes it.
            low, high = 0, slot.numel * (shared.first.get(part.path, 0) == group.rank)
        else:
            low, high = (0, slot.numel) if is_own else _share(slot, index, group)
        output = _parts.PartSpan(slot, low, low, high - low, is_own)
        outputs = (output,) if low < high else ()
        sources.append(WriteSource(part.value, real_dtype(slot.dtype), outputs))
    report: dict[str, Any] = {"own": list(map(_described, own)), "values": own_values}
    report |= {"rng": contents.rng, "loader": contents.loader}
    if group.rank == 0 or is_spread:
        report["shared"] = {
            "step": contents.step,
            "leaves": list(map(_described, slots)),
            "ties": contents.ties,
            "masters": contents.masters,
            "optional": [part.path for part in contents.parts if part.is_optional],
            "values": values,
            "joined": [part.path for part in contents.parts if part.check is not None],
            "data": contents.data if group.rank == 0 else None,
            "composition": {"ranks": group.size, **contents.composition},
        }
    return sorted((x for x in sources if x.outputs), key=lambda x: -x.dtype.itemsize), report


def _described(slot: _parts.PartSlot) -> list[Any]:
    return [slot.key, dtype_name(slot.dtype), list(slot.shape), list(slot.cuts)]


def _is_own(part: _parts.Part, bucket: int, differing: set[str]) -> bool:
    return part.value.placement is P or _name_of(part, bucket) in differing


def _name_of(part: _parts.Part, bucket: int) -> str:
    """Name a bucket among the records; ranks with other parts of its leaves have other names."""
    layout, axes = part.value.layout, model_groups(part.value.group)
    spreads = (layout.leaves[leaf].spread for leaf in layout.buckets[bucket].leaves)
    is_part = any(kind is not None for spread in spreads for kind in spread)
    place = "".join(f"@{axis.rank}" for axis in axes) if is_part else ""
    return f"{part.path}#{bucket}{place}"


def _sources_of(
    part: _parts.Part, slots: Sequence[_parts.PartSlot], differing: set[str]
) -> Iterator[tuple[int, WriteSource]]:
    flat = part.value
    for bucket, buffer in enumerate(flat.buffers):
        is_own = _is_own(part, bucket, differing)
        whole = (0, flat.layout.buckets[bucket].padded_numel)
        within = whole if is_own else _parts.owned_range(flat, bucket)
        found = _parts.spans_of(part, slots, bucket, within)
        spans = (x for x in found if is_own or not x.slot.is_shared)
        outputs = tuple(span._replace(by_rank=is_own) for span in spans)
        yield bucket, WriteSource(buffer, buffer.dtype, outputs)


def _share(slot: _parts.PartSlot, index: int, group: Group) -> tuple[int, int]:
    if slot.numel * slot.dtype.itemsize >= _SPLIT_BYTES:
        return _parts.share_of(0, slot.numel, group)
    return (0, slot.numel) if index % group.size == group.rank else (0, 0)


def _check_keys(parts: Sequence[_parts.Part]) -> None:
    seen: set[str] = set()
    for part in parts:
        _parts.check_part(part)
        slots: list[_parts.PartSlot] = [] if _parts.is_plain(part.value) else _parts.slots_of(part)
        for key in [part.path] if _parts.is_plain(part.value) else [slot.key for slot in slots]:

            def refuse(problem: str, key: str = key) -> None:
                raise CheckpointError(f"{problem}; rename the leaf", leaf=str(key)[:80])

            check_key(key, refuse)
            if key in seen:
                refuse(f"every leaf of a state has a path of its own; got {key!r} twice")
            seen.add(key)
        for slot in slots:
            if dtype_name(slot.dtype) not in DTYPES:
                raise CheckpointError(
                    f"leaf {slot.key!r} has a dtype of the format; got {slot.dtype}; convert the "
                    "leaf",
                    leaf=slot.key,
                )


# Values that may differ from rank to rank.


def records_of(
    parts: Sequence[_parts.Part], group: Group, by_rank: Callable[[str], bool]
) -> dict[str, str]:
    """Describe the values that may differ from rank to rank, by name.

    A tensor that is no flat is described by its bits. A flat is replicated or sharded, and its bits
    are read only where ``by_rank`` says so, because that reads all of it.
    """
    records: dict[str, str] = {}
    for part in parts if group.size > 1 else ():
        value = part.value
        if _parts.is_plain(value):
            records[part.path] = f"{type(value).__name__} {value!r}"
        elif not isinstance(value, Flat):
            records[part.path] = f"{value.dtype} {tuple(value.shape)} {_print_of(value)}"
        else:
            # Along a model axis ranks may hold other leaves.
            held = () if model_groups(value.group) else value.layout.paths
            paths = "\n".join(held).encode()
            records[f"{part.path}@"] = repr((value.placement, zlib.crc32(paths)))
            if value.placement is R and by_rank(part.path):
                for bucket, buffer in enumerate(value.buffers):
                    records[_name_of(part, bucket)] = str(_print_of(buffer))
    return records


class Shared(NamedTuple):
    """Values that differ between ranks, and values that some ranks lack.

    Attributes:
        differing: the names of the values that are not the same on all ranks.
        first: for values that not all ranks have, the first rank that has one.
    """

    differing: set[str]
    first: dict[str, int]


def compared(records: dict[str, str], group: Group, *, is_spread: bool) -> Shared:
    """Compare the records of all ranks, which all call.

    Raises:
        SpecMismatch: the ranks describe other things, though leaves are not spread over model axes.
    """
    if group.size == 1:
        return Shared(set(), {})
    digest = hashlib.sha256(json.dumps(records).encode()).digest()
    digests = gather_values(
        torch.frombuffer(bytearray(digest), dtype=torch.uint8), group, "checkpoint digest"
    )
    if bool((digests == digests[0]).all()):
        return Shared(set(), {})
    found = gather_json(records, group, "checkpoint records")
    first: dict[str, int] = {}
    for rank, other in enumerate(found):
        first |= {name: rank for name in other if name not in first}
        if list(other) != list(found[0]) and not is_spread:
            name = next(iter(sorted(set(other) ^ set(found[0]))), "the order")
            raise SpecMismatch(
                f"all ranks must save one tree; rank {rank} and rank 0 differ at {name!r}; save "
                "what belongs to one rank as loader= or rng=",
                leaf=name,
            )
    names = {name for name in records if len({x[name] for x in found if name in x}) > 1}
    return Shared(names, {name: rank for name, rank in first.items() if rank > 0})


def _print_of(value: Any) -> int:
    return ops.fingerprint(stores.fetch(value, torch.device("cpu")))


# Bytes.


def snapshot(sources: Sequence[WriteSource]) -> list[WriteSource]:
    """Copy what this rank writes, so that steps may change the state while a thread writes.

    A tensor on a disk is not copied, because no one overwrites it.
    """
    kept: list[WriteSource] = []
    ring = stores.Ring()
    for source in sources:
        if not (isinstance(source.value, stores.Stored) and source.value.can_fail):
            flat = _elements(source.value)
            spans = [slice(x.start, x.start + x.numel) for x in source.outputs]
            copies = [ring.start(flat[span]) or flat[span].to("cpu", copy=True) for span in spans]
            source = WriteSource(copies, source.dtype, source.outputs)
        kept.append(source)
    for source in kept:
        if isinstance(source.value, list):
            source.value[:] = [x if isinstance(x, Tensor) else x() for x in source.value]
    return kept


def bytes_of(sources: Sequence[WriteSource]) -> Iterator[np.ndarray]:
    """Yield the bytes of all ranges, one source in memory at a time."""
    yield from map(_as_bytes, stores.hosted(_ranges(sources)))


def _ranges(sources: Sequence[WriteSource]) -> Iterator[Tensor]:
    for source in sources:
        if isinstance(source.value, list):
            yield from source.value
            continue
        flat = _elements(source.value)
        for output in source.outputs:
            yield flat[output.start : output.start + output.numel]
        del flat  # before the next source is read from a store


def _elements(value: Any) -> Tensor:
    """Return a tensor as a vector of real numbers."""
    if isinstance(value, Deferred):
        held = value.load()
    else:
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
        held = stores.fetch(value, device).detach()
    held = held.resolve_conj().resolve_neg()
    return (torch.view_as_real(held) if held.is_complex() else held).reshape(-1)


def _as_bytes(x: Tensor) -> np.ndarray:
    if x.numel() and x.stride(0) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8).numpy()
