"""Training in 16 bits: what float32 gradients and master weights hold, and 16 bits do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop.engine import Engine

L = pytest.importorskip("lightning")

from tests.interop import fabrics, lightnings  # noqa: E402, needs Lightning
from zfun.interop.lightning import ZfunFabricStrategy, ZfunStrategy  # noqa: E402
from zfun.interop.lightning._fabric import Scaled  # noqa: E402
from zfun.interop.lightning._plugins import ZfunPrecision  # noqa: E402

RANKS = 2
WIDE = torch.float32, torch.float32  # of gradients and of master weights
# Nothing in float16, without the loss scale.
TINY = 1e-8


class Small(L.LightningModule):
    """A module whose gradients need the loss scale."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.weight, self.reads, self.seen = nn.Parameter(torch.ones(4)), reads, [0.0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch.to(self.weight.dtype)).sum().float() * TINY

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01, eps=1e-12)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.reads:
            assert self.weight.grad is not None
            self.seen.append(self.weight.grad.float().norm().item())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@pytest.mark.parametrize("reads", [False, True])
def test_small_gradients_train_in_lightning(
    stage: int, precision: str, reads: bool, tmp_path: Path
) -> None:
    """The scale was taken out in float16, so such gradients were 0."""
    found = []
    for strategy, plugins in (
        ("auto", []),
        (ZfunStrategy(stage=stage), [ZfunPrecision(precision)]),
    ):
        model = Small(reads=reads)
        trainer = lightnings.trainer_of(
            strategy, 1, tmp_path, enable_checkpointing=False, plugins=plugins
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=1))  # type: ignore[arg-type]
        found.append((model.seen, model.weight.detach().float()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=0)
    assert found[0][1].max() < 0.98


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_small_gradients_train_in_fabric(stage: int, clips: bool) -> None:
    fabric = fabrics.fabric_of(ZfunFabricStrategy(stage=stage), plugins=[Scaled("16-mixed")])
    raw = nn.Linear(4, 1, bias=False)
    nn.init.ones_(raw.weight)
    adam = torch.optim.Adam(raw.parameters(), 0.01, eps=1e-12)
    model, optimizer = fabric.setup(raw, adam)
    for _ in range(4):
        fabric.backward(model(torch.ones(1, 4)).float().sum() * TINY)
        if clips:
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            assert float(norm) == pytest.approx(2 * TINY, rel=1e-2)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(raw.weight.float(), torch.full((1, 4), 0.96), rtol=1e-3, atol=0)


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
def test_an_average_of_rounded_parameters_is_refused(tmp_path: Path) -> None:
    callbacks = [L.pytorch.callbacks.WeightAveraging()]
    trainer = lightnings.trainer_of(
        ZfunStrategy(stage=1), 1, tmp_path, precision="bf16-true", callbacks=callbacks
    )
    with pytest.raises(OptionError, match=r"got WeightAveraging, which would average the rounded"):
        trainer.fit(Small(reads=False), torch.utils.data.DataLoader(torch.ones(4, 4)))  # type: ignore[arg-type]


def clamped(model: nn.Linear, engine: Engine) -> None:
    with torch.no_grad():
        model.weight.clamp_(-10, 10)


def loaded(model: nn.Linear, engine: Engine) -> None:
    model.load_state_dict(model.state_dict())


def loaded_by_the_engine(model: nn.Linear, engine: Engine) -> None:
    engine.load_state_dict(engine.state_dict())


def swapped(model: nn.Linear, engine: Engine) -> None:
    with torch.no_grad():
        own = model.weight.detach().clone()
        model.weight.mul_(3.0)
        assert model.weight.mean() > 2
        model.weight.copy_(own)


def swapped_by_loads(model: nn.Linear, engine: Engine) -> None:
    own = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict({name: 3 * x for name, x in own.items()})
    model.load_state_dict(own)


def trained(
    group: zf.Group, stage: int, dtype: torch.dtype, touch: Callable[..., None] | None
) -> Tensor:
    model = nn.Linear(8, 1, bias=False)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), 1e-4)
    options = {"stage": stage, "precision": zf.Precision(dtype, dtype, *WIDE)}
    engine = Engine(model, sgd, zero=options, group=group)
    for step in range(20):
        engine.backward(engine(torch.ones(1, 8)).sum().float())
        engine.step()
        if touch is not None and step:
            touch(model, engine)
    engine.close()
    return model.weight.detach()


@EACH_STAGE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "touch", [clamped, loaded, loaded_by_the_engine, swapped, swapped_by_loads]
)
def test_writes_of_the_same_values_round_no_master_weight(
    stage: int, dtype: torch.dtype, touch: Callable[..., None]
) -> None:
    """Each write replaced the master weights by rounded ones, so small steps were lost."""
    for found in zf.simulate(RANKS, lambda group: trained(group, stage, dtype, touch)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.full((1, 8), 0.998), rtol=1e-5, atol=0)


@EACH_STAGE
def test_writes_of_other_values_reach_the_master_weights(stage: int) -> None:
    def write(model: nn.Linear, engine: Engine) -> None:
        if engine.state.step == 10:
            with torch.no_grad():
                model.weight[0, 0] = 5.0
            assert engine.gathered("weight", master=True)[0, 0] == 5.0

    for found in zf.simulate(RANKS, lambda group: trained(group, stage, torch.bfloat16, write)):
        torch.testing.assert_close(found[0, 0], torch.tensor(4.999), rtol=1e-5, atol=0)
        torch.testing.assert_close(found[0, 1:], torch.full((7,), 0.998), rtol=1e-5, atol=0)
