"""Scripts of DeepSpeed over zfun: numbers of plain torch, DeepSpeed's counters and names."""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.conftest import FORM
from tests.interop.deepspeed_runs import (
    ADAMW,
    BATCH,
    MICRO_BATCHES,
    WARMUP,
    WIDTH,
    Net,
    Row,
    batch,
    config,
    net,
    plain,
    ranks,
    run,
    trained,
    weights,
)
from tests.interop.ds_configs import FILES, auto_of
from zfun.errors import CheckpointError, ConfigError, OptionError, PlacementError, SpecMismatch
from zfun.interop import from_ds_config
from zfun.interop.deepspeed._absent import ABSENT
from zfun.testing import assert_same_bits

STEPS = 6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
STAGES = (0, 1, 2, 3)


def made(group: zf.Group, stage: int = 3, model: nn.Module | None = None, **options: Any) -> Any:
    more = options.pop("config", {"optimizer": ADAMW, "scheduler": WARMUP})
    return deepspeed.initialize(
        model=model or net(), config=config(stage, **more), mpu=ranks(group), **options
    )


def numbers(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([[x.loss, x.lr, math.nan if x.norm is None else x.norm] for x in rows])


@pytest.mark.shows(
    "`engine.backward(loss)`, `engine.step()`",
    "right",
    "the numbers of plain torch, with bits that stages share",
)
def test_every_stage_gives_the_numbers_of_plain_torch() -> None:
    expected, final = plain(2, STEPS)
    found = {stage: zf.simulate(2, partial(run, stage=stage, steps=STEPS)) for stage in STAGES}
    for stage, results in found.items():
        for rank, (rows, values) in enumerate(results):
            torch.testing.assert_close(
                numbers(rows), numbers(expected[rank]), **CLOSE, equal_nan=True
            )
            torch.testing.assert_close(
                {name: values[name] for name in final if name in values},
                {name: final[name] for name in final if name in values},
                **CLOSE,
            )
            # Below stage 2 the micro-batches are added before the ranks.
            same = found[0 if stage < 2 else 3][0][1]
            torch.testing.assert_close(values, same, rtol=0, atol=0)
    assert expected[0][0].loss != expected[0][-1].loss


def test_the_counters_are_those_of_deepspeed() -> None:
    def main(group: zf.Group) -> None:
        engine, *_ = made(group, 2)
        assert engine.get_global_grad_norm() is None
        seen = []
        for step in range(5):
            x, y = batch(step, group.rank, group.size)
            loss = (engine(x) - y).square().mean()
            returned = engine.backward(loss)
            assert float(returned) == pytest.approx(float(loss.detach()) / MICRO_BATCHES)
            engine.step()
            seen.append((engine.micro_steps, engine.global_steps, engine.was_step_applied()))
        assert seen == [(1, 0, False), (2, 1, True), (3, 1, False), (4, 2, True), (5, 2, False)]
        assert engine.global_samples == 2 * BATCH * MICRO_BATCHES * group.size
        assert engine.skipped_steps == 0
        assert engine.train_batch_size() == BATCH * MICRO_BATCHES * group.size
        assert engine.train_micro_batch_size_per_gpu() == BATCH
        assert engine.gradient_accumulation_steps() == MICRO_BATCHES
        assert engine.get_batch_info() == (16, 4, 2)
        assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
        assert (engine.gradient_clipping(), engine.loss_scale(), engine.cur_scale) == (0.5, 0, 1)
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
        assert engine.optimizer_name() == "adamw"
        assert engine.scheduler_params()["warmup_num_steps"] == 4
        assert (engine.dynamic_loss_scale(), engine.initial_dynamic_scale()) == (True, 65536.0)
        assert (engine.dump_state(), engine.postscale_gradients()) == (False, True)
        assert engine.checkpoint_tag_validation_enabled()
        assert (engine.checkpoint_tag_validation_fail(), engine.zero_cpu_offload()) == (
            False,
            False,
        )
        for absent in ("monitor", "timers", "set_data_post_process_func"):
            assert getattr(engine, absent, None) is None
            with pytest.raises(OptionError, match=rf"{absent}, which is not there; \w+ \w+"):
                getattr(engine, absent)()
        assert engine.global_rank == group.rank
        assert engine.get_mom() == [(0.9, 0.999)]

    zf.simulate(2, main)


def test_a_step_with_an_overflow_counts_and_does_nothing_else() -> None:
    def main(group: zf.Group) -> None:
        engine, *_ = made(group, 1)
        trained(engine, group, 0, 1)
        before, rate = weights(engine), engine.get_lr()
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(torch.full((BATCH, WIDTH), math.inf)).mean())
            engine.step()
        assert (engine.global_steps, engine.skipped_steps) == (2, 1)
        assert not engine.was_step_applied()
        assert engine.get_lr() == rate
        torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)

    zf.simulate(2, main)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def cycling(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of the learning rate and of the momentum."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)


@pytest.mark.parametrize(
    ("make", "scheduler"),
    [
        (lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), falling),
        (lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1), cycling),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), cycling),
        (lambda params: torch.optim.RMSprop(params, lr=1e-2), falling),
    ],
    ids=["AdamW", "Adam", "SGD", "RMSprop"],
)
@pytest.mark.shows(
    "optimizers and schedulers of torch",
    "right",
    "element-wise ones; `lr` of a group counts at the next step",
)
def test_an_optimizer_of_torch_with_groups_and_a_scheduler(make: Any, scheduler: Any) -> None:
    """The engine reads the numbers that a scheduler of torch writes, group by group."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        thin = [p for p in model.parameters() if p.ndim < 2]
        wide = [p for p in model.parameters() if p.ndim > 1]
        return [{"params": thin, "weight_decay": 0.0, "lr": 5e-3}, {"params": wide}]

    def main(group: zf.Group) -> Any:
        model = net()
        optimizer = make(groups(model))
        engine, returned, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=config(3, gradient_clipping=0),
            mpu=ranks(group),
        )
        assert returned.param_groups is optimizer.param_groups
        trained(engine, group, 0, 3)
        return weights(engine)

    model = net()
    optimizer = make(groups(model))
    schedule = scheduler(optimizer)
    for step in range(3):
        for micro in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
            x, y = batch(micro, 0, 1)
            ((model(x) - y).square().mean() / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    expected = dict(model.named_parameters())
    found = zf.simulate(1, main)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), **CLOSE)


@pytest.mark.shows(
    "a scheduler that cycles decays which the optimizer holds constant",
    "refused",
    "`cycle_momentum=False`",
)
def test_a_scheduler_that_cycles_constant_decays_is_refused() -> None:
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters()),
        lr_scheduler=cycling,
        config=config(2),
    )

    def train() -> None:
        for _ in range(4):
            engine.backward(engine(batch(0, 0, 1)[0]).sum())
            engine.step()

    with pytest.raises(OptionError, match=r"NAdam has constant betas.*cycle_momentum=False"):
        train()


@pytest.mark.parametrize("kind", ["Lamb", "RMSprop", "Adam"])
def test_a_configured_optimizer_in_a_cycle_is_that_of_the_recipe(kind: str) -> None:
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 2}
    made_of = config(
        2,
        optimizer={"type": kind, "params": {"lr": 1e-2}},
        scheduler={"type": "OneCycle", "params": cycle},
        gradient_accumulation_steps=1,
    )

    def main(group: zf.Group) -> None:
        engine, *_ = deepspeed.initialize(model=net(), config=made_of, mpu=ranks(group))
        apply = zf.functional(net())
        loss_fn = lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean()
        zero = from_ds_config(made_of).zero(loss_fn, group)
        state = zero.init(apply.params)
        for step in range(5):
            x, y = batch(step, 0, 1)
            engine.backward((engine(x) - y).square().mean())
            engine.step()
            state, _ = zero.step(state, (x, y))
        found = weights(engine)
        for name, value in zero.params(state).items():
            torch.testing.assert_close(found[name], value, **CLOSE)

    zf.simulate(1, main)


def test_a_learning_rate_set_by_hand_counts_at_the_next_step() -> None:
    def main(group: zf.Group) -> None:
        engine, optimizer, _, _ = made(
            group, 2, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        )
        optimizer.param_groups[0]["lr"] = 0.0
        before = weights(engine)
        trained(engine, group, 0, 1)
        torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
        optimizer.param_groups[0]["lr"] = 0.1
        trained(engine, group, 1, 1)
        assert not torch.equal(weights(engine)["scale"], before["scale"])

    zf.simulate(2, main)


def test_the_optimizers_of_ops_are_those_of_the_configuration() -> None:
    from zfun.interop.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.lamb import FusedLamb  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.lion import FusedLion  # pyrefly: ignore[missing-import]

    kinds: list[tuple[str, Any]] = [
        ("Adam", FusedAdam),
        ("Adam", DeepSpeedCPUAdam),
        ("Lamb", FusedLamb),
        ("Lion", FusedLion),
        ("Adagrad", DeepSpeedCPUAdagrad),
    ]

    def main(group: zf.Group, kind: str, make: Any) -> Any:
        model = net()
        section = {"type": kind, "params": {"lr": 1e-2, "weight_decay": 0.1}}
        by_config, *_ = made(group, 3, config={"optimizer": section})
        by_hand, *_ = made(
            group,
            3,
            model,
            config={},
            optimizer=make(model.parameters(), lr=1e-2, weight_decay=0.1),
        )
        return [trained(engine, group, 0, 2)[-1] for engine in (by_config, by_hand)]

    for kind, make in kinds:
        for one, other in zf.simulate(1, partial(main, kind=kind, make=make)):
            assert one == other, kind
    with pytest.raises(OptionError, match=r"FusedAdam has amsgrad=False only; got True; leave"):
        FusedAdam(net().parameters(), amsgrad=True)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_in_pieces_train_as_whole_ones(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        if group.rank:
            torch.manual_seed(17)  # the values of rank 0 count
        else:
            torch.manual_seed(0)
        with deepspeed.zero.Init(data_parallel_group=group):
            model = Net()
        assert model.first.weight.shape == (WIDTH, WIDTH)
        with pytest.raises(PlacementError, match="GatheredParameters"):
            model.first.weight.data.zero_()
        assert not model.first.weight.isnan().any()
        told: Any = list(model.parameters())
        pieces = [param.ds_tensor.numel() for param in told]
        assert pieces == [-(-param.numel() // group.size) for param in model.parameters()]
        engine, *_ = made(group, stage, model)
        return trained(engine, group, 0, 3), weights(engine)

    expected = zf.simulate(2, partial(run, stage=stage, steps=3))
    for (rows, values), (wanted, final) in zip(zf.simulate(2, main), expected, strict=True):
        assert rows == wanted
        torch.testing.assert_close(values, final, rtol=0, atol=0)


def test_gathered_parameters_of_an_engine() -> None:
    gathered = deepspeed.zero.GatheredParameters

    def main(group: zf.Group) -> None:
        engine, *_ = made(group, 3, config={"optimizer": ADAMW, "bf16": {"enabled": True}})
        x, _ = batch(0, 0, 1)
        assert not engine.module.first.weight.isnan().any()
        before = float(engine(x.bfloat16()).detach().float().square().mean())
        with gathered(engine.module.parameters(), modifier_rank=0):
            if group.rank == 0:
                engine.module.scale.data.zero_()
        assert float(engine(x.bfloat16()).detach().float().square().mean()) == 0.0 != before
        read: Any = deepspeed.utils.safe_get_full_fp32_param
        assert read(engine.module.scale).tolist() == [0, 0, 0]
        deepspeed.utils.safe_set_full_fp32_param(engine.module.scale, torch.full((3,), 1 + 2**-12))
        assert read(engine.module.scale).tolist() == [1 + 2**-12] * 3
        with gathered(engine.module.scale):
            assert engine.module.scale.tolist() == [1.0] * 3

    zf.simulate(2, main)


@pytest.mark.shows(
    "`safe_set_full_fp32_param` between the steps",
    "different",
    "the next call has the new values; DeepSpeed's has the old ones, until the step",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_that_a_script_sets_count_in_the_next_call(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine, *_ = made(group, stage)
        x, _ = batch(0, 0, 1)
        assert bool(engine(x).any())
        deepspeed.utils.safe_set_full_fp32_param(engine.module.scale, torch.zeros(3))
        assert not bool(engine(x).any())

    zf.simulate(2, main)


def test_integers_of_a_module_are_frozen_parameters(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.codes = nn.Parameter(torch.tensor([0, 2, 1]), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[..., self.codes] * self.mask

    def main(group: zf.Group, stage: int) -> Any:
        torch.manual_seed(0)
        engine, *_ = made(group, stage, Masked())
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(torch.ones(3)).sum())
            engine.step()
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            return {name: x.detach().clone() for name, x in engine.module.named_parameters()}

    first = zf.simulate(1, partial(main, stage=2))[0]
    assert first["codes"].tolist() == [0, 2, 1]
    torch.testing.assert_close(zf.simulate(1, partial(main, stage=3))[0], first)


def test_the_module_shows_the_state_below_stage_3() -> None:
    def main(group: zf.Group, stage: int) -> None:
        engine, *_ = made(group, stage)
        trained(engine, group, 0, 3)
        x, _ = batch(9, 0, 1)
        engine.eval()
        with torch.no_grad():
            torch.testing.assert_close(engine.module(x), engine(x))
        with deepspeed.zero.GatheredParameters(engine.module.scale, modifier_rank=0):
            engine.module.scale.data.zero_()
        assert not engine(x).any()
        engine.train()
        assert engine.module.training

    for stage in (0, 1, 2):
        zf.simulate(2, partial(main, stage=stage))


def test_methods_of_the_module_read_the_state() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([3.0]))
            self.name = "twice"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x

        def twice(self) -> float:
            return 2 * self.w.item()

    def main(group: zf.Group, stage: int) -> None:
        engine, *_ = made(group, stage, Twice())
        assert (engine.twice(), engine.name) == (6.0, "twice")
        for name, remedy in ABSENT["engine"].items():
            with pytest.raises(OptionError, match=re.escape(name)) as error:
                getattr(engine, name)()
            assert remedy in str(error.value)
        with pytest.raises(AttributeError, match="did you mean 'save_checkpoint'"):
            engine.save_checkpont("x")

    for stage in (1, 3):
        zf.simulate(2, partial(main, stage=stage))


@pytest.mark.shows(
    "checkpoints",
    "different",
    "zfun's format, hashed and published by one rename; any stage and number of ranks loads",
)
def test_a_checkpoint_goes_on_bitwise_and_at_another_stage(tmp_path: Path) -> None:
    def whole(group: zf.Group) -> Any:
        engine, *_ = made(group, 3)
        rows = trained(engine, group, 0, 2)
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "best": 0.5})
        return rows + trained(engine, group, 2, 2), weights(engine)

    def resumed(group: zf.Group, stage: int) -> Any:
        engine, *_ = made(group, stage, net(seed=5))
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step2")
        assert client_state == {"epoch": 3, "best": 0.5}
        assert (engine.global_steps, engine.micro_steps) == (2, 0)
        return trained(engine, group, 2, 2), weights(engine)

    expected = zf.simulate(2, whole)
    assert (tmp_path / "latest").read_text() == "global_step2"
    for stage in (3, 2):
        for (rows, values), (wanted, final) in zip(
            zf.simulate(2, partial(resumed, stage=stage)), expected, strict=True
        ):
            assert rows == wanted[-len(rows) :]
            torch.testing.assert_close(values, final, rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_frozen_parameters_are_left_out_of_fp32_weights(momentum: float, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        model = net()
        model.scale.requires_grad_(False)
        rule = {"type": "SGD", "params": {"lr": 0.1, "momentum": momentum}}
        engine, *_ = made(group, 3, model, config={"optimizer": rule})
        trained(engine, group, 0, 1)
        engine.save_checkpoint(tmp_path)

    zf.simulate(2, main)
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    if momentum:
        found = read(tmp_path, exclude_frozen_parameters=True)
        assert set(read(tmp_path)) - set(found) == {"scale"}
    else:
        with pytest.raises(OptionError, match=r"without any moments.*pass False"):
            read(tmp_path, exclude_frozen_parameters=True)


def test_all_ranks_are_told_that_rank_0_cannot_name_the_latest(tmp_path: Path) -> None:
    def main(group: zf.Group) -> str:
        engine, *_ = made(group, 3)
        with pytest.raises(CheckpointError, match="rank 0 can write") as error:
            engine.save_checkpoint(tmp_path)
        return str(error.value)

    (tmp_path / "latest").mkdir()
    first, second = zf.simulate(2, main)
    assert "is a directory" in first.lower()
    assert "rank 0 failed" in second
    assert "is a directory" in second.lower()


@pytest.mark.shows(
    "`save_16bit_model`",
    "different",
    "writes at stage 3 whatever `stage3_gather_16bit_weights_on_model_save` says",
)
def test_weights_leave_and_enter_an_engine(tmp_path: Path) -> None:
    tool = deepspeed.utils.zero_to_fp32

    def main(group: zf.Group) -> Any:
        engine, *_ = made(group, 3)
        assert engine.load_checkpoint(tmp_path / "none") == (None, None)
        with pytest.raises(CheckpointError, match=r"'.*absent', which has no checkpoint"):
            engine.load_checkpoint(tmp_path, tag="absent")
        trained(engine, group, 0, 2)
        engine.save_checkpoint(tmp_path, tag="mine")
        assert engine.save_16bit_model(tmp_path, "weights.bin")
        values = weights(engine)
        other, *_ = made(group, 2, net(seed=5))
        assert other.load_checkpoint(tmp_path, load_module_only=True)[1] == {}
        torch.testing.assert_close(weights(other), values, rtol=0, atol=0)
        assert other.global_steps == 0
        other.load_module_state_dict(net(seed=3).state_dict())
        torch.testing.assert_close(other.module.scale, net(seed=3).scale)
        with pytest.raises(SpecMismatch, match=r"unknown are \['nope'\]"):
            other.load_module_state_dict({**net().state_dict(), "nope": torch.ones(1)})
        with pytest.raises(SpecMismatch, match=r"'scale' has \(3,\); got \(4,\)"):
            other.load_module_state_dict({"scale": torch.ones(4)}, strict=False)
        return values

    values = zf.simulate(2, main)[0]
    names = sorted(dict(net().named_parameters(remove_duplicate=False)))
    found = tool.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert sorted(found) == names
    for name in names:
        assert torch.equal(found[name], values[name])
    tool.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", tag="mine")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin")
    tool.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "safe", safe_serialization=True
    )
    safe = zf.sources.huggingface(tmp_path / "safe")
    half = torch.load(tmp_path / "weights.bin")
    for name in names:
        assert torch.equal(written[name], values[name])
        # A file of safetensors has one name of a tie, as Hugging Face writes it.
        if name != "last.weight":
            assert torch.equal(safe[name].load(), values[name])
        assert torch.equal(half[name], values[name])
    assert len(tool.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="mine")) == len(names)


class Rotated(nn.Module):
    """Buffers of both kinds, as in a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x) * self.angles


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_a_checkpoint_have_the_names_of_the_module(tmp_path: Path, stage: int) -> None:
    """Buffers that are not persistent are left out, as in state_dict()."""

    def main(group: zf.Group) -> None:
        model = nn.Sequential(Rotated(), Rotated())
        engine, *_ = made(group, stage, model)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path)
        for options in ({"load_module_only": True}, {"load_optimizer_states": False}, {}):
            assert engine.load_checkpoint(tmp_path, **options)[0] is not None

    zf.simulate(2, main)
    plain = nn.Sequential(Rotated(), Rotated())
    read = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    plain.load_state_dict(read(tmp_path))
    assert plain[1].seen == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_configurations_in_the_wild_train(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("/local_nvme", str(tmp_path))
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")

    def main(group: zf.Group) -> None:
        model = net()
        optimizer = None if '"optimizer"' in text else torch.optim.AdamW(model.parameters(), 0.05)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=file,
            auto=auto_of(path),
            mpu=ranks(group),
        )
        for step in range(engine.gradient_accumulation_steps()):
            x, y = batch(step, group.rank, group.size)
            half = next(iter(engine.module.parameters())).dtype
            engine.backward((engine(x.to(half)).float() - y).square().mean())
            engine.step()
        assert engine.global_steps == 1

    zf.simulate(2, main)


