"""Law 5 for every optimizer: under any composition of transforms and at any group size the
parameters have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models
from tests.conftest import examples
from tests.distributed.programs.optimizers import over_a_mesh
from zfun import optim
from zfun.testing import (
    Composition,
    assert_same_bits,
    assert_same_runs,
    bucket_sizes,
    compositions,
    same_bits,
)

LR = 0.05


def kind(path: str, leaf: Any) -> str:
    """Alternate between two labels in every block, so that one bucket would mix both."""
    return "matrix" if leaf.ndim == 2 else "rest"


OPTIMIZERS: dict[str, Any] = {
    "lion": optim.lion(LR, weight_decay=0.1),
    "lion, clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.lion(optim.warmup(LR, 2))),
    "adagrad": optim.with_master(optim.adagrad(LR, rate_decay=0.1)),
    "adamw of parts": optim.chain(
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1),
        optim.scale_by_learning_rate(optim.warmup(LR, 2)),
    ),
    "momentum of parts, masked": optim.chain(
        optim.clip_by_global_norm(0.1),
        optim.masked(optim.trace(0.9, nesterov=True), lambda path, leaf: leaf.ndim == 2),
        optim.masked(optim.scale_by_lion(), lambda path, leaf: leaf.ndim != 2),
        optim.add_decayed_weights(0.1, mask=lambda path, leaf: leaf.ndim == 2),
        optim.scale_by_learning_rate(LR),
    ),
    "adagrad of parts, masters": optim.with_master(
        optim.chain(optim.scale_by_adagrad(), optim.scale_by_learning_rate(LR))
    ),
    "torch": optim.from_torch(torch.optim.SGD, lr=LR, momentum=0.9, dampening=0.5),
    "lamb": optim.lamb(LR, weight_decay=0.1, max_ratio=1.5),
    "lamb, clipped, masters": optim.chain(
        optim.clip_by_global_norm(0.1), optim.with_master(optim.lamb(LR))
    ),
    "muon": optim.muon(LR, optim.adamw(LR), weight_decay=0.1),
    "by label": optim.by_label(
        {"matrix": optim.adamw(LR, weight_decay=0.3), "rest": optim.sgd(LR, momentum=0.9)}, kind
    ),
    "by label, clipped, masters": optim.chain(
        optim.clip_by_global_norm(0.1),
        optim.with_master(optim.by_label({"matrix": optim.sgd(LR), "rest": optim.adamw(LR)}, kind)),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=examples(2))
@given(
    size=st.sampled_from([1, 2, 3, 4, 7]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    drawn=st.lists(compositions(), min_size=3, max_size=3),
    buckets=st.lists(bucket_sizes(), min_size=2, max_size=2),
)
def test_every_composition_is_the_same_optimizer(
    name: str, size: int, dtype: torch.dtype, drawn: list[Composition], buckets: list[int]
) -> None:
    params, batches = (
        models.mlp(num_layers=2, dtype=dtype),
        models.mlp_batches(2, size, dtype=dtype),
    )
    run = assert_same_runs(
        models.mlp_loss,
        OPTIMIZERS[name],
        params,
        batches,
        [Composition(), *drawn],
        bucket_bytes=buckets,
    )
    assert not same_bits(run.params, params)


@pytest.mark.parametrize(
    ("num_rows", "inner"), [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["lamb", "muon", "by_label", "parts", "onebit_adam"])
def test_over_a_mesh_every_stage_is_the_same_optimizer(
    name: str, num_rows: int, inner: int
) -> None:
    """Rules that depend on leaves or ranks have equal bits over the mesh and over the inner axis,
    and are near the same steps in one process.
    """
    first, *others = zf.simulate(num_rows * inner, over_a_mesh, inner, [name], slice(None))
    for other in others:
        assert_same_bits(other, first, "ranks")
