"""Leaves of unusual kinds train, or are refused by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, batch_of, fresh
from zfun import optim
from zfun.errors import (
    LeafError,
    ZfunError,
)

pytestmark = pytest.mark.timeout(60)


# Leaves of unusual shapes, strides and dtypes.


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator, dtype=dtype)


UNUSUAL: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no elements": lambda: {"none": numbers(0, 3), "some": numbers(4)},
    "no dims": lambda: {"number": numbers(), "some": numbers(2, 3)},
    "fewer elements than ranks": lambda: {"one": numbers(1), "two": numbers(2)},
    "strides": lambda: {"turned": numbers(3, 5).t(), "far": numbers(9)[1::2], "some": numbers(3)},
    "complex": lambda: {"z": numbers(3, 2, dtype=torch.complex128), "some": numbers(5)},
    "dtypes": lambda: {"short": numbers(7, dtype=torch.float32), "long": numbers(3)},
}


@EACH_STAGE
@pytest.mark.parametrize("kind", UNUSUAL)
def test_leaves_of_any_kind_train_as_in_plain_torch(kind: str, stage: int) -> None:
    size, batches = 5, models.tree_batches(2, 5, 3)

    def main(group: zf.Group) -> Any:
        recorded = zf.record(group)
        optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1))
        z = zf.zero(stage, models.tree_loss, optimizer, recorded, bucket_bytes=64)
        state, norms = z.init(UNUSUAL[kind]()), []
        for batch in batches:
            state, info = z.step(state, batch[group.rank])
            norms.append(float(info.grad_norm))
        calls = [(entry.kind, entry.name, entry.part) for entry in recorded.log]
        return z.params(state), norms, state.step, calls

    expected, norms = UNUSUAL[kind](), []
    for batch in batches:
        by_rank = [torch.func.grad(models.tree_loss)(expected, x) for x in batch]
        grads = {name: torch.stack([x[name] for x in by_rank]).mean(0) for name in expected}
        norm = math.sqrt(sum(float(x.abs().double().square().sum()) for x in grads.values()))
        norms.append(norm)
        factor = 0.1 / max(1.0, (norm + 1e-6) / 0.5)
        expected = {name: x - factor * grads[name] for name, x in expected.items()}
    tolerance = 1e-5 if kind == "dtypes" else 1e-10
    runs = zf.simulate(size, main)
    for params, found, step, calls in runs:
        torch.testing.assert_close(params, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found, norms, rtol=tolerance, atol=tolerance)
        # A rank without elements takes the same steps, and part in the same collectives.
        assert (step, calls) == (2, runs[0][3])


# Leaves that cannot be trained.


@EACH_STAGE
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.arange(3), r"'h\.1\.b' (is|has) torch.int64"),
        (torch.ones(3, dtype=torch.bool), r"'h\.1\.b' (is|has) torch.bool"),
        (torch.ones(1).expand(5), r"'h\.1\.b' shows an element twice"),
        (1.5, r"'h\.1\.b' is float"),
        (torch.ones(2, 2).to_sparse(), r"'h\.1\.b' is torch.sparse_coo"),
    ],
    ids=["int", "bool", "expanded", "float", "sparse"],
)
def test_leaves_that_cannot_be_trained_are_refused_by_name(
    stage: int, leaf: Any, message: str
) -> None:
    params = fresh()
    params["h"][1]["b"] = leaf

    def main(group: zf.Group) -> None:
        with pytest.raises(LeafError, match=message) as caught:
            zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group).init(params)
        assert caught.value.leaf == "h.1.b"

    zf.simulate(2, main)
    with pytest.raises(LeafError, match=message):
        zf.value_and_grad(models.mlp_loss)(params, torch.ones(4, 5, dtype=torch.float64))


# Losses that are not scalars.


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            lambda p, x: p["out"],
            r"must return a scalar tensor, .* got a tensor of shape \(5,\); reduce it with mean",
        ),
        (lambda p, x: 3.0, "got float"),
        (lambda p, x: None, "got NoneType"),
        (lambda p, x: (p["out"].sum(), 1, 2), "got tuple"),
        (lambda p, x: {"loss": p["out"].sum()}, "got dict"),
    ],
)
def test_a_loss_must_be_a_scalar(out: Any, message: str) -> None:
    with pytest.raises(ZfunError, match=message):
        zf.value_and_grad(out)(fresh(), torch.ones(4, 5))


def test_a_lazy_leaf_does_not_outlive_the_loss() -> None:
    def main(group: zf.Group) -> None:
        def loss_fn(params: Any, x: Tensor) -> Any:
            return models.mlp_loss(params, x), params["out"]

        (_, leaked), _ = zf.value_and_grad(zf.shard_params(loss_fn, group))(
            zf.shard(fresh(), group), batch_of(group)
        )
        assert leaked.shape == (5,)
        with pytest.raises(
            ZfunError,
            match=r"only while its loss and the gradient of it run; leaf 'out' was used later; "
            r"return a clone",
        ) as caught:
            leaked + 1
        assert caught.value.leaf == "out"

    zf.simulate(2, main)


def test_each_call_makes_new_lazy_leaves() -> None:
    """A user who kept a reused leaf would see new values."""

    def main(group: zf.Group) -> int:
        seen: list[Tensor] = []

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            seen.append(params["out"])
            with (
                pytest.raises(ZfunError, match="leaf 'out' was used later")
                if len(seen) > 1
                else contextlib.nullcontext()
            ):
                seen[0].sum()
            return models.mlp_loss(params, x)

        vg, params = zf.value_and_grad(zf.shard_params(loss_fn, group)), zf.shard(fresh(), group)
        for _ in range(3):
            vg(params, batch_of(group))
        return len({id(leaf) for leaf in seen})

    assert zf.simulate(2, main) == [3] * 2
