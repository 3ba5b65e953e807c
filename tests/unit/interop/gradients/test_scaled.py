"""Gradients under a loss scale: what code reads before the step, and which steps are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError, ZfunError
from zfun.interop.accelerate import Accelerator

L = pytest.importorskip("lightning")

from tests.interop import fabrics, lightnings  # noqa: E402, needs Lightning
from zfun.interop.lightning import ZfunFabricStrategy, ZfunStrategy  # noqa: E402
from zfun.interop.lightning._fabric import Scaled  # noqa: E402
from zfun.interop.lightning._plugins import ZfunPrecision  # noqa: E402

SCALE = 1024.0


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def in_float16(stage: int | None) -> Any:
    """An accelerator with a loss scale; accelerate has one on GPUs alone, unless it is put in."""
    if stage is not None:
        handlers = [accelerate.utils.GradScalerKwargs(init_scale=SCALE)]
        return Accelerator(cpu=True, zero=stage, mixed_precision="fp16", kwargs_handlers=handlers)
    plain = accelerate.Accelerator(cpu=True)
    plain.state._mixed_precision = "fp16"
    plain.native_amp = True
    plain.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    return plain


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm_of(model: nn.Module) -> float:
    return torch.stack([grad.norm() for grad in grads_of(model)]).norm().item()


def add_noise(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.unscale_gradients()
    for grad in grads_of(model):
        grad.add_(0.01)


def read(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.unscale_gradients()
    seen.append(norm_of(model))


def clip_of_torch(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.unscale_gradients()
    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())


def read_clipped(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 0.3)
    seen.append(norm_of(model))


def read_clipped_by_value(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.clip_grad_value_(model.parameters(), 0.02)
    seen.append(norm_of(model))


def without_infinities(accelerator: Any, model: nn.Module, seen: list[float]) -> None:
    accelerator.unscale_gradients()
    for grad in grads_of(model):
        torch.nan_to_num_(grad, 0.0, 0.0, 0.0)


def trained(
    accelerator: Any, touch: Any, overflows: tuple[int, ...] = (), **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Take steps, of which some overflow, with a schedule."""
    raw = runs.net()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.02, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(raw, optimizer, schedule)
    seen: list[float] = []
    for index in range(5):
        x, y = runs.batch(index, 0, 1)
        loss = mse_loss(model(x).float(), y)
        accelerator.backward(loss * (torch.inf if index in overflows else 1.0))
        touch(accelerator, raw, seen)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += [optimizer.param_groups[0]["lr"], accelerator.optimizer_step_was_skipped]
    return seen, accelerator.get_state_dict(model)


@EACH_STAGE
@pytest.mark.parametrize("overflows", [(), (1, 3)])
@pytest.mark.parametrize(
    "touch",
    [add_noise, read, clip_of_torch, read_clipped, read_clipped_by_value, without_infinities],
)
def test_gradients_have_no_scale_once_they_are_unscaled(
    stage: int, overflows: tuple[int, ...], touch: Callable[..., None]
) -> None:
    expected = trained(in_float16(None), touch, overflows)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = trained(in_float16(stage), touch, overflows)
    assert found[0] == pytest.approx(expected[0], rel=2e-3, nan_ok=True)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-2, atol=2e-4, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_of_a_fused_optimizer_is_not_told(fused: bool) -> None:
    """GradScaler lets fused optimizers skip by themselves, so schedules go on."""
    nothing = lambda *_: None
    expected, _ = trained(in_float16(None), nothing, (0, 2), fused=fused)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found, _ = trained(in_float16(2), nothing, (0, 2), fused=fused)
    assert found == pytest.approx(expected)
    assert any(found[1::2]) is not fused


