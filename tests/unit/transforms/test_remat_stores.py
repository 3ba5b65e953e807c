"""Saved activations in a store: reads ahead of backward, room, and errors."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.faulty_files import FaultyFiles
from tests.slow_store import SlowStore
from zfun import policies
from zfun.errors import OffloadError
from zfun.testing import assert_same_bits

WIDTH = 16
X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
POLICIES = pytest.mark.parametrize(
    "policy",
    [policies.nothing, policies.matmuls, policies.everything],
    ids=["nothing", "matmuls", "everything"],
)


def layers(depth: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for _ in range(depth)]


def block(w: Tensor, x: Tensor) -> Tensor:
    return x + torch.sin(torch.tanh(x @ w))


def loss_of(run: Any) -> Any:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for w in params:
            x = run(w, x)
        return x.square().mean()

    return loss_fn


@POLICIES
def test_backward_reads_a_few_tensors_ahead_and_each_once(policy: Any) -> None:
    store = SlowStore()
    vg = zf.value_and_grad(loss_of(zf.remat(block, policy=policy, store=store)))
    found = vg(layers(8), X)
    starts = [label for kind, label in store.events if kind == "start"]
    waits = [label for kind, label in store.events if kind == "wait"]
    assert sorted(starts) == sorted(waits) == list(range(store.count))
    # The first reads are waited for at once; after that a read begins two waits earlier.
    places = {event: place for place, event in enumerate(store.events)}
    for before, label in zip(waits, waits[2:], strict=False):
        assert places["start", label] < places["wait", before]
    assert store.most_under_way == 3
    assert_same_bits(found, zf.value_and_grad(loss_of(block))(layers(8), X))


@POLICIES
def test_few_activations_are_in_memory_however_many_blocks_there_are(policy: Any) -> None:
    def most(depth: int) -> int:
        store = SlowStore()
        run = zf.remat(block, policy=policy, store=store)
        zf.value_and_grad(loss_of(run))(layers(depth), X)
        gc.collect()
        assert not store.living
        return store.most_living

    assert most(4) == most(16)


@pytest.mark.slow
@POLICIES
def test_a_dropped_graph_frees_the_room(policy: Any, tmp_path: Path) -> None:
    store = zf.stores.nvme(tmp_path, num_threads=1)
    run = zf.remat(block, policy=policy, store=store)
    sizes = list[int]()
    for _ in range(4):
        params = [w.requires_grad_() for w in layers(6)]
        loss = loss_of(run)(params, X)
        assert store.bytes_moved("put", "activations") > 0
        del loss
        gc.collect()
        sizes.append(store.file_bytes)
    assert len(set(sizes)) == 1
    store.close()


@POLICIES
def test_a_graph_may_be_used_twice(policy: Any) -> None:
    def run(wrap: Any) -> Any:
        params = [w.requires_grad_() for w in layers(4)]
        loss = loss_of(wrap)(params, X)
        first = torch.autograd.grad(loss, params, retain_graph=True)
        return first, torch.autograd.grad(loss, params)

    store = SlowStore()
    assert_same_bits(run(zf.remat(block, policy=policy, store=store)), run(block))
    assert store.under_way == 0


def test_without_gradients_nothing_goes_to_the_store() -> None:
    store = SlowStore()
    with torch.no_grad():
        loss_of(zf.remat(block, store=store))(layers(3), X)
    assert store.count == 0


@POLICIES
def test_parameters_and_activations_lie_each_in_a_store_of_its_own(
    policy: Any, tmp_path: Path
) -> None:
    def train(group: zf.Group, offload: zf.stores.Offload | None, run: Any) -> Any:
        z = zf.zero(3, loss_of(run), zf.optim.adamw(0.1), group, bucket_bytes=1, offload=offload)
        state = z.init(layers(5))
        losses = []
        for step in range(3):
            state, info = z.step(state, X + step + group.rank)
            losses.append(info.loss)
        return losses, z.params(state)

    def stored(group: zf.Group) -> Any:
        nvme, host, slow = zf.stores.nvme(tmp_path), zf.stores.host(), SlowStore()
        run = zf.remat(block, policy=policy, store=nvme)
        found = train(group, zf.stores.Offload(params=slow, grads=host, optimizer=host), run)
        assert nvme.bytes_moved("get", "activations") == nvme.bytes_moved("put", "activations") > 0
        assert nvme.bytes_moved() == nvme.bytes_moved(name="activations")
        nvme.close()
        return found

    assert_same_bits(zf.simulate(2, stored), zf.simulate(2, train, None, block))


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("policy", [policies.nothing, policies.everything])
def test_an_error_of_the_store_names_the_activation_and_leaves_the_state(
    policy: Any, fault: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> int:
        at, expected = 0, None
        while True:
            files = FaultyFiles(None, fault, kinds=("reserve", "read", "write"))
            store = zf.stores.nvme(tmp_path, num_threads=1, files=files)
            run = zf.remat(block, policy=policy, store=store)
            z = zf.zero(3, loss_of(run), zf.optim.sgd(0.1), group, bucket_bytes=1)
            state, _ = z.step(z.init(layers(3)), X)
            files.count, files.at = 0, at
            error = None
            try:
                state, _ = z.step(state, X)
            except OffloadError as raised:
                error = raised
            files.at = None
            assert (error is None) == (files.failed is None)
            if error is not None:
                assert (error.errno, error.rank) == (fault, 0)
                assert str(error.leaf).startswith("activation ")
                assert str(error.leaf).endswith(" of block")
                # The step after the error continues from the state before.
                state, _ = z.step(state, X)
            expected = z.params(state) if expected is None else expected
            assert_same_bits(z.params(state), expected)
            store.close()
            if error is None:
                return at
            at += 1

    assert zf.simulate(1, main)[0] > 3
