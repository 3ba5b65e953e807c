"""Runs go on from directories that DeepSpeed wrote, and from tags of any type."""

from __future__ import annotations

import pickle
import shutil
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.fixtures.deepspeed.write import Model
from tests.interop.deepspeed_runs import ADAMW, config, net, ranks, trained, weights
from zfun.errors import CheckpointError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "deepspeed"
TAG, STEPS, SIZE = "global_step3", 2, 2
OTHER_RATE, CLIP = 0.5, 1.0
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = [leaf for leaf in model.parameters() if leaf.requires_grad]
    return [
        {"params": [leaf for leaf in params if leaf.ndim > 1], "weight_decay": 0.1},
        {"params": [leaf for leaf in params if leaf.ndim < 2], "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(90 * step + rank))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def engine_of(group: zf.Group, stage: int, **more: Any) -> Any:
    torch.manual_seed(5)
    model = Model()
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups_of(model), lr=OTHER_RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": CLIP,
            **more,
        },
        mpu=ranks(group),
    )[0]


def goes_on(group: zf.Group, folder: Path, tag: str, stage: int) -> tuple[Any, ...]:
    engine = engine_of(group, stage)
    path, client = engine.load_checkpoint(folder, tag)
    assert path == str(folder / tag)
    assert client["epoch"] == 4
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()
    before = weights(engine)
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, group.rank))
        engine.step()
    return counters, before, weights(engine)


