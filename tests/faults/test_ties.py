"""Tied leaves have one gradient, the sum; a tie that changes is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, batch_of, fresh
from zfun import optim, tree
from zfun.errors import (
    AliasChanged,
    SpecMismatch,
)

pytestmark = pytest.mark.timeout(60)


def tied() -> dict[str, Any]:
    params = fresh()
    params["h"][2]["w"] = params["h"][0]["w"]
    return params


@EACH_STAGE
def test_the_gradient_of_tied_leaves_is_the_sum(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        z = zf.zero(stage, models.mlp_loss, optim.sgd(0.1), group, bucket_bytes=300)
        state, _ = z.step(z.init(tied()), batch_of(group))
        return z.params(state)

    def tied_by_hand(w: Tensor, x: Tensor) -> Tensor:
        params = fresh()
        params["h"][0]["w"] = params["h"][2]["w"] = w
        return models.mlp_loss(params, x)

    batches = models.mlp_batches(1, 2)[0]
    w = fresh()["h"][0]["w"]
    grad = sum(torch.func.grad(tied_by_hand)(w, x) for x in batches) / 2
    for found in zf.simulate(2, main):
        assert found["h"][0]["w"] is found["h"][2]["w"]
        torch.testing.assert_close(found["h"][0]["w"] - w, -0.1 * grad, rtol=1e-11, atol=1e-13)


def test_a_tie_that_is_broken_or_made_later_is_refused() -> None:
    broken = tree.map(torch.clone, tied())

    def main(group: zf.Group) -> None:
        layout = zf.shard(tied(), group).layout
        with pytest.raises(
            AliasChanged, match=r"'h\.0\.w' and 'h\.2\.w' shared one tensor and are now two"
        ) as caught:
            zf.flat.ravel(broken, layout, group)
        assert caught.value.leaf == "h.2.w"
        # Gradients of tied parameters do not fit parameters without the tie.
        _, grads = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)(
            tied(), batch_of(group)
        )
        for params in (broken, zf.replicate(broken, group)):
            with pytest.raises(
                SpecMismatch, match=r"shared one tensor and are now two|must have one layout"
            ):
                zf.apply(optim.sgd(0.1), grads, optim.sgd(0.1).init(params), params)

    zf.simulate(2, main)


def test_a_tie_that_is_made_later_is_refused_by_an_optimizer() -> None:
    def main(group: zf.Group) -> None:
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        optimizer = optim.adamw(0.1)
        params = fresh()
        params, state = zf.apply(
            optimizer, vg(params, batch_of(group))[1], optimizer.init(params), params
        )
        params["h"][2]["w"] = params["h"][0]["w"]
        with pytest.raises(
            AliasChanged,
            match=r"'h\.0\.w' and 'h\.2\.w' are one tensor now and have two optimizer states",
        ) as caught:
            zf.apply(optimizer, vg(params, batch_of(group))[1], state, params)
        assert caught.value.leaf == "h.2.w"
        flat = zf.shard(fresh(), group)
        _, grads = vg(tied(), batch_of(group))
        with pytest.raises(SpecMismatch, match="must have one layout"):
            zf.apply(optimizer, grads, optimizer.init(flat), flat)

    zf.simulate(2, main)
