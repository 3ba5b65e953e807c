"""``offload`` chooses by type, and stores count the transfers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.stores import Crossing, Stored
from zfun.testing import assert_same_bits
from zfun.transforms import offload_grads, offload_loss, replicate_grads

PARAMS = {"w": torch.linspace(-1, 1, 70)}
BATCH = torch.linspace(0, 2, 140).reshape(2, 70)


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (batch @ params["w"]).square().mean()


# Gradient functions, of which some hide from transforms in a function of zfun.
GRADIENTS = {
    "data_parallel": lambda vg, group: vg,
    "shard_grads": zf.shard_grads,
    "accumulate": lambda vg, group: zf.accumulate(vg, 2),
    "shard_grads of accumulate": lambda vg, group: zf.shard_grads(zf.accumulate(vg, 2), group),
    "replicate_grads of accumulate": lambda vg, group: replicate_grads(zf.accumulate(vg, 2), group),
    "accumulate of shard_grads": lambda vg, group: zf.accumulate(zf.shard_grads(vg, group), 2),
    "scale_loss": lambda vg, group: zf.transforms.scale_loss(vg, 2.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradients_of_every_gradient_function_go_to_the_store(name: str) -> None:
    def main(group: Group) -> None:
        vg = GRADIENTS[name](zf.data_parallel(zf.value_and_grad(loss_fn), group), group)
        store = zf.stores.host()
        params = zf.replicate(PARAMS, group)
        (expected_loss, expected), (loss, found) = (
            fn(params, BATCH) for fn in (vg, zf.offload(vg, store))
        )
        assert all(isinstance(buffer, Stored) for buffer in found.buffers)
        assert store.bytes_moved("put", "grads") > 0
        assert_same_bits(loss, expected_loss)
        assert_same_bits(zf.unshard(found), zf.unshard(expected))

    zf.simulate(2, main)


@pytest.mark.parametrize("fn", [loss_fn, lambda params, batch: 0, torch.nn.Linear(1, 1)])
def test_a_function_that_no_transform_made_is_named_by_the_caller(fn: Any) -> None:
    with pytest.raises(
        OptionError,
        match=r"got the function '(loss_fn|<lambda>|Linear)', which may be either; call "
        r"zf\.transforms\.offload_loss\(\) for a loss, or zf\.transforms\.offload_grads\(\)",
    ):
        zf.offload(fn, zf.stores.host())


def test_the_losses_of_transforms_are_known() -> None:
    def main(group: Group) -> None:
        store = zf.stores.host()
        sharded = zf.shard(PARAMS, group)
        params = zf.offload(sharded, store)
        for loss in (
            zf.shard_params(loss_fn, group),
            zf.cast(zf.shard_params(loss_fn, group), torch.float64),
            offload_loss(zf.shard_params(loss_fn, group), store),
        ):
            expected = loss(params if "_Offloaded" in type(loss).__name__ else sharded, BATCH)
            assert_same_bits(zf.offload(loss, store)(params, BATCH), expected)
        assert store.bytes_moved("get", "params") > 0

    zf.simulate(2, main)


def test_a_gradient_function_is_no_loss_and_a_loss_no_gradient_function() -> None:
    def main(group: Group) -> None:
        store = zf.stores.host()
        vg = zf.value_and_grad(loss_fn)
        for gradient in (vg, zf.accumulate(vg, 2), zf.data_parallel(vg, group)):
            for name, transform in {
                "value_and_grad": zf.value_and_grad,
                "cast": lambda fn: zf.cast(fn, torch.float64),
                "shard_params": lambda fn: zf.shard_params(fn, group),
                "offload_loss": lambda fn: offload_loss(fn, store),
            }.items():
                with pytest.raises(OptionError, match=rf"^{name}\(\) takes a loss; got a grad"):
                    transform(gradient)
        for loss in (zf.cast(loss_fn, torch.float64), zf.shard_params(loss_fn, group)):
            for name, transform in {
                "accumulate": lambda fn: zf.accumulate(fn, 2),
                "data_parallel": lambda fn: zf.data_parallel(fn, group),
                "shard_grads": lambda fn: zf.shard_grads(fn, group),
                "replicate_grads": lambda fn: replicate_grads(fn, group),
                "offload_grads": lambda fn: offload_grads(fn, store),
            }.items():
                with pytest.raises(OptionError, match=rf"^{name}\(\) takes a gradient function"):
                    transform(loss)

    zf.simulate(1, main)


def moved(store: Any, num_steps: int) -> list[Crossing] | None:
    def main(group: Group) -> None:
        z = zf.zero(
            3, loss_fn, zf.optim.adamw(0.1), group, offload=zf.stores.Offload(store, store, store)
        )
        state = z.init(PARAMS)
        for _ in range(num_steps):
            state, _ = z.step(state, BATCH)

    zf.simulate(1, main)
    return store.log


def test_a_store_counts_always_and_logs_on_request() -> None:
    store, logging = zf.stores.host(), zf.stores.host(log=True)
    assert moved(store, 2) is None
    log = moved(logging, 2)
    assert log is not None
    for kind in (None, "put", "get"):
        for name in (None, "params", "grads", "state"):
            expected = sum(
                entry.num_bytes
                for entry in log
                if kind in (None, entry.kind) and name in (None, entry.name)
            )
            assert expected > 0
            assert store.bytes_moved(kind, name) == logging.bytes_moved(kind, name) == expected


def test_a_store_does_not_grow_with_the_steps() -> None:
    def size(value: Any) -> int:
        return sum(len(found) for found in vars(value).values() if isinstance(found, (list, dict)))

    sizes = []
    for num_steps in (1, 3):
        store = zf.stores.host()
        moved(store, num_steps)
        sizes.append(size(store))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_unsharded_value_shares_no_memory_with_the_store(size: int) -> None:
    def main(group: Group) -> None:
        for place in (zf.replicate, zf.shard):
            kept = zf.offload(place(PARAMS, group), zf.stores.host())
            zf.unshard(kept)["w"].zero_()
            zf.unshard(kept, lambda path, leaf: True)["w"].zero_()
            assert_same_bits(zf.unshard(kept), PARAMS)

    zf.simulate(size, main)
