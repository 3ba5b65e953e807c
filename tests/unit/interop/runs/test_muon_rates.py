"""The rates of the parts of Muon under a scheduler of DeepSpeed, in runs that go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import config, net, ranks, trained, weights

OWN = {"lr": 0.05, "muon_lr": 0.02, "adam_lr": 0.01}
PARTS = ("muon_lr", "adam_lr")
SCHEDULES = {
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 20},
    "WarmupLR": {"warmup_num_steps": 8, "warmup_max_lr": 0.03, "warmup_type": "linear"},
}


def begun(group: zf.Group, kind: str, **changed: float) -> Any:
    section = {
        "optimizer": {"type": "Muon", "params": {**OWN, **changed}},
        "scheduler": {"type": kind, "params": SCHEDULES[kind]},
    }
    return deepspeed.initialize(model=net(), config=config(2, **section), mpu=ranks(group))[0]


def rates(engine: Any) -> dict[str, float]:
    group = engine.optimizer.param_groups[0]
    # The parts have their own rates where lr is the base.
    assert group["lr"] == group["base_lr"]
    return {name: group[name] for name in PARTS}


def losses(engine: Any, group: zf.Group) -> list[float]:
    return [loss for loss, *_ in trained(engine, group, 5, 4)]


def test_the_parts_follow_a_cosine_whatever_lr_the_saved_run_had(tmp_path: Path) -> None:
    """A configuration with all three rates trains no leaf at ``lr``."""

    def main(group: zf.Group) -> None:
        first = begun(group, "WarmupCosineLR")
        trained(first, group, 0, 5)
        first.save_checkpoint(tmp_path)
        other, faster = (
            begun(group, "WarmupCosineLR", lr=0.1),
            begun(group, "WarmupCosineLR", lr=0.1, muon_lr=0.04),
        )
        for engine in (other, faster):
            engine.load_checkpoint(tmp_path)
        assert losses(other, group) == losses(first, group)
        torch.testing.assert_close(weights(other), weights(first), rtol=0, atol=0)
        trained(faster, group, 5, 4)
        assert rates(other) == rates(first)
        assert rates(faster) == {"muon_lr": 2 * rates(first)["muon_lr"]} | {
            "adam_lr": rates(first)["adam_lr"]
        }

    zf.simulate(2, main)


def test_a_scheduler_returns_to_the_own_rates_after_set_lr() -> None:
    def main(group: zf.Group) -> None:
        engine, plain = (begun(group, "WarmupCosineLR") for _ in range(2))
        for one in (engine, plain):
            trained(one, group, 0, 3)
        engine.set_lr(0.5)
        assert rates(engine) == dict.fromkeys(PARTS, 0.5)
        for one in (engine, plain):
            trained(one, group, 3, 2)
        assert rates(engine) == rates(plain)

    zf.simulate(1, main)


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_groups_of_an_earlier_muon_go_on_at_the_rates_of_the_scheduler(
    kind: str, tmp_path: Path
) -> None:
    """Earlier groups have the rates of the configuration, and no base."""

    def main(group: zf.Group) -> None:
        engine, other, third = (begun(group, kind) for _ in range(3))
        trained(engine, group, 0, 5)
        numbers = engine.optimizer.param_groups[0]
        now = {name: numbers[name] for name in (*PARTS, "base_lr")}
        del numbers["base_lr"]
        numbers.update({name: OWN[name] for name in PARTS})
        engine.save_checkpoint(tmp_path)
        third.load_module_state_dict(weights(engine))
        third.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        third.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
        numbers.update(now)
        other.load_checkpoint(tmp_path)
        expected = losses(engine, group)
        for resumed in (other, third):
            assert losses(resumed, group) == expected
            assert rates(resumed) == rates(engine)

    zf.simulate(2, main)


def test_a_base_lr_of_a_script_stays_its_own() -> None:
    def main(group: zf.Group) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        optimizer.param_groups[0]["base_lr"] = 0.25
        section = {"scheduler": {"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]}}
        settings = config(1, **section)
        engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, mpu=ranks(group)
        )[0]
        trained(engine, group, 0, 2)
        engine.set_lr(0.125)
        found = engine.optimizer.param_groups[0]
        assert (found["lr"], found["base_lr"]) == (0.125, 0.25)

    zf.simulate(1, main)


def test_a_schedule_alone_leaves_a_base_lr_of_a_script() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)
    optimizer.param_groups[0]["base_lr"] = 0.25
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, 0.5, 4)
    schedule.step()
    assert optimizer.param_groups[0]["base_lr"] == 0.25
