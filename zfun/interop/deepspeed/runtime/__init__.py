"""``deepspeed.runtime``: loaders, and the modules from which scripts import functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from zfun.interop.deepspeed._absent import absent

# initialize() returns a loader of torch for training_data.
DeepSpeedDataLoader = DataLoader


class RepeatingLoader:
    """An iterator over a loader that begins again at the end.

    Args:
        loader: anything that can be iterated over more than once.

    Example:
        >>> batches = RepeatingLoader([1, 2])
        >>> [next(batches) for _ in range(5)]
        [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


__getattr__ = absent("runtime", globals())
