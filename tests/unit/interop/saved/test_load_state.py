"""``load_state`` of accelerate as hooks say, and files that a user has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.testing import assert_same_bits

accelerate = pytest.importorskip("accelerate")

from zfun.interop.accelerate import Accelerator  # noqa: E402, needs accelerate


def edited(path: Path, names: Callable[[str], bool]) -> dict[str, Tensor]:
    """Halve values of a file, and return all."""
    values = {name: x * (0.5 if names(name) else 1.0) for name, x in load_file(path).items()}
    save_file(values, path, metadata={"format": "pt"})
    return values


class Net(nn.Module):
    """Layers, one of which is frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = runs.net(), nn.BatchNorm1d(runs.WIDTH)
        self.frozen = nn.Linear(runs.WIDTH, runs.WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.frozen(self.net(x))
        return out + self.norm(out)


class Loop:
    """A loop of accelerate, plain without a stage."""

    def __init__(self, zero: Any, seed: int = 0, *, adds: bool = False) -> None:
        self.accelerator: Any = accelerate.Accelerator(cpu=True)
        if zero is not None:
            self.accelerator = Accelerator(cpu=True, zero=zero)
        self.raw = Net()
        torch.manual_seed(seed)
        for param in self.raw.parameters():
            nn.init.normal_(param, std=0.5)
        optimizer = torch.optim.AdamW(self.raw.parameters(), 0.05)
        if adds:
            self.raw.more = nn.Linear(2, 2).requires_grad_(False)
        self.model, self.optimizer = self.accelerator.prepare(self.raw, optimizer)

    def train(self, first: int, count: int) -> list[float]:
        """Return losses, and what the buffers are at the end."""
        losses = []
        for index in range(first, first + count):
            x, y = runs.batch(index, 0, 1)
            loss = (self.model(x) - y).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses + [float(x.sum()) for x in self.raw.buffers()]

    def hook(self, keep: Callable[[str], bool], factor: float) -> None:
        """Let hooks save and load some values, as scripts of diffusers do."""

        def save(models: Any, weights: Any, folder: str) -> None:
            state = self.accelerator.unwrap_model(models[0]).state_dict()
            values = {name: factor * x for name, x in state.items() if keep(name)}
            torch.save(values, Path(folder) / "own.bin")
            weights.pop()

        def load(models: Any, folder: str) -> None:
            model = self.accelerator.unwrap_model(models.pop())
            model.load_state_dict(torch.load(Path(folder) / "own.bin"), strict=False)

        self.accelerator.register_save_state_pre_hook(save)
        self.accelerator.register_load_state_pre_hook(load)


def both_loops(run: Callable[[Any, Path], Any], stage: int, folder: Path) -> None:
    expected, found = run(None, folder / "plain"), run(stage, folder / "ours")
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@EACH_STAGE
@pytest.mark.parametrize("part", ["", "net.body", "norm"])
def test_load_hooks_of_accelerate_say_what_the_models_have(
    part: str, stage: int, tmp_path: Path
) -> None:
    """Values and buffers that the hook leaves out stay, and moments are loaded."""

    def run(stage: Any, folder: Path) -> list[float]:
        first, second = Loop(stage), Loop(stage, seed=5)
        for loop in (first, second):
            loop.hook(lambda name: name.startswith(part), 0.5)
        first.train(0, 3)
        first.accelerator.save_state(str(folder))
        second.train(7, 1)
        second.accelerator.load_state(str(folder))
        return second.train(3, 3)

    both_loops(run, stage, tmp_path)


@EACH_STAGE
def test_an_edited_file_of_save_state_is_loaded(stage: int, tmp_path: Path) -> None:
    def run(stage: Any, folder: Path) -> list[float]:
        first, second = Loop(stage), Loop(stage, seed=5)
        first.train(0, 3)
        first.accelerator.save_state(str(folder))
        edited(folder / "model.safetensors", lambda name: True)
        second.accelerator.load_state(str(folder))
        return second.train(3, 3)

    both_loops(run, stage, tmp_path)


@EACH_STAGE
def test_whole_moments_in_a_file_of_save_state_are_loaded(stage: int, tmp_path: Path) -> None:
    def run(stage: Any, folder: Path) -> list[float]:
        first, second = Loop(stage), Loop(stage, seed=5)
        first.train(0, 3)
        first.accelerator.save_state(str(folder))
        state = first.optimizer.state_dict()
        for row in state["state"].values():
            row["exp_avg"] = row["exp_avg"] * 3
        torch.save(state, folder / "optimizer.bin")
        second.accelerator.load_state(str(folder))
        return second.train(3, 3)

    both_loops(run, stage, tmp_path)


@EACH_STAGE
@pytest.mark.parametrize("added", [0, 1])
def test_load_state_takes_strict(added: int, stage: int, tmp_path: Path) -> None:
    """The loop that saves, or the one that loads, has a layer more."""

    def run(stage: Any, folder: Path) -> list[float]:
        first, second = (Loop(stage, seed, adds=seed == added) for seed in (0, 1))
        first.train(0, 3)
        first.accelerator.save_state(str(folder))
        second.accelerator.load_state(str(folder), strict=False)
        return second.train(3, 3)

    both_loops(run, stage, tmp_path)


@EACH_STAGE
def test_load_state_keeps_the_digits_of_master_weights(stage: int, tmp_path: Path) -> None:
    """Also beside an edited value, whose master weight is the value."""
    zero = {"stage": stage, "precision": torch.bfloat16}
    first, second = Loop(zero), Loop(zero, seed=5)
    first.train(0, 3)
    first.accelerator.save_state(str(tmp_path))
    name = next(iter(dict(first.raw.named_parameters())))
    values = edited(tmp_path / "model.safetensors", name.__eq__)
    second.accelerator.load_state(str(tmp_path))
    ours, theirs = (loop.accelerator.engine_of() for loop in (second, first))
    assert ours is not None
    assert theirs is not None
    found = {key: ours.gathered(key, master=True) for key in ours.leaves}
    expected = {key: theirs.gathered(key, master=True) for key in theirs.leaves}
    assert any(not torch.equal(x, x.bfloat16().float()) for x in found.values())
    expected[name] = values[name].float()
    assert_same_bits(found, expected)
