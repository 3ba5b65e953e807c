"""A second ``initialize`` of a model, and what scripts do with files of a run."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import (
    ADAMW,
    WIDTH,
    batch,
    config,
    net,
    ranks,
    trained,
    weights,
)
from zfun.errors import CheckpointError, ConfigError, OptionError, PlacementError
from zfun.interop.deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

STAGES = (0, 1, 2, 3)


def made(group: zf.Group, stage: int, model: nn.Module, **more: Any) -> Any:
    section = {"optimizer": ADAMW, **more}
    return deepspeed.initialize(model=model, config=config(stage, **section), mpu=ranks(group))[0]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("second", STAGES)
@pytest.mark.parametrize("first", STAGES)
@pytest.mark.shows(
    "a second `initialize` of a model",
    "right",
    "begins with the values that the first engine has trained, and the first one trains no more",
)
def test_a_second_call_begins_with_the_values_of_the_first(
    first: int, second: int, is_held: bool
) -> None:
    def again(group: zf.Group, held: bool) -> Any:
        model = net()
        params = list(model.parameters())
        engine = made(group, first, model)
        trained(engine, group, 0, 2)
        if not held:
            del engine
            gc.collect()
        other = made(group, second, model)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        return trained(other, group, 2, 2), weights(other)

    def copied(group: zf.Group) -> Any:
        engine = made(group, first, net())
        trained(engine, group, 0, 2)
        model = net()
        model.load_state_dict(weights(engine))
        other = made(group, second, model)
        return trained(other, group, 2, 2), weights(other)

    wanted = zf.simulate(2, copied)
    for (rows, values), (other, final) in zip(
        zf.simulate(2, partial(again, held=is_held)), wanted, strict=True
    ):
        assert rows == other
        torch.testing.assert_close(values, final, rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_engine_answers_and_trains_no_more(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        model = net()
        first = made(group, stage, model)
        trained(first, group, 0, 1)
        second = made(group, stage, model)
        trained(second, group, 1, 1)
        x = torch.ones(2, WIDTH)
        with pytest.raises(OptionError, match=r"step\(\) trains the model of the engine; got an"):
            first.step()
        with pytest.raises(OptionError, match="a later engine has taken; use the later engine"):
            first.save_checkpoint(tmp_path)
        assert torch.equal(first(x), second(x))

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_that_fails_leaves_a_plain_model(stage: int) -> None:
    def main(group: zf.Group) -> None:
        model = net()
        engine = made(group, stage, model)
        trained(engine, group, 0, 1)
        wanted = {name: x.clone() for name, x in weights(engine).items()}
        with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
            made(group, 7, model)
        assert all(type(param) is nn.Parameter for param in model.parameters())
        torch.testing.assert_close(dict(model.state_dict()), wanted, rtol=0, atol=0)
        trained(made(group, stage, model), group, 1, 1)

    zf.simulate(2, main)


@pytest.mark.shows(
    '`zero.Init(remote_device="nvme")`', "right", "pieces are in files of `offload_param.nvme_path`"
)
def test_pieces_of_parameters_lie_on_a_disk(tmp_path: Path) -> None:
    section = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "new")}}
    given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section}

    def main(group: zf.Group) -> Any:
        found = []
        cases: tuple[dict[str, Any], ...] = (
            {"config": given},
            {"config": given, "remote_device": "nvme"},
            {},
        )
        for options in cases:
            torch.manual_seed(0)
            with deepspeed.zero.Init(data_parallel_group=group, **options):
                model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
            with deepspeed.zero.GatheredParameters(model.parameters()):
                found.append([param.detach().clone() for param in model.parameters()])
        torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
        torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)

    zf.simulate(2, main)
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(OptionError, match=r"got no zero_optimization.offload_param.nvme_path"):
        deepspeed.zero.Init(remote_device="nvme")
    with pytest.raises(OptionError, match=r"memory or on a disk; got remote_device='tape'"):
        deepspeed.zero.Init(remote_device="tape")


def test_files_of_a_checkpoint_tell_the_client_state(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 2, net())
        trained(engine, group, 0, 2)
        engine.save_checkpoint(tmp_path, tag="here", client_state={"epoch": 3})

    zf.simulate(2, main)
    (first,) = get_optim_files(tmp_path / "here")
    stage = torch.load(first)["optimizer_state_dict"]["zero_stage"]
    told = torch.load(get_model_state_file(tmp_path / "here", stage))
    assert (told["epoch"], told["global_steps"]) == (3, 2)
    with pytest.raises(CheckpointError, match="does not exist"):
        get_optim_files(tmp_path / "there")
    for rank in (10, 9):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert [Path(path).name[13:15] for path in get_optim_files(tmp_path)] == ["9_", "10"]
    assert Path(get_model_state_file(tmp_path, 3)).parent == tmp_path


@pytest.mark.shows(
    "a client state of any values",
    "right",
    "pickled where JSON does not hold them, so load only checkpoints that you trust",
)
def test_a_client_state_has_any_values(tmp_path: Path) -> None:
    client: dict[str, Any] = {"path": Path("a"), "epoch": 3, "order": OrderedDict(b=1), "f": len}

    def main(group: zf.Group) -> None:
        made(group, 2, net()).save_checkpoint(tmp_path, tag="one", client_state=client)
        found = made(group, 3, net()).load_checkpoint(tmp_path)[1]
        assert found == client
        assert found is not None
        assert type(found["order"]) is OrderedDict

    zf.simulate(2, main)
    told = torch.load(get_model_state_file(tmp_path / "one", 2), weights_only=False)
    assert told.items() >= client.items()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.shows(
    "`module.cpu()`, `.to(device)`",
    "different",
    "an engine's module stays on its device at every stage, as DeepSpeed's pieces of stage 3",
)
def test_a_module_on_another_device_keeps_its_values(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, net())
        values = weights(engine)
        assert engine.module.to("meta") is engine.module
        assert engine.to("meta") is engine
        torch.testing.assert_close(weights(engine), values, rtol=0, atol=0)
        trained(engine, group, 0, 1)
        copied = copy.deepcopy(engine.module).to("meta")
        assert all(param.is_meta for param in copied.parameters())
        with pytest.raises(PlacementError, match="keeps shape, dtype and device"):
            engine.module.double()

    zf.simulate(2, main)


class Saved(nn.Module):
    """A model with the method of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def save_pretrained(
        self, folder: Path, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        found = self.state_dict() if state_dict is None else state_dict
        if is_main_process:
            torch.save(found, folder / "weights.pt")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.shows(
    "`save_pretrained` with `accelerator.get_state_dict`",
    "right",
    "rank 0 alone writes, with the engine's weights",
)
def test_rank_0_saves_a_model_alone_with_the_weights_of_the_engine(
    is_given: bool, stage: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        torch.manual_seed(0)
        engine = made(group, stage, Saved())
        given = engine._zero3_consolidated_16bit_state_dict() if is_given else None
        assert (given is None) == (group.rank == 1 or not is_given)
        is_first = group.rank == 0
        engine.module.save_pretrained(tmp_path, is_main_process=is_first, state_dict=given)
        # The ranks are at the same collective again.
        assert not engine(torch.ones(2, 4)).isnan().any()

    zf.simulate(2, main)
    torch.manual_seed(0)
    wanted = dict(Saved().state_dict())
    torch.testing.assert_close(dict(torch.load(tmp_path / "weights.pt")), wanted, rtol=0, atol=0)


WARMUP = {"warmup_num_steps": 2, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.02, "cycle_first_step_size": 8}


# By kind, the rates of the parts for get_lr() 1, and get_lr() of the last step.
@pytest.mark.parametrize(
    ("kind", "more", "muon", "adam", "last"),
    [
        ("WarmupCosineLR", {**WARMUP, "total_num_steps": 20}, 0.5, 0.25, 0.046651),
        ("WarmupLR", {**WARMUP, "warmup_max_lr": 0.02}, 1, 1, 0.02),
        ("WarmupLR", WARMUP, 0.5, 0.25, 0.05),
        ("WarmupDecayLR", {**WARMUP, "warmup_max_lr": 0.02, "total_num_steps": 10}, 1, 1, 0.015),
        ("OneCycle", CYCLE, 1, 1, 0.01625),
    ],
)
def test_a_schedule_changes_the_own_rates_and_numbers_of_muon(
    kind: str, more: dict[str, Any], muon: float, adam: float, last: float
) -> None:
    own = {"lr": 0.05, "muon_lr": 0.025, "adam_lr": 0.0125}
    section = {
        "optimizer": {"type": "Muon", "params": own},
        "scheduler": {"type": kind, "params": more},
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
    }
    steps, changed = 6, {"weight_decay": 0.5, "momentum": 0.5, "betas": (0.5, 0.6)}

    def main(group: zf.Group, stage: int) -> tuple[list[float], Any]:
        engine = made(group, stage, net(), **section)
        rates = []
        for step in range(steps):
            if step == 3:
                engine.optimizer.param_groups[0].update(changed)
            x, y = batch(step, group.rank, group.size)
            engine.backward((engine(x) - y).square().mean())
            rates += engine.get_lr()
            engine.step()
        return rates, weights(engine)

    def expected(rates: list[float]) -> dict[str, Tensor]:
        model = net()
        params = {name: x.detach() for name, x in model.named_parameters()}
        state: Any = None
        for step, rate in enumerate(rates):
            decay, momentum, b1, b2 = (0.5, 0.5, 0.5, 0.6) if step >= 3 else (0.0, 0.95, 0.9, 0.95)
            rest = zf.optim.adamw(rate * adam, b1=b1, b2=b2, eps=1e-10, weight_decay=decay)
            rule = zf.optim.muon(rate * muon, rest, momentum=momentum, weight_decay=decay)
            state = rule.init(params) if state is None else state
            x, y = batch(step, 0, 1)
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            grads = {name: x.grad for name, x in model.named_parameters()}
            params, state = rule.apply(grads, state, params)
            for name, param in model.named_parameters():
                param.data = params[name]
        return params

    for stage in (0, 1, 3):
        rates, found = zf.simulate(1, partial(main, stage=stage))[0]
        assert len(set(rates)) > 2
        assert rates[-1] == pytest.approx(last, rel=1e-3)
        for name, value in expected(rates).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_resumed_run_of_muon_has_the_rates_of_the_saved_one(steps: int, tmp_path: Path) -> None:
    def begun(group: zf.Group, rate: float) -> Any:
        own = {"lr": rate, "muon_lr": 0.02, "adam_lr": 3e-4}
        return made(group, 2, net(), optimizer={"type": "Muon", "params": own})

    def main(group: zf.Group) -> None:
        engine, other, third = begun(group, 0.05), begun(group, 0.1), begun(group, 0.1)
        decay = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer.optimizer, 0.5)
        for step in range(steps):
            trained(engine, group, step, 1)
            decay.step()
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        third.load_module_state_dict(weights(engine))
        third.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        expected = trained(engine, group, steps, 2)
        for resumed in (other, third):
            assert trained(resumed, group, steps, 2) == expected
            torch.testing.assert_close(weights(resumed), weights(engine), rtol=0, atol=0)

    zf.simulate(2, main)


def test_set_lr_sets_the_rates_of_both_parts_of_muon() -> None:
    def main(group: zf.Group, **params: float) -> Any:
        engine = made(group, 1, net(), optimizer={"type": "Muon", "params": params})
        engine.set_lr(0.01)
        return trained(engine, group, 0, 2)

    expected = zf.simulate(1, partial(main, lr=0.01))
    assert zf.simulate(1, partial(main, muon_lr=0.02, adam_lr=3e-4)) == expected


def test_each_group_warms_up_to_its_own_rate() -> None:
    layer = nn.Linear(2, 1)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, None, 2, "linear")
    for _ in range(4):
        schedule.step()
    assert schedule.get_lr() == [0.4, 0.1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_has_the_numbers_of_the_groups(stage: int, tmp_path: Path) -> None:
    changed = {"lr": 0.03, "weight_decay": 0.5, "betas": (0.5, 0.6)}

    def main(group: zf.Group) -> None:
        engine, other = made(group, stage, net()), made(group, stage, net(1))
        trained(engine, group, 0, 1)
        engine.optimizer.param_groups[0].update(changed, initial_lr=torch.tensor(0.25))
        engine.save_checkpoint(tmp_path)
        assert other.load_checkpoint(tmp_path)[1] == {}
        found = other.optimizer.param_groups[0]
        assert {name: found[name] for name in changed} == changed
        assert torch.equal(found["initial_lr"], torch.tensor(0.25))
        assert len(found["params"]) == len(list(other.module.parameters()))
        expected = trained(engine, group, 1, 2)
        assert trained(other, group, 1, 2) == expected
        torch.testing.assert_close(weights(other), weights(engine), rtol=0, atol=0)
        # Earlier files have rates only.
        zf.checkpoint.save(tmp_path / "early", engine._core.state, data={"lr": [0.125]})
        other.load_checkpoint(tmp_path, "early")
        assert {name: found[name] for name in changed} == {**changed, "lr": 0.125}

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_begins_after_a_load_between_micro_batches(stage: int, tmp_path: Path) -> None:
    """DeepSpeed saves no count of micro-batches, as it saves none of their gradients."""

    def main(group: zf.Group) -> None:
        more = {"gradient_accumulation_steps": 4}
        first, other = (made(group, stage, net(), **more) for _ in range(2))

        def micro_batch(engine: Any) -> None:
            x, y = batch(0, group.rank, group.size)
            engine.backward((engine(x) - y).square().mean())
            engine.step()

        for _ in range(6):
            micro_batch(first)
        first.save_checkpoint(tmp_path)
        for engine in (first, other):
            engine.load_checkpoint(tmp_path)
            for index in range(4):
                assert engine.global_steps == 1
                assert engine.is_gradient_accumulation_boundary() is (index == 3)
                micro_batch(engine)
            assert engine.global_steps == 2

    zf.simulate(1, main)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.shows(
    "a parameter that no rank has used",
    "different",
    "stays, as in torch; DeepSpeed steps it with a gradient of zeros",
)
def test_a_parameter_that_no_rank_has_used_stays(stage: int) -> None:
    def main(group: zf.Group) -> None:
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        section = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
        engine = made(group, stage, model, optimizer=section, gradient_accumulation_steps=1)
        before = weights(engine)
        engine.backward(engine.module[0](torch.ones(1, 2)).sum())
        engine.step()
        for name, value in weights(engine).items():
            assert torch.equal(value, before[name]) is name.startswith("1.")

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_has_the_place_of_hooks_at_stage_3(stage: int) -> None:
    def main(group: zf.Group) -> None:
        given = {**config(stage), "optimizer": None, "scheduler": None}
        given = {name: x for name, x in given.items() if x is not None}
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=given, mpu=ranks(group))
        assert optimizer is engine.optimizer
        if stage == 3:
            assert (optimizer.module, optimizer.forward_hooks) == (engine.module, [])
        else:
            assert optimizer is None
        with pytest.raises(OptionError, match="got an engine of initialize\\(\\) without an"):
            engine.step()

    zf.simulate(1, main)
