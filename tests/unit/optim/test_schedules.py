from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zfun import optim
from zfun.errors import OptionError


def test_warmup_cosine_has_the_values_of_deepspeed() -> None:
    # DeepSpeed counts from the previous step: k = 10 there is step 11 here. Warm-up 10, total 20,
    # cos_min_ratio 1e-4.
    schedule = optim.warmup_cosine(1.0, 10, 20, end=1e-4)
    expected = [0.9755, 0.9045, 0.7939, 0.6545, 0.5, 0.3456, 0.2062, 0.0956, 0.0246, 0.0001]
    assert [round(schedule(step), 4) for step in range(11, 21)] == expected
    assert [schedule(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]


def test_warmup_linear_has_the_values_of_deepspeed() -> None:
    schedule = optim.warmup_linear(1.0, 10, 20)
    assert [schedule(step) for step in range(10, 22)] == pytest.approx(
        [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0], abs=1e-15
    )


@pytest.mark.parametrize(("num_warmup", "num_steps"), [(0, 1), (0, 7), (3, 10), (9, 10)])
def test_schedules_equal_those_of_transformers(num_warmup: int, num_steps: int) -> None:
    cosine, line = (
        optim.warmup_cosine(3e-4, num_warmup, num_steps),
        optim.warmup_linear(3e-4, num_warmup, num_steps),
    )
    for step in range(num_steps + 3):
        if step < num_warmup:
            rising = step / num_warmup
            assert cosine(step) == line(step) == pytest.approx(3e-4 * rising, rel=1e-15)
        else:
            progress = min(1.0, (step - num_warmup) / (num_steps - num_warmup))
            assert cosine(step) == pytest.approx(
                3e-4 * 0.5 * (1 + math.cos(math.pi * progress)), rel=1e-12, abs=1e-19
            )
            assert line(step) == pytest.approx(3e-4 * (1 - progress), rel=1e-12, abs=1e-19)


def test_ends_are_exact() -> None:
    for schedule in (
        optim.linear(0.3, 0.1, 7),
        optim.warmup_linear(0.3, 2, 7, end=0.1),
        optim.warmup_cosine(0.3, 2, 7, end=0.1),
    ):
        assert [schedule(7), schedule(10**9)] == [0.1, 0.1]
    assert (
        optim.linear(0.3, 0.1, 7)(0)
        == optim.warmup_cosine(0.3, 2, 7)(2)
        == optim.warmup_linear(0.3, 2, 7)(2)
        == 0.3
    )
    assert optim.constant(0.2)(12345) == 0.2


# The counter of DeepSpeed's schedulers is 0 at the second step. Warm-ups are functions of this
# counter, and the other schedules of the step.


def test_warmup_has_the_values_of_deepspeed() -> None:
    log = optim.warmup(1.0, 10, shape="log")
    expected = [0, 0.3010, 0.4771, 0.6021, 0.6990, 0.7782, 0.8451, 0.9031, 0.9542, 1, 1]
    assert [round(log(step), 4) for step in range(11)] == expected
    assert [optim.warmup(3.0, 4, start=1.0)(step) for step in range(-1, 7)] == [
        1.0,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        3.0,
        3.0,
    ]
    assert [optim.warmup(3.0, 1, start=1.0, shape="log")(step) for step in range(3)] == [
        1.0,
        3.0,
        3.0,
    ]
    assert optim.warmup(3.0, 0)(0) == 3.0
    # One step late, as DeepSpeed's first two steps are.
    assert [round(optim.warmup(1.0, 10, shape="log")(step - 1), 4) for step in range(3)] == [
        0.0,
        0.0,
        0.3010,
    ]


def test_warmup_may_rise_in_logarithms_and_from_elsewhere() -> None:
    falling = optim.warmup_linear(1.0, 10, 20, end=0.1, start=0.1, shape="log")
    for step in range(10):
        assert falling(step) == pytest.approx(
            0.1 + 0.9 * math.log(step + 1) / math.log(10), rel=1e-15
        )
    for step in range(10, 25):
        assert falling(step) == pytest.approx(0.1 + 0.9 * max(0.0, (20 - step) / 10), rel=1e-15)
    assert [
        optim.warmup_cosine(1.0, 10, 20, start=0.2)(step) for step in (0, 5, 10)
    ] == pytest.approx([0.2, 0.6, 1.0])


def test_one_cycle_has_the_values_of_deepspeed() -> None:
    assert [optim.one_cycle(0.0, 1.0, 4)(step) for step in range(9)] == [
        0,
        0.25,
        0.5,
        0.75,
        1,
        0.75,
        0.5,
        0.25,
        0,
    ]
    assert [optim.one_cycle_momentum(0.8, 0.9, 4)(step) for step in (0, 4, 8, 9)] == [
        0.9,
        0.8,
        0.9,
        0.9,
    ]
    lr = optim.one_cycle(0.1, 0.5, 3, 5, decay_rate=2.0, decay_steps=4)
    momentum = optim.one_cycle_momentum(0.1, 0.5, 3, 5, decay_rate=0.2, decay_steps=4)
    for counter in range(-1, 20):
        position = (counter + 1) / 8 - math.floor((counter + 1) / 8)
        ratio = 3 / 8
        height = position / ratio if position <= ratio else (position - 1) / (ratio - 1)
        past = (counter - 8 + 1) / 4
        assert lr(counter + 1) == pytest.approx(
            0.1 + 0.4 * height if counter < 8 else 0.1 / (1 + 2.0 * past), rel=1e-12
        )
        assert momentum(counter + 1) == pytest.approx(
            0.5 - 0.4 * height if counter < 8 else 0.5 * (1 + 0.2 * past), rel=1e-12
        )


def test_one_cycle_may_move_in_stairs() -> None:
    assert [optim.one_cycle(0.0, 1.0, 6, stairs_up=2)(step) for step in range(13)] == [
        0,
        0,
        0,
        0.5,
        0.5,
        0.5,
        1,
        0.5,
        0.5,
        0.5,
        0,
        0,
        0,
    ]
    assert [
        optim.one_cycle(0.0, 1.0, 3, 4, stairs_up=3, stairs_down=0)(step) for step in range(8)
    ] == pytest.approx([0, 1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])
    # 49 stairs of one step: in floating point, the floor of the 49th would be the 48th.
    assert [optim.one_cycle(0.0, 1.0, 49, stairs_up=49)(step) for step in (48, 49, 50)] == [
        48 / 49,
        1.0,
        48 / 49,
    ]


def test_lr_range_test_has_the_values_of_deepspeed() -> None:
    for staircase in (False, True):
        schedule = optim.lr_range_test(1e-3, 5, 0.7, staircase=staircase)
        for counter in range(-1, 20):
            interval = float(counter + 1) / 5
            assert schedule(counter + 1) == pytest.approx(
                1e-3 * (1 + 0.7 * (math.floor(interval) if staircase else interval)), rel=1e-15
            )


def torch_values(make: Any, num_steps: int, key: str = "lr") -> list[float]:
    """The learning rate of torch's scheduler at each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3, momentum=0.9)
    scheduler, found = make(optimizer), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0][key])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_equal_those_of_torch() -> None:
    schedulers = torch.optim.lr_scheduler

    def one_cycle(optimizer: Any) -> Any:
        # The peak is the last step of the first part.
        return schedulers.OneCycleLR(
            optimizer,
            0.5,
            total_steps=26,
            pct_start=11 / 26,
            anneal_strategy="linear",
            div_factor=5,
            final_div_factor=1,
            base_momentum=0.8,
        )

    def joined(optimizer: Any) -> Any:
        parts: list[Any] = [
            schedulers.LinearLR(optimizer, 0.1, 1.0, 4),
            schedulers.CosineAnnealingLR(optimizer, 10, 0.03),
        ]
        return schedulers.SequentialLR(optimizer, parts, [4])

    assert torch_values(one_cycle, 25) == pytest.approx(
        [optim.one_cycle(0.1, 0.5, 10, 15)(step) for step in range(25)], rel=1e-12
    )
    momentum = optim.one_cycle_momentum(0.8, 0.95, 10, 15)
    assert torch_values(one_cycle, 25, "momentum") == pytest.approx(
        [momentum(step) for step in range(25)], rel=1e-12
    )
    ours = optim.join([optim.linear(0.03, 0.3, 4), optim.warmup_cosine(0.3, 0, 10, end=0.03)], [4])
    assert torch_values(joined, 14) == pytest.approx([ours(step) for step in range(14)], rel=1e-12)


def test_joined_schedules_begin_at_their_boundaries() -> None:
    schedule = optim.join([float, lambda step: 100.0 + step], [3])
    assert [schedule(step) for step in range(-1, 6)] == [-1, 0, 1, 2, 100, 101, 102]
    assert optim.join([float], [])(7) == 7.0


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_momentum_may_be_a_function_of_the_steps_taken(rule: str) -> None:
    rate, momentum = optim.one_cycle(0.01, 0.1, 3), optim.one_cycle_momentum(0.5, 0.9, 3)
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    ours: Any = (
        optim.sgd(rate, momentum=momentum) if rule == "sgd" else optim.adamw(rate, b1=momentum)
    )
    theirs: Any = (
        torch.optim.SGD([p], lr=1.0, momentum=0.9)
        if rule == "sgd"
        else torch.optim.AdamW([p], lr=1.0)
    )
    params = {"w": torch.ones(3, dtype=torch.float64)}
    state = ours.init(params)
    for step in range(8):
        grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * math.cos(step)
        params, state = ours.apply({"w": grad}, state, params)
        theirs.param_groups[0].update(
            {
                "lr": rate(step),
                **(
                    {"momentum": momentum(step)}
                    if rule == "sgd"
                    else {"betas": (momentum(step), 0.999)}
                ),
            }
        )
        p.grad = grad
        theirs.step()
        torch.testing.assert_close(params["w"] - 1, p.detach() - 1, rtol=1e-12, atol=0)
    with pytest.raises(
        OptionError, match=r"below 1 at every step; its schedule gave 1.5 at step 0"
    ):
        (
            optim.sgd(0.1, momentum=optim.constant(1.5))
            if rule == "sgd"
            else optim.adam(0.1, b1=optim.constant(1.5))
        ).update(params, ours.init(params), params)


@pytest.mark.parametrize(
    "make",
    [
        optim.sgd,
        optim.muon,
        optim.scale_by_schedule,
        optim.scale_by_learning_rate,
        lambda schedule: optim.from_torch(torch.optim.RMSprop, lr=schedule),
        lambda schedule: optim.adam(0.1, b1=schedule),
    ],
)
def test_the_values_of_a_schedule_are_checked(make: Any) -> None:
    def changed(value: Any) -> torch.Tensor:
        options = (optim.sgd(0.1),) if make is optim.muon else ()
        optimizer, params = make(lambda step: value, *options), {"w": torch.ones(2, 2)}
        return optimizer.apply(params, optimizer.init(params), params)[0]["w"]

    for bad in (None, "0.1", 1j, math.nan, math.inf, torch.ones(2)):
        with pytest.raises(
            OptionError, match=r"number.* at every step; its schedule gave .* 0; let"
        ):
            changed(bad)
    if make is not optim.scale_by_schedule:
        with pytest.raises(OptionError, match=r"at least 0.* its schedule gave -0.25 at step 0"):
            changed(-0.25)
    for good in (torch.tensor(0.25), torch.tensor([0.25])):
        assert torch.equal(changed(good), changed(0.25))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.warmup(1.0, -1), "must be an integer of at least 0, .*; got -1"),
        (lambda: optim.warmup(1.0, 3, shape="cosine"), "'linear' or 'log'; got 'cosine'"),
        (lambda: optim.lr_range_test(1.0, 0), "an integer of at least 1, "),
        (lambda: optim.one_cycle(0.0, 1.0, 0), "an integer of at least 1, "),
        (lambda: optim.one_cycle(0.0, 1.0, 3, 0), "an integer of at least 1, "),
        (
            lambda: optim.one_cycle_momentum(0.0, 1.0, 3, stairs_up=-1),
            "an integer of at least 0, ",
        ),
        (
            lambda: optim.one_cycle(0.0, 1.0, 3, decay_steps=-1),
            "an integer of at least 0, ",
        ),
        (lambda: optim.join([float, float], []), "2 schedules, 0 boundaries; a boundary is"),
        (
            lambda: optim.join([float, float, float], [5, 5]),
            r"boundaries ascend and are above 0; got \[5, 5\]",
        ),
        (lambda: optim.join([float, float], [0]), "above 0"),
    ],
)
def test_options_are_checked(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