def test_the_configuration_comes_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(1, optimizer=ADAMW)), encoding="utf-8")
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, _, loader, scheduler = deepspeed.initialize(args=args, model=net())
    assert (engine.zero_optimization_stage(), loader, scheduler) == (1, None, None)
    with pytest.raises(OptionError, match=r"one configuration; got config= and args"):
        deepspeed.initialize(args=args, model=net(), config=config(1))
    with pytest.raises(OptionError, match=r"takes a configuration; got none; pass config="):
        deepspeed.initialize(model=net())
    with pytest.raises(OptionError, match=r"takes a model; got none"):
        deepspeed.initialize(config=config(1))
    with pytest.raises(OptionError, match=r"changes an optimizer; got none, and the configurat"):
        deepspeed.initialize(model=net(), config=config(1, scheduler=WARMUP))
    with pytest.raises(ConfigError, match=r"2 mistakes") as error:
        deepspeed.initialize(
            model=net(), config=config(5, optimizer={"type": "AdamW", "params": {"lr": "fast"}})
        )
    assert "zero_optimization.stage" in str(error.value)
    with pytest.raises(OptionError, match=r"has parameters of the model; got one of shape \(2, 2"):
        deepspeed.initialize(
            model=net(), optimizer=torch.optim.SGD([torch.ones(2, 2)], 0.1), config=config(1)
        )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["engine", "loss"])
