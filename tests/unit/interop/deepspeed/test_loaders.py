"""Loaders of ``deepspeed_io`` and ``training_data``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import zfun as zf
from tests.interop.deepspeed_runs import ranks
from zfun.errors import OptionError
from zfun.interop import deepspeed

DATA = TensorDataset(torch.arange(23))


def loader_of(group: zf.Group, data: Any = DATA, **config: Any) -> tuple[Any, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **config,
    }
    given = {"model": nn.Linear(1, 1), "training_data": data, "mpu": ranks(group)}
    engine, _, loader, _ = deepspeed.initialize(config=config, **given)
    return engine, loader


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def flat(rows: list[list[int]]) -> list[int]:
    return [x for row in rows for x in row]


def order(group: zf.Group, is_random: bool, epoch: int = 0) -> list[int]:
    sampler: Any = DistributedSampler(DATA, group.size, group.rank, shuffle=is_random)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.shows(
    "`next(loader)` after `iter(loader)`, for the loader of `initialize`",
    "right",
    "goes on with its one iterator",
)
@pytest.mark.parametrize("drops", [False, True])
def test_a_loader_has_one_iterator(drops: bool) -> None:
    def main(group: zf.Group) -> None:
        engine, loader = loader_of(group, dataloader_drop_last=drops)
        assert type(loader) is deepspeed.DeepSpeedDataLoader
        assert loader is engine.training_dataloader
        with pytest.raises(OptionError, match=r"got next\(\) before iter\(\); call iter"):
            next(loader)
        expected = order(group, True)
        batches = iter(loader)
        assert batches is loader
        assert rows([next(batches), next(loader), next(batches)]) == [
            expected[:2],
            expected[2:4],
            expected[4:6],
        ]
        whole = rows(loader)  # begins again
        assert flat(whole) == (expected[:-1] if len(expected) % 2 and drops else expected)
        assert len(whole) == len(loader) == loader.len
        with pytest.raises(StopIteration):
            next(loader)
        loader.data_sampler.set_epoch(1)
        assert flat(rows(loader))[:10] == order(group, True, 1)[:10] != expected[:10]
        assert (loader.batch_size, len(loader.dataset)) == (2, 23)
        assert isinstance(loader.dataloader, DataLoader)
        assert loader.tput_timer is engine.tput_timer

    zf.simulate(2, main)


def test_routes_have_the_order_of_deepspeed() -> None:
    """Of the four, DeepSpeed keeps the order for two."""

    def main(group: zf.Group) -> None:
        engine, _ = loader_of(group)
        for route, is_random in (
            ("train", True),
            ("encode", True),
            ("eval", False),
            ("predict", False),
        ):
            loader = engine.deepspeed_io(DATA, batch_size=5, route=route)
            assert flat(rows(loader)) == order(group, is_random), route
            assert (loader.tput_timer is None) == (route != "train")
        given = engine.deepspeed_io(DATA, batch_size=3, data_sampler=[5, 1, 2, 3])
        assert rows(given) == [[5, 1, 2], [3]]

    zf.simulate(2, main)


@pytest.mark.shows("a `route` of `deepspeed_io` that is not there", "refused", "")
@pytest.mark.parametrize("route", ["Train", "test", "", None, 0])
def test_a_route_that_deepspeed_does_not_know_is_refused(route: Any) -> None:
    def main(group: zf.Group) -> None:
        engine, _ = loader_of(group)
        for given in ({}, {"data_sampler": [1, 2]}):
            with pytest.raises(OptionError, match=rf"'encode'; got {route!r}; pass 'train'"):
                engine.deepspeed_io(DATA, route=route, **given)

    zf.simulate(1, main)


def test_a_loader_takes_the_arguments_of_deepspeed() -> None:
    starts: list[int] = []
    timer = SimpleNamespace(start=lambda: starts.append(1))
    loader = deepspeed.DeepSpeedDataLoader(
        DATA, 4, True, 0, timer, None, None, None, 2, 1, True, {"any": 1}
    )
    sampler = DistributedSampler(DATA, 2, 1)
    found = rows(loader)
    assert found == [list(sampler)[i : i + 4] for i in range(0, 12, 4)]
    assert len(starts) == len(found) + 1  # DeepSpeed starts the timer before the end too
    collated: Any = deepspeed.DeepSpeedDataLoader(
        DATA, 4, False, 0, None, len, data_sampler=range(6)
    )
    assert list(collated) == [4, 2]


def test_a_loader_without_a_launcher_is_that_of_one_rank() -> None:
    torch.manual_seed(3)
    found = rows(deepspeed.DeepSpeedDataLoader(DATA, 4, False, -1, None))
    assert sorted(flat(found)) == list(range(23)) != flat(found)
    count = deepspeed.get_accelerator().device_count()
    assert len(found[0]) == 4 * count


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_a_stream_has_its_own_order() -> None:
    def main(group: zf.Group) -> None:
        _, loader = loader_of(group, Stream())
        assert [x.tolist() for x in loader] == [[0, 1], [2, 3], [4]]

    zf.simulate(1, main)


def test_a_repeating_loader_begins_again() -> None:
    class Three(Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    loader = deepspeed.DeepSpeedDataLoader(Three(), 2, False, 0, None, data_sampler=range(3))
    batches = deepspeed.utils.RepeatingLoader(loader)
    assert [next(batches).tolist() for _ in range(5)] == [[0, 1], [2], [0, 1], [2], [0, 1]]
