"""A wrong option or composition is refused at the call, before any collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, batch_of, fresh
from zfun import optim, tree
from zfun.errors import (
    NotElementwiseError,
    OptionError,
    PlacementError,
    SpecMismatch,
)

pytestmark = pytest.mark.timeout(60)


# Options.


def group_of_one() -> zf.Group:
    return zf.collectives.single_group()


# A type checker would find these typos too.
untyped: Any = zf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: untyped.zero(1, models.mlp_loss, optim.sgd(0.1), g, bucket_byte=1),
            r"zero\(\) has no option 'bucket_byte'; did you mean 'bucket_bytes'\?",
        ),
        (
            lambda g: untyped.zero(1, models.mlp_loss, optim.sgd(0.1), g, compresion=None),
            r"did you mean 'compression'\?",
        ),
        (
            lambda g: untyped.zero(1, models.mlp_loss, optim.sgd(0.1), g, offload=zf.stores.host()),
            (
                r"offload of zero\(\) must be a zf.stores.Offload or None; got .*; write "
                r"offload=zf.stores.Offload\(optimizer=zf.stores.host\(\)\)"
            ),
        ),
        (
            lambda g: untyped.zero(
                1, models.mlp_loss, optim.sgd(0.1), g, compression=zf.compression.int8()
            ),
            r"compression of zero\(\) must be a zf.compression.Compression or None; got .*; write",
        ),
        (
            lambda g: untyped.zero(3, models.mlp_loss, optim.sgd(0.1), g, schedule={"prefetch": 2}),
            (
                r"schedule of zero\(\) must be a zf.ScheduleOptions or None; got .*; write "
                r"schedule=zf.ScheduleOptions\(prefetch=2\)"
            ),
        ),
        (
            lambda g: untyped.shard({}, g, bucketbytes=1),
            r"shard\(\) has no option 'bucketbytes'; did you mean 'bucket_bytes'\?",
        ),
        (
            lambda g: untyped.replicate({}, g, inti="check"),
            r"replicate\(\) has no option 'inti'; did you mean 'init'\?",
        ),
        (
            lambda g: untyped.data_parallel(zf.value_and_grad(models.mlp_loss), g, reduction="sum"),
            r"data_parallel\(\) has no option 'reduction'",
        ),
        (
            lambda g: untyped.shard_grads(zf.value_and_grad(models.mlp_loss), g, reduce="sum"),
            r"shard_grads\(\) has no option 'reduce'; it takes vg, group",
        ),
        (
            lambda g: untyped.shard_params(models.mlp_loss, g, freeze=None),
            r"shard_params\(\) has no option 'freeze'; did you mean 'frozen'\?",
        ),
        (
            lambda g: untyped.shard_optimizer(optim.sgd(0.1), g, bucket=1),
            r"shard_optimizer\(\) has no option 'bucket'",
        ),
        (
            lambda g: untyped.accumulate(zf.value_and_grad(models.mlp_loss), num_microbatches=2),
            r"did you mean 'num_micro_batches'\?",
        ),
        (
            lambda g: untyped.zero(4, models.mlp_loss, optim.sgd(0.1), g),
            r"stage of zero\(\) must be 0, 1, 2 or 3; got 4; write stage=3",
        ),
        (
            lambda g: untyped.zero("3", models.mlp_loss, optim.sgd(0.1), g),
            r"stage of zero\(\) must be 0, 1, 2 or 3; got '3'",
        ),
        (
            lambda g: untyped.zero(True, models.mlp_loss, optim.sgd(0.1), g),
            r"stage of zero\(\) must be 0, 1, 2 or 3; got True",
        ),
        (
            lambda g: untyped.zero(
                2,
                models.mlp_loss,
                optim.sgd(0.1),
                g,
                offload=zf.stores.Offload(params=zf.stores.host()),
            ),
            "Offload.params keeps shards, which only stage 3 has",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g).init({}, init="chek"),
            "init must be 'check' or 'broadcast'; got 'chek'",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, max_skipped=0),
            (
                r"max_skipped of zero\(\) must be an integer of at least 1, below 2\*\*63 or None; "
                r"got 0; write max_skipped=1"
            ),
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, num_micro_batches=0),
            r"num_micro_batches of zero\(\) must be an integer of at least 1",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, bucket_bytes=0).init(
                {"w": torch.ones(1)}
            ),
            r"bucket_bytes of zero\(\) must be an integer of at least 1, below 2\*\*63; got 0",
        ),
        (
            lambda g: untyped.data_parallel(zf.value_and_grad(models.mlp_loss), g, reduce="avg"),
            r"reduce of data_parallel\(\) must be 'mean' or 'sum'; got 'avg'",
        ),
        (
            lambda g: untyped.shard({}, g, init="yes"),
            r"init of shard\(\) must be 'check' or 'broadcast'; got 'yes'",
        ),
        (
            lambda g: untyped.accumulate(zf.value_and_grad(models.mlp_loss), 0),
            r"num_micro_batches of accumulate\(\) must be an integer of at least 1",
        ),
        (
            lambda g: untyped.zero(
                1, models.mlp_loss, torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), g
            ),
            "an optimizer is an Optimizer or a pair",
        ),
    ],
)
def test_options_are_checked_before_anything_runs(call: Any, message: str) -> None:
    recorded = zf.record(group_of_one())
    with pytest.raises(OptionError, match=message) as caught:
        call(recorded)
    assert isinstance(caught.value, (TypeError, ValueError))
    assert recorded.log == []


# Impossible compositions.


def test_impossible_compositions_are_refused() -> None:
    def main(group: zf.Group) -> None:
        x, params = batch_of(group), fresh()
        vg = zf.value_and_grad(models.mlp_loss)
        parallel = zf.data_parallel(vg, group)
        whole, shards = zf.replicate(params, group), zf.shard(params, group)
        other = zf.record(group)

        def opaque(params: Any, batch: Any) -> Any:
            """A gradient function that zfun cannot look into."""
            return vg(params, batch)

        def opaque_parallel(params: Any, batch: Any) -> Any:
            return parallel(params, batch)

        terms = parallel(params, x)[1]
        refused: list[tuple[Any, str]] = [
            (
                lambda: zf.shard_params(models.mlp_loss, group)(params, x),
                r"got dict of whole leaves; call zf.shard\(params, group\) first",
            ),
            (
                lambda: zf.shard_params(models.mlp_loss, group)(whole, x),
                r"got a Flat with placement R; call zf.redistribute\(params, zf.S, group\) first",
            ),
            (
                lambda: zf.shard_params(models.mlp_loss, other)(shards, x),
                "must be given the group over which its parameters are sharded",
            ),
            (
                lambda: models.mlp_loss(shards, x),
                r"\['h'\] on a Flat with placement S; unshard\(\) it .*shard_params\(\)",
            ),
            (
                lambda: zf.value_and_grad(models.mlp_loss)(shards, x),
                r"on a Flat with placement S.*shard_params\(\)",
            ),
            (lambda: models.mlp_loss(whole, x), r"\['h'\] on a Flat with placement R"),
            (lambda: shards.h, r"\.h on a Flat with placement S"),
            (lambda: list(shards), "iteration on a Flat"),
            (lambda: zf.shard_grads(vg, group), "wrap them in data_parallel"),
            (
                lambda: zf.shard_grads(opaque, group)(params, x),
                r"got dict of whole leaves; wrap them in data_parallel\(\) first",
            ),
            (
                lambda: zf.shard_grads(parallel, other),
                r"shard_grads\(\) must be given the group of its gradients; got another one",
            ),
            (
                lambda: zf.transforms.replicate_grads(vg, group),
                r"replicate_grads\(\) takes gradients with placement P.*wrap them in data_parallel",
            ),
            (
                lambda: zf.transforms.replicate_grads(opaque, group)(params, x),
                "got dict of whole leaves; wrap them in data_parallel",
            ),
            (
                lambda: zf.transforms.replicate_grads(parallel, other),
                r"the same group to data_parallel\(\) and replicate_grads\(\)$",
            ),
            (
                lambda: zf.data_parallel(parallel, group),
                r"got ones with placement P; apply it once, and before shard_grads",
            ),
            (
                lambda: zf.data_parallel(zf.shard_grads(parallel, group), group),
                "got ones with placement S; apply it once",
            ),
            (
                lambda: zf.data_parallel(opaque_parallel, group)(params, x),
                "put it directly around value_and_grad",
            ),
            (
                lambda: parallel({"net": whole}, x),
                "got a Flat inside a tree; shard the whole tree at once",
            ),
            (lambda: parallel(terms, x), "got a Flat with placement P; redistribute"),
            (lambda: zf.data_parallel(vg, other)(whole, x), "must be of one group; got two"),
            (lambda: zf.gather(terms), "got a Flat with placement P"),
            (lambda: zf.flat.unravel(shards), r"got a Flat with placement S; unshard\(\) it"),
            (lambda: zf.reductions.global_norm(terms), "got a Flat with placement P; redistribute"),
            (
                lambda: zf.apply(optim.sgd(0.1), terms, (), terms),
                "parameters are whole or sharded; got a Flat with placement P",
            ),
            (
                lambda: zf.apply(optim.sgd(0.1), params, (), whole),
                "flat parameters need flat gradients; got a tree of tensors",
            ),
            (
                lambda: zf.offload(3, zf.stores.host()),
                "takes an optimizer, a gradient function, a loss or a Flat; got int",
            ),
            (
                lambda: untyped.transforms.offload_params(params, zf.stores.host()),
                r"offload_params\(\) takes a Flat; got dict",
            ),
            (
                lambda: zf.offload(zf.shard_params(models.mlp_loss, group), zf.stores.host())(
                    shards, x
                ),
                "got some that are not; move them with params = zf.offload",
            ),
            (
                lambda: zf.transforms.offload_grads(opaque, zf.stores.host())(params, x),
                "wrap them in data_parallel",
            ),
        ]
        for call, message in refused:
            with pytest.raises(PlacementError, match=message):
                call()
        with pytest.raises(SpecMismatch, match="must have one layout"):
            zf.apply(
                optim.sgd(0.1),
                zf.replicate(params, group, bucket_bytes=64),
                optim.sgd(0.1).init(whole),
                whole,
            )

    zf.simulate(2, main)


def per_leaf_norm(grads: Any, state: Any, params: Any) -> Any:
    return tree.map(lambda g: -0.1 * g / (g.norm() + 1e-6), grads), state


@EACH_STAGE
def test_an_optimizer_that_mixes_elements_is_caught_at_construction(stage: int) -> None:
    recorded = zf.record(group_of_one())
    with pytest.raises(
        NotElementwiseError, match="an optimizer that runs on shards works element by element"
    ):
        zf.zero(stage, models.mlp_loss, (lambda params: (), per_leaf_norm), recorded)
    with pytest.raises(NotElementwiseError, match="works element by element"):
        zf.shard_optimizer((lambda params: (), per_leaf_norm), recorded)
    assert recorded.log == []


def test_an_optimizer_that_mixes_elements_runs_on_whole_leaves() -> None:
    grads = {"w": torch.tensor([3.0, 4.0])}
    new, _ = zf.apply((lambda params: (), per_leaf_norm), grads, (), {"w": torch.zeros(2)})
    torch.testing.assert_close(new["w"], torch.tensor([-0.06, -0.08]))
