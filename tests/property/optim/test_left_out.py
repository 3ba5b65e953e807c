"""Laws of steps that the device leaves out: a run has the bits of one whose host decides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from zfun import ops, optim, tree
from zfun.collectives import single_group
from zfun.errors import OptionError
from zfun.ops import reference
from zfun.testing import assert_same_bits

FALLING = optim.linear(0.1, 0.0, 9)
CLIP = optim.clip_by_global_norm(0.5)


def label(path: str, leaf: Any) -> str:
    return "matrix" if leaf.ndim == 2 else "rest"


OPTIMIZERS: dict[str, Any] = {
    "adam": optim.adam(FALLING),
    "adamw, clipped": optim.chain(CLIP, optim.adamw(FALLING)),
    "sgd": optim.sgd(0.1),
    "momentum, clipped": optim.chain(CLIP, optim.sgd(0.1, momentum=optim.linear(0.5, 0.9, 4))),
    "lion": optim.lion(FALLING),
    "adagrad, masters": optim.with_master(optim.adagrad(0.1, rate_decay=0.5), torch.float64),
    "by label": optim.chain(
        CLIP, optim.by_label({"matrix": optim.adamw(0.1), "rest": optim.sgd(0.1)}, label)
    ),
    "injected": optim.inject_hyperparams(optim.adam)(0.1),
}
SCALE = optim.dynamic_loss_scale(2.0**10, window=1, hysteresis=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": torch.bfloat16},
    "scaled": {"precision": zf.Precision(loss_scale=SCALE)},
    "micro-batches": {"num_micro_batches": 2, "precision": zf.Precision(loss_scale=SCALE)},
    "kept": {"donate": False, "unused": "zeros"},
}


def loss(params: Any, batch: Tensor) -> Any:
    hidden = torch.tanh(batch.to(params["in"].dtype) @ params["in"] + params["bias"])
    # A leaf that some batches do not use.
    out = hidden @ params["out"] if float(batch[0, 0]) > 0 else hidden
    return zf.weighted_mean(out.square().sum(), (batch > -1.0).sum())


def train(
    max_skipped: int | None, optimizer: str, stage: int, size: int, bad: int, **options: Any
) -> Any:
    def main(group: zf.Group) -> Any:
        z = zf.zero(
            stage,
            loss,
            OPTIMIZERS[optimizer],
            group,
            bucket_bytes=200,
            max_skipped=max_skipped,
            **options,
        )
        draw = torch.Generator().manual_seed(7)
        shapes = {"in": (4, 5), "bias": (5,), "out": (5, 3)}
        state = z.init({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()})
        run: list[Any] = []
        for step in range(4):
            batches = torch.randn(size, 4, 4, generator=draw)
            # In the second step no rank uses one of the leaves.
            batches[:, ::2, 0] = -1.0 if step == 1 else 1.0
            if step == bad:
                batches[-1, 1] = math.inf
            state, info = z.step(state, batches[group.rank])
            assert bool(info.skipped) == (step == bad)
            assert (info.bad_leaf is None) == (step != bad or max_skipped is None)
            run += [info.loss, info.grad_norm, float(info.loss_scale), info.learning_rate]
            run += [int(info.num_applied), int(state.num_applied), int(state.num_skipped)]
            run += [state.missed.counts, state.loss_scale]
        return run, z.params(state), tree.leaves(state.opt_state), state.step

    return zf.simulate(size, main)


@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(OPTIONS)),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["compiled", "reference"]),
)
@settings(max_examples=examples(24))
def test_a_step_that_the_device_leaves_out_has_the_bits_of_one_that_the_host_leaves_out(
    optimizer: str, options: str, stage: int, size: int, bad: int, kernels: str
) -> None:
    case = optimizer, stage, size, bad
    with ops.use(kernels):
        assert_same_bits(
            train(None, *case, **OPTIONS[options]), train(9, *case, **OPTIONS[options])
        )


@pytest.mark.parametrize("bad", [1, 2])
def test_buffers_of_a_step_that_is_left_out_keep_their_values(bad: int) -> None:
    def norm_loss(params: Any, batch: Tensor) -> Tensor:
        held = params["mean"], params["var"]
        return torch.nn.functional.batch_norm(batch @ params["w"], *held, training=True)[0].sum()

    def run(max_skipped: int | None) -> Any:
        def main(group: zf.Group) -> Any:
            rule = lambda path, leaf: None if path == "w" else "mean"
            z = zf.zero(2, norm_loss, optim.sgd(0.1), group, buffers=rule, max_skipped=max_skipped)
            state = z.init({"w": torch.eye(3), "mean": torch.zeros(3), "var": torch.ones(3)})
            for step in range(3):
                batch = torch.arange(12.0).reshape(4, 3).sin() * (math.nan if step == bad else 1.0)
                state, info = z.step(state, batch + group.rank)
                assert bool(info.skipped) == (step == bad)
            return z.params(state)

        return zf.simulate(2, main)

    assert_same_bits(run(None), run(9))


def test_a_checkpoint_has_numbers(tmp_path: Path) -> None:
    def main(group: zf.Group) -> Any:
        options: dict[str, Any] = {"bucket_bytes": 200, **OPTIONS["scaled"]}
        late, eager = (
            zf.zero(3, loss, optim.adamw(FALLING), group, max_skipped=max_skipped, **options)
            for max_skipped in (None, 9)
        )
        params = {"in": torch.ones(4, 5), "bias": torch.ones(5), "out": torch.ones(5, 3)}
        batches = [torch.full((4, 4), value) for value in (1.0, math.inf, 0.5, 0.25)]

        def stepped(state: Any, first: int, *loops: Any) -> Any:
            for z, batch in zip(loops, batches[first:], strict=False):
                state, _ = z.step(state, batch)
            return state

        state, first = (stepped(z.init(params), 0, z, z) for z in (late, eager))
        zf.save(tmp_path, state)
        loaded = zf.load(tmp_path, like=eager.init(params)).state
        numbers = loaded.num_skipped, loaded.num_applied, type(loaded.num_applied)
        # A state goes from one kind of run to the other.
        ends = [
            stepped(first, 2, eager, eager),
            stepped(loaded, 2, eager, late),
            stepped(state, 2, late, eager),
        ]
        found = [
            (eager.params(end), float(end.loss_scale.scale), int(end.num_applied)) for end in ends
        ]
        return numbers, found

    numbers, found = zf.simulate(2, main)[0]
    assert numbers == (1, 1, int)
    assert_same_bits(found[1:], found[:1] * 2)


LIMBS = ops.squares_in_bins(torch.zeros(1)).numel() - 1
LIMB = st.one_of(st.integers(0, 2**62), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32]))


@given(
    st.integers(3, LIMBS - 1),
    st.lists(st.lists(LIMB, min_size=1, max_size=6), min_size=1, max_size=7),
    st.sampled_from([0.0, 0.0, 0.0, math.inf, math.nan]),
)
@settings(max_examples=examples(400))
def test_the_sum_on_the_device_has_the_bits_of_the_sum_of_the_host(
    first: int, limbs: list[list[int]], special: float
) -> None:
    """Of any limbs of numbers of float64, whose last bit is that of the third limb at the least."""
    rows = torch.zeros(len(limbs), LIMBS + 1, dtype=torch.int64)
    for row, its in zip(rows, limbs, strict=True):
        row[first:-1][: len(its)] = torch.tensor(its)[: LIMBS - first]
    rows[-1, -1] = torch.tensor(special, dtype=torch.float64).view(torch.int64)
    assert_same_bits(ops.total_on_device(rows), ops.total_of_bins(rows))


@given(st.integers(2**53, 2**54 - 1), st.integers(96, 1990), st.sampled_from([-1, 0, 1]))
@settings(max_examples=examples(200))
def test_the_sum_on_the_device_rounds_ties_to_even(digits: int, lift: int, more: int) -> None:
    total = (digits << lift) + (more << (lift - 90) if lift > 170 else 0)
    row = [total >> 32 * place & 2**32 - 1 for place in range(LIMBS)]
    rows = torch.tensor([[*row, 0]])
    assert_same_bits(ops.total_on_device(rows), ops.total_of_bins(rows))


RULES: dict[str, Any] = {
    "adam": ops.AdamRule(b1=0.9, b2=0.99, step_size=0.1, eps=1e-8, decay=0.1),
    "sgd": ops.SgdRule(0.1, momentum=0.9, l2=0.1),
    "plain_sgd": ops.SgdRule(0.1),
    "lion": ops.LionRule(0.9, 0.99, 0.1),
    "adagrad": ops.AdagradRule(0.1, 1e-8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_change", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_readable_kernels_write_only_where_a_step_is_taken(
    name: str, to_change: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    num_moments = {"adam": 2, "plain_sgd": 0}.get(name, 1)
    rule, values = RULES[name], torch.randn(3 + num_moments, 40, generator=draw).abs().to(dtype)
    scale = torch.tensor(0.37, dtype=torch.float64)

    def stepped(grad: Tensor, factor: Any, taken: Tensor | None) -> list[Tensor]:
        param, change, *moments = values.clone()[[0, 2, *range(3, 3 + num_moments)]].unbind()
        reference.step(
            name, param, grad, moments, change if to_change else None, rule, factor, taken
        )
        return [param, change, *moments]

    grad, no = values[1], torch.full_like(values[1], math.nan)
    assert_same_bits(stepped(grad, scale, torch.tensor(True)), stepped(grad, 0.37, None))
    before = [values[0], *values[2:]]
    assert_same_bits(stepped(no, scale, torch.tensor(False)), before)


OWN = ops.SgdRule(0.1).without_velocity


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (
            optim.by_label(
                {"all": optim.elementwise(optim.SgdState, (), lambda step: OWN)},
                label,
            ),
            "an optimizer of your own",
        ),
        (optim.muon(0.1, optim.adamw(0.1)), "muon"),
        (optim.ema(0.9, optim.sgd(0.1)), "ema"),
        (optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1)), "add_decayed_weights"),
        (optim.with_master(optim.from_torch(torch.optim.SGD, lr=0.1)), "from_torch"),
        ((lambda params: (), lambda grads, state, params: (grads, state)), "optimizer"),
    ],
)
def test_an_optimizer_that_needs_the_host_is_refused_by_name(optimizer: Any, name: str) -> None:
    with pytest.raises(OptionError, match=f"got {name}; give max_skipped a number"):
        zf.zero(2, loss, optimizer, single_group(), max_skipped=None)


def test_a_store_is_refused() -> None:
    offload = zf.stores.Offload(optimizer=zf.stores.host())
    with pytest.raises(OptionError, match="got a store of optimizer; give max_skipped a number"):
        zf.zero(2, loss, optim.sgd(0.1), single_group(), max_skipped=None, offload=offload)
