"""Bounds of the norm in loops of accelerate."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from zfun.errors import OptionError
from zfun.interop.accelerate import Accelerator

transformers = pytest.importorskip("transformers")

from tests.interop import trainers  # noqa: E402, after the check that the packages are there
from zfun.interop.transformers import Trainer  # noqa: E402


def prepared(cls: Any, **options: Any) -> tuple[Any, nn.Module, Any]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = cls(cpu=True, **options)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    for param in net.parameters():
        param.data = torch.linspace(-1, 1, param.numel()).view_as(param)
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.5))


def clipped(cls: Any, bound: float = 0.25, **options: Any) -> tuple[float, Any]:
    accelerator, net, optimizer = prepared(cls, **options)
    accelerator.backward(net(torch.ones(2, 3)).square().mean() * 100)
    norm = accelerator.clip_grad_norm_((p for p in net.parameters()), bound)
    optimizer.step()
    return float(norm), accelerator.get_state_dict(net)


@pytest.mark.parametrize("bound", [0.25, 0.0, 1e9])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_generator_of_parameters_is_clipped(stage: int, bound: float) -> None:
    norm, values = clipped(accelerate.Accelerator, bound)
    found, others = clipped(Accelerator, bound, zero=stage)
    assert found == pytest.approx(norm)
    torch.testing.assert_close(others, values)


def test_modules_without_an_engine_are_clipped_too() -> None:
    accelerator, _, _ = prepared(Accelerator, zero=2)
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    assert float(accelerator.clip_grad_norm_(other.parameters(), 0.25)) > 1
    found = torch.stack([param.grad.norm() for param in other.parameters()]).norm()  # pyrefly: ignore[missing-attribute]
    assert float(found) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_of_the_parameters_is_refused(stage: int) -> None:
    accelerator, net, _ = prepared(Accelerator, zero=stage)
    accelerator.backward(net(torch.ones(2, 3)).square().mean())
    with pytest.raises(OptionError, match=r"all trained.*without leaf '2\.weight'.*model\.par"):
        accelerator.clip_grad_norm_(net[0].parameters(), 1.0)  # pyrefly: ignore[bad-index]
    net[2].requires_grad_(False)  # pyrefly: ignore[bad-index]
    trained = [param for param in net.parameters() if param.requires_grad]
    assert float(accelerator.clip_grad_norm_(trained, 1.0)) > 0


def test_parameters_of_two_models_are_refused() -> None:
    accelerator, net, _ = prepared(Accelerator, zero=2)
    other = nn.Linear(2, 1)
    accelerator.backward(net(torch.ones(2, 3)).square().mean())
    with pytest.raises(OptionError, match=r"shape \(1, 2\) that the model lacks.*of its own"):
        accelerator.clip_grad_norm_([*net.parameters(), *other.parameters()], 1.0)


@pytest.mark.parametrize("bounds", [[0.25, float("inf")], [0.25, 1.0], ["zero_grad"]])
def test_the_least_bound_of_a_step_counts(bounds: list[Any]) -> None:
    """Infinity asks for the norm alone, and dropped gradients take their bound along."""

    def run(cls: Any, **options: Any) -> Any:
        accelerator, net, optimizer = prepared(cls, **options)
        for factor in (100.0, 0.01):
            accelerator.backward(net(torch.ones(2, 3)).square().mean() * factor)
            for bound in bounds if factor == 100.0 else ():
                if bound == "zero_grad":
                    accelerator.clip_grad_norm_(net.parameters(), 1e-3)
                    optimizer.zero_grad()
                    accelerator.backward(net(torch.ones(2, 3)).square().mean())
                else:
                    accelerator.clip_grad_norm_(net.parameters(), bound)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(net)

    torch.testing.assert_close(run(Accelerator, zero=2), run(accelerate.Accelerator))


class Clipping(Trainer):
    """Clips in its own training step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.25)
        return loss


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_a_bound_in_a_run_without_clipping_is_refused(tmp_path: Any) -> None:
    options = {"max_steps": 1, "max_grad_norm": 0.0}
    trainer = trainers.make(Clipping, str(tmp_path), options=options, zero=2)
    with pytest.raises(OptionError, match=r"max_norm=0\.25; pass max_grad_norm=0\.25"):
        trainer.train()
