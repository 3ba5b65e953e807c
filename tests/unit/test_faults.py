"""What goes wrong in training, and the error or the number that is owed then. Nothing hangs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import (
    AliasChanged,
    DonatedStateError,
    LeafError,
    NotElementwiseError,
    OptionError,
    PeerLost,
    PlacementError,
    SpecMismatch,
    ZfunError,
)
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(60)

STAGES = [0, 1, 2, 3]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)


def fresh() -> dict[str, Any]:
    return models.mlp(num_layers=3)


def batch_of(group: zf.Group, step: int = 0) -> Tensor:
    return models.mlp_batches(step + 1, group.size)[step][group.rank]


# Ranks that do not agree (rows 11 and 12).


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
def test_ranks_that_disagree_are_told_before_anything_is_sent(change: Any, message: str) -> None:
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


# Options (row 21).


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
                r"offload is a zf.Offload or None; got .*; write "
                r"zf.Offload\(optimizer=zf.stores.host\(\)\)"
            ),
        ),
        (
            lambda g: untyped.zero(
                1, models.mlp_loss, optim.sgd(0.1), g, compression=zf.compression.int8()
            ),
            r"compression is a zf.Compression or None; got .*; write zf.Compression\(grads=",
        ),
        (
            lambda g: untyped.zero(3, models.mlp_loss, optim.sgd(0.1), g, schedule={"prefetch": 2}),
            (
                r"schedule is a zf.ScheduleOptions or None; got .*; write "
                r"zf.ScheduleOptions\(prefetch=2\)"
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
            "stage must be 0, 1, 2 or 3; got 4",
        ),
        (
            lambda g: untyped.zero("3", models.mlp_loss, optim.sgd(0.1), g),
            "stage must be 0, 1, 2 or 3; got '3'",
        ),
        (
            lambda g: untyped.zero(True, models.mlp_loss, optim.sgd(0.1), g),
            "stage must be 0, 1, 2 or 3; got True",
        ),
        (
            lambda g: untyped.zero(
                2, models.mlp_loss, optim.sgd(0.1), g, offload=zf.Offload(params=zf.stores.host())
            ),
            "Offload.params keeps shards, which only stage 3 has",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g).init({}, init="chek"),
            "init must be 'check' or 'broadcast'; got 'chek'",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, max_skipped=0),
            "max_skipped must be at least 1; got 0",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, num_micro_batches=0),
            "num_micro_batches must be at least 1; got 0",
        ),
        (
            lambda g: untyped.zero(2, models.mlp_loss, optim.sgd(0.1), g, bucket_bytes=0).init(
                {"w": torch.ones(1)}
            ),
            "bucket_bytes must be at least 1; got 0",
        ),
        (
            lambda g: untyped.data_parallel(zf.value_and_grad(models.mlp_loss), g, reduce="avg"),
            "reduce must be 'mean' or 'sum'; got 'avg'",
        ),
        (
            lambda g: untyped.shard({}, g, init="yes"),
            "init must be 'check' or 'broadcast'; got 'yes'",
        ),
        (
            lambda g: untyped.accumulate(zf.value_and_grad(models.mlp_loss), 0),
            "num_micro_batches must be at least 1; got 0",
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


# Donated state (row 20).


@EACH_STAGE
@pytest.mark.parametrize("offload", [False, True])
def test_a_state_that_was_given_away_says_who_has_it(stage: int, offload: bool) -> None:
    def main(group: zf.Group) -> None:
        stores = zf.Offload(optimizer=zf.stores.host()) if offload else None
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, offload=stores)
        old = z.init(fresh())
        new, _ = z.step(old, batch_of(group))
        rule = (
            r"a donated value must not be used again; its buffers were taken over by step 0 "
            r"at .*test_faults\.py:\d+; use the value"
        )
        uses = [
            lambda: z.step(old, batch_of(group)),
            lambda: z.params(old),
            lambda: zf.describe(old),
            lambda: zf.unshard(old.params),
            lambda: old.params.buffers,
            lambda: tree.leaves(old.params),
            lambda: zf.redistribute(old.params, zf.S, group).buffers,
        ]
        if not offload:
            uses.append(lambda: zf.unshard(old.opt_state.mu))
        for use in uses:
            with pytest.raises(DonatedStateError, match=rule):
                use()
        # The new one is whole, and the old one still prints.
        assert "rank" in repr(old.params)
        newer, _ = z.step(new, batch_of(group, 1))
        assert z.params(newer)["out"].shape == (5,)

    zf.simulate(2, main)


@EACH_STAGE
def test_without_donation_a_state_can_be_used_again(stage: int) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, donate=False)
        old = z.init(fresh())
        before = z.params(old)
        first, second = (z.step(old, batch_of(group))[0] for _ in range(2))
        assert_same_bits(z.params(first), z.params(second))
        assert_same_bits(z.params(old), before)
        assert not same_bits(z.params(first), before)

    zf.simulate(2, main)


def test_apply_with_donation() -> None:
    def main(group: zf.Group) -> None:
        optimizer = zf.shard_optimizer(optim.adamw(0.1), group)
        params = zf.replicate(fresh(), group)
        state = optimizer.init(params)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        _, grads = vg(params, batch_of(group))
        new, new_state = zf.apply(optimizer, grads, state, params, donate=True)
        for use in (
            lambda: params.buffers,
            lambda: state.mu.buffers,
            lambda: vg(params, batch_of(group)),
        ):
            with pytest.raises(
                DonatedStateError,
                match=r"taken over by zf.apply\(..., donate=True\) at .*test_faults\.py",
            ):
                use()
        # The same state twice, by way of an old name.
        with pytest.raises(DonatedStateError):
            zf.apply(optimizer, vg(new, batch_of(group))[1], state, new, donate=True)
        zf.apply(optimizer, vg(new, batch_of(group))[1], new_state, new)

    zf.simulate(2, main)


def test_only_flat_values_can_be_donated() -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(
        OptionError, match="donate=True takes over flat buffers; got trees of tensors"
    ):
        zf.apply(optim.sgd(0.1), params, optim.sgd(0.1).init(params), params, donate=True)

    def main(group: zf.Group) -> None:
        _, grads = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)(
            fresh(), batch_of(group)
        )
        with pytest.raises(
            OptionError,
            match="donate=True takes over flat buffers; got parameters as a tree of tensors",
        ):
            zf.apply(optim.sgd(0.1), grads, (), fresh(), donate=True)

    zf.simulate(1, main)


# A rank that raises (row 23).


@EACH_STAGE
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_raises_in_mid_step_ends_all_with_its_error(stage: int, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
            if where == "forward":
                raise ValueError("bad batch in shard 7")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
            raise ValueError("bad batch in shard 7")

    seen: list[BaseException] = []

    def main(group: zf.Group) -> None:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for i, layer in enumerate(params["h"]):
                x = torch.tanh(x @ layer["w"] + layer["b"])
                if group.rank == 1 and i == 1 and step == 1:
                    x = Fails.apply(x)
            return (x @ params["out"]).pow(2).mean()

        z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(2):
            try:
                state, _ = z.step(state, batch_of(group, step))
            except PeerLost as error:
                seen.append(error)
                raise

    started = time.monotonic()
    with pytest.raises(ValueError, match="bad batch in shard 7"):
        zf.simulate(3, main)
    assert time.monotonic() - started < 20
    assert len(seen) == 2
    assert all("rank 1 failed: ValueError: bad batch in shard 7" in str(error) for error in seen)


def test_a_state_survives_an_error_in_the_loss() -> None:
    def main(group: zf.Group) -> None:
        fail = [True]

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            out = models.mlp_loss(params, x)
            if fail.pop() if fail else False:
                raise ValueError("out of data")
            return out

        for stage in STAGES:
            fail[:] = [True]
            z = zf.zero(stage, loss_fn, optim.adamw(0.1), group, bucket_bytes=300)
            state = z.init(fresh())
            before = z.params(state)
            with pytest.raises(ValueError, match="out of data"):
                z.step(state, batch_of(group))
            # Every rank raised at the same place: they may go on with what they had.
            assert_same_bits(z.params(state), before)
            state, info = z.step(state, batch_of(group))
            assert not info.skipped

    zf.simulate(2, main)


# Leaves that are not used, and other branches (row 14, problem 7).


def branching(rank: int, kind: str) -> Any:
    """A loss that uses other blocks, or another order of blocks, on rank 1 than on the others."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = list(params["h"])
        if rank == 1:
            layers = {
                "skips one": layers[:1] + layers[2:],
                "skips the last": layers[:-1],
                "other order": layers[::-1],
                "uses one twice": [*layers, layers[0]],
                "uses nothing": [],
                "as the others": layers,
            }[kind]
        for layer in layers:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return (
            (x.sum(1) if kind == "uses nothing" and rank == 1 else x @ params["out"]).pow(2).mean()
        )

    return loss_fn