@pytest.mark.shows("`set_train_batch_size`", "right", "boundaries are counted as in DeepSpeed")
def test_the_batch_grows_while_it_trains(stage: int, way: str) -> None:
    def main(group: zf.Group) -> Any:
        engine, *_ = made(group, stage, config={"optimizer": ADAMW})
        micro = 0
        for accumulation in (2, 1, 3):
            engine.set_train_batch_size(accumulation * BATCH * group.size)
            assert engine.get_batch_info() == (
                accumulation * BATCH * group.size,
                BATCH,
                accumulation,
            )
            for _ in range(accumulation):
                x, y = batch(micro, group.rank, group.size)
                loss = (engine(x) - y).square().mean()
                if way == "engine":
                    engine.backward(loss)
                else:
                    loss.backward()
                engine.step()
                micro += 1
        assert (engine.global_steps, engine.micro_steps) == (3, 6)
        with pytest.raises(OptionError, match=r"got train_batch_size 12 .* a multiple of 8"):
            engine.set_train_batch_size(12)
        engine.set_train_micro_batch_size(1)
        assert engine.get_batch_info() == (6, 1, 3)
        return weights(engine)

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    micro = 0
    for accumulation in (2, 1, 3):
        for _ in range(accumulation):
            parts = [batch(micro, rank, 2) for rank in range(2)]
            for x, y in parts:
                ((model(x) - y).square().mean() / (2 * accumulation)).backward()
            micro += 1
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    for found in zf.simulate(2, main):
        torch.testing.assert_close(
            found, {name: expected[name] for name in found}, rtol=1e-4, atol=1e-6
        )


