"""1-bit Adam: the paper's steps, one result under every sharding, few bytes, the loss of Adam."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models, reference
from tests.conftest import examples
from zfun import optim, tree
from zfun.errors import OptionError, PlacementError
from zfun.testing import (
    Composition,
    all_compositions,
    assert_same_bits,
    assert_same_runs,
    bucket_sizes,
    same_bits,
)

LR = 0.02
ONE_BIT = optim.onebit_adam(LR, freeze_step=2, weight_decay=0.1)
# shard_grads sums gradients in backward, which leaves nothing to compress.
UNSUMMED = [
    composition for composition in all_compositions() if "shard_grads" not in composition.grads
]


@pytest.mark.parametrize(
    "optimizer",
    [ONE_BIT, optim.chain(optim.with_master(ONE_BIT), optim.scale(0.5))],
    ids=["alone", "masters, in a chain"],
)
@settings(max_examples=examples(2))
@given(
    size=st.sampled_from([1, 2, 3, 4, 7]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    drawn=st.lists(st.sampled_from(UNSUMMED), min_size=3, max_size=3),
    buckets=st.lists(bucket_sizes(), min_size=2, max_size=2),
)
def test_every_composition_is_the_same_optimizer(
    optimizer: optim.Optimizer,
    size: int,
    dtype: torch.dtype,
    drawn: list[Composition],
    buckets: list[int],
) -> None:
    params, batches = (
        models.mlp(num_layers=2, dtype=dtype),
        models.mlp_batches(5, size, dtype=dtype),
    )
    run = assert_same_runs(
        models.mlp_loss, optimizer, params, batches, [UNSUMMED[0], *drawn], bucket_bytes=buckets
    )
    assert not same_bits(run.params, params)


def train(
    group: zf.Group,
    stage: int,
    optimizer: Any,
    steps: list[list[Tensor]],
    params: Any,
    **options: Any,
) -> tuple[Any, Any]:
    z = zf.zero(stage, models.mlp_loss, optimizer, group, **options)
    state, trace = z.init(params), []
    for batches in steps:
        state, info = z.step(state, batches[group.rank])
        trace.append((info.loss, info.grad_norm))
    return z.params(state), trace


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": torch.bfloat16}, {"num_micro_batches": 2}],
    ids=["exact", "bfloat16", "micro-batches"],
)
def test_stages_of_onebit_adam_agree(options: dict[str, Any]) -> None:
    batches = models.mlp_batches(
        5, 3, dtype=torch.bfloat16 if "precision" in options else torch.float64
    )

    def main(group: zf.Group) -> Any:
        # In the warm-up, stage 2 sums micro-batches one by one, which rounds differently.
        stages = (0, 1) if "num_micro_batches" in options else (0, 1, 2)
        found = [
            train(
                group,
                stage,
                ONE_BIT,
                batches,
                models.mlp(),
                bucket_bytes=300 * (stage + 1),
                **options,
            )
            for stage in stages
        ]
        stored = {
            "offload": zf.stores.Offload(optimizer=zf.stores.host(), grads=zf.stores.host()),
            "donate": False,
        }
        found.append(train(group, 1, ONE_BIT, batches, models.mlp(), **stored, **options))
        for other in found[1:]:
            assert_same_bits(other, found[0], "stages")
        return found[0]

    first, *others = zf.simulate(3, main)
    for other in others:
        assert_same_bits(other, first, "ranks")


@given(
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0, 1]),
    st.sampled_from([0.0, 0.5, 0.9]),
)
@settings(max_examples=examples(6))
def test_steps_of_onebit_adam_follow_the_paper(
    size: int, freeze_step: int, decay: float, stage: int, b1: float
) -> None:
    params, steps = models.mlp(num_layers=2), models.mlp_batches(7, size)
    optimizer = optim.onebit_adam(LR, freeze_step=freeze_step, weight_decay=decay, b1=b1)
    found = zf.simulate(size, train, stage, optimizer, steps, params)[0][0]
    expected, state = models.flat_dict(params), {}
    loss = lambda flat, batch: models.mlp_loss(models.unflat_dict(flat, params), batch)
    for step in steps:
        grads = [reference.gradients(loss, expected, [batch])[1] for batch in step]
        # One rank sends nothing and rounds nothing.
        expected = (
            frozen_adamw(expected, grads[0], state, freeze_step, decay, b1)
            if size == 1
            else reference.onebit_adam(expected, grads, state, LR, freeze_step, decay, b1)
        )
    for name, x in models.flat_dict(found).items():
        # A sign that depends on the last bit would fail here; with these numbers no sign does.
        torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-10)


def frozen_adamw(
    params: Any, grads: Any, state: dict[Any, Any], freeze_step: int, decay: float, b1: float
) -> Any:
    kept = {
        key: value for key, value in state.items() if key[-1] == "v" and state["t"] >= freeze_step
    }
    t = min(state.get("t", 0) + 1, freeze_step)
    out = reference.adamw(params, grads, state, LR, decay, b1)
    if not kept:
        return out
    state.update(kept)
    hat = lambda name: (kept[name, "v"] / (1 - 0.999**t)).sqrt() + 1e-8
    return {
        name: p - LR * (state[name, "m"] / (1 - b1 ** state["t"]) / hat(name) + decay * p)
        for name, p in params.items()
    }


def test_the_warm_up_of_onebit_adam_is_adamw() -> None:
    batches = models.mlp_batches(3, 2, dtype=torch.float32)

    def main(group: zf.Group) -> None:
        for stage in (0, 2):
            run = functools.partial(
                train, group, stage, steps=batches, params=models.mlp(dtype=torch.float32)
            )
            expected = run(optim.adamw(LR, weight_decay=0.1))
            assert_same_bits(run(optim.onebit_adam(LR, freeze_step=3, weight_decay=0.1)), expected)
            assert not same_bits(run(ONE_BIT), expected)

    zf.simulate(2, main)


def quadratic(params: Any, target: Tensor) -> Tensor:
    return (torch.linspace(0.1, 1.0, 64) * (params["w"] - target).square()).sum()


@pytest.mark.slow
def test_onebit_adam_reaches_the_optimum_of_adam_although_ranks_disagree() -> None:
    """Each rank's optimum is far from the common optimum, so signs alone lead away from the latter;
    the error feedback of both hops corrects the steps.
    """
    size, steps, freeze_step = 4, 200, 15
    generator = torch.Generator().manual_seed(0)
    targets = (
        torch.randn(size, 64, generator=generator) * torch.tensor([1.0, 3.0, 10.0, 30.0])[:, None]
    )
    best = targets.mean(0)
    rate = optim.warmup_cosine(0.5, 0, steps)

    def distances(group: zf.Group, optimizer: Any) -> tuple[float, float]:
        params = zf.replicate({"w": torch.zeros(64)}, group)
        vg, state, found = (
            zf.data_parallel(zf.value_and_grad(quadratic), group),
            optimizer.init(params),
            [],
        )
        for step in range(steps):
            params, state = zf.apply(optimizer, vg(params, targets[group.rank])[1], state, params)
            if step + 1 in (freeze_step, steps):
                found.append(float((zf.unshard(params)["w"] - best).norm() / best.norm()))
        return found[0], found[1]

    def forgetful(*hops: int) -> float:
        params, state = {"w": torch.zeros(64)}, {}
        for step in range(steps):
            grads = [reference.gradients(quadratic, params, [target])[1] for target in targets]
            params = reference.onebit_adam(params, grads, state, rate(step), freeze_step)
            for hop in hops if step >= freeze_step else ():
                state["w", "errors"][hop] = [
                    torch.zeros_like(error) for error in state["w", "errors"][hop]
                ]
        return float((params["w"] - best).norm() / best.norm())

    halfway, adam = zf.simulate(size, distances, optim.adam(rate))[0]
    start, compressed = zf.simulate(
        size, distances, optim.onebit_adam(rate, freeze_step=freeze_step)
    )[0]
    assert start == halfway
    assert adam < 0.01
    assert compressed < 0.1 < halfway / 3
    assert abs(forgetful() - compressed) < 0.1 * compressed
    assert min(forgetful(0), forgetful(1)) > 4 * compressed


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_sends_by_formula(stage: int) -> None:
    size, steps = 3, models.mlp_batches(4, 3, width=24, dtype=torch.float32)
    params = models.mlp(24, dtype=torch.float32)
    numels = [leaf.numel() for leaf in tree.leaves(params)]

    def main(group: zf.Group) -> list[int]:
        group = zf.record(group)
        z = zf.zero(stage, models.mlp_loss, ONE_BIT, group, bucket_bytes=3000)
        state, sent = z.init(params), []
        for batches in steps:
            group.clear()
            state, _ = z.step(state, batches[group.rank])
            sent.append(group.bytes_sent("momentum"))
            assert (group.bytes_sent("grads") > 0) == (len(sent) <= 2)
        return sent

    hop = sum(4 + math.ceil(numel / (8 * size)) for numel in numels)
    layout = zf.layout.layout_of(params, size, 3000)
    # With sharded moments all ranks gather the exact momentum once.
    whole = (
        0
        if stage == 0
        else 4 * sum(bucket.padded_numel // layout.size for bucket in layout.buckets)
    )
    for sent in zf.simulate(size, main):
        assert sent == [0, 0, (size - 1) * (2 * hop + whole), (size - 1) * 2 * hop]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    def main(group: zf.Group) -> None:
        loss_fn = lambda params, batch: (
            models.mlp_loss(params, batch[0]) + (params["h"][1]["b"] * batch[1]).sum()
        )
        z = zf.zero(stage, loss_fn, ONE_BIT, group, bucket_bytes=300, donate=False)
        state = z.init(models.mlp())
        for step, batches in enumerate(models.mlp_batches(5, 2)):
            bad = step == 3
            before, kept = z.params(state), tree.map(torch.clone, state.opt_state)
            shift = torch.full((), math.nan if bad and group.rank else 0.0)
            state, info = z.step(state, (batches[group.rank], shift))
            assert info.skipped is bad
            assert info.bad_leaf == ("h.1.b" if bad else None)
            assert same_bits(z.params(state), before) is bad
            assert same_bits(state.opt_state, kept) is bad

    zf.simulate(2, main)


def test_elements_without_a_gradient_in_the_warm_up_do_not_move() -> None:
    def main(group: zf.Group) -> None:
        for stage in (0, 1):
            z = zf.zero(
                stage,
                lambda params, batch: (params["w"] * batch).sum() ** 2,
                optim.onebit_adam(0.1, freeze_step=2),
                group,
            )
            state = z.init({"w": torch.ones(40)})
            for step in range(5):
                batch = torch.where(
                    torch.arange(40) < (20 if step < 3 else 40), 1.0 + group.rank, 0.0
                )
                state, _ = z.step(state, batch)
            moved = z.params(state)["w"] != 1.0
            assert moved[:20].all()
            assert not moved[20:].any()

    zf.simulate(2, main)


def test_bias_correction_may_be_left_out() -> None:
    """The first step is ``(1 - b1) / √(1 - b2)`` times that of Adam, as in DeepSpeed."""
    params, grads = (
        {"w": torch.zeros(2, dtype=torch.float64)},
        {"w": torch.tensor([3.0, -4.0], dtype=torch.float64)},
    )
    optimizer = optim.onebit_adam(1.0, bias_correction=False, eps=0.0)
    after, _ = optimizer.apply(grads, optimizer.init(params), params)
    torch.testing.assert_close(
        after["w"],
        torch.tensor([-1.0, 1.0], dtype=torch.float64) * 0.1 / math.sqrt(0.001),
        rtol=1e-12,
        atol=0,
    )


def test_wrong_options_are_refused() -> None:
    group = zf.collectives.abstract_group(2)
    with pytest.raises(OptionError, match=r"an integer of at least 1, .*; got 0"):
        optim.onebit_adam(0.1, freeze_step=0)
    with pytest.raises(OptionError, match=r"at least 0, below 1; got 1.0"):
        optim.onebit_adam(0.1, b2=1.0)
    with pytest.raises(
        OptionError,
        match=r"keeps whole values on every rank, which stage 3 is there to avoid; got stage 3; "
        r"use stage 0, 1",
    ):
        zf.zero(3, models.mlp_loss, ONE_BIT, group)
    with pytest.raises(
        PlacementError, match=r"stands first in a chain, because a part in front would see terms"
    ):
        optim.chain(optim.clip_by_global_norm(1.0), ONE_BIT)
    with pytest.raises(
        PlacementError,
        match=r"by_label\(\) gives all .* sum of the gradients; got an optimizer for 'a'",
    ):
        optim.by_label({"a": ONE_BIT, "b": optim.sgd(0.1)}, lambda path, leaf: "a")

    def main(group: zf.Group, around: Any) -> None:
        params = zf.replicate(models.mlp(), group)
        state = ONE_BIT.init(params)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        for step, batches in enumerate(models.mlp_batches(3, group.size)):
            _, grads = (around(vg, group) if step == 2 else vg)(params, batches[group.rank])
            params, state = zf.apply(ONE_BIT, grads, state, params)

    with pytest.raises(
        PlacementError,
        match=r"from step 2 on onebit_adam\(\) sums by itself.*\(P\); got S, summed "
        r"already.*shard_grads\(\) out",
    ):
        zf.simulate(2, main, zf.shard_grads)
    with pytest.raises(
        PlacementError,
        match=r"takes each rank's own term of the gradients \(P\); got R, summed already",
    ):
        zf.simulate(
            2,
            main,
            lambda vg, group: (
                lambda params, batch: (0.0, zf.redistribute(vg(params, batch)[1], zf.R, group))
            ),
        )
