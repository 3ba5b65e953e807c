"""Runs that leave zfun: the host library goes on from files that zfun has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.interop import deepspeed_runs as runs
from tests.interop import trainers
from tests.unit.interop.runs.test_missed import EACH_STAGE, adamw, steps
from zfun.interop.accelerate import Accelerator
from zfun.interop.transformers import Trainer

OTHER_NUMBER = "loaded state dict has a different number of parameter groups"


def trained(cls: Any, folder: Path, count: int, resume: Any = None, **zero: Any) -> Any:
    options = {
        "max_steps": count,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trainers.make(cls, str(folder), options=options, **zero)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@EACH_STAGE
@pytest.mark.filterwarnings("ignore:.*save_steps")
@pytest.mark.shows(
    "a checkpoint that transformers or accelerate alone resume",
    "refused",
    "by torch, for its number of groups; write the whole `optimizer.state_dict()` into the file",
)
def test_a_plain_trainer_goes_on_with_whole_moments_alone(stage: int, tmp_path: Path) -> None:
    """It began with new moments, in silence."""
    expected = trained(transformers.Trainer, tmp_path / "plain", 4)
    ours = trained(Trainer, tmp_path / "ours", 2, zero=stage)
    folder = tmp_path / "ours" / "checkpoint-2"
    with pytest.raises(ValueError, match=OTHER_NUMBER):
        trained(transformers.Trainer, tmp_path / "left", 4, resume=str(folder))
    torch.save(ours.optimizer.state_dict(), folder / "optimizer.pt")
    found = trained(transformers.Trainer, tmp_path / "left", 4, resume=str(folder))
    for ours_, theirs in zip(trainers.history(found), trainers.history(expected), strict=True):
        assert ours_ == pytest.approx(theirs, rel=1e-5)


@EACH_STAGE
def test_a_plain_accelerator_goes_on_with_whole_moments_alone(stage: int, tmp_path: Path) -> None:
    def loop(accelerator: Any) -> tuple[Any, Any, Any]:
        model = runs.net()
        net, optimizer = accelerator.prepare(model, adamw(model))

        def train(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            accelerator.backward(mse_loss(net(x), y))

        return model, optimizer, lambda first, count: steps(train, optimizer.step, first, count)

    expected, _, step = loop(accelerate.Accelerator(cpu=True))
    step(0, 4)

    ours = Accelerator(cpu=True, zero=stage)
    _, optimizer, step = loop(ours)
    step(0, 2)
    ours.save_state(tmp_path)
    moments = optimizer.state_dict()

    plain = accelerate.Accelerator(cpu=True)
    found, _, step = loop(plain)
    with pytest.raises(ValueError, match=OTHER_NUMBER):
        plain.load_state(tmp_path)
    torch.save(moments, tmp_path / "optimizer.bin")
    plain.load_state(tmp_path)
    step(2, 2)
    torch.testing.assert_close(found.state_dict(), expected.state_dict())
