from __future__ import annotations

import math

import pytest

from zfun import optim


def test_warmup_cosine_has_the_values_of_deepspeed() -> None:
    # DeepSpeed counts from the step before: its k = 10 is step 11 here. Warm-up 10, total 20, cos_min_ratio 1e-4.
    schedule = optim.warmup_cosine(1.0, 10, 20, end=1e-4)
    expected = [0.9755, 0.9045, 0.7939, 0.6545, 0.5, 0.3456, 0.2062, 0.0956, 0.0246, 0.0001]
    assert [round(schedule(step), 4) for step in range(11, 21)] == expected
    assert [schedule(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]


def test_warmup_linear_has_the_values_of_deepspeed() -> None:
    schedule = optim.warmup_linear(1.0, 10, 20)
    assert [schedule(step) for step in range(10, 22)] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0], abs=1e-15)


@pytest.mark.parametrize(("num_warmup", "num_steps"), [(0, 1), (0, 7), (3, 10), (9, 10)])
def test_schedules_equal_those_of_transformers(num_warmup: int, num_steps: int) -> None:
    cosine, line = optim.warmup_cosine(3e-4, num_warmup, num_steps), optim.warmup_linear(3e-4, num_warmup, num_steps)
    for step in range(num_steps + 3):
        if step < num_warmup:
            rising = step / num_warmup
            assert cosine(step) == line(step) == pytest.approx(3e-4 * rising, rel=1e-15)
        else:
            progress = min(1.0, (step - num_warmup) / (num_steps - num_warmup))
            assert cosine(step) == pytest.approx(3e-4 * 0.5 * (1 + math.cos(math.pi * progress)), rel=1e-12, abs=1e-19)
            assert line(step) == pytest.approx(3e-4 * (1 - progress), rel=1e-12, abs=1e-19)


def test_ends_are_exact() -> None:
    for schedule in (optim.linear(0.3, 0.1, 7), optim.warmup_linear(0.3, 2, 7, end=0.1), optim.warmup_cosine(0.3, 2, 7, end=0.1)):
        assert [schedule(7), schedule(10**9)] == [0.1, 0.1]
    assert optim.linear(0.3, 0.1, 7)(0) == optim.warmup_cosine(0.3, 2, 7)(2) == optim.warmup_linear(0.3, 2, 7)(2) == 0.3
    assert optim.constant(0.2)(12345) == 0.2
