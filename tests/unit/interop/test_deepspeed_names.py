"""The names of DeepSpeed that need no engine, and the names that are not there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from tests.interop.deepspeed_runs import net
from zfun.errors import ConfigError, OptionError
from zfun.interop import deepspeed
from zfun.interop.deepspeed._absent import ABSENT
from zfun.planner.formulae import estimate_zero2, estimate_zero3, sizes_of


def test_gathered_parameters_show_values_and_take_those_of_one_rank() -> None:
    gathered = deepspeed.zero.GatheredParameters

    def main(group: zf.Group) -> None:
        with deepspeed.zero.Init(data_parallel_group=group, dtype=torch.bfloat16):
            model = net()
        weight = model.first.weight
        assert weight.dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="single memory location"):
            weight.data.normal_()
        model.scale.data.fill_(1.0)
        with pytest.raises(OptionError, match=r"shape \(3,\) with new values.*modifier_rank=0"):
            gathered(model.scale).__enter__()
        model.scale.data.fill_(float("nan"))
        with gathered([weight, model.scale], modifier_rank=1):
            assert not weight.isnan().any()
            with gathered(weight):  # inside of another context
                assert not weight.isnan().any()
            weight.data.fill_(float(group.rank))
        with gathered(weight):
            assert weight.unique().tolist() == [1.0]
        with (
            pytest.raises(OptionError, match=r"without one; pass modifier_rank=0"),
            gathered(weight),
        ):
            weight.data.zero_()
        with (
            pytest.raises(OptionError, match=r"one of the ranks .* got 7"),
            gathered(weight, modifier_rank=7),
        ):
            pytest.fail("nothing was gathered")

    zf.simulate(2, main)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16", "stage3-bf16"])
def test_zero_to_fp32_reads_what_deepspeed_wrote(name: str) -> None:
    found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(FIXTURES / name)
    expected = zf.sources.deepspeed(FIXTURES / name)
    assert set(expected.params) <= set(found)
    for key, leaf in expected.params.items():
        assert torch.equal(found[key], leaf.load().float())


# Those of the engine are attributes of an object, which test_deepspeed_facade.py makes.
@pytest.mark.parametrize("module", sorted(set(ABSENT) - {"engine"}))
def test_a_name_that_is_not_there_says_what_to_use(module: str) -> None:
    parts = {"zero": "runtime.zero"}.get(module, module)
    found = importlib.import_module(f"zfun.interop.deepspeed.{parts}".rstrip("."))
    for name, remedy in ABSENT[module].items():
        with pytest.raises(OptionError, match=name) as error:
            getattr(found, name)
        assert str(error.value).endswith(remedy)
        with pytest.raises(OptionError, match=name):
            exec(f"from {found.__name__} import {name}")
    with pytest.raises(AttributeError, match=r"which is not there"):
        found.no_such_name  # noqa: B018


def test_the_nearest_name_is_named() -> None:
    untyped: Any = deepspeed
    with pytest.raises(AttributeError, match=r"did you mean 'initialize'\?"):
        untyped.initialise  # noqa: B018
    assert not hasattr(deepspeed, "__wrapped__")


def test_the_estimators_print_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    from zfun.interop.deepspeed.runtime.zero import stage3, stage_1_and_2

    model = net()
    numel, largest = sizes_of(model)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, 8, 2)
    assert capsys.readouterr().out.rstrip("\n") == str(
        estimate_zero3(numel, largest, gpus_per_node=8, num_nodes=2)
    )
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, 8, 2)
    assert capsys.readouterr().out.rstrip("\n") == str(
        estimate_zero2(numel, gpus_per_node=8, num_nodes=2)
    )


def test_schedules_write_the_rates_of_the_configuration() -> None:
    def rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(8):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return found

    schedules = deepspeed.lr_schedules
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.5)
    cosine = schedules.WarmupCosineLR(optimizer, 8, warmup_num_steps=2)
    found = rates(cosine, optimizer)
    assert found[0] == 0.0
    assert max(found) == pytest.approx(0.5, rel=0.2)
    state = cosine.state_dict()
    assert state == {"last_batch_iteration": 7}
    cosine.load_state_dict({"last_batch_iteration": 2})
    assert cosine.get_last_lr() == [found[3]]
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.5)
    schedules.OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=4)
    assert optimizer.param_groups[0]["betas"][1] == 0.99
    with pytest.raises(ConfigError, match="warmup_num_stpes"):
        schedules.WarmupLR(optimizer, warmup_num_stpes=3)