def test_a_loss_scale_beside_several_optimizers_is_refused() -> None:
    accelerator = in_float16(2)
    raw = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    pair = [torch.optim.SGD(part.parameters(), 0.1) for part in raw]
    model, *_ = accelerator.prepare(raw, *pair)
    with pytest.raises(OptionError, match="with a loss scale, an Accelerator has one optimizer; "):
        accelerator.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_stays_where_the_scale_cannot_fall(stage: int, tmp_path: Path) -> None:
    section = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 2}

    def main(group: zf.Group) -> None:
        model = nn.Linear(4, 1)
        more = {"fp16": section, "gradient_accumulation_steps": 1}
        engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            config=runs.config(stage, **more),
            mpu=runs.ranks(group),
        )[0]
        x = torch.ones(2, 4).half()
        engine.backward(engine(x).float().mean())
        engine.step()
        before = runs.weights(engine)
        engine.backward(engine(x).float().mean() * torch.inf)
        with pytest.raises(Exception, match="scale"):
            engine.step()
        engine.save_checkpoint(tmp_path)
        torch.testing.assert_close(runs.weights(engine), before, rtol=0, atol=0)
        assert engine(x).isfinite().all()

    zf.simulate(1, main)


class Hooks(L.LightningModule):
    """Reads and changes gradients before the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.seen = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), [0.0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(norm_of(self))
        for grad in grads_of(self):
            grad.add_(0.01)


def rows() -> Tensor:
    return torch.randn(12, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_lightning_see_no_scale(stage: int, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    mixed = L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    found = []
    for strategy, plugin in (
        ("auto", mixed),
        (ZfunStrategy(stage=stage, initial_scale_power=10), ZfunPrecision("16-mixed")),
    ):
        model = Hooks()
        options = {"enable_checkpointing": False, "plugins": [plugin]}
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options)
        data: Any = rows()
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
        found.append((model.seen, [x.float() for x in model.state_dict().values()]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-3)


class OwnBackward(Hooks):
    """Runs backward by itself, in a way of its own."""

    way: Any

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.way(loss)


class Inherits(Hooks):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_modules_own_backward_has_the_scale(stage: int, tmp_path: Path) -> None:
    """It was refused, with a remedy that Lightning does not have."""

    def fitted(cls: Any, strategy: Any, plugin: Any, way: Any = None) -> Any:
        model = cls()
        model.way = way
        options = {"enable_checkpointing": False, "plugins": [plugin]}
        data: Any = rows()
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
        return [x.float() for x in model.state_dict().values()]

    twice = lambda loss: (loss.backward(retain_graph=True), loss.backward())
    once = lambda loss: loss.backward()
    for cls, way in ((OwnBackward, once), (OwnBackward, twice), (Inherits, None)):
        mixed = L.pytorch.plugins.MixedPrecision("16-mixed", "cpu")
        plain = fitted(cls, "auto", mixed, way)
        ours = fitted(cls, ZfunStrategy(stage=stage), ZfunPrecision("16-mixed"), way)
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-3)
    other = lambda loss: (2 * loss).backward()
    with pytest.raises(ZfunError, match=r"got loss\.backward\(\); .*of its argument"):
        fitted(OwnBackward, ZfunStrategy(stage=stage), ZfunPrecision("16-mixed"), other)


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_fabric_has_clipped_have_no_scale(stage: int) -> None:
    fabric = fabrics.fabric_of(
        ZfunFabricStrategy(stage=stage, initial_scale_power=10), plugins=[Scaled("16-mixed")]
    )
    raw = nn.Linear(2, 1)
    model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), 0.02))
    for batch in rows().split(4):
        fabric.backward(model(batch).float().square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        assert norm_of(raw) == pytest.approx(0.05, rel=2e-2)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
def test_a_loss_scale_in_a_plugin_of_lightning_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    with pytest.raises(
        OptionError, match=r"a plugin whose GradScaler has .*'scale': 4\.0.*; pass "
    ):
        L.Trainer(accelerator="cpu", strategy=ZfunStrategy(stage=2), plugins=[plugin])
