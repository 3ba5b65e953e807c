"""A store whose reads are complete only when somebody waits, with notes of all events."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from zfun.collectives import Work
from zfun.errors import OffloadError
from zfun.stores import Stored

__all__ = ["SlowStore"]


class Slow(Stored):
    """A tensor whose read is complete only at the wait."""

    store: SlowStore  # type: ignore[bad-override]

    def __init__(self, store: SlowStore, tensor: Tensor, name: str) -> None:
        self.store, self.name = store, name
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.label = store.count
        store.count += 1
        self.tensor = tensor.clone()

    def get(self, device: torch.device) -> Work:
        store = self.store
        store.events.append(("start", self.label))
        store.num_reads += 1
        if store.fails_at == store.num_reads:
            raise OffloadError("a store must keep tensors; got a broken one; mend the store")
        store.under_way += 1
        store.most_under_way = max(store.most_under_way, store.under_way)

        def finish() -> Tensor:
            store.under_way -= 1
            store.events.append(("wait", self.label))
            found = self.tensor.clone()
            store.living.add(found.untyped_storage()._cdata)
            weakref.finalize(
                found.untyped_storage(), store.living.discard, found.untyped_storage()._cdata
            )
            store.most_living = max(store.most_living, len(store.living))
            return found

        return Work(finish)


class SlowStore:
    """Keeps tensors in memory, and notes when a read is started and waited for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.count = self.under_way = self.most_under_way = self.most_living = 0
        self.num_reads = 0
        self.living = set[int]()
        self.fails_at: int | None = None

    def put(self, tensor: Tensor, name: str) -> Stored:
        return Slow(self, tensor, name)

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        pass
