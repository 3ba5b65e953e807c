"""Keep a tensor until backward in a store, as one part per rank, or both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import (
    AllGather,
    Collective,
    Group,
    LeafRecord,
    Stream,
    check_same,
    is_checked,
)
from zfun.errors import SpecMismatch
from zfun.stores import Store, Stored, fetch
from zfun.transforms.remat._vectors import Form, form_of, tensor_of, vector_of

__all__ = ["Elsewhere", "Moved", "Stays"]


@dataclass(frozen=True, slots=True)
class Stays:
    """A value that is kept in place."""

    value: Any


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that is kept elsewhere, as a vector or as this rank's part of the vector."""

    memory: Tensor | Stored
    numel: int  # of the whole vector
    form: Form
    device: torch.device


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A place for tensors until backward.

    Attributes:
        store: the store; ``None`` for the current device.
        shard_over: the ranks that keep one part each; ``None`` for the whole on every rank.
        agreed: dtypes and shapes for which the ranks have been compared.
    """

    store: Store | None
    shard_over: Group | None
    agreed: set[tuple[torch.dtype, torch.Size]] = field(default_factory=set)

    def keep(self, tensor: Tensor) -> Moved | Stays:
        """Move a tensor here; an empty tensor, or one with overlapping elements, stays in place."""
        vector = vector_of(tensor)
        if vector is None:
            return Stays(tensor)
        numel = vector.numel()
        if self.shard_over is not None:
            self._check_agreement(tensor, self.shard_over)
            vector = _part(vector, self.shard_over)
        elif self.store is not None and vector.device == self.store.device:
            # Copy, because the store keeps the tensor and the caller may write to the tensor.
            vector = vector.clone()
        memory = vector if self.store is None else self.store.put(vector, "activations")
        return Moved(memory, numel, form_of(tensor), tensor.device)

    def restore(self, kept: Moved | Stays) -> Any:
        """Return the tensor."""
        if isinstance(kept, Stays):
            return kept.value
        vector, group = fetch(kept.memory, kept.device), self.shard_over
        if group is not None and group.size > 1:
            vector = group.start(
                Collective(AllGather(), "activations", stream=Stream.PARAMS), vector
            ).wait()
        return tensor_of(vector[: kept.numel], kept.form)

    def _check_agreement(self, tensor: Tensor, group: Group) -> None:
        key = (tensor.dtype, tensor.shape)
        if group.size == 1 or (key in self.agreed and not is_checked(group)):
            return
        entry = LeafRecord(
            "input", f"{tensor.dtype} {tuple(tensor.shape)}", str(ops.fingerprint(tensor))
        )
        try:
            check_same([entry], group, "activations")
        except SpecMismatch as error:
            raise SpecMismatch(
                "shard_over takes ranks that hold the same activations, such as the ranks of a "
                f"model-parallel axis; {error}; data-parallel ranks hold different activations: "
                "leave shard_over out, or pass the group of the model-parallel axis",
                rank=group.rank,
            ) from None
        self.agreed.add(key)


def _part(vector: Tensor, group: Group) -> Tensor:
    """Return a copy of this rank's part of a vector, padded with zeros."""
    numel = -(-vector.numel() // group.size)
    mine = vector[group.rank * numel : (group.rank + 1) * numel]
    part = vector.new_zeros(numel)
    part[: mine.numel()] = mine
    return part
