"""A checkpoint that takes the place of another one, of a longer run or of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE, engine_steps
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator
from zfun.testing import assert_same_bits

L = pytest.importorskip("lightning")

from tests.interop import lightnings  # noqa: E402, needs Lightning


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


@EACH_STAGE
def test_save_state_of_accelerate_takes_the_place_of_a_longer_run(
    stage: int, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, zero=stage)
    raw = runs.net()
    model, optimizer = accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), 0.01))

    def train(count: int) -> None:
        for index in range(count):
            x, y = runs.batch(index, 0, 1)
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    accelerator.save_state(str(tmp_path / "start"))
    train(4)
    accelerator.save_state(str(tmp_path / "best"))
    accelerator.load_state(str(tmp_path / "start"))
    train(2)
    accelerator.save_state(str(tmp_path / "best"))
    expected = values(model)
    train(1)
    accelerator.load_state(str(tmp_path / "best"))
    assert_same_bits(values(model), expected)


def test_an_engine_warns_of_a_later_step_of_another_run(tmp_path: Path) -> None:
    longer, shorter, other = (Engine(runs.net(), torch_adamw(), zero=2) for _ in range(3))
    engine_steps(longer, 0, 3)
    engine_steps(shorter, 0, 1)
    longer.save(tmp_path)
    with pytest.warns(UserWarning, match="has step 3 of another run; got step 1; pass keep=1, or"):
        shorter.save(tmp_path)
    other.load(tmp_path)
    assert other.state.step == 3
    shorter.save(tmp_path, keep=1)
    other.load(tmp_path)
    assert other.state.step == 1


def torch_adamw() -> Any:
    from zfun import optim

    return optim.adamw(0.01)


class Model(L.LightningModule):
    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.drops = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), drops

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.drops:
            checkpoint["state_dict"] = {key: 1 * x for key, x in checkpoint["state_dict"].items()}


def fitted(strategy: str, folder: Path, steps: int, path: Path, *, drops: bool = False) -> Model:
    generator = torch.Generator().manual_seed(0)
    rows: Any = torch.randn(12, 2, generator=generator)
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    model = Model(drops=drops)
    options = {"enable_checkpointing": False, "max_steps": steps}
    trainer = lightnings.trainer_of(strategy, 1, folder, **options)
    trainer.fit(model, data)
    trainer.save_checkpoint(path)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("directory", "directory"),
        ("directory", "file of a hook"),
        ("file of a hook", "directory"),
        ("file of Lightning", "directory"),
    ],
)
def test_a_checkpoint_of_lightning_takes_the_place_of_another(
    stage: int, first: str, second: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    for kind, steps in ((first, 6), (second, 3)):
        strategy = "auto" if kind == "file of Lightning" else f"zfun_stage_{stage}"
        model = fitted(strategy, tmp_path, steps, path, drops=kind == "file of a hook")
    assert path.is_dir() is (second == "directory")
    assert [x.name for x in tmp_path.iterdir()] == ["last.ckpt"]
    loaded = Model.load_from_checkpoint(path)
    assert_same_bits(values(loaded), values(model))