def plainly(expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same steps by AdamW of torch, from the values that DeepSpeed's own tools read."""
    model = Model()
    values = {key[5:]: x for key, x in expected.items() if key.startswith("fp32.")}
    # A frozen parameter of stage 1 is in no file of DeepSpeed's tool, and never changes.
    model.load_state_dict(values, strict=False)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    for name, leaf in model.named_parameters():
        if leaf.requires_grad:
            moments = {key: expected[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
            state = {key: x.float().clone() for key, x in moments.items()}
            optimizer.state[leaf] = {"step": torch.tensor(3.0), **state}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (loss_of(model, step, rank) / SIZE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.shows(
    "`load_checkpoint` of a directory that DeepSpeed wrote",
    "right",
    "of all stages, and universal ones, and those of stages 1 to 3 converted: weights, moments, "
    "groups, schedules, counters, loss scale, and the plain values of the client state",
)
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    ("saved", "stage"),
    [
        ("stage1-fp32", 1),
        ("stage2-fp32", 2),
        ("stage3-fp32", 3),
        ("stage1-bf16", 3),
        ("stage2-bf16", 1),
        ("stage3-bf16", 0),
        ("universal2-bf16", 2),
        ("universal3-bf16", 3),
    ],
)
def test_a_run_goes_on_where_deepspeed_was(
    saved: str, stage: int, is_converted: bool, tmp_path: Path
) -> None:
    folder, tag = FIXTURES / saved, TAG
    if not (folder / TAG).is_dir():
        folder, tag = FIXTURES, saved
    if is_converted:
        zf.checkpoint.convert(zf.sources.deepspeed(folder / tag), tmp_path / tag)
        folder = tmp_path
    expected = load_file(FIXTURES / saved.replace("universal", "stage") / "expected.safetensors")
    final = plainly(expected)
    for counters, before, after in zf.simulate(
        SIZE, partial(goes_on, folder=folder, tag=tag, stage=stage)
    ):
        assert counters == (3, 12, 0, [0.01, 0.01])
        for name, value in final.items():
            first = expected.get(f"fp32.{name}", value)
            torch.testing.assert_close(before[name], first, rtol=0, atol=0)
            change, wanted = after[name] - before[name], value - first
            torch.testing.assert_close(change, wanted, rtol=1e-4, atol=1e-6)
        moved = after["inner.weight"] - before["inner.weight"]
        assert moved.abs().max() > 1e-3


def test_master_weights_and_the_loss_scale_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "stage2-bf16", folder)
    scaler = {"cur_scale": 64.0, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1}
    rule = {"dynamic": True, "scale_window": 9, "delayed_shift": 1, "min_scale": 2.0}
    for file in (folder / TAG).glob("*optim_states.pt"):
        rewrite(file, {**scaler, **rule, "consecutive_hysteresis": False})

    def main(group: zf.Group) -> None:
        engine = engine_of(group, 3, **FP16)
        assert engine.cur_scale == 16
        engine.load_checkpoint(folder)
        expected = load_file(folder / "expected.safetensors")
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                master = deepspeed.utils.safe_get_full_fp32_param(param)
                torch.testing.assert_close(master, expected[f"fp32.{name}"], rtol=0, atol=0)
                moment = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
                wanted = expected[f"exp_avg_sq.{name}"]
                torch.testing.assert_close(moment, wanted, rtol=0, atol=0)
        found = engine.optimizer.state_dict()["loss_scaler"]
        assert (float(found["scale"]), int(found["count"])) == (64.0, 7)
        assert (int(found["last_overflow"]), int(found["hysteresis"])) == (5, 1)
        assert found["fp16.loss_scale_window"] == 9
        assert found["fp16.min_loss_scale"] == 2.0

    zf.simulate(SIZE, main)


class Scaler:
    """Stands for a class of DeepSpeed, of which a file has the attributes."""


class Loader(pickle.Unpickler):
    """Reads files of DeepSpeed without DeepSpeed."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("deepspeed."):
            return type(name, (), {"__init__": lambda self, *args: None})
        return super().find_class(module, name)


def rewrite(file: Path, numbers: dict[str, Any]) -> None:
    """Give a file of DeepSpeed another loss scale."""
    pickles: Any = types.ModuleType("pickles")
    pickles.Unpickler, pickles.load = Loader, lambda file, **options: Loader(file).load()
    content = torch.load(file, weights_only=False, pickle_module=pickles)
    state = content["optimizer_state_dict"]
    for name in ("zero_stage", "param_slice_mappings"):
        state.pop(name, None)
    state["loss_scaler"] = scale = Scaler()
    scale.__dict__.update(numbers)
    own: Any = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    own.DynamicLossScaler = Scaler
    before = Scaler.__module__, Scaler.__qualname__
    Scaler.__module__, Scaler.__qualname__ = own.__name__, "DynamicLossScaler"
    names = own.__name__.split(".")
    added = {".".join(names[:i]): own for i in range(1, len(names) + 1)}
    others = {name: sys.modules.get(name) for name in added}
    sys.modules.update(added)
    try:
        torch.save(content, file)
    finally:
        for name, module in others.items():
            del sys.modules[name]
            sys.modules.update({name: module} if module is not None else {})
        Scaler.__module__, Scaler.__qualname__ = before


@pytest.mark.parametrize("way", ["groups", "moments"])
def test_another_optimizer_is_refused(way: str) -> None:
    def main(group: zf.Group) -> None:
        model = Model()
        params = [x for x in model.parameters() if x.requires_grad]
        optimizer: Any = (
            torch.optim.AdamW(params)
            if way == "groups"
            else torch.optim.SGD(groups_of(model), 0.1, momentum=0.9)
        )
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=ranks(group)
        )
        problem = "2 parameter groups for 1" if way == "groups" else "'momentum_buffer'"
        with pytest.raises(CheckpointError, match=rf"{problem}.*load_optimizer_states=False"):
            engine.load_checkpoint(FIXTURES / "stage2-fp32")
        engine.load_checkpoint(FIXTURES / "stage2-fp32", load_optimizer_states=False)
        assert engine.global_steps == 3

    zf.simulate(1, main)


@pytest.mark.parametrize("tag", [7, 2.5, "seven"])
def test_tags_are_text_as_in_deepspeed(tag: Any, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine, *_ = deepspeed.initialize(
            model=net(), config=config(2, optimizer=ADAMW), mpu=ranks(group)
        )
        engine.save_checkpoint(tmp_path, tag)
        assert (tmp_path / "latest").read_text() == str(tag)
        path, _ = engine.load_checkpoint(tmp_path, tag)
        assert path == str(tmp_path / str(tag))
        assert engine.loaded_checkpoint_tag == str(tag)

    zf.simulate(2, main)
    found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag)
    assert found.keys() >= net().state_dict().keys()
    convert = deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(tmp_path, tmp_path / "out", tag=tag)
    assert torch.load(tmp_path / "out" / "pytorch_model.bin").keys() == found.keys()


@pytest.mark.shows(
    "`load_checkpoint(custom_load_fn=)`",
    "right",
    "replaces the load of the weights alone: moments, groups and counters are those of the file",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
def test_a_function_replaces_the_load_of_the_weights_alone(
    stage: int, half: bool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.05}}}

    def made(group: zf.Group, seed: int) -> Any:
        own = {**config(stage, **more), "bf16": {"enabled": half}}
        model = net(seed)
        # The batches of the runs are in float32.
        model.register_forward_pre_hook(
            lambda _, args: tuple(x.to(model.scale.dtype) for x in args)
        )
        return deepspeed.initialize(model=model, config=own, mpu=ranks(group))[0]

    def write(src: Any, dst: nn.Module) -> None:
        dst.load_state_dict(src)

    def main(group: zf.Group) -> None:
        engine = made(group, 0)
        trained(engine, group, 0, 3)
        engine.optimizer.param_groups[0]["lr"] = 0.01
        engine.save_checkpoint(tmp_path / "run")
        rows, wanted = trained(engine, group, 3, 2), weights(engine)
        other = made(group, 1)
        other.load_checkpoint(tmp_path / "run", custom_load_fn=write)
        assert other.get_lr() == [0.01]
        assert trained(other, group, 3, 2) == rows
        for name, value in weights(other).items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
        # Weights that the function leaves alone stay.
        third = made(group, 1)
        before = weights(third)
        third.load_checkpoint(tmp_path / "run", custom_load_fn=lambda src, dst: None)
        for name, value in weights(third).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        trained(third, group, 3, 1)
        step = weights(third)["body.0.weight"] - before["body.0.weight"]
        assert 0 < step.abs().max() < 0.02

    zf.simulate(2, main)
