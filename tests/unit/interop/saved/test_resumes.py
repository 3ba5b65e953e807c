"""Runs of transformers that resume as overrides say, and files that a user has changed."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import CheckpointError

transformers = pytest.importorskip("transformers")

from tests.interop import trainers  # noqa: E402, needs transformers
from zfun.interop.transformers import EmaCallback, Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*save_steps")
OPTIONS = {
    "max_steps": 4,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "save_strategy": "steps",
    "save_steps": 2,
}


def made(cls: Any, folder: Path, **more: Any) -> Any:
    return trainers.make(cls, str(folder), options=OPTIONS, **more)


def halved(path: Path) -> dict[str, Any]:
    return {name: 0.5 * x for name, x in load_file(path).items()}


def no_optimizer(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            pass

    return Own


def own_weights(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
            values = halved(Path(path) / "model.safetensors")
            self.model.load_state_dict(values, strict=False)

    return Own


def changed_weights(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
            super()._load_from_checkpoint(path, model)
            with torch.no_grad():
                self.model.transformer.wpe.weight.mul_(0.5)

    return Own


def own_files(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, {name: 0.5 * x for name, x in state_dict.items()})

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            if not isinstance(self, Trainer):
                self._save(output_dir, self.model.state_dict())
                return
            super().save_model(output_dir, _internal_call)

    return Own


def edited(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(halved(path), path, metadata={"format": "pt"})


def without_optimizer(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def resumed(
    cls: Any, root: Path, edit: Callable[[Path], None] | None, **zero: Any
) -> list[tuple[float, float, float]]:
    made(cls, root, **zero).train()
    folder = root / "checkpoint-2"
    if edit is not None:
        edit(folder)
    # Another start, so that what nobody has loaded shows.
    model = trainers.model()
    torch.manual_seed(5)
    model.apply(model._init_weights)
    trainer = made(cls, root, model=model, **zero)
    trainer.train(resume_from_checkpoint=str(folder))
    return trainers.history(trainer)


@pytest.mark.slow
@EACH_STAGE
@pytest.mark.parametrize("is_mixin", [False, True])
@pytest.mark.parametrize("own", [no_optimizer, own_weights, changed_weights, own_files])
def test_overrides_of_a_trainer_say_what_a_resume_loads(
    own: Any, is_mixin: bool, stage: int, tmp_path: Path
) -> None:
    plain = own(transformers.Trainer)
    expected = resumed(plain, tmp_path / "plain", None)
    ours = type("Mixed", (Trainer, plain), {}) if is_mixin else own(Trainer)
    found = resumed(ours, tmp_path / "ours", None, zero=stage)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@EACH_STAGE
@pytest.mark.parametrize("edit", [edited, without_optimizer])
def test_files_that_a_user_has_changed_say_what_a_trainer_resumes(
    edit: Any, stage: int, tmp_path: Path
) -> None:
    expected = resumed(transformers.Trainer, tmp_path / "plain", edit)
    found = resumed(Trainer, tmp_path / "ours", edit, zero=stage)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@EACH_STAGE
def test_whole_moments_in_the_file_of_a_trainer_are_loaded(stage: int, tmp_path: Path) -> None:
    states: list[Any] = []

    class Keeps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                states.append(copy.deepcopy(given["optimizer"].state_dict()))

    def edit(folder: Path) -> None:
        for row in states[-1]["state"].values():
            row["exp_avg"] = row["exp_avg"] * 3
        torch.save(states[-1], folder / "optimizer.pt")

    histories = []
    for cls, more in ((transformers.Trainer, {}), (Trainer, {"zero": stage})):
        folder = tmp_path / cls.__module__
        histories.append(resumed(cls, folder, edit, callbacks=[Keeps()], **more))
    expected, found = map(torch.tensor, histories)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@EACH_STAGE
def test_a_checkpoint_is_loaded_outside_of_train(stage: int, tmp_path: Path) -> None:
    losses = []
    for cls, more in ((transformers.Trainer, {}), (Trainer, {"zero": stage})):
        trainer = made(cls, tmp_path / cls.__module__, **more)
        trainer.train()
        path = str(tmp_path / cls.__module__ / "checkpoint-2")
        trainer._load_from_checkpoint(path)
        other = made(cls, tmp_path / "other", **more)
        other._load_from_checkpoint(path)
        losses.append([x.evaluate()["eval_loss"] for x in (trainer, other)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] == losses[0][1]


@EACH_STAGE
def test_a_copy_of_a_checkpoint_resumes_its_state(stage: int, tmp_path: Path) -> None:
    """With master weights and an average, of which the files of weights have no digit."""
    zero = {"stage": stage, "precision": torch.bfloat16}
    more = {"zero": zero, "callbacks": [EmaCallback(0.5)]}
    first = made(Trainer, tmp_path / "run", **more)
    first.train()
    folder = tmp_path / "copy" / "checkpoint-2"
    shutil.copytree(tmp_path / "run" / "checkpoint-2", folder)
    path = folder / "model.safetensors"
    os.utime(path, (1, 1))
    second = made(Trainer, tmp_path / "copy", **more)
    second.train(resume_from_checkpoint=str(folder))
    assert trainers.history(second) == trainers.history(first)
    edited(folder)
    third = made(Trainer, tmp_path / "copy", **more)
    with pytest.raises(CheckpointError, match=r"have the average.*got other files in .*copy"):
        third.train(resume_from_checkpoint=str(folder))
    path.unlink()
    third.train(resume_from_checkpoint=str(folder))
    assert trainers.history(third) == trainers.history(first)