def averaged_training(kind: str, size: int, num_steps: int) -> Any:
    params, lr = fresh(), 0.1
    for step in range(num_steps):
        leaves, spec = tree.flatten(params)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for rank in range(size):
            mine = [leaf.clone().requires_grad_() for leaf in leaves]
            loss = branching(rank, kind)(
                tree.unflatten(spec, mine), models.mlp_batches(step + 1, size)[step][rank]
            )
            for slot, leaf in zip(total, mine, strict=True):
                grad = (
                    torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0]
                    if loss.requires_grad
                    else None
                )
                if grad is not None:
                    slot += grad / size
        params = tree.unflatten(
            spec, [leaf - lr * grad for leaf, grad in zip(leaves, total, strict=True)]
        )
    return params


@pytest.mark.parametrize(
    "kind", ["skips one", "skips the last", "other order", "uses one twice", "uses nothing"]
)
@EACH_STAGE
def test_a_rank_may_take_another_branch(stage: int, kind: str) -> None:
    size, num_steps = 3, 3

    def main(group: zf.Group, switches: bool) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            # In the second form the plan is learnt on the common path, and left in the second step.
            return branching(group.rank, kind if step or not switches else "as the others")(
                params, x
            )

        z = zf.zero(stage, loss_fn, optim.sgd(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(num_steps):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    expected = averaged_training(kind, size, num_steps)
    for found in zf.simulate(size, main, False):
        for path, x, y in zip(
            tree.paths(expected), tree.leaves(found), tree.leaves(expected), strict=True
        ):
            torch.testing.assert_close(
                x, y, rtol=1e-12, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}"
            )
    runs = zf.simulate(size, main, True)
    assert all(same_bits(run, runs[0]) for run in runs)


@pytest.mark.parametrize("kind", ["skips one", "skips the last", "other order", "uses one twice"])
def test_a_rank_may_take_another_branch_with_frozen_leaves(kind: str) -> None:
    """Frozen and trained blocks alternate, so ranks wait for gathers of both kinds crosswise."""

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(
            stage,
            branching(group.rank, kind),
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, leaf: not path.startswith(("h.1", "h.3", "h.5")),
        )
        state = z.init(models.mlp(num_layers=7))
        for step in range(3):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    runs = [run for stage in (0, 3) for run in zf.simulate(3, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)


def test_branches_are_equal_to_the_last_bit_across_stages() -> None:
    def main(group: zf.Group, stage: int, kind: str) -> Any:
        z = zf.zero(stage, branching(group.rank, kind), optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(fresh())
        for step in range(3):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    for kind in ("skips one", "other order", "uses one twice", "uses nothing"):
        runs = [run for stage in STAGES for run in zf.simulate(3, main, stage, kind)]
        assert all(same_bits(run, runs[0]) for run in runs), kind


@EACH_STAGE
def test_a_leaf_that_nobody_uses_has_gradient_zero(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        params = {
            **fresh(),
            "unused": torch.ones(7, dtype=torch.float64),
            "other": {"b": torch.ones((), dtype=torch.float64)},
        }
        z = zf.zero(
            stage, models.mlp_loss, optim.adamw(0.1, weight_decay=0.0), group, bucket_bytes=300
        )
        state = z.init(params)
        for step in range(2):
            state, info = z.step(state, batch_of(group, step))
            assert not info.skipped
        after = z.params(state)
        assert_same_bits((after["unused"], after["other"]), (params["unused"], params["other"]))
        assert not same_bits(after["h"], params["h"])

    zf.simulate(2, main)


# Frozen leaves (row 15).


def is_trainable(path: str, leaf: Any) -> bool:
    return path.startswith("h.1") or path == "out"


@pytest.mark.parametrize("size", [1, 3])
def test_frozen_leaves_are_equal_across_stages_and_do_not_move(size: int) -> None:
    def main(group: zf.Group, stage: int) -> Any:
        offload = zf.Offload(params=zf.stores.host()) if stage == 3 and group.size == 3 else None
        z = zf.zero(
            stage,
            models.mlp_loss,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=is_trainable,
            offload=offload,
        )
        state, losses = z.init(fresh()), []
        for step in range(3):
            state, info = z.step(state, batch_of(group, step))
            losses.append(float(info.loss))
        assert state.frozen is not None
        assert state.frozen.placement is (zf.S if stage == 3 else zf.R)
        assert [slot.path for slot in state.params.layout.leaves] == ["h.1.w", "h.1.b", "out"]
        assert [slot.path for slot in state.opt_state.mu.layout.leaves] == ["h.1.w", "h.1.b", "out"]
        return z.params(state), losses

    runs = [run for stage in STAGES for run in zf.simulate(size, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)
    before, (after, _) = fresh(), runs[0]
    for path, x, y in zip(tree.paths(before), tree.leaves(before), tree.leaves(after), strict=True):
        assert same_bits(x, y) != is_trainable(path, x), path


def test_partition_by_hand_is_what_trainable_does() -> None:
    trained, frozen = zf.partition(fresh(), is_trainable)

    def main(group: zf.Group) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            return models.mlp_loss(zf.combine(params, frozen), x)

        z = zf.zero(1, loss_fn, optim.adamw(0.1), group)
        named = zf.zero(1, models.mlp_loss, optim.adamw(0.1), group, trainable=is_trainable)
        one, other = z.init(trained), named.init(fresh())
        for step in range(2):
            one, _ = z.step(one, batch_of(group, step))
            other, _ = named.step(other, batch_of(group, step))
        return zf.combine(z.params(one), frozen), named.params(other)

    for by_hand, by_name in zf.simulate(2, main):
        assert_same_bits(by_hand, by_name)


def test_another_trainable_set_needs_another_state() -> None:
    def main(group: zf.Group) -> None:
        trained, _ = zf.partition(fresh(), is_trainable)
        optimizer = zf.shard_optimizer(optim.adamw(0.1), group)
        state = optimizer.init(trained)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        _, grads = vg(fresh(), batch_of(group))
        with pytest.raises(
            SpecMismatch,
            match=r"parameters and gradients must have one layout|must have the tree|must keep "
            r"the structure",
        ):
            zf.apply(optimizer, grads, state, trained)

    zf.simulate(2, main)


def test_integer_leaves_may_be_frozen() -> None:
    params = {
        **fresh(),
        "steps": torch.arange(3),
        "mask": torch.tensor([True, False, True, True, True]),
    }

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return models.mlp_loss(p, x * p["mask"]) + p["steps"].sum() * p["out"].sum() * 0.01

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(
            stage,
            loss_fn,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, leaf: leaf.is_floating_point(),
        )
        state = z.init(params)
        for step in range(2):
            state, _ = z.step(state, batch_of(group, step))
        return z.params(state)

    runs = [run for stage in STAGES for run in zf.simulate(3, main, stage)]
    assert all(same_bits(run, runs[0]) for run in runs)
    assert_same_bits((runs[0]["steps"], runs[0]["mask"]), (params["steps"], params["mask"]))


# Ties (row 16).


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
        # Gradients from tied parameters do not fit parameters that are not.
        _, grads = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)(
            tied(), batch_of(group)
        )
        for params in (broken, zf.replicate(broken, group)):
            with pytest.raises(
                SpecMismatch, match=r"shared one tensor and are now two|must have one layout"
            ):
                zf.apply(optim.sgd(0.1), grads, optim.sgd(0.1).init(params), params)

    zf.simulate(2, main)


def test_a_tie_that_is_made_later_is_refused() -> None:
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


# Leaves that cannot be trained (rows 18 and 19).


@EACH_STAGE
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.arange(3), r"'h\.1\.b' (is|has) torch.int64"),
        (torch.ones(3, dtype=torch.bool), r"'h\.1\.b' (is|has) torch.bool"),
        (torch.ones(1).expand(5), r"'h\.1\.b' is expanded"),
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


# Compositions that cannot be.


def test_impossible_compositions() -> None:
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


# Losses that are none.


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


def test_a_lazy_leaf_does_not_outlive_its_loss() -> None:
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


def test_a_lazy_leaf_of_one_call_is_never_that_of_the_next() -> None:
    """A leaf that somebody has kept would have other values."""

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
