"""Law 6 for steps that go bucket by bucket: no store, fraction or size of buckets changes a bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from tests.user_store import user_store
from zfun import optim, tree
from zfun.testing import assert_same_bits, bucket_sizes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as found:
        yield found


def centred(grads: Any, state: Any, params: Any) -> Any:
    """An element-wise rule of a user."""
    moved = tree.map(lambda g, m: 0.5 * m + g, grads, state)
    return tree.map(lambda m: -0.05 * m, moved), moved


def normed(grads: Any, state: Any, params: Any) -> Any:
    """A rule of a user that looks at all gradients, and so cannot go bucket by bucket."""
    norm = float(zf.reductions.global_norm(grads)) + 1.0
    return tree.map(lambda g: -0.05 / norm * g, grads), state


def zeros(params: Any) -> Any:
    return tree.map(torch.zeros_like, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.05, weight_decay=0.1),
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "lamb": lambda: optim.lamb(0.05),
    "muon": lambda: optim.muon(0.02, optim.adamw(0.05)),
    "torch": lambda: optim.from_torch(torch.optim.NAdam, lr=0.05),
    "schedule": lambda: optim.chain(
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, mask=lambda path, leaf: leaf.ndim > 1),
        optim.scale_by_learning_rate(optim.linear(0.1, 0.0, 9)),
    ),
    "pair": lambda: (zeros, centred),
    "pair with a norm": lambda: (zeros, normed),
}


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return models.mlp_loss(params, x.to(params["out"].dtype))


PRECISIONS: dict[str, Any] = {
    "float32": None,
    "bfloat16": BF16,
    "bfloat16 gradients": zf.Precision(param=BF16, compute=BF16, reduce=BF16, master=FP32),
    # Scales at which some steps overflow and are skipped.
    "float16": zf.Precision(
        param=FP16,
        compute=FP16,
        reduce=FP32,
        master=FP32,
        loss_scale=optim.dynamic_loss_scale(2.0**17, hysteresis=1, window=2),
    ),
}
STORES: dict[str, Callable[[str], Any]] = {
    "host": lambda path: zf.stores.host(),
    "nvme": lambda path: zf.stores.nvme(path, block_size=4096, queue_depth=2, num_threads=2),
    "user": lambda path: user_store(),
}
PARTS = st.dictionaries(
    st.sampled_from(["optimizer", "grads", "params"]), st.sampled_from([*STORES]), min_size=1
)


CASES = st.fixed_dictionaries(
    {
        "stage": st.integers(0, 3),
        "size": st.sampled_from([1, 2, 2, 3]),
        "bucket_bytes": bucket_sizes(),
        "parts": PARTS,
        "optimizer": st.sampled_from([*OPTIMIZERS]),
        "precision": st.sampled_from([*PRECISIONS]),
        "clip": st.sampled_from([None, 0.5]),
        "num_micro_batches": st.sampled_from([1, 2]),
        "donate": st.booleans(),
        "fraction": st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.0]),
    }
)


@settings(max_examples=examples(20))
@given(case=CASES)
def test_no_store_changes_a_bit_of_a_step(case: dict[str, Any], path: str) -> None:
    compare(path, **case)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(case=CASES)
def test_no_store_changes_a_bit_of_many_steps(case: dict[str, Any], path: str) -> None:
    compare(path, **case)


def compare(
    path: str,
    *,
    stage: int,
    size: int,
    bucket_bytes: int,
    parts: dict[str, str],
    optimizer: str,
    precision: str,
    clip: float | None,
    num_micro_batches: int,
    donate: bool,
    fraction: float,
) -> None:
    params, batches = models.mlp(dtype=FP32), models.mlp_batches(4, size, dtype=FP32)
    if stage < 3:
        parts = {name: kind for name, kind in parts.items() if name != "params"} or {
            "optimizer": "host"
        }

    def rule() -> Any:
        made = OPTIMIZERS[optimizer]()
        return made if clip is None else optim.chain(optim.clip_by_global_norm(clip), made)

    def train(group: zf.Group, offload: zf.stores.Offload | None) -> Any:
        z = zf.zero(
            stage,
            loss_fn,
            rule(),
            group,
            bucket_bytes=bucket_bytes,
            precision=PRECISIONS[precision],
            num_micro_batches=num_micro_batches,
            donate=donate,
            offload=offload,
        )
        state, infos = z.init(params), []
        for step in batches:
            state, info = z.step(state, step[group.rank])
            infos.append((info.loss, info.grad_norm, info.skipped, info.bad_leaf, info.loss_scale))
        return z.params(state), infos, state.num_applied

    fraction = fraction if "optimizer" in parts else 1.0
    made: dict[str, Any] = {name: STORES[kind](path) for name, kind in parts.items()}
    found = zf.simulate(size, train, zf.stores.Offload(**made, fraction=fraction))
    for store in made.values():
        if hasattr(store, "close"):
            store.close()
    assert_same_bits(found, zf.simulate(size, train, None))
