"""Keep a tensor until backward in a store, as one part per rank, or both.

[Note: reads of activations]
Backward needs the tensors of the blocks from the last block to the first. A block that runs again
needs its tensors in the order of forward; a block that does not run again, in the reverse order. So
each restore starts to read the next ``AHEAD`` tensors, and the store works while backward computes.
References to the other tensors are weak, because the graph alone keeps the tensors alive: a graph
that is dropped frees the room in the store.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, ops, stores
from zfun.collectives import AllGather, Collective, Group, LeafRecord, Stream, Work, is_checked
from zfun.errors import SpecMismatch
from zfun.stores import Store, Stored, has_queues
from zfun.transforms.remat._vectors import VectorForm, form_of, tensor_of, vector_of

# How many tensors are read from a store before backward needs the tensors.
AHEAD = 2

# Dtypes and shapes for which the ranks have been compared.
Agreed = set[tuple[torch.dtype, torch.Size]]


class _Last(threading.local):
    """The block of this thread that kept tensors last."""

    block: weakref.ref[Elsewhere] | None = None


_last = _Last()


@dataclass(frozen=True, slots=True)
class Stays:
    """A value that is kept in place."""

    value: Any


class MovedVector:
    """A tensor that is kept elsewhere, as a vector or as this rank's part of the vector.

    ``numel`` counts the whole vector; ``place`` is the number of the tensor in its block.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "form",
        "is_restored",
        "memory",
        "numel",
        "place",
        "reading",
    )

    def __init__(self, memory: Tensor | Stored, tensor: Tensor, numel: int, place: int) -> None:
        self.memory = memory
        self.numel = numel
        self.form: VectorForm = form_of(tensor)
        self.device = tensor.device
        self.place = place
        self.reading: Work | None = None
        self.is_restored = False

    def read(self) -> None:
        """Start to read from the store, unless a read is under way."""
        if self.reading is None and isinstance(self.memory, Stored):
            self.reading = self.memory.get(self.device)

    def wait(self) -> Tensor:
        """Return the vector in memory; a later call reads again."""
        self.read()
        self.is_restored = True
        reading, self.reading = self.reading, None
        return reading.wait() if reading is not None else stores.fetch(self.memory, self.device)


class Elsewhere:
    """A place for the tensors of one call of a block; see [Note: reads of activations].

    Without a store tensors stay on the device. The ranks of ``shard_over`` keep one part each, and
    have compared the dtypes and shapes in ``agreed``. ``runs_again`` says that backward runs the
    block again.
    """

    def __init__(
        self,
        store: Store | None,
        shard_over: Group | None,
        agreed: Agreed | None = None,
        *,
        runs_again: bool = True,
        name: str = "a block",
    ) -> None:
        self.store = store
        self.shard_over = shard_over
        self._agreed = set() if agreed is None else agreed
        self._runs_again = runs_again
        self._name = name
        self._kept: list[weakref.ref[MovedVector]] = []
        self._before: weakref.ref[Elsewhere] | None = None

    def keep(self, tensor: Tensor) -> MovedVector | Stays:
        """Move a tensor here; an empty tensor, or one with overlapping elements, stays in place."""
        vector = vector_of(tensor)
        if vector is None:
            return Stays(tensor)
        numel = vector.numel()
        if self.shard_over is not None:
            self._check_agreement(tensor, self.shard_over)
            vector = _part(vector, self.shard_over)
        elif self.store is not None and (
            vector.device == self.store.device or has_queues(vector.device)
        ):
            # Copy, because the store keeps the tensor, or copies it later, and the caller may write
            # to the tensor.
            vector = vector.clone()
        place = len(self._kept)
        with self._locating(place):
            memory = vector if self.store is None else self.store.put(vector, "activations")
        kept = MovedVector(memory, tensor, numel, place)
        if self.store is not None and not self._kept:
            self._before = _last.block
            _last.block = weakref.ref[Elsewhere](self)
        self._kept.append(weakref.ref(kept))
        return kept

    def restore(self, kept: MovedVector | Stays) -> Any:
        """Return the tensor, and start to read the tensors that backward needs next."""
        if isinstance(kept, Stays):
            return kept.value
        with self._locating(kept.place):
            kept.read()
        if self.store is not None:
            self._read_ahead(kept)
        with self._locating(kept.place):
            vector = kept.wait()
        group = self.shard_over
        if group is not None and group.size > 1:
            vector = group.start(
                Collective(AllGather(), "activations", stream=Stream.PARAMS), vector
            ).wait()
        return tensor_of(vector[: kept.numel], kept.form)

    def _locating(self, place: int) -> Any:
        return stores.locating(leaf=f"activation {place} of {self._name}")

    def _read_ahead(self, kept: MovedVector) -> None:
        todo = itertools.chain(self._after(kept.place), self._of_blocks_before())
        for block, following in itertools.islice(todo, AHEAD):
            with block._locating(following.place):
                following.read()

    def _after(self, place: int | None) -> Iterator[tuple[Elsewhere, MovedVector]]:
        """Yield this block's tensors after a place, or all, in the order of backward's needs."""
        if self._runs_again:
            kept = self._kept if place is None else self._kept[place + 1 :]
        else:
            kept = (self._kept if place is None else self._kept[:place])[::-1]
        for reference in kept:
            moved = reference()
            if moved is not None and not moved.is_restored:
                yield self, moved

    def _of_blocks_before(self) -> Iterator[tuple[Elsewhere, MovedVector]]:
        block = self._before() if self._before is not None else None
        while block is not None:
            yield from block._after(None)
            block = block._before() if block._before is not None else None

    def _check_agreement(self, tensor: Tensor, group: Group) -> None:
        key = (tensor.dtype, tensor.shape)
        if group.size == 1 or (key in self._agreed and not is_checked(group)):
            return
        entry = LeafRecord(
            "input", f"{tensor.dtype} {tuple(tensor.shape)}", str(ops.fingerprint(tensor))
        )
        try:
            collectives.check_same([entry], group, "activations")
        except SpecMismatch as error:
            raise SpecMismatch(
                "shard_over takes ranks that hold the same activations, such as the ranks of a "
                f"model-parallel axis; {error}; data-parallel ranks hold different activations: "
                "leave shard_over out, or pass the group of the model-parallel axis",
                rank=group.rank,
            ) from None
        self._agreed.add(key)


def _part(vector: Tensor, group: Group) -> Tensor:
    """Return a copy of this rank's part of a vector, padded with zeros."""
    numel = -(-vector.numel() // group.size)
    mine = vector[group.rank * numel : (group.rank + 1) * numel]
    part = vector.new_zeros(numel)
    part[: mine.numel()] = mine
    return part
