"""Law 6 for the store on a disk, and tensors of any size and dtype."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun.stores import nvme
from zfun.testing import assert_same_bits, bucket_sizes, tensors

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as found:
        yield found


# Blocks of a page, so that a small tensor ends before, at and after the end of every block.
OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4096, 8192]),
        "queue_depth": st.integers(1, 3),
        "num_threads": st.integers(1, 4),
        "buffer_count": st.integers(1, 5),
        "buffer_size": st.sampled_from([0, 1000, 10**6]),
        "max_in_cpu": st.sampled_from([0, 0, 500]),
        "checksum": st.booleans(),
    }
)
NUMELS = st.one_of(
    st.integers(0, 20_000),
    st.builds(
        lambda blocks, more: max(0, blocks * 1024 + more), st.integers(0, 12), st.integers(-2, 2)
    ),
)


@settings(max_examples=examples(60))
@given(options=OPTIONS, data=st.data())
def test_tensors_of_any_size_and_dtype_return_with_the_same_bits(
    options: Any, data: st.DataObject, path: str
) -> None:
    """Puts, gets and drops in any order: a handle keeps its value while the handle lives."""
    store = nvme(path, **options)
    held: list[tuple[zf.stores.Stored, torch.Tensor]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["put", "put", "view", "get", "drop", "flush"])):
            case "put":
                dtype, numel = data.draw(st.sampled_from(DTYPES)), data.draw(NUMELS)
                seed = data.draw(st.integers(0, 99))
                generator = torch.Generator().manual_seed(seed)
                size = numel * dtype.itemsize
                raw = torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8)
                value = raw.view(dtype) if dtype is torch.bool else (raw * 77).view(dtype)
                held.append((store.put(value.clone(), "state"), value))
            case "view":
                value = data.draw(tensors(DTYPES[:5], max_dims=3))
                held.append((store.put(value, "state"), value.clone()))
            case "get" if held:
                handle, value = data.draw(st.sampled_from(held))
                found = handle.get(CPU).wait()
                assert_same_bits(found, value)
                if found.numel():
                    found.reshape(-1).view(torch.uint8).zero_()
            case "drop" if held:
                held.pop(data.draw(st.integers(0, len(held) - 1)))
            case "flush":
                store.flush()
    for handle, value in held:
        assert_same_bits(handle.get(CPU).wait(), value)
    store.close()


@settings(max_examples=examples(20))
@given(
    stage=st.integers(0, 3),
    size=st.integers(1, 3),
    bucket_bytes=bucket_sizes(),
    options=OPTIONS,
    donate=st.booleans(),
    num_micro_batches=st.sampled_from([1, 2]),
    parts=st.sets(st.sampled_from(["params", "grads", "optimizer"]), min_size=1),
)
def test_training_over_a_disk_has_the_bits_of_training_in_memory(
    stage: int,
    size: int,
    bucket_bytes: int,
    options: Any,
    donate: bool,
    num_micro_batches: int,
    parts: set[str],
    path: str,
) -> None:
    params, batches = models.mlp(), models.mlp_batches(3, size, rows=4)
    parts = parts if stage == 3 else parts - {"params"} or {"optimizer"}

    def train(group: zf.Group, store: Any) -> Any:
        z = zf.zero(
            stage,
            models.mlp_loss,
            zf.optim.adamw(0.05),
            group,
            bucket_bytes=bucket_bytes,
            num_micro_batches=num_micro_batches,
            donate=donate,
            offload=None if store is None else zf.stores.Offload(**dict.fromkeys(parts, store)),
        )
        state, losses = z.init(params), []
        for step in batches:
            state, info = z.step(state, step[group.rank])
            losses.append(float(info.loss))
        return z.params(state), losses

    store = nvme(path, **options)
    found = zf.simulate(size, train, store)
    for name in parts:
        name = {"optimizer": "state"}.get(name, name)
        assert store.bytes_moved("put", name)
        assert store.bytes_moved("get", name)
    store.close()
    for other in (zf.stores.host(), None):
        assert_same_bits(found, zf.simulate(size, train, other))
