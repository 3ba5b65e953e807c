"""The peak of an init is the state, one leaf and nothing else."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import zfun as zf
from tests.unit.planner.test_memory import Echo, Live
from zfun import optim, tree

FP32, BF16 = torch.float32, torch.bfloat16
# Digests and counts, which do not grow with the model.
SMALL = 2**15
WIDTH, LAYERS = 128, 12
SHAPES = {
    "wte": (1000, WIDTH),
    **{f"h.{i}.w": (WIDTH, WIDTH) for i in range(LAYERS)},
    **{f"h.{i}.b": (WIDTH,) for i in range(LAYERS)},
}
LARGEST = 1000 * WIDTH * 4
SPECS = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}


class Alone(Echo):
    """One of four ranks; a broadcast hands the message through."""

    def start(self, call: Any, x: Tensor, out: Tensor | None = None) -> Any:
        if call.op.kind == "broadcast":
            return zf.collectives.Work.done(x)
        return super().start(call, x, out)


def initialise(path: str, spec: Tensor) -> Tensor:
    return torch.ones(spec.shape)


def loss_fn(params: Any, batch: Any) -> Tensor:
    return params["wte"].sum()


def num_bytes(value: Any) -> int:
    return sum(x.nbytes for x in tree.leaves(value) if isinstance(x, Tensor))


def peaks(start: Any) -> tuple[int, int, Any]:
    """Return the peak of a start beside the result, the bytes of the result, and the result."""
    gc.collect()
    with Live() as live:
        found = start()
        kept = live.now()
    return live.peak - kept, kept, found


@pytest.fixture
def fingerprints_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest works on pieces of 2 MiB, which is more than these small models."""
    monkeypatch.setattr("zfun.ops._fingerprint._CHUNK_BYTES", 4096)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "bucket_bytes", [pytest.param(1, marks=SLOW), 2**17, pytest.param(2**26, marks=SLOW)]
)
@pytest.mark.parametrize("init", ["check", pytest.param("broadcast", marks=SLOW)])
@pytest.mark.parametrize("source", ["initialised", "safetensors", "tensors"])
@pytest.mark.usefixtures("fingerprints_without_memory")
def test_a_shard_takes_one_leaf_beside_the_result(
    source: str, init: str, bucket_bytes: int, tmp_path: Path
) -> None:
    params: Any = {path: initialise(path, spec) for path, spec in SPECS.items()}
    largest = LARGEST
    if source == "initialised":
        params = zf.sources.initialised(SPECS, initialise)
    elif source == "safetensors":
        save_file(params, tmp_path / "model.safetensors")
        params = zf.sources.safetensors(tmp_path)
    else:
        largest = 0
    for make in (zf.shard, zf.replicate):
        beside, kept, flat = peaks(
            lambda make=make: make(params, Alone(), bucket_bytes=bucket_bytes, init=init)
        )
        assert kept == num_bytes(flat)
        assert beside <= largest + SMALL


@pytest.mark.parametrize("precision", [None, BF16, zf.Precision(param=BF16)])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
@pytest.mark.usefixtures("fingerprints_without_memory")
def test_a_start_takes_one_leaf_beside_the_state(stage: int, precision: Any) -> None:
    params = zf.sources.initialised(SPECS, initialise)
    z = zf.zero(stage, loss_fn, optim.adamw(0.1), Alone(), precision=precision, bucket_bytes=2**17)
    beside, kept, state = peaks(lambda: z.init(params))
    assert 0 <= num_bytes(tuple(state)) - kept <= 64
    assert beside <= LARGEST + SMALL


@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.usefixtures("fingerprints_without_memory")
def test_a_start_on_a_disk_takes_a_leaf_and_a_bucket(precision: Any, tmp_path: Path) -> None:
    params = zf.sources.initialised(SPECS, initialise)
    store = zf.stores.nvme(tmp_path, buffer_count=1)
    offload = zf.stores.Offload(params=store, optimizer=store)
    group = Alone()
    z = zf.zero(
        3,
        loss_fn,
        optim.adamw(0.1),
        group,
        precision=precision,
        offload=offload,
        bucket_bytes=2**17,
    )
    beside, kept, state = peaks(lambda: z.init(params))
    assert kept <= SMALL
    # Of the largest bucket: parameters, master weights, and two moments, in one of four shards.
    bucket = LARGEST // group.size * (4 if precision is None else 5)
    assert num_bytes(tuple(state)) <= SMALL
    assert beside <= LARGEST + bucket + SMALL
    store.close()


def test_the_digest_of_a_tensor_takes_no_copy_of_the_tensor() -> None:
    x = torch.ones(2**24)
    for value, dtype in ((x, None), (x, BF16), (x[1:], None)):
        with Live() as live:
            zf.ops.fingerprint(value, dtype)
        assert live.peak <= 2**24
    rounded = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0))
    assert zf.ops.fingerprint(rounded, BF16) == zf.ops.fingerprint(rounded.to(BF16))


def test_the_parts_of_a_state_are_compared_one_after_the_other() -> None:
    """A part has the structure of the whole tree, so all parts at once grow with the square."""
    most, calls = [0], [0]
    adam = zf.optim.adam(0.1)

    def init(params: Any) -> Any:
        calls[0] += 1
        if calls[0] % 40 == 0:
            alive = sum(type(x) is zf.layout.Layout for x in gc.get_objects())
            most[0] = max(most[0], alive)
        return adam.init(params)

    def main(group: zf.Group) -> None:
        rule = adam._replace(init=init)
        loss = lambda params, batch: sum((w * batch).sum() for w in params)
        gc.collect()
        before = sum(type(x) is zf.layout.Layout for x in gc.get_objects())
        zf.zero(3, loss, rule, group, bucket_bytes=1).init([torch.ones(9) for _ in range(200)])
        assert calls[0] > 400
        # layout.select() remembers 64 layouts.
        assert most[0] - before < 80

    zf.simulate(1, main)
