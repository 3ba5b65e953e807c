"""All values of a state go into a store between phases of a run, and come back to the last bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim, tree
from zfun.errors import DonatedStateError, OffloadError, OptionError, SpecMismatch
from zfun.stores import Stored
from zfun.testing import assert_same_bits, bucket_sizes

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": torch.bfloat16},
    "fp16": {"precision": torch.float16},
    "frozen": {"trainable": lambda path, leaf: path != "h.0.w"},
    "buffers": {"buffers": lambda path, leaf: "mean" if path == "out" else None},
}


def loss_fn(params: Any, batch: Any) -> Any:
    return models.mlp_loss(params, batch.to(params["out"].dtype)).float()


def train(
    group: zf.Group, stage: int, store: Any, options: dict[str, Any], *, moves: bool
) -> tuple[Any, Any]:
    z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, **options)
    state = z.init(models.mlp(dtype=torch.float32))
    for batches in models.mlp_batches(3, group.size):
        if moves:
            before = [type(leaf) for leaf in tree.leaves(tuple(state))]
            state = zf.offload(state, store)
            large = [x for x in tree.leaves(tuple(state)) if isinstance(x, torch.Tensor) and x.ndim]
            assert large == []
            whole = z.params(state)
            state = zf.stores.reload(state, store)
            assert [type(leaf) for leaf in tree.leaves(tuple(state))] == before
            assert_same_bits(z.params(state), whole)
        state, _ = z.step(state, batches[group.rank])
    return z.params(state), tree.leaves(tuple(state.opt_state))


@settings(max_examples=examples(24))
@given(
    stage=st.integers(0, 3),
    size=st.integers(1, 3),
    name=st.sampled_from(sorted(OPTIONS)),
    bucket_bytes=bucket_sizes(),
    on_disk=st.booleans(),
)
def test_a_run_that_moves_its_state_is_the_run_that_does_not(
    stage: int, size: int, name: str, bucket_bytes: int, on_disk: bool, tmp_path: Path
) -> None:
    options = OPTIONS[name] | {"bucket_bytes": bucket_bytes}
    store: Any = zf.stores.nvme(tmp_path) if on_disk else zf.stores.host()
    moved, stayed = (
        zf.simulate(size, train, stage, store, options, moves=moves) for moves in (True, False)
    )
    assert_same_bits(moved, stayed)
    if on_disk:
        store.close()


def one(group: zf.Group, **options: Any) -> tuple[Any, Any]:
    z = zf.zero(3, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300, **options)
    return z, z.init(models.mlp())


def test_values_in_other_stores_stay_there() -> None:
    def main(group: zf.Group) -> None:
        own, between = zf.stores.host(), zf.stores.host()
        z, state = one(group, offload=zf.stores.Offload(params=own, optimizer=own))
        state = zf.stores.reload(zf.offload(state, between), between)
        assert all(x.store is own for x in state.params.buffers)
        state, _ = z.step(state, models.mlp_batches(1, 2)[0][group.rank])
        assert all(x.store is own for x in state.opt_state.mu.buffers)

    zf.simulate(2, main)


def test_a_step_refuses_a_state_in_another_place() -> None:
    def main(group: zf.Group) -> None:
        store = zf.stores.host()
        batch = models.mlp_batches(1, 2)[0][group.rank]
        z, state = one(group)
        stored = zf.offload(state, store)
        with pytest.raises(SpecMismatch, match=r"params in a store for a step .*stores.reload\("):
            z.step(stored, batch)
        half = zf.stores.reload(stored, store)
        half = half._replace(opt_state=zf.offload(list(half.opt_state[1:]), store))
        with pytest.raises(SpecMismatch, match=r"a state with opt_state in a store for a step"):
            z.step(half, batch)
        z, state = one(group, offload=zf.stores.Offload(params=store))
        back = zf.stores.reload(state, store)
        with pytest.raises(SpecMismatch, match=r"params on the device for a step that keeps"):
            z.step(back, batch)
        again = back._replace(params=zf.offload(back.params, store))
        z.step(again, batch)

    zf.simulate(2, main)


def test_the_old_values_must_not_be_used_again() -> None:
    def main(group: zf.Group) -> None:
        store = zf.stores.host()
        z, state = one(group)
        stored = zf.offload(state, store)
        with pytest.raises(DonatedStateError, match=r"taken over by zf.offload\(\) at .*phases"):
            z.params(state)
        zf.stores.reload(stored, store)
        with pytest.raises(DonatedStateError, match=r"taken over by zf.stores.reload\(\) at"):
            z.params(stored)

    zf.simulate(1, main)


def test_a_state_has_flats() -> None:
    store = zf.stores.host()
    for move in (zf.stores.offload_values, zf.stores.reload):
        with pytest.raises(OptionError, match=r"a state has flat values; got dict without any"):
            move({"w": torch.ones(2)}, store)


class Broken(zf.files.Files):
    """Fails with the error of a disk while ``fails`` names a kind of transfer."""

    fails = ""

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        if self.fails == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, buffer, offset)

    def read(self, fd: int, buffer: Any, offset: int) -> int:
        if self.fails == "read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, buffer, offset)


def test_a_disk_that_fails_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        files = Broken()
        store = zf.stores.nvme(tmp_path, files=files)
        z, state = one(group)
        expected = z.params(state)
        zf.offload([zf.shard({"w": torch.ones(9)}, group)], store)
        files.fails = "write"
        with pytest.raises(OffloadError, match="No space left") as caught:
            zf.offload(state, store)
        assert "bucket 0" in str(caught.value.leaf)
        assert_same_bits(z.params(state), expected)
        files.fails = ""
        stored = zf.offload(state, store)
        files.fails = "read"
        with pytest.raises(OffloadError, match="Input/output error") as caught:
            zf.stores.reload(stored, store)
        assert "bucket 0" in str(caught.value.leaf)
        files.fails = ""
        assert_same_bits(z.params(zf.stores.reload(stored, store)), expected)
        store.close()

    zf.simulate(1, main)


def test_everything_is_in_the_store() -> None:
    def main(group: zf.Group) -> None:
        store = zf.stores.host()
        z = zf.zero(
            3,
            loss_fn,
            optim.adamw(0.1),
            group,
            precision=torch.float16,
            trainable=lambda path, leaf: path != "h.0.w",
            buffers=lambda path, leaf: "mean" if path == "out" else None,
        )
        state = zf.offload(z.init(models.mlp(dtype=torch.float32)), store)
        for part in (state.params, state.frozen, state.buffers, state.opt_state):
            large = [x for x in tree.leaves(part) if not isinstance(x, torch.Tensor) or x.ndim]
            assert large
            assert all(isinstance(x, Stored) and x.store is store for x in large)

    zf.simulate(2, main)
