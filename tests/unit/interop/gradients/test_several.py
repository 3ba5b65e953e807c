"""Several optimizers for one model, as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop.accelerate import Accelerator


class Net(nn.Module):
    """A model with statistics, and a branch that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 6, bias=False)  # statistics follow
        self.norm = nn.BatchNorm1d(6)
        self.branch, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, *, short: bool = False) -> Tensor:
        hidden = self.norm(self.inner(x)).tanh()
        return self.out(hidden if short else hidden + self.branch(hidden).tanh())


def by_dim(model: Net) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(vectors, 0.01)]


def by_part(model: Net) -> list[torch.optim.Optimizer]:
    rest = [*model.inner.parameters(), *model.norm.parameters()]
    return [
        torch.optim.SGD(model.branch.parameters(), 0.1, momentum=0.9),
        torch.optim.RMSprop(model.out.parameters(), 0.01),
        torch.optim.Adam(rest, 0.01),
    ]


class Loop:
    """A loop of accelerate with several optimizers."""

    def __init__(self, accelerator: Any, optimizers_of: Any) -> None:
        self.accelerator, self.raw = accelerator, Net()
        self.prepare(optimizers_of(self.raw))
        self.seen: list[Any] = []

    def prepare(self, optimizers: list[Any]) -> None:
        self.model, *self.optimizers = self.accelerator.prepare(self.raw, *optimizers)

    def backward(self, index: int, **options: Any) -> None:
        x, y = runs.batch(index, 0, 1)
        loss = mse_loss(self.model(x[:, :4], **options), y[:, :1].expand(-1, 2))
        self.accelerator.backward(loss)
        self.seen.append(loss.item())

    def step(self, every: int = 1, index: int = 0) -> None:
        for place, optimizer in enumerate(self.optimizers):
            if place == 0 or index % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    def plain(self, folder: Path) -> None:
        for index in range(4):
            self.backward(index)
            self.step()

    def at_other_times(self, folder: Path) -> None:
        for index in range(5):
            self.backward(index)
            self.step(every=2, index=index)

    def clipped_together(self, folder: Path) -> None:
        for index in range(4):
            self.backward(index)
            self.seen.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1).item())
            self.step()

    def clipped_apart(self, folder: Path) -> None:
        for index in range(4):
            self.backward(index)
            for optimizer in self.optimizers:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                self.seen.append(self.accelerator.clip_grad_norm_(own, 0.05).item())
            self.step()

    def clipped_by_value(self, folder: Path) -> None:
        for index in range(4):
            self.backward(index)
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)
            self.step()

    def micro_batches(self, folder: Path) -> None:
        for index in range(6):
            with self.accelerator.accumulate(self.model):
                self.backward(index)
                self.step()

    def left_out(self, folder: Path) -> None:
        """Take steps of an optimizer of which no parameter was used."""
        for index in range(5):
            self.backward(index, short=index in (0, 2, 3))
            self.step()

    def scheduled(self, folder: Path) -> None:
        schedules = [torch.optim.lr_scheduler.StepLR(x, 2, 0.5) for x in self.optimizers]
        for index in range(5):
            self.backward(index)
            self.step()
            for schedule in schedules:
                schedule.step()

    def evaluated(self, folder: Path) -> None:
        for index in range(3):
            self.backward(index)
            self.step()
            self.raw.eval()
            with torch.no_grad():
                self.seen.append(self.model(torch.ones(1, 4)).sum().item())
            self.raw.train()

    def resumed(self, folder: Path) -> None:
        for index in range(2):
            self.backward(index)
            self.step()
        self.accelerator.save_state(str(folder))
        self.backward(2)
        self.step()
        self.accelerator.load_state(str(folder))
        for index in range(3, 5):
            self.backward(index)
            self.step()


LOOPS = [name for name, x in vars(Loop).items() if callable(x) and not name.startswith("_")]
LOOPS = [name for name in LOOPS if name not in ("prepare", "backward", "step")]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def loops(stage: int, optimizers_of: Any, **options: Any) -> tuple[Loop, Loop]:
    """The loop of accelerate, and that of zfun."""
    plain = Loop(accelerate.Accelerator(cpu=True, **options), optimizers_of)
    return plain, Loop(Accelerator(cpu=True, zero=stage, **options), optimizers_of)


def assert_same(found: Loop, expected: Loop) -> None:
    assert found.seen == pytest.approx(expected.seen, rel=1e-5)
    values = found.accelerator.get_state_dict(found.model)
    for name, value in expected.raw.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=name)


@EACH_STAGE
@pytest.mark.parametrize("optimizers_of", [by_dim, by_part])
@pytest.mark.parametrize("name", LOOPS)
def test_each_optimizer_steps_its_own_parameters(
    stage: int, optimizers_of: Any, name: str, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": 2} if name == "micro_batches" else {}
    plain, sharded = loops(stage, optimizers_of, **options)
    for loop, folder in ((plain, "plain"), (sharded, "sharded")):
        getattr(loop, name)(tmp_path / folder)
    assert_same(sharded, plain)


@EACH_STAGE
def test_a_parameter_in_no_optimizer_stays(stage: int) -> None:
    def some(model: Net) -> list[torch.optim.Optimizer]:
        model.norm.weight.requires_grad_(False)
        return by_dim(model)

    plain, sharded = loops(stage, some)
    for loop in (plain, sharded):
        loop.clipped_together(Path())
    assert_same(sharded, plain)


@EACH_STAGE
def test_an_optimizer_may_come_after_steps_of_another(stage: int) -> None:
    found = []
    for loop in loops(stage, lambda model: by_part(model)[:1]):
        loop.plain(Path())
        loop.raw.zero_grad()  # of the parameters that were in no optimizer
        others = by_part(loop.raw)[1:]
        loop.optimizers += [loop.accelerator.prepare(x) for x in others]
        loop.clipped_together(Path())
        found.append(loop)
    assert_same(found[1], found[0])


def test_gradients_of_parameters_in_no_optimizer_are_dropped_too() -> None:
    """Torch would add them up from step to step, and clip by their norm."""

    def some(model: Net) -> list[torch.optim.Optimizer]:
        return by_part(model)[:1]

    for drops in (True, False):
        norms = []
        for loop in loops(2, some):
            for index in range(2):
                loop.backward(index)
                norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e9)
                loop.step()
                if drops:
                    loop.model.zero_grad()
            norms.append(norm.item())
        assert (norms[1] == pytest.approx(norms[0], rel=1e-5)) is drops


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_an_optimizer_whose_parameters_another_one_has_is_refused(stage: int) -> None:
    loop = Loop(Accelerator(cpu=True, zero=stage), by_dim)
    first, _ = loop.optimizers
    loop.optimizers = [loop.accelerator.prepare(x) for x in by_dim(loop.raw)]
    loop.plain(Path())
    with pytest.raises(OptionError, match=r"a parameter has one optimizer.*step the last one, or"):
        first.step()
