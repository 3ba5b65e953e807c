"""Ranks that start with other trees, values or options raise before any bucket is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, STAGES, batch_of, fresh
from zfun import optim
from zfun.errors import (
    SpecMismatch,
)
from zfun.testing import same_bits

pytestmark = pytest.mark.timeout(60)


def another_shape(params: Any) -> Any:
    params["h"][1]["w"] = torch.zeros(5, 6, dtype=torch.float64)
    return params


def another_dtype(params: Any) -> Any:
    params["h"][1]["w"] = params["h"][1]["w"].float()
    return params


def one_more(params: Any) -> Any:
    return {**params, "extra": torch.zeros(2)}


def one_less(params: Any) -> Any:
    return {"h": params["h"]}


def another_order(params: Any) -> Any:
    return {"out": params["out"], "h": params["h"]}


def another_value(params: Any) -> Any:
    params["h"][1]["w"] = params["h"][1]["w"].clone()
    params["h"][1]["w"][2, 3] += 1e-15
    return params


def a_tie(params: Any) -> Any:
    params["h"][2]["b"] = params["h"][0]["b"]
    return params


def not_a_tensor(params: Any) -> Any:
    params["h"][1]["w"] = 3.0
    return params


DISAGREEMENTS = [
    (
        another_shape,
        (
            r"leaf h\.1\.w is torch.float64 \(5, 5\) on ranks 0, 2 and torch.float64 \(5, 6\) on "
            r"rank "
            r"1"
        ),
    ),
    (
        another_dtype,
        (
            r"leaf h\.1\.w is torch.float64 \(5, 5\) on ranks 0, 2 and torch.float32 \(5, 5\) on "
            r"rank "
            r"1"
        ),
    ),
    (one_more, r"leaf extra is missing on ranks 0, 2 and torch.float32 \(2,\) on rank 1"),
    (one_less, r"leaf out is torch.float64 \(5,\) on ranks 0, 2 and missing on rank 1"),
    (another_order, r"come in another order"),
    (
        another_value,
        r"leaf h\.1\.w has other values: fingerprint \d+ on ranks 0, 2 and \d+ on rank 1",
    ),
    (a_tie, r"h\.2\.b|ties"),
    (not_a_tensor, r"leaf h\.1\.w is torch.float64 \(5, 5\) on ranks 0, 2 and float on rank 1"),
]


@pytest.mark.parametrize(
    ("change", "message"), DISAGREEMENTS, ids=[change.__name__ for change, _ in DISAGREEMENTS]
)
def test_ranks_that_disagree_raise_before_any_bucket_is_sent(change: Any, message: str) -> None:
    def main(group: zf.Group) -> Any:
        params = change(fresh()) if group.rank == 1 else fresh()
        recorded = zf.record(group)
        starts = [
            lambda: zf.shard(params, recorded),
            lambda: zf.replicate(params, recorded),
            *(
                lambda stage=stage: zf.zero(
                    stage, models.mlp_loss, optim.adamw(0.1), recorded
                ).init(params)
                for stage in STAGES
            ),
            lambda: zf.data_parallel(zf.value_and_grad(models.mlp_loss), recorded)(
                params, batch_of(group)
            ),
            lambda: zf.shard_optimizer(optim.adamw(0.1), recorded).init(params),
        ]
        texts = []
        for start in starts:
            with pytest.raises(SpecMismatch, match=message) as caught:
                start()
            assert caught.value.rank == group.rank
            texts.append(str(caught.value))
        assert {entry.name for entry in recorded.log} <= {
            "digest",
            "digest lengths",
            "digest texts",
        }
        return texts

    zero, one, two = zf.simulate(3, main)
    assert zero == one == two


@EACH_STAGE
def test_broadcast_takes_the_values_of_rank_0(stage: int) -> None:
    def main(group: zf.Group, init: str) -> Any:
        params = models.mlp(num_layers=3, seed=1 + group.rank if init == "broadcast" else 1)
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300)
        state, info = z.step(z.init(params, init=init), batch_of(group))
        return info.loss, z.params(state)

    runs = [*zf.simulate(3, main, "broadcast"), *zf.simulate(3, main, "check")]
    assert all(same_bits(run, runs[0]) for run in runs)


def test_broadcast_still_compares_shapes() -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(
            SpecMismatch,
            match=r"leaf h\.1\.w is torch.float64 \(5, 5\) on rank 0 and torch.float64 \(5, 6\) "
            r"on rank 1",
        ):
            zf.shard(
                another_shape(fresh()) if group.rank == 1 else fresh(), group, init="broadcast"
            )

    zf.simulate(2, main)


def test_ranks_must_agree_on_bucket_bytes() -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(
            SpecMismatch, match=r"bucket_bytes\) is 100 on rank 0 and 101 on rank 1"
        ):
            zf.shard(fresh(), group, bucket_bytes=100 + group.rank)

    zf.simulate(2, main)
