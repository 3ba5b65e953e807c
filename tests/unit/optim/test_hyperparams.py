"""Learning rates and other numbers that a loop sets between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.testing import assert_same_bits

RATES = [0.05, 0.01, 0.03, 0.0]
DECAYS = [0.3, 0.0, 0.1, 0.2]


def is_matrix(path: str, leaf: Any) -> str:
    return "matrix" if leaf.ndim == 2 else "rest"


def split_rule(learning_rate: float, weight_decay: float) -> optim.Optimizer:
    rules = {
        "matrix": optim.adamw(learning_rate, weight_decay=weight_decay),
        "rest": optim.adamw(learning_rate, weight_decay=0.0),
    }
    return optim.by_label(rules, is_matrix)


def orthogonal(learning_rate: float, weight_decay: float) -> optim.Optimizer:
    return optim.muon(learning_rate, optim.lion(learning_rate), weight_decay=weight_decay)


MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda learning_rate, weight_decay: optim.sgd(
        learning_rate, momentum=0.9, weight_decay=weight_decay
    ),
    "adam": optim.adam,
    "adamw": optim.adamw,
    "lion": optim.lion,
    "adagrad": optim.adagrad,
    "lamb": optim.lamb,
    "muon": orthogonal,
    "by_label": split_rule,
}


def grads_of(params: Any, step: int) -> Any:
    return zf.value_and_grad(models.mlp_loss)(params, models.mlp_batches(4, 1)[step][0])[1]


def test_values_that_are_set_are_those_of_torch_param_groups() -> None:
    params = models.mlp()
    twins = tree.map(lambda x: torch.nn.Parameter(x.clone()), params)
    oracle = torch.optim.AdamW(tree.leaves(twins), lr=1.0)
    optimizer = optim.inject_hyperparams(optim.adamw)(1.0)
    state = optimizer.init(params)
    for step, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True)):
        b1 = 0.9 - 0.1 * step
        oracle.param_groups[0].update(lr=rate, weight_decay=decay, betas=(b1, 0.999))
        oracle.zero_grad()
        models.mlp_loss(twins, models.mlp_batches(4, 1)[step][0]).backward()
        oracle.step()
        state = optim.set_hyperparams(state, learning_rate=rate, weight_decay=decay, b1=b1)
        params, state = optimizer.apply(grads_of(params, step), state, params)
    for mine, theirs, start in zip(
        tree.leaves(params), tree.leaves(twins), tree.leaves(models.mlp()), strict=True
    ):
        assert (mine - start).abs().max() > 1e-3
        torch.testing.assert_close(mine - start, theirs.detach() - start, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_has_the_bits_of_an_optimizer_made_with_the_values(name: str) -> None:
    make = MAKERS[name]
    injected = optim.inject_hyperparams(make)(learning_rate=1.0, weight_decay=0.5)
    params = plain = models.mlp()
    state, expected = injected.init(params), make(1.0, weight_decay=0.5).init(params)
    for step, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True)):
        grads = grads_of(plain, step)
        plain, expected = make(rate, weight_decay=decay).apply(grads, expected, plain)
        state = optim.set_hyperparams(state, {"weight_decay": decay}, learning_rate=rate)
        assert injected.learning_rate(state) == rate
        params, state = injected.apply(grads, state, params)
        assert_same_bits(params, plain)
    assert_same_bits(state.inner, expected)


EVERY_DAY = [("adamw", 2), ("by_label", 3)]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if (name, stage) in EVERY_DAY else pytest.mark.slow)
        for name in ("adamw", "by_label", "muon")
        for stage in range(4)
    ],
)
def test_every_stage_and_store_takes_the_same_steps(name: str, stage: int) -> None:
    batches = models.mlp_batches(4, 2)

    def train(group: zf.Group, stage: int, optimizer: Any, **options: Any) -> Any:
        # Clipping looks at all gradients before a step that goes bucket by bucket.
        rule = optim.chain(optim.clip_by_global_norm(0.5), optimizer)
        zero = zf.zero(stage, models.mlp_loss, rule, group, bucket_bytes=100, **options)
        state, rates = zero.init(models.mlp()), []
        for step, rate in enumerate(RATES):
            if optim.hyperparams(state):
                state = optim.set_hyperparams(state, learning_rate=rate)
            state, info = zero.step(state, batches[step][group.rank])
            rates.append(info.learning_rate)
        return zero.params(state), rates

    def main(group: zf.Group) -> None:
        make = MAKERS[name]
        scheduled = make(lambda step: RATES[step], weight_decay=0.1)
        expected = train(group, 0, scheduled)
        injected = optim.inject_hyperparams(make)(learning_rate=1.0, weight_decay=0.1)
        plain = train(group, stage, injected)
        assert plain[1] == RATES
        assert_same_bits(plain[0], expected[0])
        if stage:
            host = zf.stores.Offload(optimizer=zf.stores.host())
            assert_same_bits(train(group, stage, injected, offload=host)[0], expected[0])

    zf.simulate(2, main)


def test_labels_have_their_own_values() -> None:
    adamw = optim.inject_hyperparams(optim.adamw)
    rules = {"matrix": adamw(0.1, weight_decay=0.5), "rest": adamw(0.2, weight_decay=0.0)}
    optimizer = optim.with_master(optim.by_label(rules, is_matrix))
    state = optimizer.init(models.mlp())
    before = optim.hyperparams(state)
    assert list(before) == [
        f"{label}.{name}"
        for label in rules
        for name in ("learning_rate", "b1", "b2", "eps", "weight_decay")
    ]
    state = optim.set_hyperparams(state, {"rest.learning_rate": torch.tensor(0.3), "b1": 0.5})
    changed = {"rest.learning_rate": torch.tensor(0.3).item(), "matrix.b1": 0.5, "rest.b1": 0.5}
    assert optim.hyperparams(state) == {**before, **changed}
    assert optimizer.learning_rate(state) == 0.1


def test_schedules_and_integers_stay_where_the_optimizer_is_made() -> None:
    optimizer = optim.inject_hyperparams(optim.muon)(optim.linear(0.1, 0.0, 2), optim.sgd(0.5))
    state = optimizer.init(models.mlp())
    assert optim.hyperparams(state) == {"momentum": 0.95, "weight_decay": 0.0}
    assert optimizer.learning_rate(state) == 0.1
    torch_rule = optim.inject_hyperparams(optim.from_torch)(torch.optim.RMSprop, lr=0.25)
    state = torch_rule.init(models.mlp())
    assert torch_rule.learning_rate(optim.set_hyperparams(state, lr=0.125)) == 0.125


def test_a_checkpoint_keeps_the_values(tmp_path: Path) -> None:
    optimizer = optim.inject_hyperparams(optim.adamw)(0.1)
    zero = zf.zero(3, models.mlp_loss, optimizer, zf.process_group())
    state = optim.set_hyperparams(zero.init(models.mlp()), learning_rate=0.1 / 3)
    zf.save(tmp_path, state, step=1)
    loaded = zf.load(tmp_path, zero.init(models.mlp())).state
    assert optim.hyperparams(loaded)["learning_rate"] == 0.1 / 3


def test_a_scheduler_of_torch_sets_the_learning_rate() -> None:
    knob = torch.optim.SGD([torch.zeros(())], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(knob, lambda step: 1.0 / (1 + step))
    zero = zf.zero(1, models.mlp_loss, optim.inject_hyperparams(optim.sgd)(0.5), zf.process_group())
    state, rates = zero.init(models.mlp()), []
    for batch in models.mlp_batches(3, 1):
        state = optim.set_hyperparams(state, learning_rate=scheduler.get_last_lr()[0])
        state, info = zero.step(state, batch[0])
        rates.append(info.learning_rate)
        knob.step()
        scheduler.step()
    assert rates == [0.5, 0.25, 0.5 / 3]


def test_what_cannot_be_set_is_refused() -> None:
    optimizer = optim.inject_hyperparams(optim.sgd)(0.1)
    params = models.mlp()
    state = optimizer.init(params)
    with pytest.raises(OptionError, match=r"got 'lr'; .*'learning_rate'"):
        optim.set_hyperparams(state, lr=0.1)
    with pytest.raises(OptionError, match=r"got 'learning_rat'; did you mean 'learning_rate'\?"):
        optim.set_hyperparams(state, learning_rat=0.1)
    with pytest.raises(OptionError, match=r"got 'b1'; make the optimizer with zf.optim.inject"):
        optim.set_hyperparams(optim.adamw(0.1).init(params), b1=0.1)
    wrong: list[Any] = [float("nan"), True, "0.1", optim.constant(0.1), torch.ones(2)]
    for value in wrong:
        with pytest.raises(OptionError, match=r"learning_rate is a finite number; got .*; pass"):
            optim.set_hyperparams(state, learning_rate=value)
    grads = grads_of(params, 0)
    with pytest.raises(OptionError, match=r"learning_rate.*at least 0.*got -1"):
        optimizer.apply(grads, optim.set_hyperparams(state, learning_rate=-1.0), params)
    with pytest.raises(OptionError, match=r"structure.*'momentum': 0\.9.*a value above 0"):
        optimizer.apply(grads, optim.set_hyperparams(state, momentum=0.9), params)
    with pytest.raises(SpecMismatch, match="state that its init returned; got SgdState"):
        optimizer.apply(grads, optim.sgd(0.1).init(params), params)


def test_a_sharded_optimizer_is_refused() -> None:
    def main(group: zf.Group) -> None:
        def make(rate: float) -> optim.Optimizer:
            return zf.shard_optimizer(optim.adamw(rate), group)

        with pytest.raises(PlacementError, match=r"stands inside of shard_optimizer\(\).*in S"):
            optim.inject_hyperparams(make)(0.1)

    zf.simulate(2, main)
