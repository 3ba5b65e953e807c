"""Hooks around the step of an optimizer run where, and with what, torch runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.interop import deepspeed
from zfun.interop.accelerate import Accelerator

L = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402, needs Lightning

from tests.interop import fabrics, lightnings  # noqa: E402
from zfun.interop.lightning import ZfunFabricStrategy, ZfunPrecision, ZfunStrategy  # noqa: E402

# Lightning warns of few workers and of torch's own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
]
STEPS = 3


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Run:
    """A small model, its optimizer, and what happened in order."""

    def __init__(self, hook: Callable[[Run], None]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.log: list[Any] = []
        hook(self)

    def loss(self, model: Any = None) -> Tensor:
        self.log.append("forward")
        return (model or self.model)(torch.ones(2, 4)).square().mean()

    def result(self) -> Any:
        return self.log, {name: x.detach().clone() for name, x in self.model.named_parameters()}

    def note(self, place: str) -> Callable[..., None]:
        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            its = [type(x).__name__ for x in args]
            kinds = {name: type(x).__name__ for name, x in kwargs.items()}
            self.log.append((place, args[0] is optimizer is self.optimizer, its, kinds))

        return note


def noted(run: Run) -> None:
    """Hooks before and after that log their arguments."""
    run.optimizer.register_step_pre_hook(run.note("before"))
    run.optimizer.register_step_post_hook(run.note("after"))


def written(run: Run) -> None:
    """A hook that writes values."""

    def write(*_: Any) -> None:
        with torch.no_grad():
            run.model.weight.mul_(1.5)

    run.optimizer.register_step_pre_hook(write)


def asked(run: Run) -> None:
    """Hooks that ask whether there are gradients."""
    ask = lambda *_: run.log.append(run.model.weight.grad is None)
    run.optimizer.register_step_pre_hook(ask)
    run.optimizer.register_step_post_hook(ask)


def zeroed(run: Run) -> None:
    """A hook that sets gradients to zero, which are those of the step before around a closure."""

    def zero(*_: Any) -> None:
        if run.model.weight.grad is not None:
            run.model.weight.grad.zero_()

    run.optimizer.register_step_pre_hook(zero)


def twice(run: Run) -> None:
    """A hook that replaces the closure by one that runs it twice."""

    def replace(_: Any, args: Any, kwargs: Any) -> Any:
        [*others] = args
        closure = kwargs.get("closure") or (others.pop() if len(others) > 1 else None)
        if closure is None:
            return None
        return (others[0],), {"closure": lambda: [closure(), closure()][1]}

    run.optimizer.register_step_pre_hook(replace)
    noted(run)


HOOKS = [noted, written, asked, zeroed, twice]


class Module(L.LightningModule):
    """A module with automatic optimization."""

    def __init__(self, run: Run, *, manual: bool = False) -> None:
        super().__init__()
        self.run, self.net = run, run.model
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Any:
        if self.automatic_optimization:
            return self.run.loss()
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self.run.loss()
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss.detach()

        self.run.log.append(round(float(optimizer.step(closure)), 4))
        return None

    def configure_optimizers(self) -> Any:
        return {"optimizer": self.run.optimizer, "lr_scheduler": self.run.scheduler}


def of_lightning(strategy: Any, hook: Any, folder: Path, **options: Any) -> Any:
    run, manual = Run(hook), options.pop("manual", False)
    trainer = lightnings.trainer_of(strategy, 1, folder, enable_checkpointing=False, **options)
    rows: Any = [torch.ones(1)] * STEPS
    batches: Any = torch.utils.data.DataLoader(rows)
    trainer.fit(Module(run, manual=manual), batches)
    return run.result()


@pytest.mark.parametrize(("stage", "manual"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_a_trainer_are_those_of_plain_lightning(
    hook: Any, stage: int, manual: bool, tmp_path: Path
) -> None:
    """They ran after forward and backward."""
    expected = of_lightning("auto", hook, tmp_path, manual=manual)
    found = of_lightning(ZfunStrategy(stage=stage), hook, tmp_path, manual=manual)
    torch.testing.assert_close(found[1], expected[1])
    assert str(found[0]) == str(expected[0])


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_a_mixed_run_come_after_backward_as_in_plain_lightning(
    hook: Any, tmp_path: Path
) -> None:
    """A GradScaler calls ``step()`` without a closure."""
    mixed = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    expected = of_lightning("auto", hook, tmp_path, plugins=[mixed])
    own = ZfunStrategy(stage=3, loss_scale=8.0, precision_plugin=ZfunPrecision("16-mixed"))
    found = of_lightning(own, hook, tmp_path)
    torch.testing.assert_close(found[1], expected[1])
    assert str(found[0]) == str(expected[0])
    assert found[0][0] == "forward"


def of_fabric(strategy: Any, hook: Any) -> Any:
    fabric, run = fabrics.fabric_of(strategy), Run(hook)
    model, optimizer = fabric.setup(run.model, run.optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model)
        fabric.backward(loss)
        return loss.detach()

    for _ in range(STEPS):
        with torch.no_grad():  # as Lightning's loops
            run.log.append(round(float(optimizer.step(closure)), 4))
        run.scheduler.step()
    optimizer.zero_grad()
    fabric.backward(run.loss(model))
    optimizer.step()
    return run.result()


@EACH_STAGE
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_fabric_are_those_of_plain_fabric(hook: Any, stage: int) -> None:
    expected = of_fabric("auto", hook)
    found = of_fabric(ZfunFabricStrategy(stage=stage), hook)
    torch.testing.assert_close(found[1], expected[1])
    assert str(found[0]) == str(expected[0])


def of_accelerate(accelerator: Any, hook: Any) -> Any:
    run = Run(hook)
    model, optimizer, scheduler = accelerator.prepare(run.model, run.optimizer, run.scheduler)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(model)
        accelerator.backward(loss)
        return loss.detach()

    for _ in range(STEPS):
        with torch.no_grad():
            optimizer.step(closure)
        scheduler.step()
    optimizer.zero_grad()
    accelerator.backward(run.loss(model))
    optimizer.step()
    return run.result()


@EACH_STAGE
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_accelerate_are_those_of_plain_accelerate(hook: Any, stage: int) -> None:
    expected = of_accelerate(accelerate.Accelerator(cpu=True), hook)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = of_accelerate(Accelerator(cpu=True, zero=stage), hook)
    torch.testing.assert_close(found[1], expected[1])
    assert str(found[0]) == str(expected[0])


@EACH_STAGE
def test_hooks_of_the_facade_get_the_optimizer_alone(stage: int) -> None:
    run = Run(noted)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=run.model, optimizer=run.optimizer, config=config)
    engine.backward(run.loss(engine))
    engine.step()
    own = (True, ["SGD"], {})
    assert run.log == ["forward", ("before", *own), ("after", *own)]


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_all_optimizers_get_what_those_of_plain_lightning_get(
    stage: int, tmp_path: Path
) -> None:
    def every(run: Run) -> None:
        noted(run)
        handles.append(register_optimizer_step_pre_hook(run.note("before all")))
        handles.append(register_optimizer_step_post_hook(run.note("after all")))

    def logged(strategy: Any) -> Any:
        found = of_lightning(strategy, every, tmp_path)
        for handle in handles:
            handle.remove()
        return found

    handles: list[Any] = []
    found, expected = logged(ZfunStrategy(stage=stage)), logged("auto")
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


def test_a_hook_that_returns_something_else_is_refused_as_in_torch(tmp_path: Path) -> None:
    def wrong(run: Run) -> None:
        hook: Any = lambda *_: 3
        run.optimizer.register_step_pre_hook(hook)

    with pytest.raises(RuntimeError, match=r"must return None or a tuple of .* but got 3"):
        of_lightning("zfun_stage_2", wrong, tmp_path)
