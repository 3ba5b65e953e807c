"""Bounds of gradients in loops of accelerate."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun import optim
from zfun.errors import OptionError
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator

transformers = pytest.importorskip("transformers")

from tests.interop import trainers  # noqa: E402, after the check that the packages are there
from zfun.interop.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


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


# Loops of accelerate: a number clips, and a word is what it says.
LOOPS: dict[str, list[Any]] = {
    "infinity asks for the norm": ["backward", 0.25, torch.inf, "step", "backward", "step"],
    "two bounds": ["backward", 0.25, 1.0, "step"],
    "zero_grad of the optimizer": ["backward", 1e-3, "zero", "backward", "step"],
    "zero_grad of the model": ["backward", 1e-3, "model zero", "backward", 1.0, "step"],
    "each micro-batch": ["backward", 0.25, "backward", 0.25, "step", "backward", "step"],
    "a bound of 0": ["backward", 0.0, "backward", "step"],
    "loaded values": ["backward", 1e-3, "load", "zero", "backward", 1.0, "step"],
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", [2, 3])
def test_clips_are_those_of_accelerate(stage: int, loop: str) -> None:
    """Norms and values; dropped gradients take their bound along."""

    def run(cls: Any, **options: Any) -> Any:
        accelerator, net, optimizer = prepared(cls, **options)
        values = {name: x.clone() for name, x in accelerator.get_state_dict(net).items()}
        norms = []
        for act in LOOPS[loop]:
            if act == "backward":
                accelerator.backward(net(torch.ones(2, 3)).square().mean() * 100)
            elif act == "step":
                optimizer.step()
                optimizer.zero_grad()
            elif act == "zero":
                optimizer.zero_grad()
            elif act == "model zero":
                net.zero_grad()
            elif act == "load":
                net.load_state_dict(values)
            else:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), act)))
        return norms, accelerator.get_state_dict(net)

    found, expected = run(Accelerator, zero=stage), run(accelerate.Accelerator)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_elements_are_clipped_as_in_accelerate(stage: int) -> None:
    """Also between the micro-batches of a step."""

    def run(cls: Any, **options: Any) -> Any:
        accelerator, net, optimizer = prepared(cls, **options)
        for bound in (0.02, 0.03):
            accelerator.backward(net(torch.ones(2, 3)).square().mean())
            accelerator.clip_grad_value_(net.parameters(), bound)
        optimizer.step()
        return accelerator.get_state_dict(net)

    found, expected = run(Accelerator, zero=stage), run(accelerate.Accelerator)
    torch.testing.assert_close(found, expected)


def test_a_clipped_overflow_is_skipped_all_the_same() -> None:
    net = nn.Linear(3, 1)
    start = net.weight.detach().clone()
    engine = Engine(net, optim.sgd(1.0), zero=2, group=zf.process_group(), precision=torch.float16)
    engine.backward(engine(torch.full((1, 3), 6e4)).sum() * 1e5)
    engine.clip_value(1.0)
    info = engine.step()
    assert info is not None
    assert info.skipped
    assert net.weight.equal(start.half())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_norm_of_nan_makes_all_gradients_nan(stage: int) -> None:
    def grads(cls: Any, **options: Any) -> Any:
        accelerator, net, _ = prepared(cls, **options)
        accelerator.backward((net(torch.ones(2, 3)) + net[2].bias * torch.nan).mean())  # pyrefly: ignore[bad-index]
        accelerator.clip_grad_norm_(net.parameters(), 0.25)
        return [param.grad for param in net.parameters()]

    found, expected = grads(Accelerator, zero=stage), grads(accelerate.Accelerator)
    assert all(x.isnan().all() for x in expected)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_of_the_loss_is_not_clipped_in_micro_batches(stage: int) -> None:
    def run(cls: Any, **options: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, net = cls(cpu=True, **options), nn.Linear(3, 1)
        net.weight.data, net.bias.data = torch.ones(1, 3), torch.ones(1)
        sigma = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*net.parameters(), sigma], 0.001)
        net, optimizer = accelerator.prepare(net, optimizer)
        norms = []
        for _ in range(2):
            for _ in range(2):
                accelerator.backward(net(torch.ones(2, 3)).square().mean() * sigma)
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.25)))
            optimizer.step()
            optimizer.zero_grad()
        return norms, accelerator.get_state_dict(net), sigma.detach().clone()

    found, expected = run(Accelerator, zero=stage), run(accelerate.Accelerator)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_engine_that_is_closed_leaves_no_bound() -> None:
    accelerator, net, _ = prepared(Accelerator, zero=2)
    accelerator.backward(net(torch.ones(2, 3)).square().mean())
    accelerator.clip_grad_norm_(net.parameters(), 1e-6)
    again = accelerator.prepare_optimizer(torch.optim.SGD(net.parameters(), 0.5))
    before = dict(net.state_dict())["2.bias"].clone()
    accelerator.backward(net(torch.ones(2, 3)).square().mean())
    again.step()
    assert (dict(net.state_dict())["2.bias"] - before).abs() > 1e-4


def clipping(parent: Any) -> Any:
    """Return a Trainer that clips in its own training step."""

    class Clipping(parent):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.25)
            return loss

    return Clipping


class Heads(nn.Module):
    """A model with a head that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(trainers.LENGTH, 1), nn.Linear(trainers.LENGTH, 1)

    def forward(self, input_ids: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"loss": self.used(input_ids / trainers.VOCAB).square().mean()}


def histories(options: dict[str, Any], folder: str, wrap: Any = lambda parent: parent) -> Any:
    """Train with transformers and with zfun; return histories and values."""
    results = []
    for parent, zero in ((transformers.Trainer, {}), (Trainer, {"zero": 2})):
        made: dict[str, Any] = {"options": {"max_steps": 3, **options}, "model": Heads(), **zero}
        trainer = trainers.make(wrap(parent), folder, **made)
        trainer.train()
        history = torch.tensor(trainers.history(trainer), dtype=torch.float64)
        results.append((history, dict(trainer.model.state_dict())))
    return results


@pytest.mark.parametrize("bound", [0.0, 0.5])
def test_a_trainer_may_clip_in_its_own_step(bound: float, tmp_path: Any) -> None:
    """In each micro-batch, also where ``max_grad_norm=0`` clips nothing else."""
    theirs, ours = histories({"max_grad_norm": bound}, str(tmp_path), clipping)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_the_loss_does_not_use_is_not_decayed(tmp_path: Any) -> None:
    """transformers looks at each gradient in the first step."""
    theirs, ours = histories({"weight_decay": 0.5, "warmup_steps": 0}, str(tmp_path))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[1]["unused.weight"], Heads().unused.weight)


def test_gradients_of_modules_without_an_engine_have_no_loss_scale() -> None:
    """float16 on a GPU, where accelerate unscales by a scaler that is not there."""
    accelerator, net, _ = prepared(Accelerator, zero=2, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    other = nn.Linear(3, 1)
    accelerator.backward(net(torch.ones(2, 3)).square().mean() + other(torch.ones(1, 3)).sum())
    with pytest.raises(OptionError, match=r"loss scale, here 65536\.0.*without an engine"):
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
    plain, _, _ = prepared(Accelerator, zero=2)
    plain.native_amp = True
    plain.state._mixed_precision = "fp16"
    other(torch.ones(1, 3)).sum().backward()
    assert float(plain.clip_grad_norm_(other.parameters(), 1.0)) > 1
