"""The average of Lightning's own callback, and that of a sharded state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zfun.errors import OptionError
from zfun.testing import assert_same_bits

L = pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import WeightAveraging  # noqa: E402
from torch.optim.swa_utils import get_ema_avg_fn  # noqa: E402

from tests.interop import lightnings  # noqa: E402
from zfun.interop.lightning import EmaAveraging, collate  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
]


class Validated(L.LightningModule):
    """A module that keeps what each validation computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.validations: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validations.append(self.net(batch).square().mean().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def rows() -> Any:
    values = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(values, batch_size=2)  # pyrefly: ignore[bad-argument-type]


def fitted(strategy: Any, callback: Any, path: Path, **options: Any) -> Any:
    module = Validated()
    trainer = lightnings.trainer_of(
        strategy, 1, path, callbacks=[callback], max_epochs=2, num_sanity_val_steps=1, **options
    )
    trainer.fit(module, rows(), rows())
    return module, trainer


def as_in_torch(step: int) -> float:
    """The average of torch begins with the parameters after the first step."""
    return 0.6 if step else 0.0


@pytest.mark.parametrize("stage", [1, 3])
def test_validation_and_the_module_after_fit_have_the_average(stage: int, tmp_path: Path) -> None:
    ours, trainer = fitted(f"zfun_stage_{stage}", EmaAveraging(as_in_torch), tmp_path / "ours")
    theirs, _ = fitted("auto", WeightAveraging(avg_fn=get_ema_avg_fn(0.6)), tmp_path / "theirs")
    assert ours.validations == pytest.approx(theirs.validations, rel=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)
    # The checkpoint has the parameters, from which a run goes on, and the average.
    trainer.save_checkpoint(tmp_path / "saved")
    again = Validated()
    file = collate(tmp_path / "saved", tmp_path / "one.ckpt", optimizer=True)
    (optimizer,) = torch.load(file, weights_only=False)["optimizer_states"]
    assert {*optimizer["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}
    later = lightnings.trainer_of(
        f"zfun_stage_{stage}", 1, tmp_path, callbacks=[EmaAveraging(as_in_torch)], max_epochs=2
    )
    later.fit(again, rows(), rows(), ckpt_path=tmp_path / "saved")
    assert_same_bits(again.state_dict(), ours.state_dict())


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"WeightAveraging\(\) of Lightning"):
        fitted("auto", EmaAveraging(0.6), tmp_path)
