"""A fit goes on with the loss scale of a checkpoint, whoever has written it in which form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

L = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402, needs Lightning

from tests.interop import lightnings  # noqa: E402, needs Lightning
from zfun.interop.lightning import ZfunPrecision, ZfunStrategy, collate  # noqa: E402, needs Lightning

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore"),
]
BEFORE, STEPS = 4, 9
RULE = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2}


class Overflows(L.LightningModule):
    """A module whose gradients overflow in some steps, and whose hooks may change a checkpoint."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.change, self.scales = nn.Linear(3, 1), change, list[float]()
        self.strict_loading = change != "saved"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = 1e30 if self.global_step in (0, 1, 2, BEFORE + 2) else 1e-3
        return self.net(batch).float().square().mean() * factor

    def on_before_zero_grad(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if not isinstance(strategy, ZfunStrategy):
            self.scales.append(strategy.precision_plugin.scaler.get_scale())

    def on_train_batch_end(self, *args: Any) -> None:
        if isinstance(self.trainer.strategy, ZfunStrategy):
            self.scales.append(float(self.trainer.strategy.last_step.loss_scale))

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.change == "saved":
            del checkpoint["state_dict"]["net.bias"]

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        if self.change == "loaded":
            checkpoint["optimizer_states"][0]["state"] = {}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit(
    folder: Path, num_steps: int, rule: Any, *, change: str = "", path: Path | None = None
) -> tuple[list[float], Any]:
    strategy = "auto" if rule is None else ZfunStrategy(stage=2, **rule)
    # Lightning takes precision="16-mixed" as bfloat16 on a CPU.
    plugin = ZfunPrecision("16-mixed") if rule is not None else MixedPrecision("16-mixed", "cpu")
    options: Any = {"plugins": [plugin], "max_steps": num_steps, "max_epochs": -1}
    trainer = lightnings.trainer_of(strategy, 1, folder, enable_checkpointing=False, **options)
    model = Overflows(change)
    rows: Any = torch.randn(4 * STEPS, 3)
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer.fit(model, loader, ckpt_path=path)
    return model.scales, trainer


@pytest.mark.parametrize("form", ["directory", "collated", "saved", "loaded"])
def test_a_fit_goes_on_with_the_scale_of_each_form_of_a_checkpoint(
    form: str, tmp_path: Path
) -> None:
    straight, _ = fit(tmp_path, STEPS, RULE)
    assert len({*straight[BEFORE:]} | {64.0}) > 2, straight
    _, trainer = fit(tmp_path, BEFORE, RULE, change=form)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    assert path.is_file() is (form == "saved")
    if form == "collated":
        path = collate(path, tmp_path / "whole.ckpt", optimizer=True)
    resumed, _ = fit(tmp_path, STEPS, RULE, change=form, path=path)
    assert resumed == straight[BEFORE:]


def test_a_file_of_plain_lightning_has_the_scale_too(tmp_path: Path) -> None:
    plain, trainer = fit(tmp_path, BEFORE, None)
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    resumed, _ = fit(tmp_path, STEPS, RULE, path=path)
    assert resumed[0] == plain[-1] != 64.0


def test_plain_lightning_takes_the_scale_of_a_file(tmp_path: Path) -> None:
    scales, trainer = fit(tmp_path, BEFORE, RULE)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    path = collate(tmp_path / "last.ckpt", tmp_path / "whole.ckpt", optimizer=True)
    resumed, _ = fit(tmp_path, BEFORE + 1, None, path=path)
    last = trainer.strategy._running().engines[0].loss_scale
    assert resumed[0] == last != scales[0]


def test_a_constant_scale_stays_what_the_run_says(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, BEFORE, RULE)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    path = collate(tmp_path / "last.ckpt", tmp_path / "whole.ckpt", optimizer=True)
    constant, _ = fit(tmp_path, STEPS, {"loss_scale": 32.0}, path=path)
    assert {*constant} == {32.0}