@pytest.mark.shows(
    "`offload_states`",
    "right",
    "parameters, and the optimizer's state with master weights",
)
@pytest.mark.parametrize("stage", STAGES)
def test_states_leave_the_device_and_come_back(stage: int) -> None:
    kinds = deepspeed.runtime.config.OffloadStateTypeEnum

    def main(group: zf.Group) -> Any:
        engine, *_ = made(group, stage)
        rows = trained(engine, group, 0, 2)
        engine.offload_states()
        for needs in (
            lambda: engine(batch(0, 0, 1)[0]),
            lambda: engine.eval()(batch(0, 0, 1)[0]),
        ):
            with pytest.raises(OptionError, match=r"a call needs parameters .* call reload\(\)"):
                needs()
        engine.train()
        engine.reload_states()
        rows += trained(engine, group, 2, 1)
        engine.offload_states(include=[kinds.optim_states])
        x, y = batch(6, group.rank, group.size)
        engine.backward((engine(x) - y).square().mean())
        engine.step()
        engine.backward((engine(x) - y).square().mean())
        with pytest.raises(OptionError, match=r"a step needs .* got the optimizer's state in host"):
            engine.step()
        with pytest.raises(OptionError, match="got device='nvme'; pass 'cpu'"):
            engine.offload_states(device="nvme")
        return rows

    expected = zf.simulate(2, partial(run, stage=stage, steps=3))
    for rows, (wanted, _) in zip(zf.simulate(2, main), expected, strict=True):
        assert rows == wanted


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.shows(
    "`engine.compile`",
    "different",
    "repeated blocks are compiled one by one, so that stage 3 gathers one at a time",
)
def test_an_engine_compiles_its_blocks(stage: int) -> None:
    """The backend sees plain tensors, once for each block that repeats."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def main(compiled: bool) -> Any:
        torch.manual_seed(0)
        group = zf.collectives.single_group()
        engine, *_ = made(group, stage, Deep(), config={"optimizer": ADAMW})
        rows = trained(engine, group, 0, 1)
        if compiled:
            engine.compile(backend=backend)
            engine.compile(backend=backend)
        return rows + trained(engine, group, 1, 2), weights(engine)

    torch.compiler.reset()
    plain_rows, plain_weights = main(compiled=False)
    rows, values = main(compiled=True)
    # The input of the first block needs no gradient.
    assert len(graphs) == 2
    torch.testing.assert_close(numbers(rows), numbers(plain_rows), **CLOSE, equal_nan=True)
    torch.testing.assert_close(values, plain_weights, **CLOSE)
    engine, *_ = made(zf.collectives.single_group(), stage, Deep())
    with pytest.raises(OptionError, match="got schedule or compiled_autograd_enabled"):
        engine.compile(schedule=[])


def test_a_loader_of_an_engine_has_the_order_of_its_route() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(16.0))

    def main(group: zf.Group) -> Any:
        engine, *_ = made(group, 1)
        found = {}
        for route in ("train", "eval"):
            loader = engine.deepspeed_io(data, batch_size=2, route=route)
            found[route] = torch.cat([x for (x,) in loader])
        return found

    found = zf.simulate(2, main)
    assert [rank["eval"].tolist() for rank in found] == [
        [*range(0, 16, 2)],
        [*range(1, 16, 2)],
    ]
    mixed = torch.cat([rank["train"] for rank in found])
    assert mixed.sort().values.tolist() == [*range(16)]
    assert found[0]["train"].tolist() != found[0]["eval"].tolist()


def test_training_data_are_shared_among_the_ranks() -> None:
    data = TensorDataset(torch.arange(12.0))

    def main(group: zf.Group) -> Any:
        engine, _, loader, _ = made(group, 1, training_data=data)
        assert loader is engine.training_dataloader
        return [x for (batch,) in loader for x in batch.tolist()]

    first, second = zf.simulate(2, main)
    assert sorted(first + second) == list(range(12))


def test_activations_are_partitioned_over_ranks_only() -> None:
    checkpointing = deepspeed.checkpointing
    with pytest.raises(OptionError, match=r"got True without ranks; call configure\(mpu"):
        checkpointing.partition_activations_in_checkpoint(True)
    assert not checkpointing.is_configured()


def test_recomputation_gives_the_same_numbers() -> None:
    class Recomputed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = deepspeed.checkpointing.checkpoint(self.body, self.first(x))
            return self.last(mixed * self.scale.sum())

    def main(group: zf.Group, in_host: bool) -> Any:
        torch.manual_seed(0)
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=in_host)
        engine, *_ = made(group, 3, Recomputed())
        return trained(engine, group, 0, 2)

    expected = [rows for rows, _ in zf.simulate(2, partial(run, stage=3, steps=2))]
    try:
        for in_host in (False, True):
            assert zf.simulate(2, partial(main, in_host=in_host)) == expected
        assert deepspeed.checkpointing.is_configured()
    finally:
        deepspeed.checkpointing.reset()


@pytest.mark.processes
@pytest.mark.skipif(FORM == "everyday", reason="starts processes; the simulated ranks show the law")
def test_ranks_of_torchrun_train_as_simulated_ones(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    root = Path(zf.__file__).parents[1]
    for stage in (2, 3):
        losses = tmp_path / f"{stage}.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", str(root / "examples" / "from_deepspeed.py")),
                *("--stage", str(stage), "--steps", "6", "--losses", str(losses)),
            ],
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=300,
        )
    first, second = (json.loads((tmp_path / f"{stage}.json").read_text()) for stage in (2, 3))
    assert first == second
    assert first[-1]["loss"] < first[0]["loss"]


KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: deepspeed.ops.adam.FusedAdam(p, lr=0.1),
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_saves_the_state_of_the_optimizer_goes_on_bitwise(
    kind: str, stage: int
) -> None:
    def fresh(group: zf.Group) -> Any:
        torch.manual_seed(0)
        model = net()
        return made(group, stage, model, optimizer=KINDS[kind](model.parameters()))[:2]

    def steps(engine: Any, numbers: Iterable[int]) -> None:
        for number in numbers:
            x, y = batch(number, 0, 1)
            engine.backward((engine(x) - y).square().mean())
            engine.step()

    def main(group: zf.Group) -> None:
        whole, _ = fresh(group)
        steps(whole, range(4 * MICRO_BATCHES))
        engine, optimizer = fresh(group)
        steps(engine, range(2 * MICRO_BATCHES))
        saved = copy.deepcopy((engine.module_state_dict(), optimizer.state_dict()))
        schedule = engine.lr_scheduler and engine.lr_scheduler.state_dict()
        assert len(saved[1]["state"]) == len([*engine.module.parameters()])
        again, optimizer = fresh(group)
        again.load_module_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if schedule:
            again.lr_scheduler.load_state_dict(schedule)
        steps(again, range(2 * MICRO_BATCHES, 4 * MICRO_BATCHES))
        assert_same_bits(again.module_state_dict(), whole.module_state_dict())
        with pytest.raises(CheckpointError, match=r"takes the moments of each leaf; got none"):
            optimizer.load_state_dict({**saved[1], "state": {}})

    zf.simulate(2, main)
