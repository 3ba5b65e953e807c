"""A parameter twice in the groups of an optimizer: torch steps it twice, and warns."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop import Engine, deepspeed
from zfun.interop.accelerate import Accelerator

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
REFUSED = r"has one place in the groups .* got leaf 'a.weight' in group {} and again in group {}, "
REMEDY = r"tied layers; pass each parameter once, such as \[\*dict.fromkeys\(params\)\]"
CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


class Tied(nn.Module):
    """Two layers of one weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))

    def doubled(self) -> list[nn.Parameter]:
        return [p for part in (self.a, self.b, self.head) for p in part.parameters()]


@pytest.fixture
def _new_accelerator() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def of_engine(model: Tied, optimizer: Any) -> None:
    Engine(model, optimizer, group=zf.process_group())


def of_accelerate(model: Tied, optimizer: Any) -> None:
    Accelerator(cpu=True).prepare(model, optimizer)


def of_deepspeed(model: Tied, optimizer: Any) -> None:
    deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)


def of_deepspeed_parameters(model: Tied, optimizer: Any) -> None:
    section = {"type": "SGD", "params": {"lr": 0.1}}
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    config = {**CONFIG, "optimizer": section}
    deepspeed.initialize(model=model, model_parameters=groups, config=config)


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank", "_new_accelerator")
@pytest.mark.parametrize("host", [of_engine, of_accelerate, of_deepspeed, of_deepspeed_parameters])
def test_a_parameter_twice_in_a_group_is_refused(host: Any) -> None:
    """It was stepped once, silently."""
    model = Tied()
    with pytest.raises(OptionError, match=REFUSED.format(0, 0) + ".*" + REMEDY) as caught:
        host(model, torch.optim.SGD(model.doubled(), 0.1))
    assert caught.value.leaf == "a.weight"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host(model, torch.optim.SGD([*dict.fromkeys(model.doubled())], 0.1))


@EACH_STAGE
@pytest.mark.parametrize("is_same", [True, False])
def test_a_group_that_is_added_later_is_refused(is_same: bool, stage: int) -> None:
    model = Tied()
    model.a.requires_grad_(False)
    first = model.head.parameters() if is_same else [*model.head.parameters(), model.a.weight]
    optimizer = torch.optim.SGD(first, 0.1)
    engine = Engine(model, optimizer, zero=stage, group=zf.process_group())
    x = torch.ones(2, 4)
    engine.backward(engine(x).sum())
    engine.step()
    model.a.requires_grad_(True)
    if is_same:
        optimizer.add_param_group({"params": [model.a.weight, model.a.bias, model.b.weight]})
    else:
        # torch refuses this group itself, but not one that code has made.
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.b.weight]})
    place = (1, 1) if is_same else (0, 1)
    with pytest.raises(OptionError, match=REFUSED.format(*place)):
        engine(x)


@EACH_STAGE
def test_a_frozen_parameter_may_be_there_twice(stage: int) -> None:
    """No step changes it, in torch neither."""
    expected, model = Tied(), Tied()
    for one in (expected, model):
        one.a.weight.requires_grad_(False)
    optimizers = [torch.optim.SGD(one.doubled(), 0.1, momentum=0.9) for one in (expected, model)]
    engine = Engine(model, optimizers[1], zero=stage, group=zf.process_group())
    for turn in range(3):
        x = torch.full((2, 4), float(turn))
        optimizers[0].zero_grad()
        expected(x).square().mean().backward()
        optimizers[0].step()
        engine.backward(engine(x).square().mean())
        engine.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


def test_a_parameter_of_a_loss_twice_is_refused() -> None:
    model, own = nn.Linear(4, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), own, own], 0.1)
    with pytest.raises(
        OptionError, match=r"got leaf 'optimizer.1' in group 0 and again in group 0"
    ):
        Accelerator(cpu=True).prepare(model, optimizer)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("strategy", ["zfun_stage_1", "zfun_stage_3"])
def test_a_callback_of_lightning_that_unfreezes_tied_layers_is_refused(
    strategy: str, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")
    finetuning = pytest.importorskip("lightning.pytorch.callbacks").BaseFinetuning
    lightnings = pytest.importorskip("tests.interop.lightnings")
    pytest.importorskip("zfun.interop.lightning")

    class Unfreezes(finetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.net.a, pl_module.net.b])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group([pl_module.net.a, pl_module.net.b], optimizer)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tied()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)

    options: Any = {"max_epochs": 2, "callbacks": [Unfreezes()], "enable_checkpointing": False}
    rows: Any = torch.ones(4, 4)
    trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options)
    with pytest.raises(OptionError, match=r"got leaf 'net.a.weight' in group 1 and again in group"):
        trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
