"""Fill the buffers of a state from a checkpoint, one bucket at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun import tree
from zfun.checkpoint import _parts
from zfun.checkpoint._match import Match
from zfun.checkpoint.format._manifest import LeafEntry
from zfun.checkpoint.format._order import StoredCut, from_stored, to_stored
from zfun.checkpoint.format._payload import Payload, Want
from zfun.checkpoint.format._plain import real_dtype
from zfun.collectives import await_readers, is_symmetric
from zfun.flat import Flat, call_site
from zfun.options import instance, takes
from zfun.placement import R, S
from zfun.sources.scratch import scratch
from zfun.stores import Stored, locating
from zfun.transforms import redistribute


def fill(like: tree.Tree, found: Match, payload: Payload) -> tuple[tree.Tree, Exception | None]:
    """Return a state like ``like`` with the values of a checkpoint. All ranks call.

    A rank that cannot read goes on with the collectives, so that no rank waits. It returns its
    error too, and then the state is of no use.
    """
    filler = _Filler(found, payload)
    filler.read_ahead(like)
    return _parts.map_parts(filler.part, like), filler.error


@takes(
    payload=instance(Payload, "a Payload", "zf.checkpoint.Payload(path, manifest)"),
    entry=instance(LeafEntry, "a leaf of a manifest", "manifest.leaves[0]"),
)
def read_leaf(payload: Payload, entry: LeafEntry) -> Tensor:
    """Read one whole leaf of a checkpoint, without a group.

    Args:
        payload: the payload files of the checkpoint.
        entry: one of ``manifest.leaves``.

    Returns:
        A new tensor, on the CPU.

    Raises:
        CorruptCheckpoint: the files are not those that were written.
        CheckpointError: the disk refused.

    Example:
        >>> import tempfile, zfun as zf
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = zf.save(path, {"w": torch.ones(3)}, step=7)
        ...     manifest = zf.checkpoint.read_manifest(saved.path)
        ...     with zf.checkpoint.Payload(saved.path, manifest) as payload:
        ...         read_leaf(payload, manifest.leaves[0])
        tensor([1., 1., 1.])
    """
    flat = scratch((entry.numel,), entry.element, torch.device("cpu"))
    payload.read(_wants(entry, 0, flat))
    real = (*entry.shape, 2) if entry.dtype.is_complex else entry.shape
    shaped = from_stored(flat, real, entry.cuts) if entry.cuts else flat.view(real)
    return torch.view_as_complex(shaped.contiguous()) if entry.dtype.is_complex else shaped


class _Filler:
    """Fills part by part, and remembers the first error."""

    def __init__(self, found: Match, payload: Payload) -> None:
        self.found, self.payload = found, payload
        self.error: Exception | None = None
        self._made: dict[int, Any] = {}
        self._ahead: dict[int, Tensor] = {}

    def read_ahead(self, like: tree.Tree) -> None:
        """Read all tensors in host memory at once, because a store is slow to begin an answer."""
        wants: list[Want] = []
        for part in _parts.parts_of(like):
            value = part.value
            if not isinstance(value, Tensor) or value.device.type != "cpu":
                continue
            (slot,) = _parts.slots_of(part)
            entry, dtype = self.found.leaves.get(slot.key), real_dtype(value.dtype)
            if entry is None or entry.element != dtype or entry.cuts or id(value) in self._ahead:
                continue
            self._ahead[id(value)] = memory = torch.zeros(slot.numel, dtype=entry.element)
            wants += _wants(entry, 0, memory)
        with self._trying():
            self.payload.read(wants)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Keep an error until the last collective, after which it is raised on all ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.error = self.error or error

    def part(self, part: _parts.Part) -> Any:
        """Return the new value of a part."""
        value = part.value
        if _parts.is_plain(value):
            return self.found.values.get(part.path, value)
        if isinstance(value, Flat):
            return self._flat(part)
        # Tied tensors stay one tensor.
        if id(value) not in self._made:
            self._made[id(value)] = self._tensor(part)
        return self._made[id(value)]

    def _tensor(self, part: _parts.Part) -> Any:
        (slot,) = _parts.slots_of(part)
        if slot.key not in self.found.leaves:
            return part.value
        like = part.value
        is_stored = isinstance(like, Stored)
        device = torch.device("cpu") if is_stored else like.device
        real = self._ahead.pop(id(like), None)
        if real is None:
            real = torch.zeros(slot.numel, dtype=real_dtype(like.dtype), device=device)
            self._read(real, [_parts.PartSpan(slot, 0, 0, slot.numel)] if slot.numel else [])
        shaped = (
            torch.view_as_complex(real.view(*slot.shape, 2))
            if slot.dtype.is_complex
            else real.view(slot.shape)
        )
        if not is_stored:
            shaped.requires_grad_(like.requires_grad)
        return self._put(like, shaped, slot.key)

    def _flat(self, part: _parts.Part) -> Flat:
        flat: Flat = part.value
        slots = _parts.slots_of(part)
        buffers = list(flat.buffers)
        # The old buffers are freed one by one, where they are not filled in place.
        fresh = flat.with_buffers(())
        flat.life.discard(f"load() at {call_site()}")
        part = _parts.Part(part.path, fresh)
        if self._in_place(part, slots, buffers):
            return flat.with_buffers(buffers)
        for bucket in range(len(buffers)):
            buffers[bucket] = self._bucket(part, slots, bucket, buffers[bucket])
        return flat.with_buffers(buffers)

    def _in_place(
        self, part: _parts.Part, slots: Sequence[_parts.PartSlot], buffers: Sequence[Any]
    ) -> bool:
        """Read all buckets at once, where no memory but the buffers is needed.

        So the disk does not wait between buckets.
        """
        flat: Flat = part.value
        found = self.found.leaves
        if self.error is not None or (flat.placement is R and flat.group.size > 1):
            return False
        for slot in slots:
            buffer = buffers[slot.bucket]
            is_memory = isinstance(buffer, Tensor) and buffer.device.type == "cpu"
            entry = found.get(slot.key)
            is_alike = entry is None or (entry.element, entry.cuts) == (buffer.dtype, slot.cuts)
            if not is_memory or not is_alike:
                return False
        if is_symmetric(flat.group):
            await_readers(flat.group, buffers)
        wants: list[Want] = []
        for bucket, buffer in enumerate(buffers):
            for span in _parts.spans_of(part, slots, bucket, flat.span(bucket)):
                if span.slot.key in found:
                    target = buffer[span.start : span.start + span.numel]
                    wants += _wants(found[span.slot.key], span.first, target)
        with self._trying():
            self.payload.read(wants)
        return True

    def _bucket(
        self, part: _parts.Part, slots: Sequence[_parts.PartSlot], bucket: int, buffer: Any
    ) -> Any:
        """Fill one bucket; of a bucket without leaves of the checkpoint nothing changes."""
        flat: Flat = part.value
        mine = [slots[leaf].key for leaf in flat.layout.buckets[bucket].leaves]
        found = [self.found.leaves[key] for key in mine if key in self.found.leaves]
        if not found:
            return buffer
        by_rank = any(entry.rank is not None for entry in found)
        keeps_some = len(found) < len(mine)
        if flat.placement is R and flat.group.size > 1 and not by_rank:
            new = self._gathered(part, slots, bucket, buffer, keeps_some=keeps_some)
        else:
            new = self._memory_of(flat, bucket, buffer, keeps_some=keeps_some)
            if is_symmetric(flat.group):
                await_readers(flat.group, [new])
            self._read(new, list(_parts.spans_of(part, slots, bucket, flat.span(bucket))))
        return self._put(buffer, new, flat.layout.label(bucket))

    def _memory_of(self, flat: Flat, bucket: int, buffer: Any, *, keeps_some: bool) -> Tensor:
        """Return memory for a bucket: the buffer itself, or, of a store, memory of its own."""
        if isinstance(buffer, Tensor):
            return buffer
        if keeps_some and self.error is None:
            with self._trying(), locating(leaf=flat.layout.label(bucket)):
                return buffer.get(torch.device("cpu")).wait().clone()
        return torch.zeros(buffer.shape, dtype=buffer.dtype)

    def _gathered(
        self,
        part: _parts.Part,
        slots: Sequence[_parts.PartSlot],
        bucket: int,
        buffer: Any,
        *,
        keeps_some: bool,
    ) -> Tensor:
        """Read this rank's part of a replicated bucket, and gather the bucket."""
        flat: Flat = part.value
        is_stored = isinstance(buffer, Stored)
        low, high = flat.layout.buckets[bucket].span(flat.group.rank, flat.group.size)
        if is_stored and not keeps_some:
            piece = torch.zeros(high - low, dtype=buffer.dtype)
        else:
            held = self._memory_of(flat, bucket, buffer, keeps_some=keeps_some)
            piece = held[low:high].clone()
            del held
        spans = [
            span._replace(start=span.start - low)
            for span in _parts.spans_of(part, slots, bucket, (low, high))
        ]
        self._read(piece, spans)
        layout = flat.layout.select([bucket])
        shard = Flat([piece], S, layout, flat.group)
        # Where ranks share memory the gather makes a new buffer, because the old one may show the
        # memory of other ranks.
        into = None
        if not is_symmetric(flat.group):
            whole = torch.empty(buffer.shape, dtype=piece.dtype) if is_stored else buffer
            into = Flat([whole], R, layout, flat.group)
        return redistribute(shard, R, flat.group, name="load", into=into).buffers[0]

    def _put(self, like: Any, new: Tensor, label: str) -> Any:
        """Put a new tensor into the store of a handle, if ``like`` is one."""
        if not isinstance(like, Stored):
            return new
        with self._trying(), locating(leaf=label):
            handle = like.store.put(new, like.name)
            handle.flush()
            return handle
        return like

    def _read(self, memory: Tensor, spans: Sequence[_parts.PartSpan]) -> None:
        """Read ranges into a vector, and convert where the dtypes differ."""
        if self.error is not None:
            return
        wants: list[Want] = []
        staged: list[tuple[_parts.PartSpan, Tensor]] = []
        is_plain_memory = memory.device.type == "cpu" and memory.is_contiguous()
        for span in spans:
            entry = self.found.leaves.get(span.slot.key)
            if entry is None:
                continue
            if entry.cuts != span.slot.cuts:
                # Stored in another order, so that the range lies in many places.
                with self._trying():
                    whole = _in_order(read_leaf(self.payload, entry), span.slot.cuts)
                    staged.append((span, whole[span.first : span.first + span.numel].clone()))
                continue
            if is_plain_memory and entry.element == memory.dtype:
                target = memory[span.start : span.start + span.numel]
            else:
                target = torch.empty(span.numel, dtype=entry.element)
                staged.append((span, target))
            wants += _wants(entry, span.first, target)
        with self._trying():
            self.payload.read(wants)
            for span, target in staged:
                memory[span.start : span.start + span.numel].copy_(target)


def _in_order(leaf: Tensor, cuts: Sequence[StoredCut]) -> Tensor:
    """Return the elements of a leaf in the stored order of some cuts."""
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return to_stored(real, cuts) if cuts else real.reshape(-1)


def _wants(entry: LeafEntry, first: int, target: Tensor) -> Iterator[Want]:
    """Yield the ranges of files that hold the range of a leaf that begins at an element."""
    size, numel = entry.element.itemsize, target.numel()
    memory: np.ndarray = target.view(torch.uint8).numpy() if numel else np.empty(0, np.uint8)
    for piece in entry.pieces:
        low = max(first, piece.first)
        high = min(first + numel, piece.first + piece.numel)
        if low < high:
            yield Want(
                piece.file,
                piece.offset + (low - piece.first) * size,
                memory[(low - first) * size : (high - first) * size],
            )
