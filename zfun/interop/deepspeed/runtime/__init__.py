"""``deepspeed.runtime``: loaders, and the modules from which scripts import functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.accelerator import get_accelerator


class _Rest(NamedTuple):
    """The last arguments of a loader."""

    data_parallel_world_size: int | None = None
    data_parallel_rank: int | None = None
    dataloader_drop_last: bool = False
    deepspeed_dataloader_config: Any = None


class DeepSpeedDataLoader(DataLoader[Any]):
    """The loader of ``training_data`` and of ``engine.deepspeed_io()``, and its one iterator.

    The arguments are DeepSpeed's; ``deepspeed_dataloader_config`` is not used, and by default no
    processes read.

    Attributes:
        data_sampler: gives the samples of this rank; for ``set_epoch``.
        tput_timer: started at each batch, if there is one.
        data: the iterator of the last ``iter(loader)``, with which ``next(loader)`` goes on.

    Example:
        >>> loader = DeepSpeedDataLoader([1, 2, 3, 4], 2, False, -1, None, data_sampler=[3, 0, 2])
        >>> first = next(iter(loader))
        >>> first, next(loader), loader.len
        (tensor([4, 1]), tensor([3]), 2)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        *more: Any,
        **others: Any,
    ) -> None:
        rest = _Rest(*more, **others)
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = (
                RandomSampler(dataset) if local_rank < 0 else DistributedSampler(dataset, *rest[:2])
            )
        super().__init__(
            dataset,
            batch_size * (get_accelerator().device_count() if local_rank < 0 else 1),
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=rest.dataloader_drop_last,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            num_workers=num_local_io_workers or 0,
        )
        self.data_sampler, self.tput_timer = self.sampler, tput_timer
        self.data: Iterator[Any] | None = None

    @property
    def dataloader(self) -> DataLoader[Any]:
        """The loader of torch, which is this one."""
        return self

    @property
    def len(self) -> int:
        """The number of batches."""
        return len(self)

    def __iter__(self) -> Any:
        self.data = super().__iter__()
        return self

    def __next__(self) -> Any:
        if self.data is None:
            raise OptionError(
                "next(loader) goes on with the batches of iter(loader); got next() before iter(); "
                "call iter(loader) first"
            )
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self.data)


def in_order(route: str, dataset: Any, size: int, rank: int) -> DistributedSampler[Any] | None:
    """Return a sampler of a rank's share in the order of a dataset, for routes that keep it."""
    if route not in (routes := ("train", "eval", "predict", "encode")):
        raise OptionError(
            f"deepspeed_io() has the routes {', '.join(map(repr, routes))}; got {route!r}; pass "
            "'train' for a random order, or 'eval'"
        )
    if route not in ("eval", "predict") or isinstance(dataset, IterableDataset):
        return None
    return DistributedSampler(dataset, size, rank, shuffle=False)


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
