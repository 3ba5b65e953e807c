"""Schedules with numbers for each parameter group, and cycles of the momentum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zfun as zf
from tests.interop.deepspeed_runs import ranks
from zfun.errors import ConfigError, OptionError
from zfun.interop import deepspeed, from_ds_config

schedules: Any = deepspeed.lr_schedules
MODEL_RATES = (0.04, 0.02)


def groups_of(model: nn.Linear) -> list[dict[str, Any]]:
    return [{"params": [model.weight]}, {"params": [model.bias], "lr": MODEL_RATES[1]}]


def engine_of(kind: str, params: dict[str, Any], stage: int = 0, **given: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": MODEL_RATES[0]}},
        "scheduler": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
    }
    given = {"model": model, "model_parameters": groups_of(model), **given}
    return deepspeed.initialize(config=config, **given)[0]


def stepped(engine: Any, steps: int) -> list[tuple[list[float], list[Any]]]:
    """Return rates and momenta of the groups before each step."""
    found = []
    for _ in range(steps):
        found.append((engine.get_lr(), engine.get_mom()))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return found


# DeepSpeed's formulas for a group, by the counter of DeepSpeed, which is -1 before the first step.


def warmup(low: float, high: float, count: int) -> float:
    gamma = 1.0 if count >= 3 else math.log(max(1, count + 1)) / math.log(3)
    return low if count < 0 else low + (high - low) * gamma


def decay(low: float, high: float, count: int) -> float:
    gamma = (
        max(0.0, (6 - count) / (6 - 3)) if count >= 3 else math.log(max(1, count + 1)) / math.log(3)
    )
    return low if count < 0 else low + (high - low) * gamma


def cycle(low: float, high: float, count: int) -> float:
    position = (count + 1) % 4 / 2
    scale = 0.0 if count < 0 else position if position <= 1 else 2 - position
    return low + (high - low) * scale


LISTS: list[tuple[str, dict[str, Any], Any]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": [0.0, 0.001], "warmup_max_lr": [0.01, 0.005], "warmup_num_steps": 3},
        lambda i, n: warmup((0.0, 0.001)[i], (0.01, 0.005)[i], n),
    ),
    (
        "WarmupLR",  # up to the rates of the groups
        {"warmup_min_lr": (0.001, 0.002), "warmup_num_steps": 3},
        lambda i, n: warmup((0.001, 0.002)[i], MODEL_RATES[i], n),
    ),
    (
        "WarmupDecayLR",
        {
            "warmup_min_lr": [0.0, 0.001],
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 3,
            "total_num_steps": 6,
        },
        lambda i, n: decay((0.0, 0.001)[i], 0.01, n),
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 2},
        lambda i, n: (1e-4, 1e-3)[i] * (1 + (n + 1) / 2),
    ),
    (
        "OneCycle",
        {"cycle_min_lr": [1e-3, 2e-3], "cycle_max_lr": [1e-2, 3e-2], "cycle_first_step_size": 2},
        lambda i, n: cycle((1e-3, 2e-3)[i], (1e-2, 3e-2)[i], n),
    ),
]


@pytest.mark.shows(
    "lists of rates and momenta in `scheduler.params`, one for each group", "right", ""
)
@pytest.mark.parametrize("is_class", [False, True])
@pytest.mark.parametrize(("kind", "params", "rate"), LISTS)
def test_a_list_has_a_number_for_each_group(
    kind: str, params: dict[str, Any], rate: Any, is_class: bool
) -> None:
    expected = [[rate(i, count) for i in range(2)] for count in range(-1, 4)]
    assert all(first != second for first, second in expected)
    if is_class:
        optimizer = torch.optim.SGD(groups_of(nn.Linear(2, 1)), lr=MODEL_RATES[0])
        schedule = getattr(schedules, kind)(optimizer, **params)
        found = []
        for _ in expected:
            found.append([group["lr"] for group in optimizer.param_groups])
            schedule.step()
    else:
        found = [rates for rates, _ in stepped(engine_of(kind, params), len(expected))]
    assert found == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_rates_of_groups_reach_their_parameters(stage: int) -> None:
    """The first step of Adam is as long as the rate."""
    params = {"warmup_min_lr": [0.25, 0.5], "warmup_max_lr": [0.25, 0.5]}

    def main(group: zf.Group) -> None:
        engine = engine_of("WarmupLR", params, stage, mpu=ranks(group))
        before = {name: x.clone() for name, x in engine.module_state_dict().items()}
        stepped(engine, 1)
        for name, length in (("weight", 0.25), ("bias", 0.5)):
            change = before[name] - engine.module_state_dict()[name]
            torch.testing.assert_close(change, torch.full_like(change, length))

    zf.simulate(2, main)


def test_a_list_of_momenta_has_one_for_each_group() -> None:
    params = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2,
        "cycle_first_step_size": 2,
        "cycle_min_mom": [0.6, 0.8],
        "cycle_max_mom": [0.8, 0.9],
    }
    found = [momenta for _, momenta in stepped(engine_of("OneCycle", params), 4)]
    # The constructor writes the least momentum, and steps go from the largest one down.
    expected = [(0.6, 0.8), (0.7, 0.85), (0.6, 0.8), (0.7, 0.85)]
    assert [[mom[0] for mom in row] for row in found] == [pytest.approx(row) for row in expected]
    assert all(mom[1] == 0.99 for row in found for mom in row)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("WarmupLR", "warmup_min_lr"),
        ("WarmupLR", "warmup_max_lr"),
        ("OneCycle", "cycle_max_lr"),
        ("OneCycle", "cycle_min_mom"),
        ("LRRangeTest", "lr_range_test_min_lr"),
    ],
)
def test_a_list_of_another_length_is_refused(kind: str, name: str) -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if kind == "OneCycle" else {}
    params |= {name: [0.1, 0.2, 0.3]}
    match = rf"scheduler\.params\.{name} \[0\.1, 0\.2, 0\.3\] for 2 groups; write .* a list of 2"
    with pytest.raises(OptionError, match=match):
        engine_of(kind, params)
    optimizer = torch.optim.SGD(groups_of(nn.Linear(2, 1)), lr=0.1)
    with pytest.raises(ValueError, match=match):
        getattr(schedules, kind)(optimizer, **params)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, MODEL_RATES[1]]


@pytest.mark.parametrize("value", [[], [0.1, "0.2"], [[0.1], 0.2], [-0.1, 0.2]])
def test_a_list_has_numbers(value: Any) -> None:
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": value}}}
    match = r"scheduler\.params\.warmup_min_lr: must be .* or a list with one for each parameter"
    with pytest.raises(ConfigError, match=match):
        from_ds_config(config)


def test_a_recipe_has_no_groups_for_a_list() -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0.1, 0.2]}},
        "gradient_clipping": 0,
    }
    recipe = from_ds_config(config)

    def main(group: zf.Group) -> None:
        with pytest.raises(OptionError, match=r"warmup_min_lr \[0\.1, 0\.2\] for 1 group; write"):
            recipe.zero(lambda params: params["w"].sum(), group)

    zf.simulate(1, main)


GROWING = {
    "cycle_min_lr": 0.001,
    "cycle_max_lr": 0.01,
    "cycle_first_step_size": 1,
    "decay_step_size": 1,
    "decay_mom_rate": 0.1,
}


@pytest.mark.shows(
    "a momentum of `OneCycle` that grows to 1", "refused", "with DeepSpeed, Adam goes on with it"
)
@pytest.mark.parametrize("given", ["configured", "torch", "fused"])
def test_a_momentum_that_grows_to_one_is_refused_by_the_keys_of_the_schedule(given: str) -> None:
    model = nn.Linear(2, 1)
    classes: dict[str, Any] = {"torch": torch.optim.Adam, "fused": deepspeed.ops.FusedAdam}
    own = {"optimizer": classes[given](model.parameters())} if given in classes else {}
    engine = engine_of("OneCycle", GROWING, model=model, model_parameters=None, **own)
    with pytest.raises(OptionError, match=r"got 1\.08.*scheduler\.params\.decay_mom_rate"):
        stepped(engine, 9)
    assert engine.global_steps == 4
    assert engine.get_mom()[0][0] == pytest.approx(1.08)
